"""Real models: their attention cores are fused, their results are eager's, and what is left is told truly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from zoo.cores import cores
from zoo.models import MODELS
from zoo.run import surveyed, warm
from zoo.survey import FUSECOMP, Backend, Result, survey
from zoo.table import markdown, summary

THRESHOLD = {"infer": 97.0, "train0": 95.0, "train": 95.0}
"""Percent of all cores, by mode."""

DIVERSE = [
    ("gpt_oss", "train0"), ("xlnet", "train0"), ("bert_decoder", "infer"), ("wavlm", "train0"),
    ("llama4_text", "train0"), ("swin", "train0"), ("falcon", "train0"),
]  # fmt: skip
"""Sinks and experts, a relative shift, padding across, gates on a bias, padded chunks, windows of images,
heads of Q, K and V side by side."""


@pytest.fixture(scope="module", autouse=True)
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FUSECOMP_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "zoo"))
        warm()
        yield
        torch._dynamo.reset()


@pytest.mark.parametrize(("name", "mode"), DIVERSE)
def test_every_core_is_fused_and_right(name: str, mode: str) -> None:
    found = surveyed(name, mode)
    assert found.right, found
    assert found.cores == found.fused > 0, found.left
    assert found.left == []


@pytest.mark.slow
def test_what_is_left_is_told() -> None:
    """JetMoE's weights are an output of the graph that its router breaks off."""
    found = surveyed("jetmoe", "infer")
    assert found.right, found
    assert (found.cores, found.fused) == (2, 0)
    (left,) = found.left
    assert left["reason"] == "the weights or scores are read elsewhere too, by the graph's output"
    assert "graph break" in left["advice"]
    assert left["where"].startswith("modeling_jetmoe.py:")


# ----------------------------------------------------------------------------------------------------------------
# The instrument itself


def test_a_wrong_backend_is_seen() -> None:
    def sharper(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            if node.target is torch.nn.functional.softmax:
                with gm.graph.inserting_before(node):
                    node.args = (gm.graph.call_method("mul", (node.args[0], 1.01)), *node.args[1:])
        gm.recompile()
        return gm.forward

    found = survey("llama", "train0", Backend(sharper, lambda: 0))
    assert not found.right
    assert (found.error or 0) > 1e-4
    assert (found.gradient_error or 0) > 2e-3


def test_a_failure_is_a_result() -> None:
    def failing(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        raise NotImplementedError("no such graph")

    found = surveyed("llama", "infer", Backend(failing, FUSECOMP.fused))
    assert "no such graph" in found.problem
    assert not found.right
    assert not Result("llama", "infer", error=float("inf")).right


def counted(fn: Callable[..., Any], *args: Any) -> int:
    found = 0

    def look(gm: GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal found
        found += len(list(cores(gm)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=look)(*args)
    return found


def test_cores_are_softmaxes_between_products() -> None:
    x, w = torch.randn(2, 7, 8), torch.randn(8, 8)
    assert counted(lambda x: torch.nn.functional.dropout((x @ x.mT / 3 + 1).softmax(-1), 0.0) @ x, x) == 1
    assert counted(lambda x: (x @ x.mT).softmax(-1), x) == 0
    assert counted(lambda x: x.softmax(-1) @ x.mT, x) == 0
    assert counted(lambda x, w: torch.sort((x @ w).softmax(-1)).values @ w, x, w) == 0


# ----------------------------------------------------------------------------------------------------------------
# All of it


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("mode", sorted(THRESHOLD))
def test_models(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [surveyed(name, mode) for name in MODELS]
    with capsys.disabled():
        print(f"\n{markdown(rows)}")
    assert [r for r in rows if not r.right] == []
    assert summary(rows)[mode]["percent"] >= THRESHOLD[mode]
    assert all(r.left for r in rows if r.fused < r.cores)
