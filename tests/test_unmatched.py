"""What fusecomp leaves alone, Inductor's own patterns of attention leave alone too: some of it they replace
by another function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from corpus.table import Draw, qkv, scores
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.fx import Graph

from fusecomp.running import unmatched


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(1) @ v


def by_hand_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    p = torch.exp(s - s.amax(-2, keepdim=True))
    return torch.dropout(p / p.sum(-2, keepdim=True), 0.0, True) @ v


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def draw() -> list[Tensor]:
    return list(qkv(Draw(torch.float32, "cpu", 1)))


@pytest.mark.parametrize("fn", [over_heads, by_hand_over_queries])
@pytest.mark.parametrize("learn", [False, True], ids=["inference", "training"])
def test_a_softmax_over_another_axis_stays_one(fn: Callable[..., Tensor], learn: bool) -> None:
    args = [x.requires_grad_(learn) for x in draw()]
    got, wanted = torch.compile(fn, backend="fusecomp")(*args), fn(*args)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    if learn:
        grads = [torch.autograd.grad(x.sin().sum(), args) for x in (got, wanted)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    assert counters["inductor"]["fuse_attention"] == 0


def test_inductor_matches_what_is_no_attention() -> None:
    """If it no longer does, `unmatched` may go."""
    args = draw()
    with config.patch(force_disable_caches=True):
        got = torch.compile(over_heads, backend="inductor")(*args)
    assert counters["inductor"]["fuse_attention"] == 1
    assert not torch.allclose(got, over_heads(*args), rtol=1e-2, atol=1e-2)


def test_nothing_is_left_apart_and_passes_of_the_user_run(own_cache: Any) -> None:
    graphs = list[list[Any]]()

    class Seen(unmatched.CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            graphs.append([n.target for n in graph.nodes])

        def uuid(self) -> str | None:
            return None

    with config.patch(force_disable_caches=True, joint_custom_pre_pass=Seen(), post_grad_custom_post_pass=Seen()):
        torch.compile(over_heads, backend="fusecomp")(*draw())
    before, after = graphs
    assert torch.ops.aten.exp.default in before
    assert unmatched.APART not in {*before, *after}


def test_a_pass_is_known_by_what_it_does() -> None:
    pre, post = unmatched.patches().values()
    assert pre.uuid() == unmatched.Pass(unmatched.put_apart, None).uuid()
    assert pre.uuid() != post.uuid()
    assert unmatched.Pass(unmatched.put_apart, print).uuid() is None
