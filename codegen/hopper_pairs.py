"""What the score or the mask reads for each pair, in the forward kernel for Hopper: blocks of it come through shared
memory beside each tile of K, by the same barriers. (frame) -> lines; nothing where nothing is so read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fusecomp.codegen.base2 import peel
from fusecomp.codegen.copied import WIDTHS
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.hopper import GROUP_ROWS, blocks, holds_q
from fusecomp.codegen.memory import widened
from fusecomp.codegen.printer import triton_dtype
from fusecomp.ir.expr import Apply, Load, Score, Var, parts, variables
from fusecomp.ir.region import extent

Lines = list[str]


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
        f"{x.tensor}_smem = gl.allocate_shared_memory({triton_dtype(x.dtype)}, "
        f"[STAGES * GROUPS, {GROUP_ROWS}, BLOCK_N], {'WIDE' if x.dtype == 'float32' else 'SHARED'})"
        for _, x in frame.copied
    ]


def size(frame: Frame) -> str:
    """Bytes of them beside a tile of K."""
    wide = sum(WIDTHS[x.dtype] for _, x in frame.copied)
    return f" + BLOCK_M * BLOCK_N * {wide}" if wide else ""


def copies(frame: Frame, place: Callable[[Load], str]) -> Lines:
    """Tiles of all of them, for every group; `place`: the coordinates of a block."""
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
    loads = [(name, x.dtype, f"{x.tensor}_smem.{index}.load(SCORES)") for name, x in frame.copied]
    tiles = [
        f"{name} = {f'widen({load})' if dtype == 'bfloat16' else load + widened(dtype)}" for name, dtype, load in loads
    ]
    return [*tiles, "fence_async_shared()"] if tiles else []


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
