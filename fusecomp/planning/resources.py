"""Shared memory and registers of one program, as Triton allocates them: equations, and what decides in them."""

from __future__ import annotations

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
    "REG_DOT": 0.2,  # a pair's operands in a float32 product, for each of its first 64 terms
    "REG_DRAW": 45,  # where weights are dropped: the generator's state, what is kept of a tile
    "REG_VECTOR": 1.67,  # one 64-bit address for each 16 bytes that a thread loads of K and V, some shared
    "SMEM_RESERVED": 1024,  # B: what the driver takes of each program
}
"""Fitted on generated kernels compiled for sm_90."""

TCGEN05_BARRIERS = 1056
"""B that a kernel with tcgen05 takes for its barriers and for the address of its tensor memory, at most."""

REG_BASE, REG_MASK, REG_SPLIT, REG_SUM, REG_PAIR, REG_PAIR_DESCRIBED, REG_DOT, REG_DRAW, REG_VECTOR = symbols(
    "REG_BASE REG_MASK REG_SPLIT REG_SUM REG_PAIR REG_PAIR_DESCRIBED REG_DOT REG_DRAW REG_VECTOR"
)
(SMEM_RESERVED,) = symbols("SMEM_RESERVED,")

# Shared memory of one program, B, as Triton allocates it: loads that feed wgmma or tcgen05 keep one buffer a stage,
# loads that go through registers (mma.sync, biases) one less; Q lies there for wgmma and passes through for mma.sync,
# as P may, and a byte of each pair that a dropout decides.
q_tile = WIDTH * BLOCK_M * D
kv_tile = WIDTH * BLOCK_N * (D + DV)
p_tile = WIDTH * BLOCK_M * BLOCK_N
buffers = STAGES - 1 + WGMMA
pipelined = 1024 * DESC + q_tile + buffers * kv_tile + (STAGES - 1) * LOAD * BLOCK_M * BLOCK_N + SCRATCH * p_tile
unpipelined = q_tile + WIDTH * BLOCK_N * CHUNK + p_tile * Max(SCRATCH, Min(1, LOAD), Min(1, Max(0, WIDTH - 2)))
smem = sympy.Piecewise((unpipelined, STAGES < 2), (pipelined, True)) + BARRIERS + DRAWS * BLOCK_M * BLOCK_N

# 32-bit registers of one thread: the float32 accumulator, the score and its probability, the operands of a product that
# no matrix instruction does, an address for each 16 bytes loaded, the rest
accumulator = BLOCK_M * DV / threads
scores = BLOCK_M * BLOCK_N / threads
turned = WGMMA * Min(1, Max(0, WIDTH - 2))  # wgmma wants float32 V turned: it comes 4 bytes at a time
vectors = (1 - DESC) * WIDTH * BLOCK_N * (D + DV * (1 + 3 * turned)) / (16 * threads)
operand = (1 - WGMMA) * (1 - DOT) * WIDTH * 16 * BLOCK_N / (4 * WARP)  # mma.sync holds 16 rows of K or V itself
registers = (
    REG_SUM * accumulator
    + (REG_PAIR + DESC * REG_PAIR_DESCRIBED + turned + DOT * REG_DOT * Min(D, 64)) * scores
    + REG_VECTOR * vectors
    + REG_MASK * Min(3, TEST + FMA + SFU)
    + REG_DRAW * DRAWS
    + REG_SPLIT * (1 - DESC) * Min(1, D + DV - Min(D + DV, 2 * CHUNK))
    + operand
    + REG_BASE
)
spilled = Max(0, registers - REGS_MAX)


def compiler(tile: Tile, known: Facts, device: Device) -> dict[str, float]:
    """What the compiler makes of a tile: which matrix instruction, and what passes through shared memory.

    wgmma (sm_90) takes four warps x 16 rows and reads both operands of Q K^T from shared memory, 64 rows at a time;
    tcgen05 (sm_100) 128 rows; mma.sync has each warp read K and V for its own rows.
    """
    tensor = known.dtype != "float32" or known.precision == "tf32"
    direct = tensor and device.capability >= 90 and tile.block_m >= 64
    native = {90: 64, 100: 128}.get(device.capability, 64)
    per_warp = max(16, tile.block_m // tile.warps)
    rows, values = tile.block_m / tile.warps, max(known.dv_chunks)
    wide = values >= (64 if rows < 16 else 128 if rows == 16 else 256)
    crosses = tile.block_m == 16 or (wide and len(known.dv_chunks) == 1)
    return {
        "WGMMA": int(direct),
        "DOT": int(not tensor),
        "BARRIERS": TCGEN05_BARRIERS if device.capability >= 100 else 0,
        "MMA_ROWS": native if direct else per_warp,
        "SCRATCH": int(not direct and (crosses or not tensor)),
    }
