"""Measuring instead of predicting: the K best planned tiles, timed once on the device; the answer is kept on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusecomp.errors import FusecompError
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.device import current
from fusecomp.planning.plan import coarse, plan, rows, scheduled
from fusecomp.planning.tile import TilePlan
from fusecomp.running import cache

log = logging.getLogger(__name__)

SECONDS = 2.0
"""Time on the device that one kernel may be measured for, compiling not counted."""
KNOWN = ("block_m", "block_n", "warps", "stages", "pack", "loads", "resident", "consumers")


def best_plans(
    region: AttentionRegion, sizes: Mapping[str, int], count: int, describable: bool = True
) -> list[TilePlan]:
    """The planner's `count` best tiles that fit, the best first."""
    first = plan(region, sizes, describable=describable)
    ranked = [r for r in rows(region, dict(coarse(sizes)), describable=describable) if "needs" not in r.reason]
    others = [replace(scheduled(first, r.tile, region, sizes, current()), cost=r.cost) for r in ranked]
    seen = {_tile(p): p for p in [first, *others]}
    return list(seen.values())[:count]


def _tile(p: TilePlan) -> tuple[Any, ...]:
    return tuple(getattr(p, f) for f in KNOWN)


def tuned(
    region: AttentionRegion,
    sizes: Mapping[str, int],
    count: int,
    run: Callable[[TilePlan], Callable[[], object]],
    machine: str,
    describable: bool = True,
    also: Sequence[TilePlan] = (),
) -> TilePlan:
    """The fastest of the `count` best plans, and of what is `also` there. `run(plan)` compiles one and returns what
    launches it.

    `describable`: whether K and V, as they lie, fit in tensor descriptors.
    """
    plans = [*best_plans(region, sizes, count, describable), *also]
    name = cache.digest("tune", region.key, coarse(sizes), count, machine, [_tile(p) for p in plans])
    path = cache.directory("tuned") / f"{name}.json"
    known = (cache.read_json(path) or {}).get("tile")
    found = next((p for p in plans if list(_tile(p)) == known), None)
    if found is None:
        found = min(plans, key=lambda p: _milliseconds(p, run, SECONDS / len(plans)))
        cache.write_json(path, {"tile": list(_tile(found))})
    return found


def _milliseconds(p: TilePlan, run: Callable[[TilePlan], Callable[[], object]], seconds: float) -> float:
    """Median time of one launch; infinite where the tile does not compile."""
    try:
        launch = run(p)
        return median(launch, seconds)
    except (FusecompError, RuntimeError) as error:
        log.debug("tile %s is not tried: %s", _tile(p), error)
        return float("inf")


def median(launch: Callable[[], object], seconds: float) -> float:
    """Median milliseconds of `launch` on the current device, within about `seconds`."""
    launch()
    torch.cuda.synchronize()
    once = _timed(launch)
    repeats = max(3, min(100, int(seconds * 1e3 / max(once, 1e-3)) - 1))
    times: list[float] = sorted(_timed(launch) for _ in range(repeats))
    return times[len(times) // 2]


def _timed(launch: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
