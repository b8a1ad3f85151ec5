"""What one launch of the forward pass costs: a page of equations, in sympy for reading, compiled once for choosing.

Bytes, operations, seconds; "pair" is one (query, key) position of a visited tile. The device's rates come from its
table (data sheets), the region's counts from `facts`, shared memory and registers from `resources`, and what none of
them says (how much a compiler hides) from `FITTED`. By part:

    bytes       FlashAttention (Dao et al. 2022, theorem 2): Q and O once, K and V once for each tile of queries, unless
                L2 still holds them; N^2 d^2 / M elements where it never does (`textbook`)
    operations  FlashAttention-2 (Dao 2023): products on the tensor cores, the rest 16 times dearer (sec. 3.1: fewer
                operations that are no products), a program for each tile of queries (3.2), rows over warps (3.3)
    waves       programs over what the device holds at once, the last wave as long as the others
    queues      `queueing`: products and element work overlap as far as a multiprocessor's groups of warps let them
"""

from __future__ import annotations

import sympy

from fusecomp.planning.equations import Equation, Model
from fusecomp.planning.queueing import TIMES
from fusecomp.planning.rates import mma_share
from fusecomp.planning.resources import (
    SMEM_RESERVED,
    kv_tile,
    q_tile,
    registers,
    smem,
    spilled,
    turned,
    vectors,
)
from fusecomp.planning.symbols import *

FITTED = {
    "SETUP": 9.57e-07,  # s: a program's start and its last stores
    "DESCRIBE": 2.86e-06,  # s: more of a program's start where it makes descriptors
    "WAIT": 2.33e-07,  # s: a late load of one tile, with one tile of lookahead; two are enough
    "WAIT_DESCRIBED": -1.25e-07,  # s: the same, more through descriptors
    "STEP": 6.29e-08,  # s: the chain of a tile, products and softmax each waiting for the one before, at no pipe
    "CROSS": 3.08e-07,  # s: more of it for each doubling of the warps that share rows, their maximum and sum
    "SPREAD": 1.0,  # of the longest program's time, where programs differ, that multiprocessors end apart
    "MEET": 0.143,  # part of the time that two groups of warps of one program wait for each other
    "FMA_PAIR": 2.08,  # FMA slots a pair: scale and subtract, max, sum, convert, less what hides in other slots
    "TURN": 10.8,  # times that a float32 V takes to be written turned; bank conflicts, presumably
    "TURN_AHEAD": 4.41,  # more of it where V was loaded ahead, and is read from shared memory first
    "FMA_VECTOR": 8.82,  # FMA slots for each 16 bytes that a thread loads of K and V itself: addresses, masks
    "FMA_ROW": 288.0,  # FMA slots a row of a tile: maximum and sum over the four threads that hold it, the new state
    "TEST_PAIR": 11.0,  # FMA slots a pair of a tile that tests its mask: positions, comparison, selection
    "L2_SHARE": 0.424,  # of the ports' 64 B a clock that L2 really delivers
    "L2_USABLE": 0.6,  # of L2 before K and V wash each other out
    "WAIT_BIAS": 5.09e-07,  # s: more of a late load where a bias comes with it
    "SYNC_CHAIN": 1.06,  # times the peak's time that mma.sync takes a lone warp, each product waiting for its operands
    "SPILL": 3.34,  # times that a spilled register is stored and loaded in a tile
}
"""Fitted on one half of the forward workloads in `examples/bench/records/tiles_h200.json`, and judged on the other
(`examples/bench/fit_tiles.py`)."""

SETUP, DESCRIBE, WAIT, WAIT_DESCRIBED, STEP, CROSS, SPILL = symbols(
    "SETUP DESCRIBE WAIT WAIT_DESCRIBED STEP CROSS SPILL"
)
FMA_PAIR, TURN, TURN_AHEAD, FMA_VECTOR, FMA_ROW, TEST_PAIR = symbols(
    "FMA_PAIR TURN TURN_AHEAD FMA_VECTOR FMA_ROW TEST_PAIR"
)
L2_SHARE, L2_USABLE, WAIT_BIAS = symbols("L2_SHARE L2_USABLE WAIT_BIAS")
(SYNC_CHAIN,) = symbols("SYNC_CHAIN,")

# Programs: one for each query tile of a head (of a group of PACK heads) and each part of its keys
query_tiles = ceiling(M / floor(BLOCK_M / PACK))
by_registers = REGS_PER_SM / (Min(REGS, REGS_MAX) * threads)
resident = Max(1, floor(Min(SMEM_PER_SM / (SHARED + SMEM_RESERVED), by_registers, THREADS_PER_SM / threads)))
slots = SMS * resident
programs = HEADS / PACK * query_tiles
waves = programs / slots
rounds = Max(1, ceiling(programs / SMS))  # programs that the busiest multiprocessor runs, one after or beside another
together = Min(resident, rounds)

# Operations
tiles = HEADS / PACK * TILES  # visited in the whole launch
tested = HEADS / PACK * TESTED
pairs = tiles * BLOCK_M * BLOCK_N
flops = 2 * pairs * (D + DV)  # Q K^T and P V, two for a multiply-add
rescale = DV / BLOCK_N  # FMA slots a pair: the accumulator shrinks to each tile's new maximum
fma_work = (
    pairs * (FMA_PAIR + FMA + rescale)
    + tested * BLOCK_M * BLOCK_N * (TEST + TEST_PAIR)
    + tiles * (BLOCK_M * FMA_ROW + (threads * vectors + LOAD * BLOCK_M * BLOCK_N / 16) * FMA_VECTOR)
)
sfu_work = pairs * (1 + SFU)  # the exponential

# Bytes of device memory. K and V are read once by the first programs of a head; further rounds of the slots over the
# same head find them in L2, or read them again.
kv_once = KV_HEADS * REACHED * (K_ROW + V_ROW)
laps = Max(1, HEADS / KV_HEADS * query_tiles / PACK / slots)
in_flight = Max(1, slots * KV_HEADS / programs) * REACHED * (K_ROW + V_ROW)
missed = Max(0, 1 - L2_USABLE * L2 / in_flight)
hbm = HEADS * M * (Q_ROW + O_ROW) + kv_once * (1 + (laps - 1) * missed) + LOAD_UNIQUE
# Eager writes and reads the M x N scores for the product, each element-wise kernel, the softmax and the second product
hbm_unfused = (
    HEADS * M * (Q_ROW + O_ROW)
    + KV_HEADS * N * (K_ROW + V_ROW)
    + HEADS * M * N * WIDTH * (4 + 2 * PASSES)
    + LOAD_UNIQUE
)

# Seconds of each pipe, were it alone
l2 = L2_RATE * (L2_SHARE + DESC * (1 - L2_SHARE))  # the unit that descriptors have fills the ports
mma_s = flops / (MMA_RATE * mma_share)
sfu_s = sfu_work / SFU_RATE
fma_s = fma_work / FMA_RATE
row_groups = Max(1, BLOCK_M / MMA_ROWS)  # each reads every K and V operand from shared memory again
smem_bytes = tiles * (
    kv_tile * (1 + row_groups)
    + turned * (TURN + TURN_AHEAD * Min(1, STAGES - 1)) * WIDTH * BLOCK_N * DV
    + WGMMA * row_groups * MMA_ROWS * WIDTH * D * Max(1, BLOCK_N / 256)
)
smem_s = smem_bytes / SMEM_RATE
l2_s = tiles * (BLOCK_N * (K_ROW + V_ROW) / l2 + LOAD * BLOCK_M * BLOCK_N / (L2_RATE * L2_SHARE))
hbm_s = hbm / HBM_RATE
spill_s = tiles * threads * 8 * SPILL * SPILLED / SMEM_RATE  # 4 B written and 4 B read, each time

# Groups of four warps go round two pipes, products and element work, and a delay that is nobody's work: barriers, the
# way of a product through its pipe, late loads, a program's start. In seconds, as if one group did all the work.
multiply_s = Max(mma_s, smem_s) + spill_s
element_s = sfu_s + fma_s  # one warp issues both
strips = 1 + (1 - WGMMA) * Max(0, MMA_ROWS / 16 - 1)  # with mma.sync, each 16 rows of a warp go their own way
per_program = WGMMA * Min(WARPS / 4, Max(1, BLOCK_M / 64)) + (1 - WGMMA) * WARPS / 4 * strips
fill = q_tile + BLOCK_M * O_ROW + Max(1, STAGES - 1) * kv_tile  # B of a program's first loads and of its result
fill_s = programs * fill / l2
late = (WAIT + DESC * WAIT_DESCRIBED + WAIT_BIAS * Min(1, LOAD)) * Max(0, 3 - STAGES)
chain_s = (1 - WGMMA) * (1 - DOT) * SYNC_CHAIN * flops / MMA_RATE
crossing = Max(0, sympy.log(16 * WARPS / BLOCK_M, 2))  # more warps than rows in sixteens share rows
delay_s = per_program * (STEP + CROSS * crossing + late) * tiles / SMS + chain_s + fill_s
start_s = (SETUP + DESC * DESCRIBE) * rounds / together  # neighbours start together, so that nobody's work hides it
busy = rounds * SMS / programs  # the busiest multiprocessor's share of the work over an even share
moving_s = Max(hbm_s, l2_s * busy)
launch_s = LAUNCH + start_s

ALLOCATION: dict[str, Equation] = {
    "smem": (smem, "B of shared memory, one program"),
    "registers": (registers, "32-bit registers, one thread"),
    "spilled": (spilled, "32-bit registers, one thread, kept in memory instead"),
}
WORK: dict[str, Equation] = {
    "resident": (resident, "programs on one multiprocessor"),
    "splits": (sympy.Integer(1), "parts of the keys"),
    "programs": (programs, "programs"),
    "tiles": (tiles, "tiles visited"),
    "waves": (waves, "programs over slots"),
    "flops": (flops, "FLOP"),
    "hbm": (hbm, "B of device memory"),
    "hbm_unfused": (hbm_unfused, "B of device memory, eager"),
    "mma_s": (mma_s, "s of the tensor cores"),
    "element_s": (element_s, "s of the special-function and FMA pipes"),
    "smem_s": (smem_s, "s of the shared-memory ports"),
    "multiply_s": (multiply_s, "s of products and of their operands"),
    "moving_s": (moving_s, "s of device memory and L2"),
    "fill_s": (fill_s, "s of the first loads and of the results"),
    "delay_s": (delay_s, "s that one group of warps waits for no pipe"),
    "launch_s": (launch_s, "s of launches and of the first start"),
    "per_program": (per_program, "groups of four warps that one program's work keeps busy"),
    "groups": (together * per_program, "groups of four warps on one multiprocessor"),
    "busy": (busy, "work of the busiest multiprocessor over an even share"),
}
FORWARD = Model(ALLOCATION, WORK, TIMES)
