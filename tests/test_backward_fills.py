"""Gradients under masks that are added: rows whose every key is filled, finitely or not."""

from __future__ import annotations

import pytest
import torch
from gradients import SIZES, agree, qkv, small
from kernels import Interpreter, tiles
from regions import M, N, attention, kv_idx, load, q_idx, scaled_score
from test_codegen import normal

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.emit import emit
from fusecomp.ir.algebra import apply

REGION = attention(
    apply("add", scaled_score, load(0, q_idx, kv_idx)), loads=[((M, N), "float32")], empty_row="zero"
)  # fmt: skip


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e38])
def test_rows_filled_with_a_number(interpreter: Interpreter, fill: float) -> None:
    """Their weights are 1 / N: a sum of the fill and the logarithm of N would lose the latter."""
    mask = normal(23, 37).masked_fill(normal(23, 37) > 0.5, fill)
    mask[3], mask[20] = fill, fill
    agree(interpreter, REGION, [*qkv(16), mask], SIZES)


def test_rows_filled_with_minus_infinity_take_no_part(interpreter: Interpreter) -> None:
    mask = torch.zeros(23, 37)
    mask[3], mask[20] = -torch.inf, -torch.inf
    inputs, lengths = [*qkv(16), mask], list(SIZES.values())
    out, lse = torch.empty(2, 3, 23, 16), torch.full((2, 3, 23, 2), 123.0)
    out, *_, lse = interpreter.launch(emit(REGION, tiles(REGION), saves_lse=True), out, inputs, lengths, lse)
    assert not out[:, :, [3, 20]].any()
    grads = [*(torch.full_like(x, torch.nan) for x in inputs[:3]), None]
    source = emit_backward(REGION, small(REGION))
    found, *_ = interpreter.launch(source, grads, out, normal(2, 3, 23, 16), lse, inputs, lengths)
    assert all(x.isfinite().all() for x in found[:3])
    assert not found[0][:, :, [3, 20]].any()
