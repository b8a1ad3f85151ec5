"""What one launch of the forward kernel for Hopper's tensor cores costs: a page of equations, as `cost` is for
the portable kernel.

One program stays on each multiprocessor and takes tiles of queries one after another. Its groups of four warps take
turns at the tensor cores, so that one group's element work hides behind another's products (Shah et al. 2024,
FlashAttention-3, sec. 3.1), and one more warp copies Q, K and V ahead, so that nobody waits for a load. What takes
longest of products, special functions and the rest sets the time; of the others a share shows.
"""

from __future__ import annotations

from fusecomp.planning.cost import hbm_unfused
from fusecomp.planning.equations import Equation, Model
from fusecomp.planning.symbols import *

HOPPER_FITTED = {
    "SHOWN": 0.117,  # part of the shorter pipes' time that does not hide behind the longest's
    "PAIR": 10.5,  # issue slots a pair: scale and subtract, max, sum, convert, rescale, and waiting for each other
    "TEST_PAIR": 14.9,  # slots a pair of a tile that tests its mask: positions, comparison, selection
    "NEXT": 2.4e-06,  # s: from one tile of queries to the next: the last product, O, the next Q, the first scores
}
"""Fitted on 34 workloads of an H200 (`examples/bench/fit_hopper.py`). Each predicted by constants that were fitted on
the other 33, the median error is 4.8 %, the largest 29 %."""

SHOWN, PAIR, TEST_PAIR, NEXT = symbols("SHOWN PAIR TEST_PAIR NEXT")

# Operations
query_tiles = HEADS * ceiling(M / BLOCK_M)  # tiles of queries in the whole launch
tiles = HEADS * TILES  # tiles of keys that they visit
pairs = tiles * BLOCK_M * BLOCK_N
flops = 2 * pairs * (D + DV)  # Q K^T and P V, two for a multiply-add
rescale = DV / BLOCK_N  # slots a pair: the accumulator shrinks to each tile's new maximum
fma_work = pairs * (PAIR + FMA + rescale) + HEADS * TESTED * BLOCK_M * BLOCK_N * (TEST + TEST_PAIR)
sfu_work = pairs * (1 + SFU)  # the exponential

# Bytes: heads take turns in sections whose K and V stay in L2, so that each is read once
hbm = HEADS * M * (Q_ROW + O_ROW) + KV_HEADS * REACHED * (K_ROW + V_ROW) + LOAD_UNIQUE
moved = tiles * BLOCK_N * (K_ROW + V_ROW + LOAD * BLOCK_M)  # from L2 to multiprocessors
held = WIDTH * (BLOCK_M * (D + Min(D, 128)) + 2 * STAGES * BLOCK_N * D)  # Q, O on its way out, K and V
smem = held + STAGES * LOAD * BLOCK_M * BLOCK_N  # what is read for each pair, beside each tile of K
registers = 8 * floor((REGS_PER_SM / WARP / 4 - 24) / GROUPS / 8)  # one that copies keeps 24

# Seconds
mma_s = flops / MMA_RATE
sfu_s = sfu_work / SFU_RATE
fma_s = fma_work / FMA_RATE
smem_s = tiles * BLOCK_N * (K_ROW + V_ROW) * (1 + GROUPS) / SMEM_RATE  # written once, read by each group
longest = Max(mma_s, sfu_s, fma_s, smem_s)
waves = query_tiles / SMS
level = tiles / query_tiles / LONGEST  # mean over longest: where tiles of queries differ, short ones fill the last wave
uneven = ceiling(waves) / waves * Max(0, 2 * level - 1)
busy = Max(1, LONGEST * SMS / tiles, uneven)  # the busiest multiprocessor's share of the work over an even share
working_s = busy * (longest + SHOWN * Max(0, mma_s + sfu_s + fma_s - longest))
moving_s = Max(hbm / HBM_RATE, moved / L2_RATE)
latency_s = NEXT * Max(1, waves) + LAUNCH

WORK: dict[str, Equation] = {
    "smem": (smem, "B of shared memory, one program"),
    "registers": (registers, "32-bit registers of a thread that multiplies"),
    "programs": (Min(SMS, query_tiles), "programs"),
    "waves": (waves, "tiles of queries that each takes, one after another"),
    "tiles": (tiles, "tiles of keys visited"),
    "flops": (flops, "FLOP"),
    "hbm": (hbm, "B of device memory"),
    "hbm_unfused": (hbm_unfused, "B of device memory, eager"),
    "mma_s": (mma_s, "s of the tensor cores"),
    "element_s": (Max(sfu_s, fma_s), "s of the special-function or FMA pipe"),
    "smem_s": (smem_s, "s of the shared-memory ports"),
    "moving_s": (moving_s, "s of device memory and L2"),
    "working_s": (working_s, "s of the busiest multiprocessor's pipes"),
    "latency_s": (latency_s, "s between tiles of queries, and of the launch"),
    "seconds": (Max(working_s, moving_s) + latency_s, "s in all"),
}
HOPPER = Model(WORK)
