"""What stands between a value and its reader is looked at before the reader is rewritten; verification, which may
notice it too, is off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def over_the_sum(q: Tensor, k: Tensor, beside: Tensor) -> Tensor:
    o = torch.exp(q @ k.mT) @ beside
    return o[..., :-1] / o[..., -1:]


def ones_doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    beside = torch.cat([v, torch.ones(*v.shape[:-1], 1)], -1)
    beside[..., -1:].mul_(2.0)
    return over_the_sum(q, k, beside)


def put_together_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        beside = torch.cat([v, torch.ones(*v.shape[:-1], 1)], -1)
    return over_the_sum(q, k, beside) + 0 * v.sum()


def added_to_what_is_not_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = torch.zeros(2, 13, 8)
    z[:, :5].add_(3.0)
    s, t = q @ k[:, :11].mT, q @ k[:, 11:].mT
    first = s.amax(-1, keepdim=True)
    m = torch.maximum(first, t.amax(-1, keepdim=True))
    p, r, a = torch.exp(s - first), torch.exp(t - m), torch.exp(first - m)
    return ((z + p @ v[:, :11]) * a + r @ v[:, 11:]) / (p.sum(-1, keepdim=True) * a + r.sum(-1, keepdim=True))


@pytest.mark.parametrize("fn", [ones_doubled, put_together_without_gradient, added_to_what_is_not_zero])
@pytest.mark.parametrize("learn", [False, True], ids=["inference", "training"])
def test_what_was_done_to_it_since_counts(fn: Callable[..., Tensor], learn: bool) -> None:
    torch._dynamo.reset()
    args = [torch.randn(2, n, 8, requires_grad=learn) for n in (13, 21, 21)]
    fast = torch.compile(fn, backend="fusecomp", options={"inner": "aot_eager", "verify": False})
    got, wanted = fast(*args), fn(*args)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    if learn:
        grads = [torch.autograd.grad(x.sum(), args) for x in (got, wanted)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
