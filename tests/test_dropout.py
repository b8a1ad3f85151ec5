"""Dropout of attention weights: one mask for a seed, whoever draws it, and PyTorch's generators decide the seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from corpus.table import INF, Draw, places, qkv, scores
from recognising import region_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusecomp
from fusecomp.ir.philox import WORDS, philox, random_words
from fusecomp.ir.reference import evaluate
from fusecomp.patterns.dropout import SEEDS, seeded_dropout
from fusecomp.running import blocks, cpu
from fusecomp.running.backward import gradients

P = 0.3
pytestmark = pytest.mark.usefixtures("own_cache")


def draw(**how: Any) -> list[Tensor]:
    return [x.requires_grad_() for x in qkv(Draw(torch.float32, "cpu", 1), **how)]


def compiled(fn: Any, **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="fusecomp", options={"inner": "eager", "strict": True, **options})


def causal(q: Tensor, k: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill(j > i + k.shape[-2] - q.shape[-2], -INF)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(causal(q, k).softmax(-1), P) @ v


def next_seed(manual: int) -> Tensor:
    """What the graph draws first after torch.manual_seed."""
    torch.manual_seed(manual)
    return torch.randint(SEEDS, [])


# ----------------------------------------------------------------------------------------------------------------
# The words


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((WORDS - 1,) * 2, (WORDS - 1,) * 4, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)  # fmt: skip
def test_published_vectors(key: tuple[int, int], counter: tuple[int, ...], words: tuple[int, ...]) -> None:
    """The known answers that Random123 publishes for philox4x32-7."""
    seed = torch.tensor([key[0], key[1]], dtype=torch.uint32).view(torch.int64)
    found = philox(seed, tuple(torch.tensor([c]) for c in counter))  # type: ignore[arg-type]
    assert [int(x) for x in found] == list(words)


def words(seed: int, batch: int = 3, rows: int = 40, keys: int = 101) -> Tensor:
    lines = torch.arange(batch).view(-1, 1, 1), torch.arange(rows).view(-1, 1), torch.arange(keys)
    return random_words(torch.tensor(seed), *lines)


def test_a_word_depends_on_its_place_alone() -> None:
    whole = words(11)
    part = random_words(torch.tensor(11), torch.tensor(2), torch.tensor([[7], [39]]), torch.arange(13, 98))
    assert torch.equal(part, whole[2, [7, 39], 13:98])
    scattered = torch.tensor([98, 3, 3, 50])
    assert torch.equal(
        random_words(torch.tensor(11), torch.tensor(1), torch.tensor(5), scattered), whole[1, 5, scattered]
    )


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_kept_fraction(p: float) -> None:
    kept = sum(
        float((seeded_dropout(torch.ones(8, 64, 100), torch.tensor(s), p) > 0).double().sum()) for s in range(20)
    )
    n = 20 * 8 * 64 * 100
    assert abs(kept - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("lag", ["seed", "high seed", "head", "row", "key", "four keys"])
def test_neighbours_are_independent(lag: str) -> None:
    a = words(2**40 + 5, 8, 64, 100)
    other = {"seed": words(2**40 + 6, 8, 64, 100), "high seed": words(2**41 + 5, 8, 64, 100)}
    shift = {"head": (a[1:], a[:-1]), "row": (a[:, 1:], a[:, :-1]), "key": (a[..., 1:], a[..., :-1])}
    x, y = shift[lag] if lag in shift else (a, other[lag]) if lag in other else (a[..., 4:], a[..., :-4])
    x, y = (z.flatten().double() / WORDS - 0.5 for z in (x, y))
    assert abs((x * y).mean()) * 12 < 5 / len(x) ** 0.5
    assert abs(x.mean()) * 12**0.5 < 5 / len(x) ** 0.5


# ----------------------------------------------------------------------------------------------------------------
# Values


def exact(fn: Callable[..., Tensor], args: list[Tensor], manual: int) -> Tensor:
    """fn with its one dropout drawn as the compiled graph draws it, in float64."""
    seed = next_seed(manual)
    patch = pytest.MonkeyPatch()
    patch.setattr(F, "dropout", lambda x, p: seeded_dropout(x, seed, p))
    try:
        return fn(*(x.double() for x in args))
    finally:
        patch.undo()


def softcapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((5 * torch.tanh(causal(q, k) / 5)).softmax(-1), P) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].repeat_interleave(3, 1) for x in (k, v))
    return F.dropout(causal(q, k).softmax(-1), 0.6) @ v


def bias_learns(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.dropout((scores(q, k) + bias).softmax(-1), P) @ v


@pytest.mark.parametrize("fn", [dropped, softcapped, grouped, bias_learns], ids=lambda f: f.__name__)
def test_values_and_gradients(fn: Callable[..., Tensor]) -> None:
    args = draw()
    args += [torch.randn(3, 13, 21, requires_grad=True)] if fn is bias_learns else []
    expected = exact(fn, args, 5)
    torch.manual_seed(5)
    got = compiled(fn)(*args)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    up = torch.randn_like(expected)
    wanted, found = (torch.autograd.grad(x, args, up.to(x.dtype)) for x in (expected, got))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_division_into_blocks_drops_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [x.detach() for x in draw()]
    region = region_of(dropped, *args)
    tensors, sizes = [*args, torch.tensor(2**62 + 12345)], {"B": 2, "H": 3, "M": 13, "N": 21}
    lengths = [sizes[s] for s in region.sizes]
    expected = evaluate(region, tensors, lengths)
    for budget, rows in ((1 << 18, 128), (600, 5), (100, 3)):
        monkeypatch.setattr(blocks, "BUDGET", budget)
        monkeypatch.setattr(blocks, "ROWS", rows)
        out = torch.empty(2, 3, 13, 8)
        cpu.lower(region)(out, tensors, lengths)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr("fusecomp.running.backward.SCORES", {"cpu": 300})
    (dv,) = gradients(region, expected.float(), tensors, lengths, [2])
    leaf = args[2].double().requires_grad_()
    again = evaluate(region, [*args[:2], leaf, tensors[3]], lengths)
    torch.testing.assert_close(dv.double(), torch.autograd.grad(again, leaf, expected)[0], rtol=1e-5, atol=1e-5)


def test_the_mean_over_seeds_is_attention_without_dropout() -> None:
    args = [x.detach() for x in draw()]
    fn = compiled(dropped)
    many = torch.stack([fn(*args) for _ in range(400)])
    error = (many.mean(0) - causal(*args[:2]).softmax(-1) @ args[2]) / (many.std(0) / 20 + 1e-6)
    assert error.abs().max() < 5


# ----------------------------------------------------------------------------------------------------------------
# Seeds


def test_manual_seed_reproduces_and_calls_differ() -> None:
    fn, args = compiled(dropped), draw()
    runs = []
    for again in (False, False, True):
        if not again:
            torch.manual_seed(3)
        out = fn(*args)
        runs.append((out, *torch.autograd.grad(out.sum(), args)))
    assert all(torch.equal(x, y) for x, y in zip(runs[0], runs[1], strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(runs[1], runs[2], strict=True))


def test_two_attentions_drop_differently() -> None:
    args = [x.detach() for x in draw()]
    x, y = compiled(lambda *a: (dropped(*a), dropped(*a)))(*args)
    assert fusecomp.counters()["fused"] == 2
    assert not torch.equal(x, y)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recomputed", [False, True], ids=["saved", "checkpoint"])
def test_the_backward_drops_the_same_again(recomputed: bool, inner: str) -> None:
    """O is linear in V: <dL/dV, V> = <dL/dO, O> where forward and backward hold the same mask.

    PyTorch's own "eager" backend draws anew in the recomputation of a compiled checkpoint, for any dropout.
    """
    args = draw()
    fn = (lambda *a: checkpoint(dropped, *a, use_reentrant=False)) if recomputed else dropped
    out = compiled(fn, inner=inner)(*args)
    assert fusecomp.counters()["fused"] == 1
    up = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, args[2], up)
    torch.testing.assert_close((dv * args[2]).sum(), (up * out).sum(), rtol=1e-4, atol=1e-4)


def test_changing_lengths_share_a_graph() -> None:
    fn = torch.compile(dropped, backend="fusecomp", dynamic=True, options={"inner": "eager", "strict": True})
    for m, n in ((13, 21), (17, 29), (5, 40)):
        args = [x.detach() for x in draw(m=m, n=n)]
        expected = exact(dropped, args, m)
        torch.manual_seed(m)
        torch.testing.assert_close(fn(*args).double(), expected, rtol=1e-5, atol=1e-6)
    assert fusecomp.counters()["fused"] == 1


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_under_vmap(randomness: str) -> None:
    args = [x.detach()[:1].expand(4, -1, -1, -1).clone() for x in draw()]
    out = compiled(lambda *a: torch.vmap(dropped, randomness=randomness)(*a))(*args)
    assert fusecomp.counters()["fused"] == 1
    assert torch.equal(out[0], out[1]) == (randomness == "same")
