"""tune=K without a GPU: which tiles are tried, which is kept, and that it is asked once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_hopper import EXPRESSED, LONG

from fusecomp.codegen.hopper import specialised
from fusecomp.errors import KernelError
from fusecomp.planning.plan import plan
from fusecomp.planning.tile import TilePlan
from fusecomp.planning.workload import Workload
from fusecomp.running import tune
from fusecomp.running.tune import best_plans, tuned

REGION = EXPRESSED["causal"]


class Stopwatch:
    """Milliseconds of a plan by what a test says of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: Callable[[TilePlan], float]) -> None:
        self.asked: list[TilePlan] = []
        self.of = of
        monkeypatch.setattr(tune, "median", lambda launch, _: launch())

    def __call__(self, p: TilePlan) -> Callable[[], object]:
        self.asked.append(p)
        return lambda: self.of(p)


def test_the_fastest_is_kept_and_measured_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, lambda p: float(p.block_n == 32) or 2.0 + p.block_m)
    found = tuned(REGION, LONG, 8, watch, "a machine")
    assert watch.asked == best_plans(REGION, LONG, 8)
    assert found == min(watch.asked, key=watch.of)
    assert tuned(REGION, LONG, 8, watch, "a machine") == found
    assert len(watch.asked) == 8
    tuned(REGION, LONG, 8, watch, "another machine")
    assert len(watch.asked) == 16
    assert len(list((own_cache / "tuned").glob("*.json"))) == 2


def test_the_first_is_the_plan_and_each_tile_comes_once() -> None:
    plans = best_plans(REGION, LONG, 12)
    first = plan(REGION, LONG)
    assert (plans[0].block_m, plans[0].block_n, plans[0].warps) == (first.block_m, first.block_n, first.warps)
    assert len({tune._tile(p) for p in plans}) == 12


def test_what_does_not_compile_is_not_taken(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = best_plans(REGION, LONG, 1)[0]
    watch = Stopwatch(monkeypatch, lambda p: 1.0 + p.block_n)

    def run(p: TilePlan) -> Callable[[], object]:
        if p == first:
            raise KernelError("no")
        return watch(p)

    assert tuned(REGION, LONG, 4, run, "a machine") != first
    assert own_cache.exists()


def test_a_kernel_for_one_device_takes_part(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    special = specialised(REGION, plan(REGION, LONG))
    watch = Stopwatch(monkeypatch, lambda p: 1.0 / (1 + p.consumers))
    for _ in range(2):
        assert tuned(REGION, LONG, 4, watch, "a machine", also=[special]) == special
    assert len(watch.asked) == 5
    assert own_cache.exists()


def test_programs_that_share_keys_all_run_at_once() -> None:
    """Registers follow the warps of the tile that is tried."""
    w = Workload(n=8192, d=128, heads=32, kv_heads=8, batch=8, m=1)
    for p in best_plans(w.region, w.sizes, 12):
        assert p.skeleton == "decode"
        assert 32 * p.warps * p.resident * (p.registers or 255) <= 65536 or p.registers == 0
