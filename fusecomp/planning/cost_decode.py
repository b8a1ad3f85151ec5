"""What one launch of decoding costs: few queries, many keys, which are split over programs and combined.

Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023): one query has no rows to fill a device with, so its keys do. The
time is that of the memory where enough bytes are on their way at once; else it is how long a tile takes to come, times
how many come one after another. The shares are those that codegen/schedule.py makes; where query tiles are many, each
is left to one program instead, and there is nothing to combine.
"""

from __future__ import annotations

import sympy

from fusecomp.planning.equations import Equation, Model
from fusecomp.planning.rates import mma_share
from fusecomp.planning.resources import SMEM_RESERVED, accumulator, buffered, kv_tile, smem, vectors
from fusecomp.planning.symbols import *

DECODE_FITTED = {
    "BEGIN": 1e-06,  # s: a launch
    "START": 5.14e-07,  # s: a program's way to its first loads, while its neighbours load
    "LOOK": 1.27e-06,  # s: a load that what follows waits for, from L2: a length, the number of a page, a share
    "ARRIVE": 9.96e-08,  # s: a tile of K and V from device memory, with nothing else on its way
    "STEP": 1.92e-07,  # s: a tile's products and softmax, each of which waits for the one before
    "EACH": 2.07e-07,  # s of a multiprocessor's issue slots: a tile of four warps, whatever its size
    "CROSS": 2.94e-07,  # s: more of it for each doubling of the warps that share its rows
    "KNEE": 6.55,  # how sharply memory goes from waited for to saturated: 1 sums the two, if large the longer counts
    "SPILL": 1.65,  # times that a spilled register is stored and loaded in a tile
    "STREAM": 1.09,  # of HBM_RATE, of a launch that only reads
    "COMBINE": 3.69e-06,  # s: the launch that combines shares, made ready meanwhile
}
"""Fitted on one half of the decoding workloads in `examples/bench/records/tiles_h200.json`, and judged on the other."""

DECODE_REGISTERS = {
    "DECODE_BASE": 20.0,  # of a thread, whatever its tile
    "DECODE_SUM": 2.5,  # a float32 sum
    "DECODE_VECTOR": 4.8,  # for each 16 bytes of K and V that it loads, which it holds while they go through a product
}
"""Fitted on the kernels of decoding compiled for sm_90."""
DECODE_WIDE = dict(zip(DECODE_REGISTERS, (86.0, 1.2, 1.9), strict=True))
"""The same where eight warps share a tile: fitted on kernels of latent caches, D 576 and Dv 512."""

BEGIN, START, LOOK, ARRIVE, STEP, EACH, CROSS, KNEE, SPILL, STREAM, COMBINE = symbols(
    "BEGIN START LOOK ARRIVE STEP EACH CROSS KNEE SPILL STREAM COMBINE"
)
DECODE_BASE, DECODE_SUM, DECODE_VECTOR = symbols("DECODE_BASE DECODE_SUM DECODE_VECTOR")
# Programs of a multiprocessor that the keys are split for (0: they are not), registers that they are held to (0: none);
# whether keys are found through a table
RESIDENT, CAP = symbols("RESIDENT CAP")
paged = Min(1, LOOKED_UP)
SPLITS = 64
"""Shares that `combine` takes at a time, at most."""

# Shares: about as many programs as RESIDENT of each multiprocessor, of whole tiles, those of a request equal
query_tiles = ceiling(M / floor(BLOCK_M / PACK))
units = HEADS / PACK * query_tiles
tiles = ceiling(N / BLOCK_N)  # of a unit
split = Min(1, RESIDENT)
longest = Max(1, (1 - split) * tiles, split * ceiling(tiles * units / (Max(1, RESIDENT) * SMS)))
splits = ceiling(tiles / longest)
own = ceiling(tiles / splits)  # tiles of a program
programs = units * splits

# Programs of the busiest multiprocessor: rounds of as many as it holds, then the rest. A program that is held to some
# registers takes them all.
ahead = Max(1, STAGES - 1)
registers = DECODE_BASE + DECODE_SUM * accumulator + DECODE_VECTOR * vectors * buffered / kv_tile
spilled = Max(0, registers - REGS_MAX)
by_registers = REGS_PER_SM / (8 * ceiling(Max(CAP, Min(REGS, REGS_MAX)) / 8) * threads)
resident = Max(1, floor(Min(SMEM_PER_SM / (SHARED + SMEM_RESERVED), by_registers, THREADS_PER_SM / threads)))
waves = programs / (SMS * resident)
most = ceiling(programs / SMS)
rounds = floor(most / resident)
rest = most - rounds * resident

# A tile of one program: bytes from device memory, which all programs share; issue slots, which those of one
# multiprocessor share; and a time in which neither is busy, the way of its loads and the chain of its products
tile_bytes = BLOCK_N * (K_ROW + V_ROW)
last = programs - rounds * resident * SMS  # programs after the rounds
port = tile_bytes * SMS / L2_RATE
slots = BLOCK_M * BLOCK_N * (3 + FMA + TEST)
spill = threads * 8 * SPILL * SPILLED / SMEM_RATE * SMS
products = 2 * BLOCK_M * BLOCK_N * (D + DV) / (MMA_RATE * mma_share / SMS)
pipe = spill + EACH * WARPS / 4 + slots / (FMA_RATE / SMS) + products
crossing = Max(0, sympy.log(16 * WARPS / BLOCK_M, 2))
chain = STEP + CROSS * crossing + pipe * 4 / Min(4, WARPS)


start = START + paged * LOOK * ahead  # until it is known where the first keys lie


def turn(neighbours: object, multiprocessors: object) -> object:
    """Seconds of a program, where so many multiprocessors hold so many programs each: at least what the queue takes in
    which all wait; what its start takes and, for each tile, its own chain, or the way of a tile over those that are on
    it at once (Denning and Buzen's bounds, 1978). Near their meeting it is more."""
    served = Max(tile_bytes * multiprocessors / (HBM_RATE * STREAM), port, pipe)
    alone = Max(chain, (served + ARRIVE + chain) / ahead)
    return power(power(own * served * neighbours, KNEE) + power(start + own * alone, KNEE), 1 / KNEE)


read_s = rounds * turn(resident, SMS) + Min(1, rest) * turn(Max(1, rest), last / Max(1, rest))
stream_s = programs * own * tile_bytes / (HBM_RATE * STREAM)

# `combine`: programs for each row of a unit, which take as many shares at a time as there are
partials = programs * BLOCK_M * 4 * (DV + 2)  # B, written and read in L2
combine_s = split * (COMBINE + LOOK * ceiling(splits / SPLITS) + 2 * partials / L2_RATE)

groups = Min(resident, most)
busy = most * SMS / programs

flops = 2 * units * tiles * BLOCK_M * BLOCK_N * (D + DV)
hbm = HEADS * M * (Q_ROW + O_ROW) + KV_HEADS * REACHED * (K_ROW + V_ROW) + LOAD_UNIQUE
# Eager writes and reads the M x N scores for the product, each element-wise kernel, the softmax and the second product
hbm_unfused = hbm + HEADS * M * N * WIDTH * (4 + 2 * PASSES)

ALLOCATION: dict[str, Equation] = {
    "smem": (smem, "B of shared memory, one program"),
    "registers": (registers, "32-bit registers, one thread"),
    "spilled": (spilled, "32-bit registers, one thread, kept in memory instead"),
}
WORK: dict[str, Equation] = {
    "resident": (resident, "programs on one multiprocessor"),
    "splits": (splits, "parts of the keys"),
    "programs": (programs, "programs"),
    "waves": (waves, "programs over slots"),
    "flops": (flops, "FLOP"),
    "hbm": (hbm, "B of device memory"),
    "hbm_unfused": (hbm_unfused, "B of device memory, eager"),
    "mma_s": (flops / (MMA_RATE * mma_share), "s of the tensor cores"),
    "element_s": (programs * own * pipe / SMS, "s of the issue slots"),
    "smem_s": (programs * own * 2 * kv_tile / SMEM_RATE, "s of the shared-memory ports"),
    "moving_s": (stream_s, "s of device memory at its best"),
    "working_s": (programs * own * pipe / SMS, "s of the multiprocessors' pipes"),
    "read_s": (read_s, "s in which the busiest multiprocessor reads its tiles"),
    "delay_s": (Max(0, read_s - stream_s) / busy * groups, "s that one program waits for no pipe"),
    "launch_s": (BEGIN + combine_s, "s of launches, and of the combination"),
    "groups": (groups, "programs at once on one multiprocessor"),
    "busy": (busy, "work of the busiest multiprocessor over an even share"),
    "latency_s": (BEGIN + combine_s + Max(0, read_s - stream_s), "s of starts, late loads and the combination"),
    "seconds": (BEGIN + read_s + combine_s, "s in all"),
}
DECODE = Model(ALLOCATION, WORK)
