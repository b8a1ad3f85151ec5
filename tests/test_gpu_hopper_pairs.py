"""On a Hopper GPU: its own kernel where something is read for each pair, copied in blocks.

    pytest -n 0 -m gpu tests/test_gpu_hopper_pairs.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_gpu_hopper import FLOOR, OPTIONS, always, attend, compared, off, places, pytestmark, scores
from torch import Tensor

from fusecomp.backend import explain
from fusecomp.planning import visits as planned

__all__ = ["always", "pytestmark"]


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attend(scores(q, k) + bias, q, v)


def wide_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (scores(q, k) + bias).softmax(-1).to(v.dtype) @ v


def biased_causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    i, j = places(q, k)
    return attend(scores(q, k) + bias, q, v, j <= i)


@pytest.mark.parametrize(("fn", "outer", "size", "dtype"), [
    (biased, (2, 4), 64, torch.bfloat16), (biased, (1, 4), 128, torch.float16), (biased, (4,), 128, torch.bfloat16),
    (biased_causal, (2, 4), 64, torch.float16), (biased_causal, (4,), 128, torch.bfloat16),
    (biased_causal, (4,), 64, torch.bfloat16),
], ids=lambda x: getattr(x, "__name__", str(x)))  # fmt: skip
def test_biases(fn: Callable[..., Tensor], outer: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    """In blocks, which the ends of the queries and of the keys cut."""
    shapes = [(2, 4, 613, size), (2, 4, 744, size), (2, 4, 744, size), (*outer, 613, 744)]
    compared(fn, [torch.randn(s, device="cuda", dtype=dtype) for s in shapes])


@pytest.mark.parametrize("size", [64, 128])
def test_biases_in_single_precision(size: int) -> None:
    """As where autocast rounds the products but not what is added to them."""
    args = [torch.randn(2, 4, n, size, device="cuda", dtype=torch.bfloat16) for n in (613, 700, 700)]
    compared(wide_biased, [*args, torch.randn(4, 613, 700, device="cuda")])


@pytest.mark.parametrize("fill", [torch.finfo(torch.bfloat16).min, -1e30, 1e38])
def test_a_bias_that_hides_keys(fill: float) -> None:
    """Where it hides all of a row alike, the row sees all alike."""
    q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (613, 744, 744))
    bias = torch.zeros(4, 613, 744, device="cuda", dtype=torch.bfloat16)
    bias[:, 100:300] = fill
    bias[:, 400:, ::2] = fill
    with torch.no_grad():
        got = torch.compile(biased, backend="fusecomp", options=OPTIONS)(q, k, v, bias)
    top = bias.double().amax(-1, keepdim=True)
    s = torch.where(top.abs() > 1e29, 0.0, scores(q.double(), k.double()))  # float32 has no digits left for a score
    assert off(got, s.masked_fill(bias < top, float("-inf")).softmax(-1) @ v.double()) <= FLOOR[torch.bfloat16]


def test_a_bias_inside_another_tensor() -> None:
    """Rows further apart than they are long; what lies between them, and around, is NaN."""
    room = torch.full((5, 650, 760), float("nan"), device="cuda", dtype=torch.bfloat16)
    bias = room[1:, 8:621, 8:752].copy_(torch.randn(4, 613, 744))
    shapes = [(2, 4, 613, 64), (2, 4, 744, 64), (2, 4, 744, 64)]
    compared(biased, [*(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes), bias])


def kept(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return attend(scores(q, k), q, v, keep)


def kept_before(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    i, j = places(q, k)
    return attend(torch.tanh(scores(q, k) / 20) * 20, q, v, keep & (j <= i))


def shown(kind: str, m: int, n: int) -> Tensor:
    """[M, N]: whole tiles are hidden and shown, others cut; each query sees its own key."""
    i, j = torch.arange(m, device="cuda")[:, None], torch.arange(n, device="cuda")
    kinds = {
        "causal": j <= i, "holes": torch.rand(m, n, device="cuda") < 0.7, "blocks": (i // 130 + j // 140) % 2 == 0,
        "all": j >= 0, "a few": (i - j).abs() < 9,
    }  # fmt: skip
    return kinds[kind] | (j == i)


@pytest.mark.parametrize("visits", ["table", "bounds"])
@pytest.mark.parametrize(("kind", "outer", "size", "dtype"), [
    ("causal", (2, 1), 64, torch.bfloat16), ("holes", (), 64, torch.float16), ("blocks", (1, 1), 64, torch.bfloat16),
    ("all", (2, 1), 128, torch.bfloat16), ("a few", (), 128, torch.float16), ("blocks", (2, 1), 128, torch.bfloat16),
], ids=str)  # fmt: skip
def test_boolean_masks(
    kind: str, outer: tuple[int, ...], size: int, dtype: torch.dtype, visits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks too, by a list of the tiles that they leave and without one."""
    monkeypatch.setattr(planned, "SHARE", float("inf") if visits == "table" else 0.0)
    keep = shown(kind, 613, 752).expand(*outer, 613, 752).contiguous()
    if outer and outer[0] == 2:
        keep[1] = shown("holes", 613, 752)
    shapes = [(2, 4, 613, size), (2, 4, 752, size), (2, 4, 752, size)]
    for fn in (kept, kept_before):
        torch._dynamo.reset()
        compared(fn, [*(torch.randn(s, device="cuda", dtype=dtype) for s in shapes), keep], visits)


def test_a_boolean_mask_inside_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is longer than the queries and the keys, and true there."""
    monkeypatch.setattr(planned, "SHARE", float("inf"))
    room = torch.ones(4, 650, 784, device="cuda", dtype=torch.bool)
    keep = room[1:3, None, 8:621, 16:768].copy_(shown("holes", 613, 752))
    args = [torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (613, 752, 752)]
    compared(kept, [*args, keep], "table")


def test_rows_that_a_boolean_mask_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "SHARE", float("inf"))
    keep = shown("holes", 613, 752)
    keep[100:300] = False
    keep[310] = False
    q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (613, 752, 752))
    with torch.no_grad():
        got, exact = torch.compile(kept, backend="fusecomp", options=OPTIONS)(q, k, v, keep), kept(
            q.double(), k.double(), v.double(), keep
        )
    assert torch.equal(got.isnan(), exact.isnan())
    assert off(got.nan_to_num(), exact.nan_to_num()) <= FLOOR[torch.bfloat16]


@pytest.mark.parametrize("fill", [float("-inf"), -3e38, -6e4])
@pytest.mark.parametrize(("kind", "size", "dtype"), [
    ("causal", 64, torch.bfloat16), ("blocks", 128, torch.bfloat16), ("all", 64, torch.float32),
    ("a few", 64, torch.float16),
], ids=str)  # fmt: skip
def test_what_all_heads_add(
    kind: str, size: int, dtype: torch.dtype, fill: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[M, N]: a bias, or a mask; a list leaves out what is -inf."""
    monkeypatch.setattr(planned, "SHARE", float("inf"))
    fill = max(fill, -6e4) if fill > float("-inf") and dtype == torch.float16 else fill
    bias = torch.randn(613, 752, device="cuda", dtype=dtype) * (kind == "all")
    bias.masked_fill_(~shown(kind, 613, 752), fill)
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    args = [torch.randn(2, 4, n, size, device="cuda", dtype=half) for n in (613, 752, 752)]
    visits = "bounds" if dtype == torch.float16 else "table"  # where a fill may overflow S, nothing is left out
    compared(wide_biased if dtype == torch.float32 else biased, [*args, bias], visits)


@pytest.mark.parametrize("kind", ["causal", "blocks", "holes"])
@pytest.mark.parametrize("size", [64, 128])
def test_gradients_beside_a_boolean_mask(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward kernel saves what the portable backward kernels take."""
    monkeypatch.setattr(planned, "SHARE", float("inf"))
    shapes = [(2, 4, 613, size), (2, 4, 752, size), (2, 4, 752, size)]
    args = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    keep, up = shown(kind, 613, 752), torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    [entry] = explain(kept, *args, keep, options=OPTIONS).entries
    assert entry.plan is not None
    assert (entry.plan.consumers, entry.plan.visits) == (2, "table")
    fast = torch.compile(kept, backend="fusecomp", options=OPTIONS)
    found = torch.autograd.grad(fast(*args, keep), args, up)
    double = [x.detach().double().requires_grad_() for x in args]
    for a, e in zip(found, torch.autograd.grad(kept(*double, keep), double, up.double()), strict=True):
        assert off(a, e) <= 2 * FLOOR[torch.bfloat16]


def test_gradients_of_a_bias() -> None:
    shapes = [(2, 4, 300, 64), (2, 4, 304, 64), (2, 4, 304, 64), (4, 300, 304)]
    args = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    up = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    fast = torch.compile(biased, backend="fusecomp", options={"inner": "aot_eager", "strict": True})
    found = torch.autograd.grad(fast(*args), args, up)
    double = [x.detach().double().requires_grad_() for x in args]
    for a, e in zip(found, torch.autograd.grad(biased(*double), double, up.double()), strict=True):
        assert off(a, e) <= 2 * FLOOR[torch.bfloat16]
