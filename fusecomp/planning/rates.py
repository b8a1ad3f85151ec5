"""What products reach of the peak, by the instruction that makes them."""

from __future__ import annotations

import sympy

from fusecomp.planning.symbols import *

RATES = {
    "SYNC_MMA": 0.62,  # of the peak that mma.sync reaches where wgmma or tcgen05 set the peak
    "LOADS_DOT": 5.0,  # slots that a float32 product's operands take, times the square root of a thread's scores
}
"""Fitted on one half of the forward workloads in `examples/bench/records/tiles_h200.json`, and judged on the other."""

SYNC_MMA, LOADS_DOT = symbols("SYNC_MMA LOADS_DOT")

# mma.sync reaches less where another instruction sets the peak; with none, a thread of s scores loads
# 2 sqrt(s) operands for s multiply-adds
mma_share = DOT / (1 + LOADS_DOT / sympy.sqrt(BLOCK_M * BLOCK_N / threads)) + (1 - DOT) * (
    NATIVE + (1 - NATIVE) * SYNC_MMA
)
