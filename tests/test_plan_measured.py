"""The plan against what an H200 measured: every tile of 93 workloads, in `examples/bench/records/tiles_h200.json`.

The constants were fitted on one half of the workloads, and never on the other. What is asked of both: the pick within
a tenth of the best, ranks that correlate by 0.8. `SLOW` and `LOOSE` are the workloads where that does not hold, with
what does. Most are due to registers: nothing predicts well what the compiler spills of dK and dV, nor of float32
products. In decoding many tiles are as fast as the memory, and rank by chance.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "examples" / "bench"
sys.path.append(str(BENCH))  # after this folder, which has a module `kernels` too

from fit_tiles import HALVES, MODELS, Set, model_of, sets, settled  # noqa: E402
from workloads import Case  # noqa: E402

from fusecomp.planning import backward, device  # noqa: E402
from fusecomp.planning import plan as planning  # noqa: E402
from fusecomp.planning.tile import Tile  # noqa: E402

RECORD = json.loads((BENCH / "records" / "tiles_h200.json").read_text())
COLUMNS = RECORD["columns"][:-1]
H200 = device.find("h200")
WORST, CORRELATION = 1.10, 0.8
SLOW = {
    "n=1024 heads=32 kv_heads=8 m=1 kind=decode": 1.2,
    "n=4096 heads=32 kv_heads=8 m=1 kind=decode page=16": 1.12,
    "n=4096 d=576 batch=32 kv_heads=1 dv=512 m=1 kind=decode page=64 latent=True": 1.2,
    "n=1024 d=64 causal=True batch=8 kind=queries": 1.14,
    "n=2048 d=64 batch=4 bias=True": 1.15,
    "n=4096 d=64 bias=True": 1.12,
    "n=2048 d=64 batch=4 kind=queries": 1.16,
    "n=16384 d=192 causal=True dv=128": 1.12,
    "n=4096 causal=True heads=32 kv_heads=8 kind=keys": 1.35,
    "n=1024 d=64 dtype=fp32 causal=True": 1.2,
    "n=2048 d=64 dtype=tf32 batch=4": 1.15,
    "n=4096 d=64 dtype=tf32": 1.15,
    "n=4096 dtype=tf32 causal=True": 1.14,
    "n=4096 d=256 causal=True heads=8 kind=keys": 1.28,
}
LOOSE = {
    "n=2048 d=64 dtype=fp32 causal=True batch=4": 0.64,
    "n=1024 d=64 dtype=fp32 causal=True": 0.6,
    "n=4096 dtype=tf32 causal=True": 0.52,
    "n=1024 heads=32 kv_heads=8 m=1 kind=decode": 0.54,
    "n=4096 heads=32 kv_heads=8 m=1 kind=decode": 0.56,
    "n=4096 heads=32 batch=64 kv_heads=8 m=1 kind=decode": 0.66,
    "n=1024 heads=32 kv_heads=8 m=1 kind=decode page=16": 0.43,
    "n=4096 heads=32 kv_heads=8 m=1 kind=decode page=16": 0.64,
    "n=1024 heads=32 batch=64 kv_heads=8 m=1 kind=decode page=16": 0.73,
    "n=4096 heads=32 batch=64 kv_heads=8 m=1 kind=decode page=16": 0.71,
    "n=8192 heads=32 batch=16 m=1 kind=decode": 0.6,
    "n=4096 heads=32 m=1 kind=decode": 0.76,
    "n=4096 heads=32 batch=16 kv_heads=8 m=4 kind=decode": 0.74,
    "n=4096 d=256 batch=8 kv_heads=8 m=1 kind=decode": 0.7,
    "n=256 heads=32 batch=256 kv_heads=8 m=1 kind=decode": 0.71,
    "n=4096 d=576 heads=128 batch=32 kv_heads=1 dv=512 m=1 kind=decode page=64 latent=True": 0.53,
    "n=4096 d=576 batch=32 kv_heads=1 dv=512 m=1 kind=decode page=64 latent=True": 0.6,
    "n=16384 d=576 heads=128 batch=4 kv_heads=1 dv=512 m=1 kind=decode page=64 latent=True": 0.66,
    "n=4096 d=64 causal=True batch=4 kind=keys": 0.72,
    "n=1024 d=64 causal=True batch=8 kind=keys": 0.69,
    "n=1024 d=64 causal=True kind=keys": 0.71,
    "n=4096 causal=True batch=4 kind=keys": 0.67,
    "n=16384 causal=True heads=8 kind=keys": 0.68,
    "n=1024 causal=True batch=8 kind=keys": 0.66,
    "n=2048 d=64 batch=4 kind=keys": 0.76,
    "n=4096 causal=True heads=32 kv_heads=8 kind=keys": 0.56,
    "n=2048 d=64 causal=True batch=4 softcap=30.0 kind=keys": 0.56,
    "n=4096 d=256 causal=True heads=8 kind=keys": 0.53,
}
MEDIAN = {
    ("forward", 0): 1.005, ("forward", 1): 1.025,
    ("decode", 0): 1.005, ("decode", 1): 1.025,
    ("backward", 0): 1.005, ("backward", 1): 1.01,
}  # fmt: skip
"""(What is planned, half: 0 fitted on, 1 judged on) -> the median slowdown."""
CASES = [Case(**row["case"]) for row in RECORD["workloads"]]
UNTIMED = {"n=8192 heads=32 batch=16 m=1 kind=decode"}
"""Timed before keys could be left unsplit, which is the plan."""
PICKED = [case for case in CASES if case.name not in UNTIMED]
Key = tuple[Any, ...]


@cache
def measured(case: Case) -> dict[Key, float]:
    """us of each tile that ran."""
    rows = RECORD["workloads"][CASES.index(case)]["tiles"]
    us = {tuple(t[: len(COLUMNS)]): t[len(COLUMNS)] for t in rows if t[len(COLUMNS)] is not None}
    tiles = [Tile(**dict(zip(COLUMNS, tile, strict=True))) for tile in us]
    return dict(zip(us, settled(case, tiles, list(us.values())), strict=True))


def picked(case: Case, describable: bool = True) -> Key:
    """The plan's tile."""
    if case.kind in ("queries", "keys"):
        made = getattr(backward.backward_plan(case.region, H200, case.sizes), case.kind)
    else:
        made = planning.plan(case.region, case.sizes, H200, describable=describable)
    return tuple(getattr(made, name) for name in COLUMNS)


@cache
def slowdown(case: Case) -> float:
    """The time of the plan's tile over the best one's."""
    times = measured(case)
    return times[picked(case)] / min(times.values())


@cache
def correlations() -> dict[str, float]:
    """Spearman's, of predicted and measured times of each workload."""
    found: dict[str, Set] = sets(RECORD)
    return {
        name: float(score[2])
        for model, s in found.items()
        for name, score in zip(s.names, s.scores(MODELS[model][1]), strict=True)
    }


def test_every_workload_is_recorded() -> None:
    assert set(CASES) == set(HALVES)
    assert len(CASES) == 93
    assert {name for table in (SLOW, LOOSE) for name in table} <= {case.name for case in CASES}


@pytest.mark.parametrize("case", PICKED, ids=lambda case: case.name)
def test_the_pick_is_near_the_best(case: Case) -> None:
    assert slowdown(case) <= SLOW.get(case.name, WORST)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_predictions_rank_as_measurements_do(case: Case) -> None:
    assert correlations()[case.name] >= LOOSE.get(case.name, CORRELATION)


@pytest.mark.parametrize(("model", "half"), MEDIAN)
def test_most_picks_are_very_near_the_best(model: str, half: int) -> None:
    found = [slowdown(case) for case in PICKED if (model_of(case), HALVES[case]) == (model, half)]
    assert statistics.median(found) <= MEDIAN[model, half]


def test_half_of_all_picks_are_within_a_fiftieth() -> None:
    assert statistics.median(map(slowdown, PICKED)) <= 1.015


@pytest.mark.parametrize("case", [c for c in CASES if c.kind == "forward" and c.dtype != "tf32"], ids=lambda c: c.name)
def test_without_descriptors_the_pick_is_the_best_of_pointers(case: Case) -> None:
    times = measured(case)
    pointers = {tile: us for tile, us in times.items() if tile[COLUMNS.index("loads")] == "pointer"}
    assert pointers[picked(case, describable=False)] <= 1.2 * min(pointers.values())
