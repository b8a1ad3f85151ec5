"""The report: what it says, that it fits its width, and that it is JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fusecomp import report as r
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Score, Size, Var
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product
from fusecomp.planning.tile import Cost, Rejected, TilePlan
from fusecomp.report import Entry, Report

B, H, M, N = map(Size, "BHMN")
b, h, q_idx, kv_idx = Var("b", B), Var("h", H), Var("q_idx", M), Var("kv_idx", N)
d, dv = Var("d", Const(64)), Var("dv", Const(64))

CAUSAL = AttentionRegion(
    operands=tuple(Operand(name, (B, H, n, Const(64)), "bfloat16") for name, n in (("q", M), ("k", N), ("v", N))),
    batch=(b, h),
    q_idx=q_idx,
    kv_idx=kv_idx,
    products=(Product(Access("q", (b, h, q_idx, d)), Access("k", (b, h, kv_idx, d)), d, "bfloat16"),),
    v=Access("v", (b, h, kv_idx, dv)),
    dv=dv,
    score=apply("mul", Score(), Const(0.125)),
    keep=(apply("ge", q_idx, kv_idx),),
    origin="model.py:18",
)
COST = Cost(1.1e12, 134e6, 4.3e9, 98304, 168, 512, 3.9, 1.72e-3, "tensor cores")
PLAN = TilePlan(
    "prefill", 128, 64, ((64,),), (64,), 8, 3, cost=COST, device="H200",
    rejected=(Rejected(256, 128, 8, 4, "needs 262144 B of shared memory, 232448 usable"),),
)  # fmt: skip
FUSED = Entry(
    0, "fused", "model.py:18", "w = torch.softmax(s[..., None], -1)  # [bold]", CAUSAL, {"B": 2, "M": 4096}, plan=PLAN,
    kernel="attention_causal_d64_bf16", kernel_text="import triton\n", lowering="triton",
    verdict="agreed with eager: error 1.2e-3, budget 4.0e-3",
)  # fmt: skip
DECLINED = Entry(
    1, "declined", "model.py:40", "w = torch.softmax(s.cumsum(-1), -1)", reason="cumsum mixes keys",
    advice="Move the cumsum out of the scores to have this attention fused.",
)  # fmt: skip


def test_the_block_of_a_fused_attention_holds_every_stage() -> None:
    text = str(Report((FUSED,), "model", "H200"))
    for part in (
        "fusecomp model for H200  1 attention in 1 graph: 1 fused",
        "#0  fused  model.py:18",
        "w = torch.softmax(s[..., None], -1)  # [bold]",
        "sizes      B = 2, M = 4096",
        "S = score * 0.125",
        "keep  q_idx >= kv_idx",
        "prefill, tile 128 x 64 (Br x Bc), 8 warps, 3 stages; 1 other tile considered",
        "1.72 ms, bound by tensor cores; 1100 GFLOP",
        "HBM 134 MB, unfused 4.3 GB (32.1 x)",
        "shared memory 98304 B, 168 registers a thread, 512 programs in 3.9 waves",
        "attention_causal_d64_bf16",
        "agreed with eager: error 1.2e-3, budget 4.0e-3",
    ):
        assert part in text


def test_the_tiles_of_a_plan_are_the_table_of_the_calculator() -> None:
    """One function prints tiles, for a workload given by numbers and for a model's."""
    from fusecomp.planning.device import find
    from fusecomp.planning.plan import plan
    from fusecomp.show import stage
    from fusecomp.tables import printed, tile_table

    sizes = {"B": 2, "H": 8, "M": 1500, "N": 1500}
    planned = replace(FUSED, sizes=sizes, plan=plan(CAUSAL, sizes, find("a100")))
    tiles = planned.tiles()
    assert tiles is not None
    assert tiles.taken.cost == planned.plan.cost  # type: ignore[union-attr]
    assert len(tiles.lines) == len(planned.plan.rejected) + 1  # type: ignore[union-attr]
    report = Report((planned,))
    for rows, text in ((r.ROWS, str(report)), (12, "\n".join(stage(report, "plan", find("a100"))))):
        for line in printed(tile_table(tiles, rows)).splitlines():
            assert line in text
    assert "taken: bound by" in text


def test_a_plan_for_a_device_that_is_not_known_here_lists_no_tiles() -> None:
    elsewhere = replace(FUSED, sizes={"B": 2, "H": 8, "M": 64, "N": 64})
    assert elsewhere.tiles() is None
    assert "Br x Bc warps" not in str(Report((elsewhere,)))


def test_the_block_of_a_declined_one_holds_reason_line_and_advice() -> None:
    text = str(Report((DECLINED,)))
    for part in ("1 declined", "#0  declined  model.py:40", "s.cumsum(-1)", "cumsum mixes keys", "Move the cumsum"):
        assert part in text
    assert "plan" not in text


def test_identical_layers_are_one_block() -> None:
    text = str(Report((FUSED,) * 32, graphs=2))
    assert "32 attentions in 2 graphs: 32 fused" in text
    assert text.count("model.py:18") == 1
    assert "#0-31  fused  model.py:18  (32 alike)" in text


def test_layers_of_two_kinds_are_two_blocks() -> None:
    kinds = (FUSED, replace(FUSED, where="model.py:30"))
    text = str(Report(tuple(kinds[i in (2, 5)] for i in range(7))))
    assert "#0-1, 3-4, 6  fused  model.py:18  (5 alike)" in text
    assert "#2, 5  fused  model.py:30  (2 alike)" in text


@pytest.mark.parametrize("folder", ["", f"{Path.cwd()}/", "/usr/lib/python3/site-packages/"])
def test_paths_are_shown_as_a_person_would_call_them(folder: str) -> None:
    entry = replace(FUSED, where=f"{folder}models/llama.py:7")
    assert "fused  models/llama.py:7\n" in str(Report((entry,)))
    assert entry.to_dict()["where"] == entry.where


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_console(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    long = replace(FUSED, source="softmax(" + "x" * 300 + ")", kernel="attention_" + "y" * 120)
    console.print(Report((long, DECLINED), notes=("a graph break at model.py:3 " + "z" * 90,)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert text.count("x") >= 300
    assert text.count("y") >= 120


def test_nothing_found_is_said() -> None:
    assert "No softmax" in str(Report())


def test_to_dict_is_json() -> None:
    endless = replace(COST, seconds=float("inf"))
    report = Report((FUSED, DECLINED, replace(FUSED, plan=replace(PLAN, cost=endless), kernel_source=object())))
    loaded = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert loaded["counts"] == {"candidates": 3, "fused": 2, "declined": 1, "fallback": 0}
    first, second, third = loaded["entries"]
    assert first["plan"]["cost"]["smem_bytes"] == 98304
    assert first["region"] == {"key": CAUSAL.key, "text": str(CAUSAL).splitlines()}
    assert (second["region"], second["plan"]) == (None, None)
    assert third["plan"]["cost"]["seconds"] is None
    assert third["status"] == "fused"


def test_kernels_are_listed_once() -> None:
    assert Report((FUSED, FUSED, DECLINED)).kernels() == {"attention_causal_d64_bf16": "import triton\n"}


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (134e6, "134 MB"), (4.8e12, "4.8 TB")]
)
def test_size(value: float, text: str) -> None:
    assert r.size(value) == text


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.5 s"), (4.2e-4, "420 us"), (1.72e-3, "1.72 ms"), (3e-8, "30 ns")])
def test_seconds(value: float, text: str) -> None:
    assert r.seconds(value) == text


def test_a_report_without_a_graph_says_where_to_look() -> None:
    assert "Dynamo compiled no graph; TORCH_LOGS=graph_breaks" in str(Report((), graphs=0))
    assert "No softmax" in str(Report(()))
