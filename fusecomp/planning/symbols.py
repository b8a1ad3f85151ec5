"""What the equations of the cost model are written in: symbols, each with one meaning on every page.

Bytes, operations, seconds; "pair" is one (query, key) position of a visited tile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import sympy


def as_written(function: Any) -> Any:
    """A function that sympy leaves as it is written: to simplify this page takes seconds, at every import."""
    return partial(function, evaluate=False)


Max, Min, ceiling, floor, power = map(as_written, (sympy.Max, sympy.Min, sympy.ceiling, sympy.floor, sympy.Pow))


def symbols(names: str) -> list[Any]:
    return list(sympy.symbols(names, nonnegative=True))


# The tile and the schedule
BLOCK_M, BLOCK_N, WARPS, STAGES, PACK, GROUPS = symbols("BLOCK_M BLOCK_N WARPS STAGES PACK GROUPS")
# The region: D and DV as Triton holds them, WIDTH in bytes, and HELD, of K and V in memory; bytes of a row of Q, K, V,
# O; work and bytes of a pair
D, DV, CHUNK, KV_TILES, WIDTH, HELD, Q_ROW, K_ROW, V_ROW, O_ROW = symbols(
    "D DV CHUNK KV_TILES WIDTH HELD Q_ROW K_ROW V_ROW O_ROW"
)
FMA, SFU, TEST, DRAWS, LOAD, LOAD_UNIQUE, LOOKED_UP, PASSES = symbols(
    "FMA SFU TEST DRAWS LOAD LOAD_UNIQUE LOOKED_UP PASSES"
)
# The launch: heads over the batch, lengths; tiles that one head visits, that it tests, that its longest program visits;
# keys reached by any query
HEADS, KV_HEADS, M, N, TILES, TESTED, LONGEST, REACHED = symbols("HEADS KV_HEADS M N TILES TESTED LONGEST REACHED")
# The device
SMS, SMEM_PER_SM, REGS_PER_SM, REGS_MAX, THREADS_PER_SM, WARP = symbols("SMS SMEM_SM REGS_SM REGS_MAX THREADS_SM WARP")
MMA_RATE, SFU_RATE, FMA_RATE, SMEM_RATE, L2_RATE, HBM_RATE, L2, LAUNCH = symbols(
    "MMA SFUS FMAS SMEM L2RATE HBM L2 LAUNCH"
)
# Choices that the compiler makes from the above: 1 or 0
SPLIT, WGMMA, TCGEN05, MMA_SYNC, DOT, CROSSES, REGROUPED, BYTES, DRAWN, PARTS, MMA_ROWS, NATIVE, DESC = symbols(
    "SPLIT WGMMA TCGEN05 MMA_SYNC DOT CROSSES REGROUPED BYTES DRAWN PARTS MMA_ROWS NATIVE DESC"
)
# What the resources of a program come to, on the pages after them
SHARED, REGS, SPILLED = symbols("smem registers spilled")

threads = WARPS * WARP
