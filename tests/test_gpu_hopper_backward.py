"""On a Hopper GPU: gradients by its own backward kernels, of programs a person would write.

    pytest -n 0 -m gpu tests/test_gpu_hopper_backward.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu_hopper import (  # noqa: F401 - `always` is a fixture
    FLOOR,
    OPTIONS,
    Attend,
    alibi,
    always,
    attend,
    causal,
    documents,
    full,
    off,
    places,
    pytestmark,
    scores,
    sink,
    window,
)
from torch import Tensor

from fusecomp.codegen.backward import BackwardSource, emit_backward
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning import visits
from fusecomp.planning.backward import BackwardPlan
from fusecomp.running import lower


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[BackwardPlan]:
    """Of the backward kernels that are made, in order: where the first disagree, portable ones follow."""
    found: list[BackwardPlan] = []

    def made(region: AttentionRegion, plan: BackwardPlan, *more: Any) -> BackwardSource:
        found.append(plan)
        return emit_backward(region, plan, *more)

    monkeypatch.setattr(lower, "emit_backward", made)
    return found


def differentiated(fn: Attend, args: list[Tensor], planned: list[BackwardPlan], deterministic: bool = True) -> None:
    """Gradients beside those of the program in float64, by backward kernels for Hopper, twice the same if they are."""
    args = [x.requires_grad_() for x in args]
    fast = torch.compile(fn, backend="fusecomp", options={**OPTIONS, "deterministic": deterministic})
    up = torch.randn_like(out := fast(*args))
    found = torch.autograd.grad(out, args, up)
    assert planned[-1].keys.consumers
    assert planned[-1].once != deterministic
    double = [x.detach().double().requires_grad_() for x in args]
    exact = torch.autograd.grad(fn(*double), double, up.double())
    eager = torch.autograd.grad(fn(*args), args, up)
    for a, e, x in zip(found, eager, exact, strict=True):
        assert off(a, x) <= max(4 * off(e, x), FLOOR[a.dtype])
    again = torch.autograd.grad(fast(*args), args, up)
    assert all(map(torch.equal, found[not deterministic :], again[not deterministic :]))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", FLOOR, ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("fn", [full, causal, window, alibi, documents, sink], ids=lambda f: f.__name__)
def test_gradients_of_each_variant(
    fn: Attend, size: int, dtype: torch.dtype, deterministic: bool, planned: list[BackwardPlan]
) -> None:
    shapes = [(2, 4, 613, size), (2, 2, 613, size), (2, 2, 613, size)]
    args = [torch.randn(s, device="cuda", dtype=dtype) for s in shapes]
    differentiated(fn, args, planned, deterministic)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("m", "n"), [(37, 1000), (128, 128), (1000, 1001), (300, 5000), (129, 257)])
@pytest.mark.parametrize("fn", [full, causal], ids=lambda f: f.__name__)
def test_gradients_at_other_lengths(
    fn: Attend, m: int, n: int, deterministic: bool, planned: list[BackwardPlan]
) -> None:
    args = [torch.randn(1, 3, x, 64, device="cuda", dtype=torch.bfloat16) for x in (m, n, n)]
    differentiated(fn, args, planned, deterministic)


def test_gradients_of_heads_side_by_side(planned: list[BackwardPlan]) -> None:
    """[B, N, 3, H, D] as one projection leaves it: each gradient goes to its place in one tensor."""

    def fn(qkv: Tensor) -> Tensor:
        return causal(*(x.transpose(1, 2) for x in qkv.unbind(2))).transpose(1, 2)

    differentiated(fn, [torch.randn(2, 500, 3, 6, 128, device="cuda", dtype=torch.bfloat16)], planned)


DOCUMENTS = {
    "sorted": lambda i: torch.stack([i // 50, i // 400]),
    "unsorted": lambda i: torch.stack([i * 7919 % 5, i // 100 % 3]),
    "each its own": lambda i: torch.stack([i, i // 1]),
    "padded": lambda i: torch.where(i < torch.tensor([[500], [200]], device=i.device), i // 150, -1),
}


def packed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    i, j = places(q, k)
    same = ids[:, None, -q.shape[2] :, None] == ids[:, None, None, :]
    return attend(scores(q, k), q, v, same & (j <= i))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("m", "n", "size"), [(613, 613, 64), (640, 640, 128), (300, 700, 64)])
@pytest.mark.parametrize("ids", DOCUMENTS)
def test_gradients_of_documents(
    ids: str, m: int, n: int, size: int, deterministic: bool, planned: list[BackwardPlan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By tables in both directions."""
    monkeypatch.setattr(visits, "SHARE", float("inf"))
    labels = DOCUMENTS[ids](torch.arange(n, device="cuda"))
    shapes = [(2, 4, m, size), (2, 2, n, size), (2, 2, n, size)]
    args = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    differentiated(lambda q, k, v: packed(q, k, v, labels), args, planned, deterministic)
    assert planned[-1].keys.visits == "ranges"


def test_a_gradient_that_is_expanded(planned: list[BackwardPlan]) -> None:
    """The gradient of a sum has strides of 0, which no descriptor can say."""
    args = [torch.randn(2, 3, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    fast = torch.compile(causal, backend="fusecomp", options=OPTIONS)
    found = torch.autograd.grad(fast(*args).sum(), args[2])
    assert planned[-1].keys.consumers == 2
    exact = torch.autograd.grad(causal(*(x.double() for x in args)).sum(), args[2])
    assert off(found[0], exact[0].double()) <= FLOOR[torch.bfloat16]
