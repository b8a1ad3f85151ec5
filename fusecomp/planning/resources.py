"""Shared memory and registers of one program, as Triton allocates them: equations, and what decides in them.

Shared memory holds what is alive at once. Triton keeps tiles that a loop loads ahead (its pipeliner: one buffer a
stage, one less where they go through registers), tiles that a product reads from there, what threads exchange when a
tensor changes its layout, and packs them without loss but for alignment. The kernels of a backward pass have
`backward_resources`; `tests/compiled_resources.py` holds both against the compiler.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import sympy

from fusecomp.planning.device import Device
from fusecomp.planning.facts import Facts
from fusecomp.planning.symbols import *
from fusecomp.planning.tile import Tile

ALLOCATED = {
    "REG_BASE": 27,  # registers a thread: addresses, row statistics, loop state
    "REG_MASK": 12.5,  # for each of the first three operations on a score: their operands, the second loop's state
    "REG_SPLIT": 26,  # where D is two chunks: addresses and Q's second part
    "REG_SUM": 1.2,  # a float32 sum of the accumulator, and its copies while it is rescaled
    "REG_PAIR": 1.06,  # a pair's score in float32, then its probability in half precision
    "REG_PAIR_DESCRIBED": 0.19,  # more of a pair through descriptors: fitted on times; registers alone would say 0.4
    "REG_DOT": 12.8,  # operands of a float32 product of 64 terms, for each pair of a thread that multiplies by itself
    "REG_LOAD": 25,  # where something is read for each pair: its address, the layout that it arrives in
    "REG_LOADED": 0.75,  # such a pair's bias or mask
    "REG_DRAW": 90,  # where weights are dropped: the generator's state, what is kept of a tile
    "REG_VECTOR": 1.67,  # one 64-bit address for each 16 bytes that a thread loads of K and V, some shared
    "SMEM_RESERVED": 1024,  # B: what the driver takes of each program
}
"""Fitted on generated kernels compiled for sm_90, whose products are wgmma's."""
INSTEAD: dict[str, dict[str, float]] = {
    "mma.sync": {
        "REG_BASE": 88, "REG_MASK": 0, "REG_SPLIT": 0, "REG_SUM": 0.95, "REG_PAIR": 1.5, "REG_DRAW": 25,
        "REG_VECTOR": 1.75,
    },
    "tcgen05": {
        "REG_BASE": 30, "REG_MASK": 8, "REG_SPLIT": 0, "REG_SUM": 1.07, "REG_PAIR": 1.5, "REG_DRAW": 0, "REG_LOAD": 45,
        "REG_VECTOR": 3.1,
    },
}  # fmt: skip
"""Of other instructions, where they differ: fitted on `examples/bench/records/compiled_resources.json`."""

REG_BASE, REG_MASK, REG_SPLIT, REG_SUM, REG_PAIR, REG_PAIR_DESCRIBED, REG_DOT, REG_LOAD, REG_LOADED = symbols(
    "REG_BASE REG_MASK REG_SPLIT REG_SUM REG_PAIR REG_PAIR_DESCRIBED REG_DOT REG_LOAD REG_LOADED"
)
REG_DRAW, REG_VECTOR = symbols("REG_DRAW REG_VECTOR")
(SMEM_RESERVED,) = symbols("SMEM_RESERVED,")

# Tiles, B
pairs = BLOCK_M * BLOCK_N
q_tile = WIDTH * BLOCK_M * D
k_tile, v_tile = WIDTH * BLOCK_N * D, WIDTH * BLOCK_N * DV
kv_tile = k_tile + v_tile
p_tile = WIDTH * pairs

# Threads exchange a tensor in as many parts as both layouts keep apart in a thread's own registers. A tile whose rows
# a thread loads 16 B at a time goes over in parts of 16 B a thread (`vector`); what is read at each pair, 32 elements a
# thread, to the rows of tensor memory 32 B; float32 scores to the layout of what is read there, in PARTS.
vector = 16 * threads
loaded = Min(LOAD * pairs, 32 * threads * (TCGEN05 + (1 - TCGEN05) * LOAD))
scored = Min(1, LOAD) * 4 * pairs / PARTS
drawn = Min(1, DRAWS) * DRAWN * pairs * (1 - TCGEN05) * (1 - DOT)  # what was drawn, from the generator's layout
# P passes to the warps that need it: where they share the columns of a tile, or threads multiply by themselves; beside
# it a number a row, of each warp or for all of them. On its way to tensor memory it may change threads.
shared = CROSSES * (p_tile + 4 * BLOCK_M * (DOT + MMA_SYNC * Max(0, WIDTH / 2 - 1) * WARPS))

# Loads that feed wgmma or tcgen05 keep one buffer a stage, loads that go through registers (mma.sync, biases, numbers
# of pages) one less; one of three stages looks up pages, but where decoding has looked them up a tile ahead. Tiles that
# the mask cuts are a loop of their own, which loads no bias ahead: mma.sync takes scores to where the bias is.
buffers = STAGES - 1 + WGMMA - (1 - SPLIT) * Min(1, LOOKED_UP) * Max(0, 1 - Max(STAGES - 3, 3 - STAGES))
ahead = Max((STAGES - 1) * LOAD * pairs + Max(shared, drawn), MMA_SYNC * scored)
# Decoding keeps K and V of 8 bits as they come, and beside them V as the product reads it
narrow = SPLIT * MMA_SYNC * Max(0, 2 - HELD)
buffered = kv_tile - narrow * (WIDTH - HELD) * BLOCK_N * (D + DV)
pipelined = q_tile + narrow * v_tile + buffers * (buffered + (1 - SPLIT) * 4 * LOOKED_UP * BLOCK_N) + ahead
# Without a pipeline, K is gone when V comes
alone = Max((1 - BYTES) * (1 - DOT) * loaded, (MMA_SYNC * BYTES + DOT) * scored)
unpipelined = q_tile + Max(k_tile, v_tile + Max(shared, REGROUPED * Min(p_tile, vector)), drawn, alone)
# The result leaves in rows, when the rest is gone: float32 where shares of the keys are combined afterwards
result = (WIDTH + SPLIT * (4 - WIDTH)) * BLOCK_M * CHUNK / Max(1, SPLIT * BLOCK_M / (16 * WARPS))
# Blocks that descriptors fill and operands of tcgen05 begin at multiples of 1 KB. What lies in between fits there, but
# for barriers, where two groups of warps meet there too: 16 B a product, 8 B for each tile and stage copied by itself.
barriers = KV_TILES * (16 + DESC * 8 * (STAGES + 1)) * Min(1, STAGES - 1)
aligned = Max(DESC, TCGEN05) * 1024 + TCGEN05 * barriers * (WARPS / 4 - 1)
smem = Max(sympy.Piecewise((unpipelined, STAGES < 2), (pipelined, True)), result) + aligned

# 32-bit registers of one thread: the float32 accumulator, the score and its probability, the operands of a product that
# no matrix instruction does, an address for each 16 bytes loaded, the rest. A warp holds 16 rows, or eight columns
# where the warps share them: of smaller tiles several warps hold the same.
accumulator = BLOCK_M * DV / threads
scores = BLOCK_M * BLOCK_N / threads
by_rows = MMA_SYNC * (1 - CROSSES) * Max(0, 16 * WARPS / BLOCK_M - 1)
again = 1 + by_rows + (WGMMA - TCGEN05) * Max(0, 16 * WARPS / BLOCK_M - 1)
again_crossing = MMA_SYNC * CROSSES * Max(0, 8 * WARPS / BLOCK_N - 1)
turned = WGMMA * Min(1, Max(0, WIDTH - 2))  # wgmma wants float32 V turned: it comes 4 bytes at a time
vectors = (1 - DESC) * WIDTH * BLOCK_N * (D + DV * (1 + 3 * turned)) / (16 * threads)
pair = REG_PAIR + DESC * REG_PAIR_DESCRIBED + turned + DOT * REG_DOT * Min(D, 64) / 64 + REG_LOADED * Min(1, LOAD)
registers = (
    REG_SUM * accumulator * (1 + by_rows)
    + pair * scores * (again + again_crossing)
    + REG_VECTOR * vectors
    + REG_MASK * Min(3, TEST + FMA + SFU)
    + REG_DRAW * DRAWS
    + REG_LOAD * Min(1, LOAD)
    + REG_SPLIT * (1 - DESC) * Min(1, D + DV - Min(D + DV, 2 * CHUNK))
    + REG_BASE
)
spilled = Max(0, registers - REGS_MAX)


def compiler(tile: Tile, known: Facts, device: Device) -> dict[str, float]:
    """What the compiler makes of a tile: which matrix instruction, and what passes through shared memory.

    wgmma (sm_90) takes four warps x 16 rows and reads both operands of Q K^T from shared memory, 64 rows at a time;
    tcgen05 (sm_100) 128 rows; mma.sync has each warp read K and V for its own rows, or, where the tile has fewer rows
    than the last product columns, for its own columns and all rows.
    """
    unit = instruction(known, device, tile.block_m, tile.warps)
    native = {"wgmma": 64, "tcgen05": 64 if device.capability != 100 else 128}
    return {
        **INSTEAD.get(unit, {}),
        "WGMMA": int(unit in native),
        "TCGEN05": int(unit == "tcgen05"),
        "MMA_SYNC": int(unit == "mma.sync"),
        "DOT": int(unit == "fma"),
        "MMA_ROWS": native.get(unit, max(16, tile.block_m // tile.warps)),
        "CROSSES": int(unit == "fma" or (unit == "mma.sync" and tile.block_m < known.dv_chunks[-1])),
        "REGROUPED": int(unit == "tcgen05" and (known.load_width == 1 or (tile.warps > 4 and tile.block_m > 64))),
        "BYTES": int(known.load_width == 1),
        "DRAWN": drawn_bytes(triton_release()),
        "PARTS": _parts(tile, known),
    }


def instruction(known: Facts, device: Device, rows: int, warps: int) -> str:
    """What multiplies tiles of `rows` rows: "wgmma", "tcgen05", "mma.sync", or "fma" for IEEE float32."""
    if known.dtype == "float32" and known.precision != "tf32":
        return "fma"
    direct = {9: "wgmma", 10: "tcgen05"}.get(device.capability // 10)
    return direct if direct and rows >= 64 and warps >= 4 else "mma.sync"


@lru_cache(maxsize=1)
def triton_release() -> tuple[int, ...]:
    """(3, 7); of no Triton the latest that is known, which takes most."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return (3, 9)
    return tuple(int(n) for n in re.findall(r"\d+", found)[:2])


def drawn_bytes(release: tuple[int, ...]) -> int:
    """Of a pair's draw as threads exchange it: a byte, since Triton 3.8 the float32 factor that it becomes."""
    return 4 if release >= (3, 8) else 1


def usable(device: Device) -> int:
    """Shared memory that a tile is planned for, B: 1 KB less under a release whose kernels were not measured, as 3.9
    exchanges a number more of some rows."""
    return device.smem_bytes - (0 if triton_release() == (3, 7) else 1024)


def _parts(tile: Tile, known: Facts) -> int:
    """In how many parts float32 scores go from the layout of a product to that of what is read for each pair."""
    width = known.load_width
    own = tile.block_m * tile.block_n // (32 * tile.warps)  # a thread's
    together = min(16 // max(1, width), own)  # columns that a thread loads at once
    least = 16 if width == 1 and tile.block_m < known.dv_chunks[-1] else 8
    apart = own >= least and tile.block_n >= 32 and (2 * together < tile.block_n or own >= 2 * together)
    return (2 if apart else 1) * (2 if apart and width == 1 and own >= 16 and tile.block_n >= 64 else 1)


TENSOR_COLUMNS = 512
"""Of tensor memory, each of 128 lanes of 4 B; a program can have no more."""


def in_tensor_memory(tile: Tile, known: Facts, device: Device) -> bool:
    """Whether tensor memory has what the forward kernel keeps there: O, the scores of each part of D, P."""
    if instruction(known, device, tile.block_m, tile.warps) != "tcgen05":
        return True
    scores = sum(map(len, known.d_chunks))
    return columns(tile.block_m, known.wide_v, tile.block_n, scores, 1, known.width) <= TENSOR_COLUMNS


def columns(rows: int, sums: int, moving: int, products: int, operands: int, width: int) -> float:
    """Columns of tensor memory: float32 sums, `products` tiles of `moving` columns, `operands` of them made P again.

    Two tensors of 64 rows lie above each other, the last P perhaps alone."""
    operand = moving * width / 4
    every = sums + products * moving + operands * operand
    return every if rows > 64 else every / 2 + operand
