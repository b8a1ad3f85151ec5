"""Tables of ranges, which the kernels for Hopper visit by: those of the forward kernel, of dQ, and of dK and dV.

The kernels themselves run on a GPU only (tests/test_gpu_hopper.py, tests/test_gpu_hopper_backward.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gradients import agree as gradients_agree
from gradients import qkv as gradient_qkv
from kernels import Interpreter, agree, tiles
from regions import B, M, N, age, attention, b, causal, kv_idx, load, q_idx, scaled_score
from test_codegen import qkv
from test_hopper import DOCUMENTS, EXPRESSED, LONG, SCALED, half, planned, written_in
from test_visits import SIZES
from torch import Tensor

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.emit import emit
from fusecomp.codegen.hopper import specialised
from fusecomp.codegen.hopper_backward import specialised as gradients
from fusecomp.codegen.source import KernelSource
from fusecomp.codegen.table_ranges import gradient_kernels, range_kernels
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.backward import BackwardPlan
from fusecomp.planning.device import find
from fusecomp.planning.holes import filled
from fusecomp.planning.plan import plan, scheduled
from fusecomp.planning.tile import Tile, TilePlan
from fusecomp.running.hopper import available
from fusecomp.running.hopper import planned as hopper_plan


def ranged(region: AttentionRegion, block_m: int = 16, block_n: int = 16, consumers: int = 0) -> TilePlan:
    return replace(tiles(region, block_m, block_n), visits="ranges", consumers=consumers)


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


def of_runs(seen: Tensor, block: int, rows: int) -> list[int]:
    """The same, then whether each row sees one run of keys, where these begin, and where they end; rows past the last
    are like it."""
    n = seen.shape[1]
    seen = seen[torch.arange(rows).clamp(max=len(seen) - 1)]
    places = torch.arange(n).expand(rows, n)
    first, last = torch.where(seen, places, n).amin(1), torch.where(seen, places, -1).amax(1)
    together = bool((seen.sum(1) == (last + 1 - first).clamp(min=0)).all())
    return [*of_row(seen, block), int(together), *first.tolist(), *last.tolist()]


OF_QUERIES, OF_KEYS = load(0, b, q_idx, dtype="int64"), load(1, b, kv_idx, dtype="int64")
SAME = apply("eq", OF_QUERIES, OF_KEYS)
IDS = {
    "sorted": (torch.arange(37) // 11, torch.arange(53) // 11),
    "one": (torch.zeros(37), torch.zeros(53)),
    "each its own": (torch.arange(37), torch.arange(53)),
    "unlike": (torch.zeros(37), torch.ones(53)),
    "again": (torch.arange(37) // 16 % 2, torch.arange(53) // 16 % 2),
    "wide": (torch.arange(37) // 20 + (1 << 40), torch.arange(53) // 20 + (1 << 40)),
    "negative": (-(torch.arange(37) // 20), -(torch.arange(53) // 20)),
}
MASKS: dict[str, tuple[Expr, ...]] = {
    "documents": (SAME,),
    "causal documents": (causal, SAME),
    "other documents": (apply("not", SAME),),
    "earlier ones": (apply("ge", OF_QUERIES, OF_KEYS), apply("lt", age, Const(30))),
    "near": (apply("lt", apply("abs", apply("sub", OF_QUERIES, OF_KEYS)), Const(2)),),
    "either": (apply("or", SAME, apply("lt", kv_idx, Const(16))),),
}


def documents(*keep: Expr, **more: Any) -> AttentionRegion:
    return attention(scaled_score, *keep, loads=[((B, M), "int64"), ((B, N), "int64")], **more)


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("keep", MASKS)
def test_attention_by_ranges(interpreter: Interpreter, keep: str, ids: str) -> None:
    """Whatever the ids, and whatever their order."""
    region, args = documents(*MASKS[keep]), [x.long().repeat(2, 1) for x in IDS[ids]]
    args[1][1] = args[1][1].flip(0)
    agree(interpreter, region, [*qkv(16), *args], SIZES, ranged(region))


@pytest.mark.parametrize("ids", ["sorted", "again", "wide"])
def test_gradients_by_ranges(interpreter: Interpreter, ids: str) -> None:
    region, args = documents(*MASKS["documents"]), [x.long().repeat(2, 1) for x in IDS[ids]]
    plans = BackwardPlan(ranged(region), ranged(region, 16, 32))
    dead = bool((args[0][0][:, None] != args[1][0]).all(1).any())
    gradients_agree(interpreter, region, [*gradient_qkv(16, m=37, n=53), *args], SIZES, plans,
                    wanted=("q", "k") + ("v",) * (not dead))  # fmt: skip


def test_padding_of_each_sequence(interpreter: Interpreter) -> None:
    """Truth values of the keys, ids in another tensor's columns, and sequences that end at a number."""
    keys = load(0, b, kv_idx, dtype="bool")
    part = load(1, b, apply("add", kv_idx, Const(3)), dtype="int32")
    ends = apply("lt", kv_idx, load(2, b, dtype="int32"))
    loads = [((B, N), "bool"), ((B, apply("add", N, Const(3))), "int32"), ((B,), "int32")]
    region = attention(scaled_score, keys, apply("ne", part, Const(0)), ends, loads=loads)
    args = [torch.arange(53) < torch.tensor([[40], [53]]), (torch.arange(56) // 19).repeat(2, 1).int(),
            torch.tensor([50, 7]).int()]  # fmt: skip
    agree(interpreter, region, [*qkv(16), *args], SIZES, ranged(region))


HEADER = """\
import torch
import triton
import triton.language as tl


"""
LAUNCH = """


def launch(out, tensors, sizes):
    out.copy_({}(tensors, sizes))
"""


def table(
    interpreter: Interpreter, region: AttentionRegion, kernels: list[str], args: list[Tensor], name: str, rows: int,
    columns: int,
) -> list[list[int]]:
    """What the function of that name returns."""
    text = HEADER + "\n\n\n".join(kernels) + LAUNCH.format(name)
    source = KernelSource(f"{name}_{abs(hash(text))}", text, "", replace(ranged(region), visits="bounds"), region)
    found = interpreter.run(source, torch.full((rows, columns), -1, dtype=torch.int32), args, [2, 37, 53])
    return found.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("ids", ["sorted", "one", "each its own", "unlike", "again"])
def test_ranges_of_documents(interpreter: Interpreter, ids: str) -> None:
    """Those that a look at every pair would give; a tile that an end cuts is never full."""
    region, args = documents(SAME), [x.long().repeat(2, 1) for x in IDS[ids]]
    args[1][1] = 0
    seen = args[0][:, :, None] == args[1][:, None]
    got = table(interpreter, region, range_kernels(region, ranged(region)), args, "list_visits", 6, 37)
    assert got == [of_runs(s, 16, 16) for x in seen for s in x.split(16)]
    kernels = gradient_kernels(region, ranged(region), ranged(region, 16, 32))
    assert table(interpreter, region, kernels, args, "key_tiles", 6, 37) == got
    got = table(interpreter, region, kernels, args, "query_tiles", 4, 69)
    assert got == [of_runs(s.mT, 16, 32) for x in seen for s in x.split(32, 1)]
    assert "key_tiles" not in "".join(gradient_kernels(region, None, ranged(region)))


def test_rows_of_more_keys_than_are_looked_at_together(interpreter: Interpreter) -> None:
    """Runs go on from one look to the next."""
    region, n = documents(SAME), 9 * 1024 + 5
    of_keys = torch.zeros(2, n).long()
    of_keys[0, 2000:2016], of_keys[0, 8200:] = 1, 2
    of_keys[1, :4096], of_keys[1, 5000:5030], of_keys[1, 7000:] = 3, 4, 5
    args = [torch.zeros(2, 16).long(), of_keys]
    text = HEADER + "\n\n\n".join(range_kernels(region, ranged(region))) + LAUNCH.format("list_visits")
    source = KernelSource("rows_of_more", text, "", replace(ranged(region), visits="bounds"), region)
    got = interpreter.run(source, torch.zeros((2, 37), dtype=torch.int32), args, [2, 16, n]).tolist()
    assert got == [of_runs((args[0][i, :, None] == of_keys[i]), 16, 16) for i in range(2)]


@pytest.mark.parametrize(("d", "begin", "cut"), [(64, 0, 2), (128, 1, 3)])
def test_the_kernels_walk_their_ranges(d: int, begin: int, cut: int) -> None:
    """What the mask cuts at the end, the run that needs no mask, what it cuts at the beginning; at D 128 the last tile
    comes before all of them."""
    region = half(SCALED, DOCUMENTS, d=d, loads=[((B, N), "int64")])
    text = emit(region, specialised(region, planned(region))).text
    walked = [text.index(f"for block in range({x}):") for x in (f"{begin}, above", "above, below", "below, blocks")]
    assert walked == sorted(walked)
    assert text.count("if in_runs:") == cut
    assert "load0_tile" not in text[walked[1] : walked[2]]


def test_gradients_walk_their_ranges() -> None:
    region = EXPRESSED["documents"]
    text = emit_backward(region, gradients(region, specialised(region, planned(region)))).text
    assert text.count("if in_runs:") == 4  # before and after the full tiles of either gradient
    for name in ("k", "q"):
        loop = text[text.index(f"for {name}_start in range(full_begin, full_end"):]
        assert "load0_" not in loop[: loop.index("\n\n")]


@written_in
def test_every_kernel_compiles() -> None:
    region = EXPRESSED["documents"]
    own = specialised(region, planned(region))
    forward, backward = emit(region, own), emit_backward(region, gradients(region, own))
    assert cross_compile(forward, 90, "key_ranges").spills in (0, None)
    for kernel in ("key_ranges", "query_ranges"):
        assert cross_compile(backward, 90, kernel).spills in (0, None)
    for kernel in ("query_gradient", "key_gradients"):
        info = cross_compile(backward, 90, kernel)
        assert info.spills is None or info.spills <= 256  # mostly where a mask shows no runs


def test_programs_have_the_registers_that_their_usual_loops_need() -> None:
    """The loop that reads the mask would take more, and leave room for one program less."""
    region, device = EXPRESSED["documents"], find("h200")
    made = plan(region, LONG, device)
    assert (made.visits, made.consumers) == ("ranges", 0)
    assert 0 < made.registers < device.registers_per_thread
    source = emit(region, made)
    assert f"maxnreg={made.registers}" in source.text
    info = cross_compile(source, 90)
    assert info.registers is None or info.registers <= made.registers
    assert info.spills is None or info.spills <= 64  # none but by the assembler of Triton 3.9
    programs = device.registers_per_sm // (made.registers * 32 * made.warps)
    assert programs * (info.shared + 1024) <= device.smem_per_sm
    assert plan(region, LONG, find("a100")).registers == 0
    assert specialised(region, made).registers == 0


def test_tiles_that_are_tried_have_registers_of_their_own() -> None:
    """Capped as the planned one, a tile of which a multiprocessor holds fewer programs would spill."""
    region, device = EXPRESSED["documents"], find("h200")
    made = plan(region, LONG, device)
    large = scheduled(made, Tile(128, 128, 4, 2), region, LONG, device)
    assert (large.visits, large.registers) == ("ranges", 0)
    own = Tile(made.block_m, made.block_n, made.warps, made.stages)
    assert scheduled(large, own, region, LONG, device).registers == made.registers > 0


def either(a: Expr, b: Expr) -> Expr:
    return apply("and", causal, apply("or", a, b))


PREFIX = apply("or", causal, apply("lt", kv_idx, Const(1024)))
FIRST_AND_RECENT = either(apply("lt", age, Const(256)), apply("lt", kv_idx, Const(4)))
EVEN_TILES = apply("eq", apply("mod", apply("floordiv", kv_idx, Const(128)), Const(2)), Const(0))


@pytest.mark.parametrize(
    ("keep", "low", "high", "visits"),
    [
        (PREFIX, 1, 1, "bounds"), (causal, 1, 1, "bounds"), (DOCUMENTS, 1, 1, "ranges"),
        (FIRST_AND_RECENT, 0.1, 0.3, "table"), (EVEN_TILES, 0.5, 0.6, "table"),
    ],
)  # fmt: skip
def test_holes_that_are_known_before_the_run(keep: Expr, low: float, high: float, visits: str) -> None:
    """Ranges would visit them, a list does not."""
    region = half(SCALED, keep, loads=[((B, N), "int64")])
    assert low <= filled(region, LONG) <= high
    assert plan(region, LONG, find("h200")).visits == visits


@pytest.mark.parametrize(("length", "inference"), [(4096, True), (1024, False)])
def test_where_documents_run_on_hopper(length: int, inference: bool) -> None:
    """Few rows of tiles are over sooner by the portable kernel; its gradients are by far the slower ones."""
    region = half(SCALED, causal, DOCUMENTS, loads=[((B, N), "int64")])
    sizes = {"B": 4 if inference else 8, "H": 16, "M": length, "N": length}
    found = [hopper_plan(region, sizes, find("h200"), trained) for trained in (False, True)]
    assert [x is not None for x in found] == [inference and available(), available()]


def test_where_no_query_sees_a_key() -> None:
    never = half(SCALED, apply("lt", kv_idx, apply("sub", q_idx, Const(10**6))))
    assert filled(never, LONG) == 0.0
