"""Which dropouts are fused, which are left as they were, and what stays in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from corpus.table import Draw, qkv, scores
from recognising import candidates
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from fusecomp import backend
from fusecomp.patterns.attention import Declined
from fusecomp.pipeline import Compilation

P = 0.3
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Compilation]:
    """What is compiled from here on."""
    found: list[Compilation] = []
    monkeypatch.setattr(backend, "_listeners", [found])
    return found


def draw() -> list[Tensor]:
    return list(qkv(Draw(torch.float32, "cpu", 1)))


def compiled(fn: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="fusecomp", options={"inner": "eager", "strict": True})


# ----------------------------------------------------------------------------------------------------------------
# Fused


def cast_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(scores(q, k).softmax(-1, dtype=torch.float32).to(v.dtype), P) @ v


def divided_by_the_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (scores(q, k) - scores(q, k).amax(-1, keepdim=True)).exp()
    return F.dropout(e / e.sum(-1, keepdim=True), P) @ v


def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.native_dropout(scores(q, k).softmax(-1), P, True)[0] @ v


def masked_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.arange(21) < 20, dropout_p=P)


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=True)


def other_dropouts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(F.dropout(scores(F.dropout(q, 0.1), k).softmax(-1), P) @ F.dropout(v, 0.2), 0.4)


def of_a_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) + F.dropout(torch.ones(13, 21), P)).softmax(-1) @ v


@pytest.mark.parametrize(
    "fn",
    [cast_before, divided_by_the_sum, native, masked_sdpa, causal_sdpa, other_dropouts, of_a_bias],
    ids=lambda f: f.__name__,
)
def test_fused(fn: Callable[..., Tensor], heard: list[Compilation]) -> None:
    out = compiled(fn)(*draw())
    assert out.isfinite().all()
    assert [c.fused for c in heard] == [1], [e.reason for e in heard[0].entries]


def test_modules_in_training(heard: list[Compilation]) -> None:
    layer = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.2, batch_first=True)
    model, x = compiled(layer), torch.randn(2, 13, 24)
    torch.manual_seed(0)
    y = model(x)
    y.sum().backward()
    torch.manual_seed(0)
    assert torch.equal(model(x), y)
    (graph,) = (c.module.graph for c in heard if c.fused)
    assert sum("dropout" in str(n.target) for n in graph.nodes) == 3  # the layer's others, as they were
    assert sum("randint" in str(n.target) for n in graph.nodes) == 1


# ----------------------------------------------------------------------------------------------------------------
# Not fused


def test_a_model_in_training(heard: list[Compilation]) -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    model = BertModel(BertConfig(**sizes, vocab_size=50, attn_implementation="eager")).train()
    ids, seen = torch.randint(50, (2, 13)), (torch.arange(13) < torch.tensor([[13], [9]])).long()
    out = compiled(model)(ids, attention_mask=seen).last_hidden_state
    out.sum().backward()
    assert [c.fused for c in heard if c.entries] == [2]
    assert all(p.grad.isfinite().all() for p in model.encoder.parameters())


def before_the_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(scores(q, k), P).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(scores(q, k).softmax(-1), P, inplace=True) @ v


def whole_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout2d(scores(q, k).softmax(-1), P) @ v


def returned(q: Tensor, k: Tensor, v: Tensor) -> Any:
    w = F.dropout(scores(q, k).softmax(-1), P)
    return w @ v, w


def used_twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    w = F.dropout(scores(q, k).softmax(-1), P)
    return w @ v, w @ (2 * v)


def in_the_sum_too(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = F.dropout(scores(q, k).exp(), P)
    return (e / e.sum(-1, keepdim=True)) @ v


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((k @ q.mT).softmax(-2), P).mT @ v


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = scores(q, k).softmax(-1)
    return (w * (torch.rand_like(w) > P) / (1 - P)) @ v


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (before_the_softmax, "dropout of the scores, before the softmax"),
        (in_place, "`dropout_` with p = 0.3 in training"),
        (whole_channels, "`feature_dropout` with p = 0.3 in training"),
        (returned, "read elsewhere too"),
        (in_the_sum_too, "multiplied by a tensor before they are normalised"),
        (keys_first, "whose last axis is not the keys"),
        (by_hand, "`rand_like` is not a pointwise function of the scores"),
    ],
)
def test_declined(fn: Callable[..., Any], reason: str, heard: list[Compilation]) -> None:
    args = draw()
    torch.manual_seed(1)
    expected = fn(*args)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(fn)(*args), expected)  # the very numbers of eager
    (done,) = heard
    assert done.fused == 0
    assert any(reason in e.reason for e in done.entries), [e.reason for e in done.entries]


@pytest.mark.parametrize("how", [(0.0, True), (0.5, False), (1.0, True)], ids=["p = 0", "eval", "p = 1"])
def test_what_never_drops_costs_nothing(how: tuple[float, bool], heard: list[Compilation]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(scores(q, k).softmax(-1), *how) @ v

    args = draw()
    torch.testing.assert_close(compiled(fn)(*args), fn(*args))
    (done,) = heard
    assert done.fused == 1
    assert "randint" not in str(done.module.graph)
    if how[0] != 1:
        without = candidates(lambda q, k, v: scores(q, k).softmax(-1) @ v, *args)[0]
        assert not isinstance(without, Declined)
        assert done.entries[0].region is not None
        assert done.entries[0].region.key == without.region.key


def test_two_products_of_the_same_weights_drop_the_same(heard: list[Compilation]) -> None:
    once, doubled = compiled(used_twice)(*draw())
    assert heard[0].fused == 2
    torch.testing.assert_close(doubled, 2 * once)
    assert not torch.equal(once, compiled(used_twice)(*draw())[0])
