"""What the kernel for Hopper's tensor cores is predicted to cost: held against its record, and shown beside the tiles
of the portable kernel."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import fusecomp
from fusecomp.codegen.hopper_choice import planned
from fusecomp.planning import device
from fusecomp.planning.workload import Workload

FOLDER = Path(__file__).parent.parent / "examples" / "bench" / "records"
RECORDS = [json.loads((FOLDER / name).read_text()) for name in ("hopper_h200.json", "hopper_short_h200.json")]
WORDS = {"alibi", "prefix", "documents", "bias"}
"""What `tiles` has no numbers for."""
PLAIN = [r for record in RECORDS for r in record["rows"] if not WORDS & set(r["case"])]
NAMES = {"heads": 16, "batch": 1, "d": 128}


def predicted(case: dict[str, Any]) -> float | None:
    """Seconds, where the kernel is chosen."""
    w = Workload(**{**NAMES, **case})
    plan = planned(w.region, w.sizes, device.find("h200"))
    return plan.cost.seconds if plan is not None and plan.cost is not None else None


def test_predictions_are_near_what_was_measured() -> None:
    rows = [r for r in PLAIN if r["impl"] == "hopper"]
    pairs = [(predicted(r["case"]), (r["burst_ms"] + r["sustained_ms"]) / 2e3) for r in rows]
    off = [abs(seconds / measured - 1) for seconds, measured in pairs if seconds is not None]
    assert len(off) > 30
    assert statistics.median(off) < 0.05
    assert max(off) < 0.15


def test_the_faster_of_two_kernels_is_chosen() -> None:
    """Or one that takes as long, but for a tenth: back to back, as the records have them."""
    found: dict[str, dict[str, float]] = {}
    for r in PLAIN:
        found.setdefault(json.dumps(r["case"]), {}).setdefault(r["impl"], r["sustained_ms"])
    for case, ms in found.items():
        chosen = "hopper" if predicted(json.loads(case)) is not None else "portable"
        assert ms[chosen] <= 1.1 * min(ms["hopper"], ms["portable"]), case


def test_tiles_show_it_beside_the_portable_kernel() -> None:
    found = fusecomp.tiles(18000, 128, causal=True, device="h200")
    portable, own = (r.taken for r in found.rankings)
    assert (own.tile.block_m, own.tile.block_n, own.tile.warps) == (128, 128, 8)
    assert own.cost is not None
    assert portable.cost is not None
    assert own.cost.seconds < portable.cost.seconds
    assert found.to_dict()["hopper_forward"] == [own.to_dict()]
    assert "hopper forward" in str(found)


@pytest.mark.parametrize(
    "other",
    [
        {"device": "a100"}, {"device": "b200"}, {"budget": "100KB"}, {"dtype": "fp32"}, {"d": 96},
        {"n": 128, "batch": 64},
    ],
    ids=str,
)
def test_the_portable_kernel_stands_alone(other: dict[str, Any]) -> None:
    """On another device, in less memory, for what the other cannot express, and where it is slower."""
    given = {"n": 18000, "d": 128, "causal": True, "device": "h200", **other}
    assert [r.kernel for r in fusecomp.tiles(**given).rankings] == ["forward"]
