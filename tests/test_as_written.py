"""A kernel is held against the program as it was written: a rewriting that is another function is noticed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from corpus.table import Draw, qkv, scores
from recognising import candidates
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

import fusecomp
from fusecomp.ir.algebra import apply, const
from fusecomp.ir.expr import Load, transform
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns import columns, distances, sdpa, sums
from fusecomp.patterns.build import Match
from fusecomp.pipeline import seen_sizes
from fusecomp.running import cpu, verify
from fusecomp.running.original import rewritten, written
from fusecomp.running.verdict import judge

pytestmark = pytest.mark.usefixtures("own_cache")


def draw() -> list[Tensor]:
    return list(qkv(Draw(torch.float32, "cpu", 1)))


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An operand and the result are the program's."""
    return scaled_dot_product_attention(q, k, v, attn_mask=k[..., 0].unsqueeze(-2).expand(2, 3, 13, 21))


def similar(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operands are made by the rewriting."""
    return (cosine_similarity(q[..., :, None, :], k[..., None, :, :], -1) * 8).softmax(-1) @ v


def difference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is fused is part of the program's result."""
    return (scores(q, k).softmax(-1) - 0.5 * scores(2 * q, k).softmax(-1)) @ v


def without_scale(how: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT + mask).softmax(-1) @ v


def without_norm(x: Tensor, y: Tensor, dim: int, eps: float, to: torch.dtype) -> Tensor:
    return (x * (y / torch.linalg.vector_norm(y, dim=dim, keepdim=True))).sum(dim)


def added(product: Any, t: Any, known: Any, weights: Any) -> Tensor:
    return -MULTIPLIED(product, t, known, weights) if t.sign < 0 else MULTIPLIED(product, t, known, weights)


def without_gradient(x: Tensor, y: Tensor, dim: int, eps: float, to: torch.dtype) -> Tensor:
    sides = (s / torch.linalg.vector_norm(s, dim=dim, keepdim=True).detach() for s in (x, y))
    left, right = sides
    return (left * right).sum(dim)


MULTIPLIED = sums.multiplied
WRONG = [
    (masked, sdpa, "definition", without_scale),
    (similar, distances, "cosine", without_norm),
    (difference, sums, "multiplied", added),
]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    fusecomp.reset()
    yield
    torch._dynamo.reset()


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="fusecomp", options={"inner": "eager", **options})


@pytest.mark.parametrize(("fn", "module", "name", "wrong"), WRONG)
def test_a_wrong_rewriting_costs_its_fusion_and_nothing_else(
    fn: Any, module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, name, wrong)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(compiled(fn)(*draw()), fn(*draw()))
    assert "DISAGREES with the program in float64" in caplog.text
    assert fusecomp.counters()["fused"] == 0
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="DISAGREES"):
        compiled(fn, strict=True)(*draw())


@pytest.mark.parametrize("fn", [masked, similar, difference])
def test_the_right_one_is_fused(fn: Any) -> None:
    torch.testing.assert_close(compiled(fn, strict=True)(*draw()), fn(*draw()), rtol=1e-4, atol=1e-5)
    assert fusecomp.counters()["fused"] > 0


def test_a_rewriting_with_another_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "cosine", without_gradient)
    args = draw()
    compiled(similar, strict=True)(*args)
    assert fusecomp.counters()["fused"] == 1
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="for the gradient of"):
        compiled(similar, strict=True)(*(x.requires_grad_() for x in args))


# ----------------------------------------------------------------------------------------------------------------
# What is written into, and where gradients stop, between the operands and the result


def doubled_since(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    v = v * 1.0
    beside = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    v.mul_(2.0)
    o = scores(q, k).exp() @ beside
    return o[..., :-1] / o[..., -1:]


def without_gradients_of_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        beside = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    o = scores(q, k).exp() @ beside
    return o[..., :-1] / o[..., -1:] + 0 * v.sum()


@pytest.mark.parametrize(
    ("fn", "noticed"),
    [(doubled_since, "before it writes into it"), (without_gradients_of_values, "for the gradient of")],
)
def test_a_rewriting_that_overlooks_what_lies_between_is_noticed(
    fn: Any, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "movable", lambda *_: True)
    args = [x.requires_grad_() for x in draw()]
    with pytest.raises(BackendCompilerFailed, match=noticed):
        compiled(fn, strict=True)(*args)
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(fn)(*args), fn(*args), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------
# Values that random ones are not like


def without_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~keep, -1e9).softmax(-1) @ v


def up_to_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return scores(q, k).masked_fill(torch.arange(21) >= lengths[:, None, None, None], -1e9).softmax(-1) @ v


def blank(region: AttentionRegion) -> AttentionRegion:
    """A query that sees no key gives 0."""
    return replace(region, filled_score=None, fill=-math.inf, empty_row="zero")


def longer(region: AttentionRegion) -> AttentionRegion:
    """A length of 0 is one of 1."""
    one = const(1)
    keep = (transform(e, lambda x: apply("max", x, one) if isinstance(x, Load) else None) for e in region.keep)
    return replace(region, keep=tuple(keep))


@pytest.mark.parametrize(
    ("fn", "more", "wrong"),
    [(without_keys, torch.ones(13, 21, dtype=torch.bool), blank), (up_to_lengths, torch.tensor([3, 21]), longer)],
)
def test_what_is_misread_of_values_that_are_never_drawn_is_noticed(fn: Any, more: Tensor, wrong: Any) -> None:
    (match,) = candidates(fn, *draw(), more)
    assert isinstance(match, Match)
    misread, sizes, device = replace(match, region=wrong(match.region)), seen_sizes(match), torch.device("cpu")
    assert verify.verify(match, cpu.lower(match.region), sizes, device, "right").passed
    drawn = verify.example(misread, sizes, device)
    assert judge(verify.compare(misread, drawn, cpu.lower(misread.region), sizes)(), "float32").passed
    verdict = verify.verify(misread, cpu.lower(misread.region), sizes, device, "wrong")
    assert not verdict.passed
    assert "the program on values far apart" in str(verdict)


@pytest.mark.parametrize("shape", [(), (1,), (21,), (13, 1), (13, 21)])
@pytest.mark.parametrize("fill", [-1e9, -math.inf])
def test_masks_of_any_number_of_axes_are_read_on_such_values(shape: tuple[int, ...], fill: float) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, drop: Tensor) -> Tensor:
        return scores(q, k).masked_fill(drop, fill).softmax(-1) @ v

    args = [*draw(), torch.zeros(shape, dtype=torch.bool)]
    torch.testing.assert_close(compiled(fn, strict=True)(*args), fn(*args), rtol=1e-4, atol=1e-5)
    assert fusecomp.counters()["fused"] == 1


# ----------------------------------------------------------------------------------------------------------------
# What is held against the program


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.dropout(scores(q, k).softmax(-1), 0.5, True) @ v


def dropped_similar(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.dropout((cosine_similarity(q[..., :, None, :], k[..., None, :, :], -1) * 8).softmax(-1), 0.5, True) @ v


def held_against(fn: Callable[..., Any], *args: Any) -> list[str]:
    matches = [m for m in candidates(fn, *args) if isinstance(m, Match)]
    return ["the program" if written(m, m.output) else "both" if rewritten(m) else "nothing" for m in matches]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [(masked, "the program"), (similar, "both"), (dropped, "the program"), (dropped_similar, "both")],
)
def test_what_is_held_against_what(fn: Any, expected: str) -> None:
    assert held_against(fn, *draw()) == [expected]


@pytest.mark.parametrize("name", ["calls", "online", "pieces", "totals"])
def test_every_attention_of_what_is_rewritten_is_held_against_the_program(name: str) -> None:
    for case in import_module(f"corpus.{name}").CASES:
        with torch.no_grad():
            assert "nothing" not in held_against(case.fn, *case.make_args(case.dtypes[0], "cpu", 1)), case.name
