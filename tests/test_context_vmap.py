"""torch.vmap: the batch axes that it adds are batch axes of the attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import INF, agree, attend, compiled, reasons
from torch import Tensor, nn, vmap
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusecomp


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [M, D], k and v [N, D]"""
    return torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1) @ v


def draw(*lead: int, m: int = 13, n: int = 21) -> list[Tensor]:
    return [torch.randn(*lead, rows, 8) for rows in (m, n, n)]


def by_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(k @ q, -1) @ v


PROGRAMS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "heads": (vmap(one_head), draw(3)),
    "batch of all heads": (vmap(attend), draw(2, 3)),
    "batch, then heads": (vmap(vmap(one_head)), draw(2, 3)),
    "three levels": (vmap(vmap(vmap(one_head))), draw(2, 3, 4, m=5, n=7)),
    "axes in other places": (
        vmap(one_head, in_dims=(1, 0, -2), out_dims=1),
        [torch.randn(13, 3, 8), torch.randn(3, 21, 8), torch.randn(21, 3, 8)],
    ),
    "keys shared by the heads": (vmap(one_head, in_dims=(0, None, None)), [*draw(3)[:1], *draw()[1:]]),
    "grouped heads": (vmap(vmap(vmap(one_head, in_dims=(0, None, None)))), [*draw(2, 3, 4)[:1], *draw(2, 3)[1:]]),
    "each query": (vmap(vmap(by_query, in_dims=(0, None, None))), draw(3)),
    "einsum": (vmap(lambda q, k, v: torch.einsum("mn,nd->md", (q @ k.T).softmax(-1), v)), draw(3)),
    "chunks": (vmap(one_head, chunk_size=2), draw(2)),
    "a dictionary": (lambda q, k, v: vmap(lambda d: one_head(**d))({"q": q, "k": k, "v": v}), draw(3)),
    "two results": (vmap(lambda q, k, v: (one_head(q, k, v), q.sum()), out_dims=(1, 0)), draw(3)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_levels_become_batch_axes(name: str) -> None:
    agree(*PROGRAMS[name])


@pytest.mark.parametrize("name", ["heads", "batch, then heads", "grouped heads"])
def test_training(name: str) -> None:
    fn, args = PROGRAMS[name]
    agree(fn, [x.detach().requires_grad_() for x in args], train=True)


def test_lengths_that_change() -> None:
    agree(vmap(vmap(attend)), draw(2, 3), dynamic=True)


def test_slopes_of_the_heads() -> None:
    def head(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])
        return torch.softmax(q @ k.T - slope * (i - j).abs(), -1) @ v

    agree(vmap(vmap(head), in_dims=(0, 0, 0, None)), [*draw(2, 3), torch.randn(3)])


def test_lengths_of_the_requests() -> None:
    def request(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(torch.arange(k.shape[-2]) >= n, -INF).softmax(-1) @ v

    agree(vmap(request), [*draw(2, 3), torch.tensor([3, 15])])


def pages() -> list[Tensor]:
    """Five requests over 20 pages of 4 keys and 3 heads: queries, block table, lengths, keys, values."""
    table = torch.randint(0, 20, (5, 6))
    return [torch.randn(5, 3, 8), table, torch.tensor([3, 4, 5, 20, 24]), *torch.randn(2, 20, 4, 3, 8)]


@pytest.mark.parametrize("fetch", [lambda pool, t: pool[t].flatten(0, 1),
                                   lambda pool, t: pool.index_select(0, t).reshape(-1, 3, 8)])  # fmt: skip
def test_one_decode_step_over_requests(fetch: Callable[[Tensor, Tensor], Tensor]) -> None:
    def step(q: Tensor, table: Tensor, n: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        k, v = fetch(keys, table), fetch(values, table)
        s = torch.einsum("hd,nhd->hn", q, k).masked_fill(torch.arange(k.shape[0]) >= n, -INF)
        return torch.einsum("hn,nhd->hd", s.softmax(-1), v)

    agree(vmap(step, in_dims=(0, 0, 0, None, None)), pages())


def test_a_cache_that_each_request_extends() -> None:
    def step(q: Tensor, k: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.where(torch.arange(21)[:, None] == at, k, cache)
        s = (q @ keys.T).masked_fill(torch.arange(21) > at, -INF)
        return s.softmax(-1) @ keys, keys

    agree(vmap(step), [torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 21, 8), torch.tensor([1, 20, 7])])


def test_scores_changed_in_place() -> None:
    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.T
        s *= 0.3
        s.masked_fill_(torch.arange(21) > 15, -INF)
        return s.softmax(-1) @ v

    agree(vmap(head), draw(3))


def under_no_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        k = k * 2
    return one_head(q, k, v)


@pytest.mark.parametrize("head", [under_no_grad, lambda q, k, v: one_head(q, k.detach(), v)])
def test_gradients_that_stop_under_a_level(head: Callable[..., Tensor]) -> None:
    agree(vmap(head), [x.requires_grad_() for x in draw(3)], train=True)


def test_scores_that_do_not_learn_under_a_level() -> None:
    fn = vmap(lambda q, k, v: (q @ k.T).detach().softmax(-1) @ v)
    agree(fn, [x.requires_grad_() for x in draw(3)], train=True)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_in_a_level_and_around(inside: bool) -> None:
    def cast(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return f(*args)

        return run

    agree(vmap(cast(one_head)) if inside else cast(vmap(one_head)), draw(3), tolerance=2e-2)


def test_beside_other_attention() -> None:
    agree(lambda q, k, v: attend(vmap(one_head)(q, k, v), k, v), draw(3), fused=2)


def test_an_ensemble_of_models() -> None:
    model = nn.Linear(8, 24)

    def one(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        made = torch.func.functional_call(model, {"weight": weight, "bias": bias}, (x,))
        return one_head(*made.chunk(3, -1))

    agree(vmap(one, in_dims=(0, 0, None)), [torch.randn(4, 24, 8), torch.randn(4, 24), torch.randn(13, 8)])


# ----------------------------------------------------------------------------------------------------------------
# Nearly the same


def test_scores_mapped_over_keys_are_scores() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return vmap(lambda key, q: q @ key, in_dims=(0, None), out_dims=1)(k, q).softmax(-1) @ v

    agree(fn, draw())


def test_a_softmax_over_queries_is_none_over_keys() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return vmap(lambda key, q: q @ key, in_dims=(0, None))(k, q).softmax(-1).mT @ v

    agree(fn, draw(), fused=0)
    agree(vmap(lambda q, k, v: (q @ k.mT).softmax(0) @ v), draw(3), fused=0)


def test_what_is_random_per_sample_stays_so() -> None:
    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return one_head(q, k, v) + torch.rand(8)

    q, k, v = (x[:1].expand(3, -1, -1).clone() for x in draw(3))
    for randomness, alike in (("same", True), ("different", False)):
        torch._dynamo.reset()
        out = compiled(vmap(head, randomness=randomness))(q, k, v)
        assert torch.equal(out[0], out[1]) == alike
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="random"):
        compiled(vmap(head))(q, k, v)


DERIVATIVES: list[Callable[..., Any]] = [
    torch.func.grad(lambda *a: one_head(*a).square().sum()),
    lambda *a: torch.func.vjp(one_head, *a)[1](a[0]),
    lambda *a: torch.func.jvp(one_head, a, a),
    torch.func.jacrev(lambda *a: one_head(*a).sum(0)),
    lambda *a: vmap(torch.func.grad(lambda *b: one_head(*b).square().sum()))(*(x[None] for x in a)),
]


@pytest.mark.parametrize("fn", DERIVATIVES)
def test_derivatives_inside_the_graph_are_declined(fn: Callable[..., Any]) -> None:
    args = draw(m=8, n=8)
    assert agree(fn, args, fused=0)["declined"] == 1
    assert "differentiates inside the graph" in reasons(fn, args)[0]


CALLS: dict[str, Callable[..., Tensor]] = {
    "plain": sdpa,
    "causal": lambda q, k, v: sdpa(q, k, v, is_causal=True),
    "scale and keywords": lambda q, k, v: sdpa(query=q, key=k, value=v, scale=0.5),
    "a mask": lambda q, k, v: sdpa(q, k, v, attn_mask=torch.ones(13, 21, dtype=torch.bool).tril(4)),
    "a bias": lambda q, k, v: sdpa(q, k, v, torch.linspace(0, 1, 13 * 21).view(13, 21)),
    "a mask made of the keys": lambda q, k, v: sdpa(q, k, v, attn_mask=k[..., 0].gt(-1)[..., None, :]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_under_a_level_is_what_it_means(name: str) -> None:
    agree(vmap(CALLS[name]), draw(2, 3))
    agree(vmap(CALLS[name]), [x.requires_grad_() for x in draw(2, 3)], train=True)


def test_a_call_with_dropout_under_a_level_is_declined() -> None:
    fn = vmap(lambda q, k, v: sdpa(q, k, v, dropout_p=0.1), randomness="different")
    assert "with dropout stands under torch.vmap; write the batch axis out" in reasons(fn, draw(2, 3))[0]


def test_levels_are_closed_when_a_trace_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("fusecomp.graph.levels.Levels.call_method", fails)
    fn, args = vmap(lambda q, k, v: (q @ k.T).softmax(-1) @ v), draw(3)
    agree(fn, args, fused=0, strict=False)
    assert torch._C._functorch.maybe_current_level() is None
    assert fusecomp.counters()["fallbacks"] == 1


SCALE = 0.25


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_number_of_pythons_inside(dynamic: bool) -> None:
    """With dynamic shapes it is taken out of a tensor where it is used."""

    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.T * SCALE, -1) @ v

    args, counted = draw(3), fusecomp.counters()["fused"]
    fast = torch.compile(vmap(scaled), backend="fusecomp", dynamic=dynamic, options={"inner": "eager", "strict": True})
    torch.testing.assert_close(fast(*args), vmap(scaled)(*args))
    assert fusecomp.counters()["fused"] == counted + 1
