"""Where gradients are recorded, where they stop, and who writes his own: as in eager, not as in the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agree, attend, plain, qkv, reasons
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QKV = Callable[[Tensor, Tensor, Tensor], Any]


def scores_under_no_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        s = q @ k.mT
        s = s * 0.3
    return s.softmax(-1) @ v


def scores_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).detach().softmax(-1) @ v


def weights_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).detach() @ v


def total_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.mT).exp()
    return e / e.sum(-1, keepdim=True).detach() @ v


def logsumexp_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return (s - s.logsumexp(-1, keepdim=True).detach()).exp() @ v


def half_of_the_scores_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return (s + 2 * s.detach()).softmax(-1) @ v


def weights_of_the_values_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ v.mT).softmax(-1).detach() @ v + k.sum()


def logsumexp_beside_detached_weights(q: Tensor, k: Tensor, v: Tensor) -> Any:
    s = q @ k.mT
    return s.softmax(-1).detach() @ v, s.logsumexp(-1)


def scores_doubled_under_no_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    with torch.no_grad():
        s *= 2
    return s.softmax(-1) @ v


@pytest.mark.parametrize("fn", [scores_under_no_grad, scores_detached, weights_detached])
def test_a_gradient_that_stops_on_all_ways_is_not_asked_for(fn: QKV) -> None:
    agree(fn, qkv(learn=True), train=True)
    agree(lambda q, k, v: fn(q, k, v) + q + k.sum(), qkv(learn=True), train=True)
    agree(lambda q, k, v: fn(q, k, v.detach()) + q.sum(), qkv(learn=True), train=True)


def test_a_bias_beside_scores_that_do_not_learn() -> None:
    args = [*qkv(learn=True), torch.randn(3, 1, 1, requires_grad=True)]
    agree(lambda q, k, v, bias: ((q @ k.mT).detach() * bias).softmax(-1) @ v, args, train=True)


@pytest.mark.parametrize(
    "fn",
    [
        total_detached, logsumexp_detached, half_of_the_scores_detached, weights_of_the_values_detached,
        logsumexp_beside_detached_weights, scores_doubled_under_no_grad,
    ],
)  # fmt: skip
def test_a_gradient_that_stops_on_some_ways_is_left_alone(fn: QKV) -> None:
    agree(fn, qkv(learn=True), fused=0, train=True)
    assert "no gradient flows back through" in reasons(fn, qkv(learn=True))[0]
    agree(fn, qkv(), fused=1)  # where nothing learns, nothing stops


def detached_maxima(of: str) -> QKV:
    """exp(S - m) / sum exp(S - n), both the maximum of a row, of which some are detached."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        m = s.amax(-1, keepdim=True)
        with torch.no_grad():
            held = s.amax(-1, keepdim=True)
        over, under = (m.detach() if "m" in of else m), (held if "n" in of else m)
        return (s - over).exp() / (s - under).exp().sum(-1, keepdim=True) @ v

    return fn


@pytest.mark.parametrize("of", ["m", "n"])
def test_a_maximum_detached_in_one_place(of: str) -> None:
    """exp(m - detach(m)) = 1 has a gradient."""
    assert set(reasons(detached_maxima(of), qkv(learn=True))) == {
        "the maximum is detached in one place and not in another"
    }
    agree(detached_maxima(of), qkv(learn=True), fused=0, train=True)
    agree(detached_maxima(of), qkv())
    agree(detached_maxima("mn"), qkv(learn=True), train=True)


@pytest.mark.parametrize(
    "apart",
    [lambda x: x.unbind(1), lambda x: (x[:, 0], x[:, 1], x[:, 2]), lambda x: [y.squeeze(1) for y in x.chunk(3, 1)],
     lambda x: [y.squeeze(1) for y in x.split(1, 1)]],
)  # fmt: skip
@pytest.mark.parametrize("fn", [half_of_the_scores_detached, scores_detached, weights_detached])
def test_one_tensor_has_ways_of_both_kinds(fn: QKV, apart: Callable[[Tensor], Any]) -> None:
    x = torch.randn(2, 3, 4, 13, 8, requires_grad=True)
    agree(lambda x: fn(*apart(x)), [x], fused=0, train=True)


def edges(q: Tensor, k: Tensor, v: Tensor, edges: Tensor) -> Tensor:
    w = (q @ k.mT * 0.3).exp() * edges
    return (w / w.sum(-1, keepdim=True)) @ v


def edges_below_one(q: Tensor, k: Tensor, v: Tensor, edges: Tensor) -> Tensor:
    s = q @ k.mT
    w = (s - s.amax(-1, keepdim=True)).exp() * edges
    return (w / w.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize(("fn", "learn", "fused"), [(edges, False, 1), (edges, True, 0), (edges_below_one, True, 1)])
def test_an_edge_of_zero_has_a_gradient(fn: Callable[..., Tensor], learn: bool, fused: int) -> None:
    """Which a mask, as keeps a far greater exponential apart, would take away."""
    q, k, v = qkv(learn=True)
    zeros = torch.arange(q.shape[-2] * k.shape[-2]).view(q.shape[-2], -1) % 3
    agree(fn, [q, k, v, zeros.float().requires_grad_(learn)], fused=fused, train=True)


def test_only_the_queries_learn_and_their_scores_do_not() -> None:
    q, k, v = qkv()
    agree(lambda *a: scores_under_no_grad(*a) + a[0].sum(), [q.requires_grad_(), k, v], train=True)


def maximum_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    return e / e.sum(-1, keepdim=True) @ v


def maximum_of_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    e = (s - s.detach().max(-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True) @ v


def maximum_under_no_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    with torch.no_grad():
        m = s.amax(-1, keepdim=True)
    e = (s - m).exp()
    return e / e.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("fn", [maximum_detached, maximum_of_detached, maximum_under_no_grad])
def test_a_maximum_without_gradient_changes_nothing(fn: QKV) -> None:
    agree(fn, qkv(learn=True), train=True)


def computed_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        bias = q[..., :1].exp() + 1
    return (q @ k.mT + bias).softmax(-1) @ v


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: plain(q, k, v.detach()),
        lambda q, k, v: plain(q, k.detach(), v),
        lambda q, k, v: (q @ k.mT.detach()).softmax(-1) @ v,
        lambda q, k, v: plain(q + (q.round() - q).detach(), k, v),
        lambda q, k, v: plain(q, k, v).detach() + q,
        computed_bias,
    ],
)
def test_operands_that_do_not_learn_are_read_behind_the_stop(fn: QKV) -> None:
    agree(fn, qkv(13, 13, learn=True), train=True)


def test_grouped_heads_under_no_grad_are_not_repeated_in_memory() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            out = plain(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))
        return out + q

    args = [torch.randn(2, h, 13, 8, requires_grad=True) for h in (3, 1, 1)]
    agree(fn, args, train=True)


@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("outside", [torch.no_grad, torch.enable_grad])
def test_modes_inside_and_around(inside: Callable[[], Any], outside: Callable[[], Any]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with inside():
            return attend(q, k, v)

    with outside():
        agree(fn, qkv(learn=inside is not torch.inference_mode), train=inside is torch.enable_grad)


def test_inference_mode_stays_in_the_graph() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            a = attend(q, k, v)
        return a, plain(q, k, v)

    agree(fn, qkv(), fused=2)


class Tripled(torch.autograd.Function):
    """The identity, whose gradient is three times as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class InPlace(torch.autograd.Function):
    """The identity, whose gradient is added to in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        twice = 2 * grad
        twice.add_(grad)
        return twice


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: attend(InPlace.apply(q), k, v) + InPlace.apply(q),
        lambda q, k, v: attend(Tripled.apply(q), k, Tripled.apply(v)),
        lambda q, k, v: Tripled.apply(attend(q, k, v)),
        lambda q, k, v: attend(Tripled.apply(q) * q, k, v),
    ],
)
def test_a_gradient_that_the_user_wrote_is_kept(fn: QKV) -> None:
    agree(fn, qkv(learn=True), train=True)


def test_a_users_gradient_between_the_products_is_no_softmaxs() -> None:
    agree(lambda q, k, v: Tripled.apply(q @ k.mT).softmax(-1) @ v, qkv(learn=True), fused=0, train=True)


def test_the_second_attention_learns_through_the_first() -> None:
    agree(lambda q, k, v: attend(attend(q, k, v), k.detach(), v.detach()), qkv(learn=True), fused=2, train=True)


def test_what_is_written_into_a_buffer_learns() -> None:
    def fn(a: Tensor, b: Tensor, q: Tensor, v: Tensor) -> Tensor:
        k = q.new_empty(2, 3, 21, 8)
        k[..., :3].copy_(a)
        k[..., 3:].copy_(b)
        return plain(q, k, v)

    a, b = torch.randn(2, 3, 21, 3, requires_grad=True), torch.randn(2, 3, 21, 5)
    agree(fn, [a, b, *qkv()[:2]], train=True)


def test_two_checkpoints() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(attend, checkpoint(plain, q, k, v, use_reentrant=False), k, v, use_reentrant=False)

    agree(fn, qkv(learn=True), fused=2, train=True)


def test_a_second_gradient_is_an_error_and_not_a_zero() -> None:
    args = qkv(learn=True)
    out = torch.compile(attend, backend="fusecomp", options={"inner": "aot_eager"})(*args)
    (first,) = torch.autograd.grad(out.square().sum(), args[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(first.sum(), args[:1])
