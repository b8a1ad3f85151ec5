"""Plain attention is handed to scaled_dot_product_attention on GPUs; here the CPU stands in for one."""

from __future__ import annotations

import pytest
import torch
from regions import Variant, attention, score, times
from torch import Tensor
from variants import VARIANTS

import fusecomp
from fusecomp.backend import explain
from fusecomp.running import library

PLAIN = {"plain", "scaled", "bmm", "einsum_bqhd"}
"""Variants without a mask, with D = Dv, that no head shares."""


@pytest.fixture(autouse=True)
def cpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "DEVICES", ("cpu",))
    monkeypatch.setattr(library, "LEAST_SECONDS", 0.0)
    torch._dynamo.reset()
    fusecomp.reset()


def in_half(variant: Variant) -> list[Tensor]:
    return [x.bfloat16() if x.is_floating_point() else x for x in variant.make_args()]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_only_plain_attention_is_handed_over(variant: Variant) -> None:
    args = in_half(variant)
    with torch.no_grad():
        report = explain(variant.fn, *args)
        taken = any(e.lowering == "library" for e in report.entries)
        if taken:
            fast = torch.compile(variant.fn, backend="fusecomp", options={"inner": "eager"})
            exact = variant.fn(*(x.double() for x in args))
            torch.testing.assert_close(fast(*args).double(), exact, atol=3e-2, rtol=3e-2)
    if variant.name in PLAIN:
        assert taken, report
    assert taken <= (not variant.region.keep and variant.region.sink is None and not variant.region.loads)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_and_lengths(dynamic: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.2).softmax(-1) @ v

    fast = torch.compile(attend, backend="fusecomp", options={"inner": "aot_eager", "strict": True}, dynamic=dynamic)
    for m, n in ((40, 56), (72, 24)):
        inputs = [torch.randn(2, 3, x, 16, dtype=torch.bfloat16, requires_grad=True) for x in (m, n, n)]
        seed = torch.randn(2, 3, m, 16, dtype=torch.bfloat16)
        got = torch.autograd.grad(fast(*inputs), inputs, seed)
        own = torch.autograd.grad(attend(*inputs), inputs, seed)
        for a, b in zip(got, own, strict=True):
            torch.testing.assert_close(a, b, atol=4e-2, rtol=4e-2)


def test_queries_that_do_not_learn_from_it() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.2).softmax(-1).detach() @ v + q

    inputs = [torch.randn(2, 3, 40, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    report = explain(attend, *inputs)
    assert [e.lowering for e in report.entries] == ["library"]
    fast = torch.compile(attend, backend="fusecomp", options={"inner": "aot_eager", "strict": True})
    got = torch.autograd.grad(fast(*inputs).sum(), inputs, materialize_grads=True)
    own = torch.autograd.grad(attend(*inputs).sum(), inputs, materialize_grads=True)
    for a, b in zip(got, own, strict=True):
        torch.testing.assert_close(a, b, atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize(("b", "h"), [(1, 3), (3, 1), (1, 1)])
def test_batches_and_heads_of_one(b: int, h: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.2).softmax(-1) @ v

    args = [torch.randn(b, h, n, 16, dtype=torch.bfloat16) for n in (40, 56, 56)]
    with torch.no_grad():
        (entry,) = explain(attend, *args).entries
        assert entry.lowering == "library"
        fast = torch.compile(attend, backend="fusecomp", options={"inner": "eager", "strict": True})
        torch.testing.assert_close(fast(*args), attend(*args), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("shared", [(1, 3), (2, 1), (1, 1)])
def test_keys_that_heads_or_batches_share_are_not_handed_over(shared: tuple[int, int]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.2).softmax(-1) @ v

    q = torch.randn(2, 3, 40, 16, dtype=torch.bfloat16)
    k, v = (torch.randn(*shared, 56, 16, dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        (entry,) = explain(attend, q, k, v).entries
        assert entry.lowering == "cpu"


def test_short_attention_runs_generated_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    region = attention(times(score, 0.125), d=64, dtype="bfloat16")
    monkeypatch.undo()
    lengths = {n: {"B": 1, "H": 8, "M": n, "N": n} for n in (128, 512, 4096)}
    assert [library.short(region, sizes) for sizes in lengths.values()] == [True, True, False]


def test_a_disagreeing_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "attend", lambda region, tensors: torch.zeros_like(tensors[0]))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.21).softmax(-1) @ v

    args = [torch.randn(2, 3, 40, 16, dtype=torch.bfloat16) for _ in range(3)]
    with torch.no_grad():
        (entry,) = explain(attend, *args).entries
    assert (entry.status, entry.lowering) == ("fused", "cpu")
