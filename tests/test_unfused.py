"""Where separate kernels are predicted faster than one, and where nothing of the kind is claimed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusecomp import pipeline
from fusecomp.backend import explain
from fusecomp.patterns.build import Match
from fusecomp.planning import device
from fusecomp.planning.plan import plan
from fusecomp.planning.unfused import faster_apart, unfused_seconds
from fusecomp.planning.workload import Workload
from fusecomp.settings import Options

H200 = device.find("h200")


def said(**given: Any) -> str:
    w = Workload(**{"d": 64, **given})
    return faster_apart(w.region, w.sizes, plan(w.region, w.sizes, H200), H200)


@pytest.mark.parametrize(
    "given",
    [
        {"m": 64, "n": 16384, "heads": 8},
        {"m": 17, "n": 8192, "heads": 1},
        {"m": 256, "n": 16384, "heads": 1},
    ],
)
def test_few_queries_of_few_heads(given: dict[str, Any]) -> None:
    reason = said(**given)
    assert reason.startswith("separate kernels are predicted to take ")
    assert reason.endswith("programs do not fill 132 multiprocessors")


@pytest.mark.parametrize(
    "given",
    [
        {"m": 64, "n": 16384, "heads": 8, "batch": 32},
        {"m": 16, "n": 16384, "heads": 8},
        {"m": 128, "n": 8192, "heads": 32, "kv_heads": 8},
        {"n": 4096, "heads": 1, "causal": True},
        {"n": 18000, "heads": 8, "causal": True},
        {"n": 2048, "heads": 8, "dtype": "fp32"},
        *({"n": n, "heads": 8, "batch": batch} for n in (16, 64, 128, 512) for batch in (1, 4)),
    ],
)
def test_all_else_is_fused(given: dict[str, Any]) -> None:
    assert said(**given) == ""


def test_many_scores_are_never_kept() -> None:
    assert said(m=64, n=1 << 19, heads=1)
    assert not said(m=64, n=1 << 24, heads=1)


def test_shared_heads_are_copied_first() -> None:
    w = Workload(n=8192, d=64, m=128, heads=32, kv_heads=8)
    tiles, alone = plan(w.region, w.sizes, H200), Workload(n=8192, d=64, m=128, heads=32)
    apart = unfused_seconds(w.region, w.sizes, tiles, H200)
    assert apart > unfused_seconds(alone.region, alone.sizes, tiles, H200)
    assert apart > unfused_seconds(w.region, w.sizes, tiles, replace(H200, hbm_rate=2 * H200.hbm_rate))


def test_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Match, "device", torch.device("cuda"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(q @ k.mT * 0.125).softmax(-1) @ v

    args = [torch.randn(1, 1, n, 64, dtype=torch.bfloat16) for n in (32, 16384, 16384)]
    with torch.no_grad():
        (entry,) = explain(attend, *args).entries
    assert entry.status == "declined"
    assert "separate kernels are predicted to take" in entry.reason
    assert entry.advice == "lowering='triton' fuses all the same"


@pytest.mark.parametrize("options", [Options(lowering="triton"), Options(batch_invariant=True)])
def test_a_strict_wish_is_kept(monkeypatch: pytest.MonkeyPatch, options: Options) -> None:
    monkeypatch.setattr(pipeline.unfused, "faster_apart", lambda *_: "asked")
    match = SimpleNamespace(device=torch.device("cuda"))
    assert pipeline.faster_apart(match, {}, options) == ""  # type: ignore[arg-type]
