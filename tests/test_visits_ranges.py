"""Tables of ranges, which the kernels for Hopper visit by: those of the forward kernel, of dQ, and of dK and dV.

The kernels themselves run on a GPU only (tests/test_gpu_hopper.py, tests/test_gpu_hopper_backward.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels import Interpreter, tiles
from regions import B, M, N, age, b, causal, kv_idx, q_idx
from test_hopper import DOCUMENTS, EXPRESSED, LONG, SCALED, half, planned, written_in
from test_visits import KEEP, keeps
from torch import Tensor

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.emit import emit
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.hopper import specialised
from fusecomp.codegen.hopper_backward import specialised as gradients
from fusecomp.codegen.source import KernelSource
from fusecomp.codegen.table_ranges import gradient_kernels, range_kernels
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.device import find
from fusecomp.planning.holes import filled
from fusecomp.planning.tile import TilePlan
from fusecomp.running.hopper import available
from fusecomp.running.hopper import planned as hopper_plan

HEADER = """\
import torch
import triton
import triton.language as tl

BLOCK_M = tl.constexpr({})
BLOCK_N = tl.constexpr({})


"""
LAUNCH = """


def launch(out, tensors, sizes):
    out.copy_({}(tensors, sizes))
"""


def ranged(region: AttentionRegion, block_m: int = 16, block_n: int = 16) -> TilePlan:
    return replace(tiles(region, block_m, block_n), visits="table", consumers=2)


def table(
    interpreter: Interpreter, region: AttentionRegion, kernels: list[str], mask: Tensor, name: str, rows: int
) -> Tensor:  # fmt: skip
    """What the function of that name returns for a mask [..., M, N]."""
    plan = ranged(region)
    text = HEADER.format(plan.block_m, plan.block_n) + "\n\n\n".join(kernels) + LAUNCH.format(name)
    source = KernelSource(f"{name}_{abs(hash(text))}", text, "", replace(plan, visits="bounds"), region)
    lengths = dict(zip("BMN", (2, *mask.shape[-2:]), strict=True))
    sizes = [lengths[s] for s in region.sizes if s in lengths and (s != "B" or mask.dim() > 2)]
    return interpreter.run(source, torch.full((rows, 4), -1, dtype=torch.int32), [mask], sizes)


def of_row(seen: Tensor, block: int) -> list[int]:
    """begin, full_begin, full_end, end of pairs [rows of one tile, all of what is visited]."""
    n = seen.shape[1]
    states = [int(t.any()) + int(t.all() and t.shape[1] == block) for t in seen.split(block, 1)]
    held = [i for i, s in enumerate(states) if s]
    if not held:
        return [0, 0, 0, 0]
    runs = [(j - i, -i) for i in range(len(states)) for j in range(i + 1, len(states) + 1) if set(states[i:j]) == {2}]
    length, first = max(runs, default=(0, -held[0]))
    return [x * block for x in (held[0], -first, length - first)] + [min((held[-1] + 1) * block, n)]


@pytest.mark.parametrize("name", KEEP)
def test_ranges(interpreter: Interpreter, name: str) -> None:
    """Of keys for 16 queries each, and of queries for 32 keys each; a tile that an end cuts is never full."""
    region, mask = keeps(q_idx, kv_idx), KEEP[name].contiguous()
    got = table(interpreter, region, range_kernels(Frame(region, ranged(region))), mask, "list_visits", 3)
    whole = list(mask.split(16))
    expected = [of_row(s, 16) for s in whole[:-1]]
    assert got[:2].tolist() == expected
    begin, full_begin, full_end, end = got[2].tolist()
    assert [begin, end] == of_row(whole[2], 16)[::3]
    assert full_begin == full_end == begin  # it has five queries
    frames = [GradientFrame(region, ranged(region, 16, n)) for n in (16, 32)]
    kernels = gradient_kernels(*frames, once=False)
    assert table(interpreter, region, kernels, mask, "key_tiles", 3).tolist() == got.tolist()
    got = table(interpreter, region, kernels, mask, "query_tiles", 2)
    assert got[0].tolist() == of_row(mask[:, :32].mT, 16)
    assert got[1, [0, 3]].tolist() == of_row(mask[:, 32:].mT, 16)[::3]


def test_ranges_of_each_sequence(interpreter: Interpreter) -> None:
    region = keeps(b, 0, q_idx, kv_idx, shape=(B, 1, M, N))
    mask = torch.stack([KEEP["window"], KEEP["padding"]])[:, None].contiguous()
    frame = GradientFrame(region, ranged(region))
    kernels = gradient_kernels(frame, frame, once=True)
    got = table(interpreter, region, kernels, mask, "query_tiles", 8).view(2, 4, 4)
    for rows, keep in zip(got, mask[:, 0], strict=True):
        assert rows[:3].tolist() == [of_row(s.mT, 16) for s in keep.split(16, 1)[:3]]
    assert "key_tiles" not in "".join(kernels)


def test_the_kernels_walk_their_ranges() -> None:
    """What the mask cuts at the end, the run that needs no mask, what it cuts at the beginning."""
    region = EXPRESSED["documents"]
    text = emit(region, specialised(region, planned(region))).text
    walked = [text.index(f"for block in range({x}):") for x in ("1, above", "above, below", "below, blocks")]
    assert walked == sorted(walked)
    assert "load0_tile" not in text[walked[1] : walked[2]]
    text = emit_backward(region, gradients(region, specialised(region, planned(region)))).text
    for name in ("k", "q"):
        loop = text[text.index(f"for {name}_start in range(full_begin, full_end"):]
        assert "load0_" not in loop[: loop.index("\n\n")]


@written_in
def test_every_kernel_compiles() -> None:
    region = EXPRESSED["documents"]
    plan = specialised(region, planned(region))
    forward, backward = emit(region, plan), emit_backward(region, gradients(region, plan))
    assert cross_compile(forward, 90, "list_ranges").spills in (0, None)
    for kernel in ("query_gradient", "key_gradients"):
        info = cross_compile(backward, 90, kernel)
        assert info.spills is None or info.spills <= 128


def either(a: Expr, b: Expr) -> Expr:
    return apply("and", causal, apply("or", a, b))


PREFIX = apply("or", causal, apply("lt", kv_idx, Const(1024)))
FIRST_AND_RECENT = either(apply("lt", age, Const(256)), apply("lt", kv_idx, Const(4)))
EVEN_TILES = apply("eq", apply("mod", apply("floordiv", kv_idx, Const(128)), Const(2)), Const(0))


@pytest.mark.parametrize(
    ("keep", "low", "high"),
    [(PREFIX, 1, 1), (causal, 1, 1), (DOCUMENTS, 1, 1), (FIRST_AND_RECENT, 0.1, 0.3), (EVEN_TILES, 0.5, 0.6)],
)
def test_holes_that_are_known_before_the_run(keep: Expr, low: float, high: float) -> None:
    """Ranges would visit them, a list does not."""
    region = half(SCALED, keep, loads=[((B, N), "int64")])
    assert low <= filled(region, LONG, 128) <= high
    assert (hopper_plan(region, LONG, find("h200")) is not None) == (low == 1 and available())


def test_where_no_query_sees_a_key() -> None:
    never = half(SCALED, apply("lt", kv_idx, apply("sub", q_idx, Const(10**6))))
    assert filled(never, LONG, 128) == 0.0
