"""Generated kernels drop the weights that the region says, forward and backward, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from golden_kernels import BACKWARD, GOLDEN
from gradients import SIZES, inputs_of, small
from gradients import agree as gradients_agree
from kernels import Interpreter, agree, tiles
from regions import H, attention, causal, dropout, grouped, h, kv_idx, load, q_idx, scaled_score
from test_backward_codegen import REGIONS
from test_codegen import qkv
from test_visits import KEEP, by_table, keeps
from torch import Tensor

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.emit import emit
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.plan import plan

ROOT = Path(__file__).parents[1]
SEED = torch.tensor(2**61 + 987_654_321)
LENGTHS = {"B": 2, "H": 3, "M": 37, "N": 53}


def drawn(region: AttentionRegion, sizes: dict[str, int]) -> list[Tensor]:
    """Operands of a region with dropout."""
    return [*inputs_of(replace(region, operands=region.operands[:-1]), sizes), SEED]


@pytest.mark.parametrize("block", [(16, 16), (32, 64), (64, 32)])
def test_every_tile_draws_the_same(interpreter: Interpreter, block: tuple[int, int]) -> None:
    region = dropout(attention(scaled_score, causal))
    agree(interpreter, region, drawn(region, LENGTHS), LENGTHS, tiles(region, *block))


@pytest.mark.parametrize("name", ["window", "symmetric_window", "bool_mask", "sink", "weight", "soft_cap", "blhd"])
def test_forward(interpreter: Interpreter, name: str) -> None:
    region = dropout(REGIONS[name], 0.6)
    agree(interpreter, region, drawn(region, LENGTHS), LENGTHS)


@pytest.mark.parametrize("batch", [(), (h,)], ids=["no batch", "heads"])
def test_fewer_batch_axes(interpreter: Interpreter, batch: tuple[object, ...]) -> None:
    region = dropout(attention(scaled_score, batch=batch))  # type: ignore[arg-type]
    agree(interpreter, region, drawn(region, LENGTHS), LENGTHS)


def test_packed_heads_and_split_keys(interpreter: Interpreter) -> None:
    region = dropout(attention(scaled_score, causal, **grouped(3)))
    args, sizes = [*qkv(16, m=5, heads=6, kv=2), SEED], {**LENGTHS, "H": 6, "M": 5}
    for skeleton in ("prefill", "decode"):
        agree(interpreter, region, args, sizes, tiles(region, 16, 16, skeleton, pack=3))


@pytest.mark.parametrize("name", ["plain", "causal", "bottom_right", "window", "soft_cap", "sink", "weight", "blhd"])
def test_gradients(interpreter: Interpreter, name: str) -> None:
    region = dropout(REGIONS[name])
    gradients_agree(interpreter, region, drawn(region, SIZES), SIZES)


def test_gradients_of_grouped_heads(interpreter: Interpreter) -> None:
    region, sizes = dropout(attention(scaled_score, causal, **grouped(3))), {**SIZES, "H": 6}
    gradients_agree(interpreter, region, [*qkv(16, m=23, n=37, heads=6, kv=2), SEED], sizes)


def test_gradients_of_half_precision_by_other_tiles(interpreter: Interpreter) -> None:
    region = dropout(attention(scaled_score, causal, dtype="float16"))
    gradients_agree(interpreter, region, drawn(region, SIZES), SIZES, small(region, 32, 16))


def test_a_loaded_weight_is_dropped_too(interpreter: Interpreter) -> None:
    region = dropout(attention(scaled_score, loads=[((H,), "float32")], weight=load(0, h)), 0.9)
    agree(interpreter, region, drawn(region, LENGTHS), LENGTHS)


def test_keys_decide_the_word_by_their_place(interpreter: Interpreter) -> None:
    """Where the first tile visited does not begin at 0."""
    region = dropout(attention(scaled_score, apply("ge", kv_idx, Const(21))))
    agree(interpreter, region, drawn(region, LENGTHS), LENGTHS, tiles(region, 16, 16))


@pytest.mark.parametrize("name", ["documents", "a few"])
def test_tiles_found_by_a_table(interpreter: Interpreter, name: str) -> None:
    region = dropout(keeps(q_idx, kv_idx))
    agree(interpreter, region, [*qkv(16), KEEP[name], SEED], LENGTHS, by_table(region))


def test_the_whole_way() -> None:
    """Compiled functions, their kernels interpreted: a process takes the interpreter up when it starts."""
    tests = ["tests/test_dropout.py", "-k", "test_values_and_gradients or test_manual_seed"]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", *tests]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert "5 passed" in done.stdout, done.stdout[-3000:]


# ----------------------------------------------------------------------------------------------------------------
# Texts


TRITON = tuple(int(n) for n in triton.__version__.split(".")[:2])


def compiled() -> Iterator[tuple[int, str]]:
    for arch in (80, 90, 100):
        yield from ((arch, name) for name in ("attention", "query_gradient", "key_gradients"))


@pytest.mark.parametrize(("arch", "kernel"), list(compiled()))
def test_compiles_without_a_gpu(arch: int, kernel: str) -> None:
    forward = kernel == "attention"
    source = emit(*GOLDEN["dropout"], saves_lse=True) if forward else emit_backward(*BACKWARD["dropout_backward"])
    info = cross_compile(source, arch, kernel)
    assert info.shared <= {80: 166_912, 90: 232_448, 100: 232_448}[arch]
    assert arch == 80 or info.spills in (0, None)


@pytest.mark.parametrize("d", [64, 128])
def test_the_plan_knows_what_dropping_takes(d: int) -> None:
    region = dropout(attention(scaled_score, causal, d=d, dtype="bfloat16"))
    chosen = plan(region, {"B": 4, "H": 16, "M": 4096, "N": 4096})
    info = cross_compile(emit(region, chosen, saves_lse=True), 90, "attention")
    assert chosen.cost is not None
    assert info.shared <= chosen.cost.smem_bytes  # as the installed release lays the draws out
    assert TRITON >= (3, 8) or info.shared == chosen.cost.smem_bytes
    assert (info.spills or 0) <= 8


def test_a_tile_draws_once() -> None:
    region = dropout(REGIONS["causal"])
    body = emit_backward(region, small(region)).text.partition("def launch")[0]
    assert body.count("kept_tile = ") == 4  # a full and an edge tile, in two kernels
    assert "keeps" not in emit(attention(scaled_score, causal), tiles(region)).text
