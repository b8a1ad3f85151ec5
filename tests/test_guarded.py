"""A softmax whose NaN are replaced by 0: rows without keys, and rows with a NaN that comes from q or k."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels import Interpreter, agree, tiles
from recognising import candidates, region_of
from regions import attention, causal, scaled_score
from torch import Tensor

from fusecomp.codegen.emit import emit
from fusecomp.codegen.hopper import specialised
from fusecomp.ir.reference import evaluate
from fusecomp.patterns.attention import Declined
from fusecomp.patterns.build import Match

INF, SIZES = float("inf"), {"B": 2, "H": 3, "M": 13, "N": 40}


def guarded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1).nan_to_num() @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Only rows without keys give 0."""
    weights = (q @ k.mT).masked_fill(~keep, -INF).softmax(-1)
    return torch.where(~keep.any(-1, keepdim=True), 0.0, weights) @ v


def operands() -> list[Tensor]:
    q, k, v = (torch.randn(2, 3, n, 16) for n in (13, 40, 40))
    keep = torch.rand(13, 40) < 0.5
    keep[3], keep[5:9] = False, True
    q[0, 0, 5, 3], q[1, 1, 6], q[0, 2, 7, 0], k[1, 0, 9, 2], k[1, 2, 3, 1] = torch.nan, INF, -INF, torch.nan, INF
    return [q, k, v, keep]


@pytest.mark.parametrize("skeleton", ["prefill", "decode"])
@pytest.mark.parametrize(("fn", "empty_row"), [(guarded, "guarded"), (chosen, "zero")])
def test_rows_of_nan(interpreter: Interpreter, fn: Callable[..., Tensor], empty_row: str, skeleton: str) -> None:
    args = operands()
    region, expected = region_of(fn, *args), fn(*args)
    assert region.empty_row == empty_row
    assert bool(expected.isnan().any()) == (fn is chosen)
    torch.testing.assert_close(evaluate(region, args, SIZES).float(), expected, equal_nan=True)
    agree(interpreter, region, args, SIZES, tiles(region, 16, 16, skeleton))
    fast = torch.compile(fn, backend="fusecomp", options={"inner": "eager", "strict": True})
    torch.testing.assert_close(fast(*args), expected, equal_nan=True)


def test_of_a_gate_it_is_another_function() -> None:
    """An infinite gate gives the largest number, and a NaN in it 0 for its key alone."""

    def fn(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return ((q @ k.mT).softmax(-1) * gate).nan_to_num() @ v

    (found,) = candidates(fn, *operands()[:3], torch.randn(13, 40))
    assert isinstance(found, Declined)
    assert "may hold NaN" in found.reason


def gated(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(~keep, -INF).softmax(-1) * gate).nan_to_num() @ v


def gated_by_a_choice(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) * (gate > 0.3) * 0.5).nan_to_num() @ v


def hidden_behind(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, gate: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(~keep, -INF).softmax(-1) * gate).masked_fill(~keep, 0.0) @ v


@pytest.mark.parametrize(("fn", "reads"), [(gated, False), (gated_by_a_choice, True), (hidden_behind, True)])
def test_a_gate_of_nan(fn: Callable[..., Tensor], reads: bool) -> None:
    """What is not a number in a factor of the weights is none of a whole row."""
    keep, gate = torch.rand(13, 40) < 0.5, torch.rand(13, 40)
    gate[3, 5], keep[3, 5], keep[:, 2] = torch.nan, False, True
    args = [*(torch.randn(2, 3, n, 16) for n in (13, 40, 40)), keep, gate]
    assert any(isinstance(x, Match) for x in candidates(fn, *args)) == reads
    fast = torch.compile(fn, backend="fusecomp", options={"inner": "eager", "strict": True})
    torch.testing.assert_close(fast(*args), fn(*args), equal_nan=True)


def test_on_hopper() -> None:
    """Where the sum of a row is NaN, all of it is."""
    texts = []
    for empty_row in ("guarded", "zero"):
        region = attention(scaled_score, causal, d=64, dtype="bfloat16", empty_row=empty_row)
        texts.append(emit(region, specialised(region, tiles(region))).text)
    line = "acc = gl.where(gl.convert_layout(row_sum, gl.SliceLayout(1, OUTPUT))[:, None] > 0.0, acc, 0.0)"
    assert [line in text for text in texts] == [True, False]
