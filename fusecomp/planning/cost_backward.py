"""What one kernel of the backward pass costs: dQ, or dK and dV, by the same pipes as the forward pass.

    dV = P^T dO      dP = dO V^T      dS = P (dP - delta)      dQ = dS K      dK = dS^T Q          P = exp(S - lse)

FlashAttention-2 (Dao 2023, sec. 3.1.2) multiplies five times a pair, in one kernel that adds to dQ in memory. These are
two kernels, each of which makes S and dP again, seven products in all, and writes each gradient once: nothing is added
out of order, so that gradients are the same bits at each run.

    dQ       a program keeps BLOCK_M queries and walks their keys        S, dP, dQ
    dK, dV   a program keeps BLOCK_N keys and walks the queries          S, dP, dV, dK
"""

from __future__ import annotations

import sympy

from fusecomp.planning.equations import Equation, Model
from fusecomp.planning.queueing import TIMES
from fusecomp.planning.rates import mma_share
from fusecomp.planning.resources import SMEM_RESERVED
from fusecomp.planning.symbols import *

BACKWARD_FITTED = {
    "BACK_CROSS": 3.79e-07,  # s: a tile, for each doubling of the warps that share its rows: P and dS pass between them
    "BACK_WAIT": 1.58e-07,  # s: a late load of one tile, with one tile of lookahead; two are enough
    "BACK_FMA": 7.66,  # FMA slots a pair: scale and subtract, dP - delta, times P, convert twice
    "BACK_MMA": 0.927,  # of the peak, of products that wait for each other
    "BACK_PORTS": 1.62,  # times that an operand is read from shared memory, over what its product needs
    "BACK_IDLE": 22.3,  # registers that spill for nothing, as the loop does not use them
    "BACK_SPILL": 4.03,  # times that a spilled register is stored and loaded in a tile
    "SPREAD": 0.946,  # of the longest program's time, where programs differ, that multiprocessors end apart
    "MEET": 0.116,  # part of the time that two groups of warps of one program wait for each other
}
"""Fitted on one half of the backward workloads in `examples/bench/records/tiles_h200.json`, and judged on the other."""

BACKWARD_REGISTERS = {
    "BACK_BASE": 94.0,  # of a thread, whatever its tile
    "BACK_KEYS": 10.0,  # more of dK and dV
    "BACK_SUM": 0.88,  # a float32 sum of a gradient
    "BACK_PAIR": 0.8,  # a pair: S or P, and dP or dS
    "BACK_HELD": 4.1,  # for each 16 bytes that a thread loads of what moves
}
"""Fitted on 96 generated kernels compiled for sm_90; they tell of nine in ten whether it spills."""

BACK_CROSS, BACK_WAIT, BACK_FMA, BACK_MMA = symbols("BACK_CROSS BACK_WAIT BACK_FMA BACK_MMA")
BACK_PORTS, BACK_IDLE, BACK_SPILL, BACK_BASE, BACK_KEYS, BACK_SUM, BACK_PAIR, BACK_HELD = symbols(
    "BACK_PORTS BACK_IDLE BACK_SPILL BACK_BASE BACK_KEYS BACK_SUM BACK_PAIR BACK_HELD"
)
# KEYS: 1 for dK and dV, 0 for dQ; rows that a program keeps, and rows of each step of its walk; heads and rows of both
KEYS, FIXED, MOVING, FIXED_HEADS, FIXED_ROWS = symbols("KEYS FIXED MOVING FIXED_HEADS FIXED_ROWS")

# Two products make S and dP [FIXED, MOVING]; the others add up the gradients [FIXED, sums]
sums = D + KEYS * DV
pair_flops = 2 * (D + DV + sums)
pairs_of_tile = FIXED * MOVING
vectors = WIDTH * MOVING * (D + DV) / (16 * threads)
gradient_sums = FIXED * sums / threads  # of a thread
registers = (
    BACK_BASE + BACK_KEYS * KEYS + BACK_SUM * gradient_sums + BACK_PAIR * pairs_of_tile / threads + BACK_HELD * vectors
)
spilled = Max(0, registers - REGS_MAX)

by_registers = REGS_PER_SM / (Min(REGS, REGS_MAX) * threads)
resident = Max(1, floor(Min(SMEM_PER_SM / (SHARED + SMEM_RESERVED), by_registers, THREADS_PER_SM / threads)))
programs = FIXED_HEADS * ceiling(FIXED_ROWS / FIXED)
waves = programs / (SMS * resident)
rounds = Max(1, ceiling(programs / SMS))
together = Min(resident, rounds)

tiles = HEADS * TILES
pairs = tiles * pairs_of_tile
flops = pairs * pair_flops
fma_work = (
    pairs * (BACK_FMA + 2 * FMA)  # the score's derivative has about the score's own operations
    + HEADS * TESTED * pairs_of_tile * (TEST + 2)
)
sfu_work = pairs * (1 + SFU)  # the exponential

moving_tile = WIDTH * MOVING * (D + DV)
fixed_tile = WIDTH * FIXED * (D + DV)
row_groups = Max(1, FIXED / MMA_ROWS)  # each reads what moves again, for each of its products
# wgmma reads the fixed side of S and dP from shared memory too, and what mma.sync adds up passes through it
smem_bytes = tiles * (
    moving_tile
    + BACK_PORTS * row_groups * WIDTH * MOVING * (D + DV + sums)
    + BACK_PORTS * WGMMA * fixed_tile
    + (1 - WGMMA) * 2 * WIDTH * pairs_of_tile
)
mma_s = flops / (MMA_RATE * mma_share * BACK_MMA)
smem_s = smem_bytes / SMEM_RATE
dear = Max(0, SPILLED - BACK_IDLE)
spill_s = tiles * threads * 8 * BACK_SPILL * dear / SMEM_RATE
l2_s = tiles * (moving_tile + 8 * MOVING + LOAD * pairs_of_tile) / L2_RATE

# O and dO are read for delta; Q, K, V and dO once each for either kernel, its gradients written
delta_bytes = 2 * HEADS * M * O_ROW
hbm = (
    delta_bytes
    + HEADS * M * (Q_ROW + O_ROW)
    + KV_HEADS * REACHED * (K_ROW + V_ROW)
    + KEYS * KV_HEADS * N * (K_ROW + V_ROW)
    + (1 - KEYS) * HEADS * M * Q_ROW
    + LOAD_UNIQUE
)
# Eager reads and writes the M x N weights and their gradients for each product, the softmax and each operation on them;
# half of it for either kernel
hbm_unfused = HEADS * M * N * WIDTH * (4 + 1.5 * PASSES) + hbm

strips = 1 + (1 - WGMMA) * Max(0, MMA_ROWS / 16 - 1)
per_program = WGMMA * Min(WARPS / 4, Max(1, FIXED / 64)) + (1 - WGMMA) * WARPS / 4 * strips
fill_s = programs * (2 * fixed_tile + Max(1, STAGES - 1) * moving_tile) / L2_RATE
late = BACK_WAIT * Max(0, 3 - STAGES)
crossing = Max(0, sympy.log(16 * WARPS / FIXED, 2))  # more warps than rows in sixteens
delay_s = per_program * (late + BACK_CROSS * crossing) * tiles / SMS + fill_s
busy = rounds * SMS / programs
delta_s = LAUNCH + delta_bytes / HBM_RATE

ALLOCATION: dict[str, Equation] = {
    "registers": (registers, "32-bit registers, one thread"),
    "spilled": (spilled, "32-bit registers, one thread, kept in memory instead"),
}
WORK: dict[str, Equation] = {
    "resident": (resident, "programs on one multiprocessor"),
    "programs": (programs, "programs"),
    "tiles": (tiles, "tiles visited"),
    "waves": (waves, "programs over slots"),
    "flops": (flops, "FLOP"),
    "hbm": (hbm, "B of device memory"),
    "hbm_unfused": (hbm_unfused, "B of device memory, eager"),
    "mma_s": (mma_s, "s of the tensor cores"),
    "element_s": (sfu_work / SFU_RATE + fma_work / FMA_RATE, "s of the special-function and FMA pipes"),
    "smem_s": (smem_s, "s of the shared-memory ports"),
    "multiply_s": (Max(mma_s, smem_s) + spill_s, "s of products and of their operands"),
    "moving_s": (Max(hbm / HBM_RATE, l2_s * busy), "s of device memory and L2"),
    "fill_s": (fill_s, "s of the first loads and of the results"),
    "delay_s": (delay_s, "s that one group of warps waits for no pipe"),
    "launch_s": (LAUNCH + delta_s, "s of both launches, and of delta"),
    "per_program": (per_program, "groups of four warps that one program's work keeps busy"),
    "groups": (together * per_program, "groups of four warps on one multiprocessor"),
    "busy": (busy, "work of the busiest multiprocessor over an even share"),
}
BACKWARD = Model(ALLOCATION, WORK, TIMES)
