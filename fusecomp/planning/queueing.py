"""How long the pipes of a multiprocessor take for work that queues at them: the last page of the forward and backward
passes, in the results of the pages before.

Groups of four warps go round two pipes, the products and the element work, and a delay at neither: a closed queueing
network, by Reiser and Lavenberg's mean value analysis (JACM 27, 1980) in Schweitzer's form, where who arrives finds the
share (n - 1) / n of each pipe's mean queue. One group alone pays the sum of its times, many pay the longest pipe: what
FlashAttention-3 (Shah et al. 2024, sec. 3.1) arranges by hand between two warpgroups.

A multiprocessor runs its programs in rounds of as many as it holds. Where all are as long, the last round may be nearly
empty and takes as long as the others; where a mask makes them differ, short ones fill it, and the longest sets an end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusecomp.planning.equations import Equation
from fusecomp.planning.symbols import *

MEET, MULTIPLY, ELEMENT, DELAY, EACH, BUSY, MOVING, LAUNCHES = symbols(
    "MEET multiply_s element_s delay_s per_program busy moving_s launch_s"
)
HELD, PROGRAMS, VISITED, FILL, SPREAD = symbols("resident programs tiles fill_s SPREAD")


def _lap(m: Any, e: Any, groups: Any) -> tuple[Any, Any, Any]:
    """Seconds at each pipe and in all, where a lap so far takes `m` and `e` at the pipes: queues are theirs over it."""
    whole = m + e + DELAY
    m, e = (own * (1 + (groups - 1) * held / whole) for own, held in ((MULTIPLY, m), (ELEMENT, e)))
    return m, e, m + e + DELAY


meet = 1 + MEET * Min(1, Max(0, WARPS / 4 - 1))  # two groups of one program wait for each other at each barrier


def taken(beside: Any) -> Any:
    """Seconds of an even share of all work on one multiprocessor, `beside` programs at a time."""
    groups = beside * EACH
    _, _, lap = _lap(*_lap(MULTIPLY, ELEMENT, groups)[:2], groups)
    return Max(MULTIPLY, ELEMENT, lap / groups * meet)


most = ceiling(PROGRAMS / SMS)  # programs of the busiest multiprocessor
share = SMS / PROGRAMS  # of an even share of all work: one program
rest = most - floor(most / HELD) * HELD
level = VISITED / PROGRAMS / LONGEST  # mean over longest program
full = taken(Min(HELD, most))
rounds = share * ((most - rest) * full + rest * taken(Max(1, rest)))
alone = share * FILL + LONGEST * (taken(1) - FILL) * SMS / VISITED  # the longest program by itself
filled = most * share * full
spread = SPREAD * (1 - level) * alone  # what uneven programs leave idle at the end (Graham's bound, 1969, at SPREAD 1)
working = Max(filled + (rounds - filled) * Max(0, 2 * level - 1) + spread, alone)
hidden = DELAY * BUSY / (Min(HELD, most) * EACH) + LAUNCHES
TIMES: dict[str, Equation] = {
    "working_s": (working, "s of the busiest multiprocessor's pipes"),
    "latency_s": (hidden, "s of starts, barriers and launch"),
    "seconds": (Max(working, MOVING) + LAUNCHES, "s in all"),
}

PIPES = {"mma_s": "tensor cores", "element_s": "special functions", "smem_s": "shared memory"}


def bound(quantities: Mapping[str, float]) -> str:
    """What sets the time: latency where it exceeds the work, memory where bytes outlast it, else the longest pipe."""
    if quantities["latency_s"] > max(quantities["working_s"], quantities["moving_s"]):
        return "latency"
    if quantities["moving_s"] > quantities["working_s"]:
        return "memory"
    return PIPES[max(PIPES, key=lambda name: quantities[name])]
