"""Calls that are written out for recognition: what is not fused stands in the graph as the program has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agree
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention

import fusecomp
from fusecomp import pipeline
from fusecomp.errors import KernelError
from fusecomp.graph.capture import capture, placeholder_values
from fusecomp.graph.facts import op_name
from fusecomp.graph.rewriting import put_back
from fusecomp.ir.expr import Load, parts
from fusecomp.patterns.build import Match
from fusecomp.patterns.written import write_out
from fusecomp.pipeline import compile_graph
from fusecomp.running.lower import Lowered
from fusecomp.settings import Options


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, n, 16) for n in (7, 11, 11)]


def weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)


def difference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (weights(q, k) - 0.5 * weights(k[..., :7, :], k)) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=k[..., 0].unsqueeze(-2).expand(2, 3, 7, 11))


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.dropout(weights(q, k), 0.5, True) @ v


def pages(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = torch.cat([k, k[..., :1, :]], 2).unflatten(2, (3, 4)), torch.cat([v, v[..., :1, :]], 2).unflatten(2, (3, 4))
    scores = torch.einsum("bhmd,bhpsd->bhmps", q, k)
    return torch.einsum("bhmps,bhpsd->bhmd", torch.softmax(scores.flatten(-2), -1).unflatten(-1, (3, 4)), v)


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bhj->bhi", weights(q, k), v[..., 0])


def with_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    both = (q @ k.transpose(-1, -2)).exp() @ torch.cat([v, torch.ones_like(v[..., :1])], -1)
    return both[..., :-1] / both[..., -1:]


def partly_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2)
    s[0, :, 2:, -3:] = 0.5
    s[..., :2].masked_fill_(v[..., 0][:, :, None, :2] > 0, -1.0)
    return s.softmax(-1) @ v


def compiled(fn: Callable[..., Any], args: list[Tensor], look: Callable[[GraphModule], GraphModule]) -> Any:
    """The results of `fn` by the graphs that `look` makes of Dynamo's."""
    torch._dynamo.reset()
    try:
        return torch.compile(fn, backend=lambda gm, _: look(gm).forward)(*args)
    finally:
        torch._dynamo.reset()


def called(gm: GraphModule) -> Counter[str]:
    return Counter(op_name(n) for n in gm.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("fn", [difference, masked, dropped, pages, expected, with_ones, partly_written])
def test_what_nothing_comes_of_is_put_back(fn: Callable[..., Tensor]) -> None:
    def look(gm: GraphModule) -> GraphModule:
        captured = capture(gm, placeholder_values(gm))
        before = called(captured)
        written = write_out(captured)
        assert written
        assert called(captured) != before
        put_back(captured, written, set())
        captured.graph.lint()
        assert called(captured) == before
        captured.recompile()
        return captured

    args = qkv()
    torch.manual_seed(1)
    got = compiled(fn, args, look)
    torch.manual_seed(1)
    torch.testing.assert_close(got, fn(*args))


def rewritten(fn: Callable[..., Any], args: list[Tensor]) -> tuple[Counter[str], int]:
    """(what the graph that is handed on calls, attention fused in it); its results are those of `fn`."""
    found: list[tuple[Counter[str], int]] = []

    def look(gm: GraphModule) -> GraphModule:
        made = compile_graph(gm, placeholder_values(gm), Options(lowering="cpu"))
        found.append((called(made.module), made.fused))
        return made.module

    torch.testing.assert_close(compiled(fn, args, look), fn(*args), rtol=1e-5, atol=1e-5)
    fusecomp.reset()
    return found[0]


def test_a_declined_sum_of_softmaxes_keeps_its_one_product() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        a, b = weights(q, k), weights(k[..., :7, :], k)
        return weights(q, k) @ v, (a - 0.5 * b) @ v, a, b

    calls, fused = rewritten(both, qkv())
    assert fused == 1
    assert calls["matmul"] == 3


@pytest.mark.parametrize("what", ["the factor", "a term"])
def test_a_sum_whose_parts_are_overwritten_stays(what: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
        a, b = weights(q, k), weights(k[..., :7, :], k)
        total = a - b * factor
        (factor if what == "the factor" else a).mul_(2.0)
        return total @ v

    agree(fn, [*qkv(), torch.tensor([0.5])], fused=0)


def test_a_sum_whose_factor_was_written_before_is_fused() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, factor: Tensor) -> Tensor:
        factor.mul_(2.0)
        return (weights(q, k) - weights(k[..., :7, :], k) * factor) @ v

    agree(fn, [*qkv(), torch.tensor([0.5])], fused=2)


def test_a_fused_sum_of_softmaxes_does_not() -> None:
    calls, fused = rewritten(lambda q, k, v: (difference(q, k, v),), qkv())
    assert fused == 2
    assert calls["matmul"] == calls["softmax"] == 0


def test_a_call_without_a_kernel_reads_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = pipeline.lower

    def lower_unmasked(match: Match, *args: Any) -> Lowered:
        if any(isinstance(x, Load) for x in parts(match.region.score)):
            raise KernelError("no masks today")
        return lower(match, *args)

    def two(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (masked(weights(q, k) @ k, k, v),)

    monkeypatch.setattr(pipeline, "lower", lower_unmasked)
    calls, fused = rewritten(two, qkv())
    assert fused == 1
    assert calls["scaled_dot_product_attention"] == 1
    assert calls["softmax"] == 0


def renormalised_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = weights(q, k) * v[..., 0].unsqueeze(-2)
    return (w / (w.sum(-1, keepdim=True).float() + 9.0)) @ v.float()


def two_values_of_another_type(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = weights(q, k[..., :2, :])
    return p[..., :1] * v[..., :1, :].float() + p[..., 1:] * v[..., 1:2, :].float()


@pytest.mark.parametrize("fn", [renormalised_in_float32, two_values_of_another_type])
def test_values_of_another_type_than_the_weights_stay(fn: Callable[..., Tensor]) -> None:
    agree(fn, [x.bfloat16() for x in qkv()], fused=0)
    agree(fn, qkv())


def test_what_is_written_out_twice_stays_so() -> None:
    def joined_and_renormalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = weights(q, k) * v[..., 0].unsqueeze(-2)
        w = w / (w.sum(-1, keepdim=True) + 9.0)
        return w[..., :5] @ v[..., :5, :] + w[..., 5:] @ (2 * v[..., 5:, :])

    agree(joined_and_renormalised, qkv())


def test_a_piece_that_every_column_takes_is_no_piece() -> None:
    def pieces(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (q @ k.mT).softmax(-1)
        return p[..., :3] @ v[..., :3, :] + p[..., 3:] @ v[..., 3:, :1]

    agree(pieces, qkv(), fused=0)
