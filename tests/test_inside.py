"""A kernel reads a tensor at every query and key, also where something else is chosen: never outside of the tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from corpus import extended, score
from test_corpus import interpret, options, score_name
from torch.fx.experimental.proxy_tensor import make_fx

import fusecomp
from fusecomp import backend
from fusecomp.ir.expr import Expr, Load, parts
from fusecomp.ir.reference import Env, evaluate_expr
from fusecomp.ir.region import AttentionRegion
from fusecomp.pipeline import Compilation

CASES = [pytest.param(c, id=c.name) for c in extended.CASES]


@pytest.mark.parametrize("case", CASES)
def test_every_index_lies_inside(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Compilation] = []
    monkeypatch.setattr(backend, "_listeners", [heard])
    args = case.make_args(torch.float32)
    with torch.no_grad():
        fusecomp.fuse(make_fx(case.fn, pre_dispatch=True)(*args), args, verify=False, strict=True)
    found = [e for c in heard for e in c.entries if e.status == "fused"]
    assert len(found) == (case.expect == "fuse")
    for entry in found:
        assert entry.region is not None
        within(entry.region, entry.sizes)


def within(region: AttentionRegion, sizes: dict[str, int]) -> None:
    """Assert that no index that is known before the run leaves its tensor, whatever the place."""
    d = {v.name: v for v in (*(p.d for p in region.products), region.dv)}
    running = (*region.batch, region.q_idx, region.kv_idx, *d.values())
    env = Env((), {}, sizes)
    spans = {v.name: range(int(evaluate_expr(v.size, env))) for v in running}
    env = Env(tuple(spans), spans, sizes)
    for name, index in indices(region):
        shape = [int(evaluate_expr(e, env)) for e in region.operand(name).shape]
        for e, size in zip(index, shape, strict=True):
            if not any(isinstance(x, Load) for x in parts(e)):
                at = evaluate_expr(e, env)
                assert at.min() >= 0, f"{name}: {e}"
                assert at.max() < size, f"{name}: {e}"


def indices(region: AttentionRegion) -> Iterator[tuple[str, tuple[Expr, ...]]]:
    """Of Q, K, V and of all that scores, masks and weights read."""
    for a in (*(x for p in region.products for x in (p.q, p.k)), region.v):
        yield a.operand, a.index
    for e in (region.score, *region.keep, region.filled_score, region.weight, region.sink):
        yield from ((x.tensor, x.index) for x in parts(e) if isinstance(x, Load)) if e is not None else ()


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_written_inside(case: Any) -> None:
    result = score.score(case, score_name(case), options("--train"))
    assert result.verdict == "right", result.detail


def test_kernels_in_the_interpreter() -> None:
    out = interpret("--train", "--file", extended.__file__)
    assert "wrong 0, errors 0" in out
