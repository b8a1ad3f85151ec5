"""What one launch costs: a page of equations, in sympy for reading, compiled once for choosing.

Bytes, operations, seconds; "pair" is one (query, key) position of a visited tile. The device's rates come from its
table, the region's counts from `facts`, and what neither says (how much a compiler hides) from `FITTED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

import sympy

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
    "SETUP": 4.21e-6,  # s: a program's start and its last stores
    "DESCRIBE": 2.44e-6,  # s: more of a program's start where it makes descriptors
    "WAIT": 324e-9,  # s: a late load of one tile, with one tile of lookahead; two are enough
    "WAIT_DESCRIBED": -253e-9,  # s: the same, more through descriptors
    "MEET": 0.169,  # part of the time that two groups of warps of one program wait for each other
    "FMA_PAIR": 0.7,  # FMA slots a pair: scale and subtract, max, sum, convert, less what hides in other slots
    "SFU_PAIR": 1.0,  # the exponential
    "TURN": 15.3,  # times that a float32 V takes to be written turned; bank conflicts, presumably
    "FMA_VECTOR": 9.13,  # FMA slots for each 16 bytes that a thread loads of K and V itself: addresses, masks
    "FMA_ROW": 262,  # FMA slots a row of a tile: maximum and sum over the four threads that hold it, the new state
    "SFU_ROW": 4.53,  # the rescaling exponential, in each of the four threads
    "TEST_PAIR": 2,  # FMA slots a pair of a tile that tests its mask: positions, comparison, selection
    "L2_SHARE": 0.474,  # of the ports' 64 B a clock that L2 really delivers
    "L2_DESCRIBED": 0.146,  # more of it through descriptors
    "L2_USABLE": 0.6,  # of L2 before K and V wash each other out
    "HBM_LATENCY": 0.9e-6,  # s: one load under full traffic
    "SYNC_MMA": 0.62,  # of the peak that mma.sync reaches where wgmma or tcgen05 set the peak
    "LOADS_DOT": 2.0,  # slots that a float32 product's operands take, times the square root of a thread's scores
    "SPILL": 4.78,  # times that a spilled register is stored and loaded in a tile
}
"""The only numbers of times that no data sheet gives, fitted on the tiles of `examples/bench/records/tiles_h200.json`,
all of them, the regret of each pick weighing most: nothing was held out. FMA_PAIR and TEST_PAIR lie at the least that
the search allowed."""

SETUP, DESCRIBE, WAIT, WAIT_DESCRIBED, MEET, SPILL = symbols("SETUP DESCRIBE WAIT WAIT_DESCRIBED MEET SPILL")
FMA_PAIR, SFU_PAIR, TURN, FMA_VECTOR, FMA_ROW, SFU_ROW, TEST_PAIR = symbols(
    "FMA_PAIR SFU_PAIR TURN FMA_VECTOR FMA_ROW SFU_ROW TEST_PAIR"
)
L2_SHARE, L2_DESCRIBED, L2_USABLE, HBM_LATENCY = symbols("L2_SHARE L2_DESCRIBED L2_USABLE HBM_LATENCY")

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
tested = HEADS / PACK * TESTED
pairs = tiles * BLOCK_M * BLOCK_N
flops = 2 * pairs * (D + DV)  # Q K^T and P V, two for a multiply-add
rescale = DV / BLOCK_N  # FMA slots a pair: the accumulator shrinks to each tile's new maximum
fma_work = (
    pairs * (FMA_PAIR + FMA + rescale)
    + tested * BLOCK_M * BLOCK_N * (TEST + TEST_PAIR)
    + tiles * (BLOCK_M * FMA_ROW + threads * vectors * FMA_VECTOR)
)
sfu_work = pairs * (SFU_PAIR + SFU) + tiles * BLOCK_M * SFU_ROW

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
l2 = L2_RATE * (L2_SHARE + DESC * L2_DESCRIBED)
mma_s = flops / (MMA_RATE * MMA_SHARE)
sfu_s = sfu_work / SFU_RATE
fma_s = fma_work / FMA_RATE
row_groups = Max(1, BLOCK_M / MMA_ROWS)  # each reads every K and V operand from shared memory again
smem_bytes = tiles * (
    kv_tile * (1 + row_groups)
    + turned * TURN * WIDTH * BLOCK_N * DV
    + WGMMA * row_groups * MMA_ROWS * WIDTH * D * Max(1, BLOCK_N / 256)
)
smem_s = smem_bytes / SMEM_RATE
l2_s = tiles * (BLOCK_N * (K_ROW + V_ROW) + LOAD * BLOCK_M * BLOCK_N) / l2
flight = SMS * together * Max(1, STAGES - 1) * kv_tile / HBM_LATENCY  # B/s that the loads under way can bring (Little)
hbm_s = hbm / Min(HBM_RATE, flight)
spill_s = tiles * threads * 8 * SPILL * spilled / SMEM_RATE  # 4 B written and 4 B read, each time

# Groups of four warps go round two pipes, products and element work, and a delay that is nobody's work: barriers, the
# way of a product through its pipe, late loads, a program's start. In seconds, as if one group did all the work.
multiply_s = Max(mma_s, smem_s) + spill_s
element_s = sfu_s + fma_s  # one warp issues both
strips = 1 + (1 - WGMMA) * Max(0, MMA_ROWS / 16 - 1)  # with mma.sync, each 16 rows of a warp go their own way
per_program = WGMMA * Min(WARPS / 4, Max(1, BLOCK_M / 64)) + (1 - WGMMA) * WARPS / 4 * strips
groups = together * per_program
fill = q_tile + BLOCK_M * O_ROW + Max(1, STAGES - 1) * kv_tile  # B of a program's first loads and of its result
fill_s = programs * fill / l2
late = (WAIT + DESC * WAIT_DESCRIBED) * Max(0, 3 - STAGES) + Max(0, 2 - STAGES) * HBM_LATENCY
delay_s = per_program * late * tiles / SMS + fill_s
start_s = (SETUP + DESC * DESCRIBE) * rounds / together  # neighbours start together, so that nobody's work hides it
busy = rounds * SMS / programs  # the busiest multiprocessor's share of the work over an even share
moving_s = Max(hbm_s, l2_s * busy)
launch_s = LAUNCH * (1 + Min(1, splits - 1)) + start_s

# The second page, in the results of the first: a closed queueing network. Reiser and Lavenberg's mean value analysis in
# Schweitzer's form: who arrives finds the share (n - 1) / n of each pipe's mean queue.
MULTIPLY, ELEMENT, DELAY, GROUPS, BUSY, MOVING, LAUNCHES = symbols(
    "multiply_s element_s delay_s groups busy moving_s launch_s"
)


def _lap(m: Any, e: Any) -> tuple[Any, Any, Any]:
    """Seconds at each pipe and in all, where a lap so far takes `m` and `e` at the pipes: queues are theirs over it."""
    whole = m + e + DELAY
    m, e = (own * (1 + (GROUPS - 1) * held / whole) for own, held in ((MULTIPLY, m), (ELEMENT, e)))
    return m, e, m + e + DELAY


_, _, lap = _lap(*_lap(MULTIPLY, ELEMENT)[:2])
meet = 1 + MEET * Min(1, Max(0, WARPS / 4 - 1))  # two groups of one program wait for each other at each barrier
working = Max(MULTIPLY, ELEMENT, lap / GROUPS * meet) * BUSY
hidden = DELAY * BUSY / GROUPS + LAUNCHES
TIMES: dict[str, tuple[Any, str]] = {
    "working_s": (working, "s of the busiest multiprocessor's pipes"),
    "latency_s": (hidden, "s of starts, barriers and launch"),
    "seconds": (Max(working, MOVING) + LAUNCHES, "s in all"),
}

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
    "multiply_s": (multiply_s, "s of products and of their operands"),
    "moving_s": (moving_s, "s of device memory and L2"),
    "delay_s": (delay_s, "s that one group of warps waits for no pipe"),
    "launch_s": (launch_s, "s of launches and of the first start"),
    "groups": (groups, "groups of four warps on one multiprocessor"),
    "busy": (busy, "work of the busiest multiprocessor over an even share"),
}
"""Every quantity that a caller can ask for, with its unit."""

PIPES = {"mma_s": "tensor cores", "element_s": "special functions", "smem_s": "shared memory"}

SYMBOLS = sorted({s for page in (QUANTITIES, TIMES) for e, _ in page.values() for s in e.free_symbols}, key=str)


class _Page:
    """Equations compiled together, with shared parts computed once."""

    def __init__(self, equations: Mapping[str, tuple[Any, str]]) -> None:
        self.names = list(equations)
        expressions = [e for e, _ in equations.values()]
        self.symbols = sorted({str(s) for e in expressions for s in e.free_symbols})
        self._inputs = itemgetter(*self.symbols)
        with sympy.evaluate(False):
            self._run = sympy.lambdify(symbols(" ".join(self.symbols)), expressions, modules="math", cse=True)

    def __call__(self, values: Mapping[str, float]) -> dict[str, float]:
        return dict(zip(self.names, self._run(*self._inputs(values)), strict=True))


@lru_cache(maxsize=1)
def _pages() -> tuple[_Page, _Page]:
    return _Page(QUANTITIES), _Page(TIMES)


def evaluate(values: Mapping[str, float]) -> dict[str, float]:
    """Every quantity at `values`, a number for each symbol's name."""
    work, times = _pages()
    known = work(values)
    return {**known, **times({**values, **known})}


def bound(quantities: Mapping[str, float]) -> str:
    """What sets the time: latency where it exceeds the work, memory where bytes outlast it, else the longest pipe."""
    if quantities["latency_s"] > max(quantities["working_s"], quantities["moving_s"]):
        return "latency"
    if quantities["moving_s"] > quantities["working_s"]:
        return "memory"
    return PIPES[max(PIPES, key=lambda name: quantities[name])]
