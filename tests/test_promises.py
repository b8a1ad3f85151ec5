"""Promises to people who train and to people who reset: eager's gradient, and functions that go on running."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fusecomp
from fusecomp.running import expected


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    fusecomp.reset()


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.25).softmax(-1) @ v


def compiled(fn: Callable[..., Tensor], inner: str = "eager") -> Callable[..., Tensor]:
    return torch.compile(fn, backend="fusecomp", options={"inner": inner})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_lost_in_a_fill_keep_eagers_gradient(dtype: torch.dtype) -> None:
    """In half precision the row without a key has uniform weights, yet its scores receive a gradient in eager."""
    keep = torch.ones(13, 21, dtype=torch.bool)
    keep[3] = False
    bias = torch.zeros(13, 21, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        zeros = torch.zeros((), dtype=q.dtype)
        mask = torch.where(bias == 0, zeros, torch.finfo(q.dtype).min)
        return torch.softmax(q @ k.mT * 0.25 + mask, -1) @ v

    inputs = [torch.randn(2, n, 16, dtype=dtype, requires_grad=True) for n in (13, 21, 21)]
    seed = torch.randn(2, 13, 16, dtype=dtype)
    got = torch.autograd.grad(compiled(attend, inner="aot_eager")(*inputs), inputs, seed)
    own = torch.autograd.grad(attend(*inputs), inputs, seed)
    for a, b in zip(got, own, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_reset_leaves_compiled_functions_running() -> None:
    args = [torch.randn(2, 3, n, 16) for n in (13, 21, 21)]
    fast = compiled(plain)
    before = fast(*args)
    fusecomp.reset()
    assert torch.equal(fast(*args), before)
    assert fusecomp.counters()["fused"] == 0


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.dropout(((q @ k.mT) * 0.25).softmax(-1), 0.3) @ v


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.mT) * 0.25
    return s.softmax(-1) @ v + s.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize("fn", [plain, dropped, with_lse])
@pytest.mark.parametrize("sampled", [False, True])
def test_compiling_draws_nothing_from_the_generator(
    fn: Callable[..., Tensor], sampled: bool, monkeypatch: pytest.MonkeyPatch, own_cache: object
) -> None:
    """A program that sets a seed draws what it drew, whatever was fused before."""
    if sampled:
        monkeypatch.setattr(expected, "EXACT_SCORES", {"cpu": 0})
    args = [torch.randn(2, n, 16, requires_grad=True) for n in (13, 21, 21)]
    graph = make_fx(fn, pre_dispatch=True)(*args)
    before = torch.get_rng_state()
    fusecomp.fuse(graph, args, strict=True)
    assert fusecomp.counters()["fused"] == 1
    assert torch.equal(torch.get_rng_state(), before)
