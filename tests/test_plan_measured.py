"""The plan against what an H200 measured: every tile of some workloads, in `examples/bench/records/tiles_h200.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fusecomp.planning import device
from fusecomp.planning import plan as planning
from fusecomp.planning.candidate import Launch, Tile
from fusecomp.planning.workload import Workload

RECORD = json.loads((Path(__file__).parents[1] / "examples/bench/records/tiles_h200.json").read_text())
CASES: list[dict[str, Any]] = RECORD["workloads"]
H200 = device.find("h200")
WORST, MEDIAN, CORRELATION = 1.05, 1.03, 0.7
"""The pick's time over the best one's, at most in each workload and in the median; the least rank correlation."""


def name(held: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in held["case"].items())


def measured(held: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Milliseconds of each tile that ran."""
    return {tuple(t[:4]): t[4] for t in held["tiles"] if t[4] is not None}


def slowdown(held: dict[str, Any]) -> float:
    """The time of the plan's tile over the best one's. Of tiles not measured, the next in rank that was counts."""
    workload, times = Workload(**held["case"]), measured(held)
    ranked = planning.tiles(workload, H200)
    picks = ((r.tile.block_m, r.tile.block_n, r.tile.warps, r.tile.stages) for r in ranked)
    return next(times[p] for p in picks if p in times) / min(times.values())


def ranks(values: list[float]) -> list[float]:
    """Ties share their mean rank."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def correlation(held: dict[str, Any]) -> float:
    """Spearman's, of predicted and measured times."""
    workload, times = Workload(**held["case"]), measured(held)
    launch = Launch(workload.region, workload.sizes, H200, decode=False)
    a, b = (ranks(x) for x in (list(times.values()), [launch.quantities(Tile(*t))["seconds"] for t in times]))
    mean = (len(a) - 1) / 2
    spread = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return float(sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True)) / spread**0.5)


@pytest.mark.parametrize("held", CASES, ids=name)
def test_the_pick_is_near_the_best(held: dict[str, Any]) -> None:
    assert slowdown(held) <= WORST


@pytest.mark.parametrize("held", CASES, ids=name)
def test_predictions_rank_as_measurements_do(held: dict[str, Any]) -> None:
    assert correlation(held) >= CORRELATION


def test_the_median_pick(record_property: Callable[[str, object], None]) -> None:
    middle = median(map(slowdown, CASES))
    record_property("median_slowdown", round(middle, 4))
    assert middle <= MEDIAN, f"the median pick takes {middle:.3f} of the best time"
