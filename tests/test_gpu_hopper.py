"""On a Hopper GPU: its own kernel, on programs a person would write, at odd sizes and in every layout.

    pytest -n 0 -m gpu tests/test_gpu_hopper.py
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusecomp
from fusecomp.backend import explain
from fusecomp.running import hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
FLOOR = {torch.bfloat16: 2 * 2.0**-7, torch.float16: 4 * 2.0**-10}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def places(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    m, n = q.shape[-2], k.shape[-2]
    return torch.arange(n - m, n, device=q.device)[:, None], torch.arange(n, device=q.device)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])


def attend(s: Tensor, q: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
    s = s if keep is None else s.masked_fill(~keep, float("-inf"))
    return s.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(scores(q, k), q, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return attend(scores(q, k), q, v, j <= i)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return attend(torch.tanh(scores(q, k) / 20) * 20, q, v, (j <= i) & (i - j < 200))


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    slope = torch.exp2(-torch.arange(1, q.shape[1] + 1, device=q.device, dtype=q.dtype))[:, None, None]
    return attend(scores(q, k) - slope * (i - j), q, v, j <= i)


def documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return attend(scores(q, k), q, v, (i // 150 == j // 150) & (j <= i))


def sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k).masked_fill(j > i, float("-inf"))
    column = torch.linspace(-1, 2, q.shape[1], device=q.device, dtype=q.dtype)[:, None, None]
    s = torch.cat([s, column.expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(hopper, "LEAST_TILES", 0)
    torch._dynamo.reset()
    fusecomp.reset()


def off(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).abs().max() / exact.abs().max())


def compared(fn: Attend, args: list[Tensor]) -> None:
    with torch.no_grad():
        [entry] = explain(fn, *args).entries
        assert entry.plan is not None
        assert entry.plan.consumers == 2, entry
        got = torch.compile(fn, backend="fusecomp", options={"inner": "aot_eager", "strict": True})(*args)
        exact, eager = fn(*(x.double() for x in args)), fn(*args)
    assert off(got, exact) <= max(4 * off(eager, exact), FLOOR[args[0].dtype])


@pytest.mark.parametrize("dtype", FLOOR, ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("fn", [full, causal, window, alibi, documents, sink], ids=lambda f: f.__name__)
def test_each_variant(fn: Attend, size: int, dtype: torch.dtype) -> None:
    shapes = [(2, 4, 613, size), (2, 2, 613, size), (2, 2, 613, size)]
    compared(fn, [torch.randn(s, device="cuda", dtype=dtype) for s in shapes])


@pytest.mark.parametrize(("m", "n"), [(37, 1000), (128, 128), (1000, 1001), (300, 5000), (129, 257)])
@pytest.mark.parametrize("fn", [full, causal], ids=lambda f: f.__name__)
def test_other_lengths(fn: Attend, m: int, n: int) -> None:
    lengths = (m, n, n)
    compared(fn, [torch.randn(1, 3, x, 64, device="cuda", dtype=torch.bfloat16) for x in lengths])


def test_heads_side_by_side() -> None:
    """[B, N, H, D] as the projections leave it, seen as [B, H, N, D]; O is wanted so too."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return causal(q, k, v).transpose(1, 2)

    compared(fn, [torch.randn(2, 500, 6, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)])


def test_many_tiles_and_few_programs() -> None:
    """More tiles than multiprocessors: each program takes several, in an order of its own."""
    compared(causal, [torch.randn(24, 16, 700, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)])


def test_nothing_outside_the_operands_is_read() -> None:
    shape, margin = (2, 3, 77, 64), 8
    inside = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    room = [torch.full((2, 3, 77 + 2 * margin, 64), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in inside]
    poisoned = [r[:, :, margin:-margin].copy_(x) for r, x in zip(room, inside, strict=True)]
    fast = torch.compile(causal, backend="fusecomp", options={"inner": "aot_eager", "strict": True})
    with torch.no_grad():
        assert torch.equal(fast(*inside), fast(*poisoned))


def test_rows_past_the_end_of_a_cache_hold_anything() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return full(q, k[:, :, :300], v[:, :, :300])

    args = [torch.randn(2, 3, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    for x in args[1:]:
        x[:, :, 300:] = float("nan")
    compared(fn, args)


def test_a_sink_that_is_none() -> None:
    """-inf for some heads, and rows whose last tile of keys is hidden."""

    def fn(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
        i, j = places(q, k)
        s = scores(q, k).masked_fill(j > i - 100 * (i > 200), float("-inf"))
        s = torch.cat([s, logits[:, None, None].expand(*s.shape[:3], 1)], -1)
        return s.softmax(-1)[..., :-1] @ v

    args = [torch.randn(2, 3, 613, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    compared(fn, [*args, torch.tensor([0.5, float("-inf"), 1.0], device="cuda", dtype=torch.bfloat16)])


def test_gradients() -> None:
    """Its log-sum-exp is what the generated backward kernels take."""
    args = [torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    up = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    fast = torch.compile(causal, backend="fusecomp", options={"inner": "aot_eager", "strict": True})
    found = torch.autograd.grad(fast(*args), args, up)
    double = [x.detach().double().requires_grad_() for x in args]
    for a, e in zip(found, torch.autograd.grad(causal(*double), double, up.double()), strict=True):
        assert off(a, e) <= 2 * FLOOR[torch.bfloat16]


def test_cuda_graphs() -> None:
    args = [torch.randn(2, 4, 520, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    fast = torch.compile(causal, backend="fusecomp", options={"inner": "aot_eager", "strict": True})
    with torch.no_grad():
        fast(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fast(*args)
        for _ in range(3):
            for x in args:
                x.normal_()
            graph.replay()
            assert off(out, causal(*(x.double() for x in args))) <= FLOOR[torch.bfloat16]
