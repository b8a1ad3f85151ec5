"""What the score or the mask reads for each pair, in the forward kernel for Hopper: blocks of it come through shared
memory beside each tile of K, by the same barriers. (frame) -> lines; nothing where nothing is so read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusecomp.codegen.base2 import peel
from fusecomp.codegen.copied import WIDTHS
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.hopper import GROUP_ROWS, blocks, holds_q
from fusecomp.codegen.memory import widened
from fusecomp.codegen.printer import triton_dtype
from fusecomp.codegen.skeletons import fill
from fusecomp.ir.expr import Apply, Expr, Load, Score, Var, parts, variables
from fusecomp.ir.region import extent

Lines = list[str]
Holes = dict[str, str | Lines]
HELD_AS = {"float32": ("float32", "BLOCK_N", "WIDE"), "bool": ("int16", "BLOCK_N // 2", "FLAGS")}
"""Blocks of other than 16 bits: elements, columns, layout."""
FLAGS = '''\
FLAGS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=«row», element_bitwidth=16, rank=2))  # of booleans by two
PAIRS = gl.constexpr(gl.DistributedLinearLayout(
    [[8, 0], «columns»], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, «pairs»],
))  # of those of the accumulator of S
BOXES |= {(8, n): gl.NVMMASharedLayout(«row», 8, n) for n in (2, 3, 4, 5)}
'''
MASKED = "block < above"
"""Of the tiles of a list, those of which a mask is read."""


def turning(frame: Frame) -> tuple[Var, ...]:
    """The batch axes, those last along which no block differs: programs side by side then read the same from L2."""
    shared = shared_axes(frame)
    return (*(v for v in frame.batch if v not in shared), *shared)


def shared_axes(frame: Frame) -> tuple[Var, ...]:
    read = [variables(x) for _, x in frame.copied]
    return tuple(v for v in frame.batch if read and not any(v.name in names for names in read))


def memory(frame: Frame) -> list[str]:
    """Names of the tiles in shared memory."""
    return [f"{x.tensor}_smem" for _, x in frame.copied]


def allocated(frame: Frame) -> Lines:
    """Memory of the tiles."""
    return [
        f"{x.tensor}_smem = gl.allocate_shared_memory({triton_dtype(held)}, "
        f"[STAGES * GROUPS, {GROUP_ROWS}, {columns}], {layout})"
        for _, x in frame.copied
        for held, columns, layout in [HELD_AS.get(x.dtype, (x.dtype, "BLOCK_N", "SHARED"))]
    ]


def flags(frame: Frame) -> Lines:
    """Layouts of booleans: [1, 2 j] and [1, 2 j + 1] are one word, of which a thread has those of its scores."""
    if all(x.dtype != "bool" for _, x in frame.copied):
        return []
    keys = frame.plan.block_n
    columns = ", ".join(f"[0, {4 << i}]" for i in range((keys // 8).bit_length() - 1))
    return fill(FLAGS, {"row": str(min(128, keys)), "columns": columns, "pairs": str(keys // 2)}).splitlines()


def expected(frame: Frame, k_bytes: str) -> Lines:
    """How many bytes come with a tile of K."""
    expect = "mbarrier.expect(k_ready.index(slot), {})"
    wide = sum(WIDTHS[x.dtype] for _, x in frame.copied)
    alone, together = expect.format(k_bytes), expect.format(f"{k_bytes} + BLOCK_M * BLOCK_N * {wide}")
    if not wide or not frame.listed:
        return [together if wide else alone]
    return [f"if {MASKED}:", f"    {together}", "else:", f"    {alone}"]


def copies(frame: Frame, place: Callable[[Load], str]) -> Lines:
    """Tiles of all of them, for every group, where they are read; `place`: the coordinates of a block."""
    lines = _copies(frame, place)
    return [f"if {MASKED}:", *("    " + line for line in lines)] if lines and frame.listed else lines


def _copies(frame: Frame, place: Callable[[Load], str]) -> Lines:
    lines: Lines = []
    for _, x in frame.copied:
        block = f"{x.tensor}_desc.dtype, {blocks(frame)[x.tensor]}, {x.tensor}_desc.layout"
        into = f"{x.tensor}_smem.index(slot * GROUPS + group)._reinterpret({block})"
        copy = f"{x.tensor}_desc, {place(x)}, k_ready.index(slot), {into}"
        lines += ["    tma.async_copy_global_to_shared(", f"        {copy}", "    )"]
    return ["for group in gl.static_range(GROUPS):", *lines] if lines else []


def read(frame: Frame) -> Lines:
    """bias_tile = bias[b, h, q_idx, kv_idx] over the tile."""
    index = "index(count % STAGES * GROUPS + group)"
    lines = []
    for name, x in frame.copied:
        load = f"{x.tensor}_smem.{index}.load({'PAIRS' if x.dtype == 'bool' else 'SCORES'})"
        lines.append(f"{name} = {f'widen({load})' if x.dtype == 'bfloat16' else load + widened(x.dtype)}")
    return lines


def masks(frame: Frame, tests: Sequence[Expr]) -> tuple[Lines, list[Expr]]:
    """(S of those `tests` that are such booleans, the others). They are asked when S is there, and by themselves:
    before, or together with others, the compiler would carry the answers as bits."""
    names: dict[Expr, str] = {x: name for name, x in frame.copied if x.dtype == "bool"}
    opened = [f"{name} = opened({name})" for name in names.values()]
    alone = [t for t in tests if t in names]
    rest = [t for t in tests if t not in names]
    return [*opened, *(f'score = gl.where({names[t]}, score, float("-inf"))' for t in alone)], rest


def in_step(frame: Frame, masked: bool = True) -> Holes:
    """What a step reads of them, what its product is added to, and what lets the next be copied over them: behind the
    products, for it waits for all that was read. A full tile of a list reads none."""
    begun = start(frame) if masked or not frame.listed else None
    lines = read(frame) if masked or not frame.listed else []
    product = f"{begun.tile}, " if begun else "gl.zeros([64, BLOCK_N], gl.float32, SCORES), use_acc=False, "
    return {"pairs": lines, "product": product, "freed": ["fence_async_shared()"] if lines else []}


@dataclass(frozen=True)
class Start:
    """S = scale Q K^T + tile: the product adds to what comes from shared memory, and Q is scaled. Added afterwards, on
    every group's way to its exponentials, it took 0.756 ms, not 0.624 (B 4, H 16, N 4096, D 64; probes_h200.json)."""

    tile: str
    scale: float


def start(frame: Frame) -> Start | None:
    """S in these parts, where registers hold Q and the scale, a power of two, rounds nothing in it."""
    held = holds_q(frame.plan, extent(frame.region.dv)) and frame.region.out_dtype == "bfloat16"
    if len(frame.copied) != 1 or not held or frame.exponent.scale != 1.0:
        return None
    (name, load), tests = frame.copied[0], [x for e in frame.region.keep for x in parts(e)]
    match frame.exponent.score:
        case Apply("add", (x, y)) if load in (x, y) and load not in tests:
            core, scale = peel(y if x == load else x)
            return Start(name, scale) if core == Score(0) and math.frexp(scale)[0] == 0.5 else None
    return None


def scaled(frame: Frame) -> Lines:
    """Q as that product takes it."""
    begun = start(frame)
    if begun is None or begun.scale == 1.0:
        return []
    return [f"q_tile = (q_tile * {begun.scale}).to({triton_dtype(frame.region.out_dtype)})"]
