"""What one launch costs: a page of equations, in sympy for reading, compiled once for choosing.

Bytes, operations, seconds; "pair" is one (query, key) position of a visited tile. The device's rates come from its
table, the region's counts from `facts`, and what neither says (how much a compiler hides) from `FITTED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

import sympy
from sympy import Max, Min, ceiling, floor

FITTED = {
    "SETUP": 1.2e-6,  # s: a program's start, its first loads and its epilogue
    "TILE": 60e-9,  # s: barriers and branches of one tile, while no other program is resident
    "WAIT": 40e-9,  # s: a late load of one tile, with one tile of lookahead; falls with its square
    "EXPOSED": 0.10,  # part of the element work that other programs' products never hide ...
    "SERIAL": 0.80,  # ... and the part that only they can hide
    "FMA_PAIR": 4.0,  # FMA slots a pair: scale and subtract, max, sum, convert
    "SFU_PAIR": 1.0,  # the exponential
    "L2_SHARE": 0.60,  # of the ports' 64 B a clock that L2 really delivers
    "L2_USABLE": 0.6,  # of L2 before K and V wash each other out
    "HBM_LATENCY": 0.9e-6,  # s: one load under full traffic
    "SYNC_MMA": 0.62,  # of the peak that mma.sync reaches where wgmma or tcgen05 set the peak
    "LOADS_DOT": 2.0,  # slots that a float32 product's operands take, times the square root of a thread's scores
    "REG_BASE": 64,  # registers a thread: addresses, row statistics, loop state
    "REG_PAIR": 1.5,  # a pair's score in float32 and its probability in half precision
    "REG_DOT": 0.2,  # a pair's operands in a float32 product, for each of its first 64 terms
    "REG_VECTOR": 2,  # one 64-bit address for each 16 bytes that a thread loads of K and V
    "SMEM_RESERVED": 1024,  # B: what the driver takes of each program
}
"""The only numbers that no data sheet gives. Registers and shared memory are fitted on compiled kernels; the rest on an
H200, bfloat16, no mask, TFLOP/s: D 64 429; D 128 531 (64x64, 4 warps, 3 stages), 466 (128x64, 8, 3) and 444
(128x128, 8, 2); D 256 513."""


def _symbols(names: str) -> list[Any]:
    return list(sympy.symbols(names, nonnegative=True))


# The tile and the schedule
BLOCK_M, BLOCK_N, WARPS, STAGES, PACK = _symbols("BLOCK_M BLOCK_N WARPS STAGES PACK")
# The region: D and DV as Triton holds them, WIDTH in bytes; bytes of a row of Q, K, V, O; work and bytes of a pair
D, DV, CHUNK, WIDTH, Q_ROW, K_ROW, V_ROW, O_ROW = _symbols("D DV CHUNK WIDTH Q_ROW K_ROW V_ROW O_ROW")
FMA, SFU, TEST, LOAD, LOAD_UNIQUE, PASSES = _symbols("FMA SFU TEST LOAD LOAD_UNIQUE PASSES")
# The launch: heads over the batch, lengths, tiles visited and tested by one head, keys reached by any query
HEADS, KV_HEADS, M, N, TILES, TESTED, REACHED = _symbols("HEADS KV_HEADS M N TILES TESTED REACHED")
# The device
SMS, SMEM_PER_SM, REGS_PER_SM, REGS_MAX, THREADS_PER_SM, WARP = _symbols("SMS SMEM_SM REGS_SM REGS_MAX THREADS_SM WARP")
MMA_RATE, SFU_RATE, FMA_RATE, SMEM_RATE, L2_RATE, HBM_RATE, L2, LAUNCH = _symbols(
    "MMA SFUS FMAS SMEM L2RATE HBM L2 LAUNCH"
)
# Choices that the compiler makes from the above: 1 or 0
SPLIT, WGMMA, SCRATCH, DOT, BARRIERS, MMA_ROWS, MMA_SHARE = _symbols(
    "SPLIT WGMMA SCRATCH DOT BARRIERS MMA_ROWS MMA_SHARE"
)
SETUP, TILE, WAIT, EXPOSED, SERIAL, FMA_PAIR, SFU_PAIR = _symbols("SETUP TILE WAIT EXPOSED SERIAL FMA_PAIR SFU_PAIR")
L2_SHARE, L2_USABLE, HBM_LATENCY = _symbols("L2_SHARE L2_USABLE HBM_LATENCY")
REG_BASE, REG_PAIR, REG_DOT, REG_VECTOR, SMEM_RESERVED = _symbols("REG_BASE REG_PAIR REG_DOT REG_VECTOR SMEM_RESERVED")

threads = WARPS * WARP

# Shared memory of one program, B, as Triton allocates it: loads that feed wgmma or tcgen05 keep one buffer a stage,
# loads that go through registers (mma.sync, biases) one less; Q lies there for wgmma and passes through for mma.sync,
# as P may.
q_tile = WIDTH * BLOCK_M * D
kv_tile = WIDTH * BLOCK_N * (D + DV)
p_tile = WIDTH * BLOCK_M * BLOCK_N
buffers = STAGES - 1 + WGMMA
pipelined = q_tile + buffers * kv_tile + (STAGES - 1) * LOAD * BLOCK_M * BLOCK_N + SCRATCH * p_tile
unpipelined = q_tile + WIDTH * BLOCK_N * CHUNK + p_tile * Max(SCRATCH, Min(1, LOAD), Min(1, Max(0, WIDTH - 2)))
smem = sympy.Piecewise((unpipelined, STAGES < 2), (pipelined, True)) + BARRIERS

# 32-bit registers of one thread: the float32 accumulator, the score and its probability, the operands of a product that
# no matrix instruction does, an address for each 16 bytes loaded, the rest
accumulator = BLOCK_M * DV / threads
scores = BLOCK_M * BLOCK_N / threads
vectors = kv_tile / (16 * threads)
registers = accumulator + (REG_PAIR + DOT * REG_DOT * Min(D, 64)) * scores + REG_VECTOR * vectors + REG_BASE
spilled = Max(0, registers - REGS_MAX)

# Programs: one for each query tile of a head (of a group of PACK heads) and each part of its keys
query_tiles = ceiling(M / floor(BLOCK_M / PACK))
by_registers = REGS_PER_SM / (Min(registers, REGS_MAX) * threads)
resident = Max(1, floor(Min(SMEM_PER_SM / (smem + SMEM_RESERVED), by_registers, THREADS_PER_SM / threads)))
slots = SMS * resident
units = HEADS / PACK * query_tiles
splits = Max(1, SPLIT * Min(floor(slots / units), ceiling(N / BLOCK_N)))
programs = units * splits
waves = programs / slots
rounds = Max(1, ceiling(programs / SMS))  # programs that the busiest multiprocessor runs, one after or beside another
together = Min(resident, rounds)

# Operations
tiles = HEADS / PACK * TILES  # visited in the whole launch
pairs = tiles * BLOCK_M * BLOCK_N
flops = 2 * pairs * (D + DV)  # Q K^T and P V, two for a multiply-add
rescale = DV / BLOCK_N  # FMA slots a pair: the accumulator shrinks to each tile's new maximum
fma_work = pairs * (FMA_PAIR + FMA + rescale) + HEADS / PACK * TESTED * BLOCK_M * BLOCK_N * (TEST + 1)
sfu_work = pairs * (SFU_PAIR + SFU)

# Bytes of device memory. K and V are read once by the first programs of a head; further rounds of the slots over the
# same head find them in L2, or read them again.
kv_once = KV_HEADS * REACHED * (K_ROW + V_ROW)
laps = Max(1, HEADS / KV_HEADS * query_tiles / PACK * splits / slots)
in_flight = Max(1, slots * KV_HEADS / programs) * REACHED * (K_ROW + V_ROW)
missed = Max(0, 1 - L2_USABLE * L2 / in_flight)
partials = Min(1, splits - 1) * 2 * splits * HEADS * M * 4 * (DV + 2)  # float32, written, then read to combine
hbm = HEADS * M * (Q_ROW + O_ROW) + kv_once * (1 + (laps - 1) * missed) + LOAD_UNIQUE + partials
# Eager writes and reads the M x N scores for the product, each element-wise kernel, the softmax and the second product
hbm_unfused = (
    HEADS * M * (Q_ROW + O_ROW)
    + KV_HEADS * N * (K_ROW + V_ROW)
    + HEADS * M * N * WIDTH * (4 + 2 * PASSES)
    + LOAD_UNIQUE
)

# Seconds of each pipe, were it alone
mma_s = flops / (MMA_RATE * MMA_SHARE)
sfu_s = sfu_work / SFU_RATE
fma_s = fma_work / FMA_RATE
row_groups = Max(1, BLOCK_M / MMA_ROWS)  # each reads every K and V operand from shared memory again
smem_bytes = tiles * (kv_tile * (1 + row_groups) + WGMMA * row_groups * MMA_ROWS * WIDTH * D * Max(1, BLOCK_N / 256))
smem_s = smem_bytes / SMEM_RATE
l2_s = tiles * (BLOCK_N * (K_ROW + V_ROW) + LOAD * BLOCK_M * BLOCK_N) / (L2_RATE * L2_SHARE)
flight = SMS * together * Max(1, STAGES - 1) * kv_tile / HBM_LATENCY  # B/s that the loads under way can bring (Little)
hbm_s = hbm / Min(HBM_RATE, flight)
spill_s = tiles * threads * 8 * spilled / SMEM_RATE

# Seconds of the launch. A program's barriers keep its own warps in step, so that its element work hides behind the
# products of other programs only.
element_s = sfu_s + fma_s
multiply_s = Max(mma_s, smem_s)
chip_s = Max(multiply_s, element_s) + (EXPOSED + SERIAL / together) * Min(multiply_s, element_s) + spill_s
busy = rounds * SMS / programs  # the busiest multiprocessor's share of the work over an even share
late = WAIT / Max(1, STAGES - 1) ** 2 + Max(0, 2 - STAGES) * HBM_LATENCY
tile_latency_s = tiles / programs * rounds / together * (TILE + late)
setup_s = SETUP * ceiling(rounds / together)
working_s = chip_s * busy
moving_s = Max(hbm_s, l2_s * busy)
latency_s = LAUNCH * (1 + Min(1, splits - 1)) + setup_s + tile_latency_s
seconds = Max(working_s, moving_s) + latency_s

QUANTITIES: dict[str, tuple[Any, str]] = {
    "smem": (smem, "B of shared memory, one program"),
    "registers": (registers, "32-bit registers, one thread"),
    "resident": (resident, "programs on one multiprocessor"),
    "splits": (splits, "parts of the keys"),
    "programs": (programs, "programs"),
    "waves": (waves, "programs over slots"),
    "flops": (flops, "FLOP"),
    "hbm": (hbm, "B of device memory"),
    "hbm_unfused": (hbm_unfused, "B of device memory, eager"),
    "mma_s": (mma_s, "s of the tensor cores"),
    "element_s": (element_s, "s of the special-function and FMA pipes"),
    "smem_s": (smem_s, "s of the shared-memory ports"),
    "working_s": (working_s, "s of the busiest multiprocessor's pipes"),
    "moving_s": (moving_s, "s of device memory and L2"),
    "latency_s": (latency_s, "s of starts, barriers and launch"),
    "seconds": (seconds, "s in all"),
}
"""Every quantity that a caller can ask for, with its unit."""

SYMBOLS = sorted({s for e, _ in QUANTITIES.values() for s in e.free_symbols}, key=str)
_INPUTS = itemgetter(*map(str, SYMBOLS))
PIPES = {"mma_s": "tensor cores", "element_s": "special functions", "smem_s": "shared memory"}


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., list[float]]:
    """All quantities at once, with shared parts computed once."""
    return sympy.lambdify(SYMBOLS, [e for e, _ in QUANTITIES.values()], modules="math", cse=True)


def evaluate(values: Mapping[str, float]) -> dict[str, float]:
    """Every quantity at `values`, a number for each symbol's name."""
    return dict(zip(QUANTITIES, _compiled()(*_INPUTS(values)), strict=True))


def bound(quantities: Mapping[str, float]) -> str:
    """What sets the time: latency where it exceeds the work, memory where bytes outlast it, else the longest pipe."""
    if quantities["latency_s"] > max(quantities["working_s"], quantities["moving_s"]):
        return "latency"
    if quantities["moving_s"] > quantities["working_s"]:
        return "memory"
    return PIPES[max(PIPES, key=lambda name: quantities[name])]
