"""On a Hopper GPU: its own kernel, on programs a person would write, at odd sizes and in every layout.

    pytest -n 0 -m gpu tests/test_gpu_hopper.py
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernels import tiles
from regions import attention, score, times
from torch import Tensor

import fusecomp
from fusecomp.backend import explain
from fusecomp.codegen import hopper_choice
from fusecomp.codegen.emit import emit
from fusecomp.codegen.hopper import specialised
from fusecomp.planning import visits
from fusecomp.running.cache import directory
from fusecomp.running.loader import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
FLOOR = {torch.bfloat16: 2 * 2.0**-7, torch.float16: 4 * 2.0**-10}
OPTIONS = {"inner": "aot_eager", "strict": True, "lowering": "triton"}
"""Generated kernels, where separate ones are predicted faster too."""
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


def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return attend(scores(q, k), q, v, (j < 300) | (j <= i))


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
    monkeypatch.setattr(hopper_choice, "AT_MOST", float("inf"))
    monkeypatch.setattr(hopper_choice, "AT_MOST_LISTED", float("inf"))
    torch._dynamo.reset()
    fusecomp.reset()


def off(x: Tensor, exact: Tensor) -> float:
    """max |x - exact| / max |exact|; where that is 0, as the gradient of a softmax of one score, max |x - exact|."""
    return float((x.double() - exact).abs().max()) / (float(exact.abs().max()) or 1.0)


def compared(fn: Callable[..., Tensor], args: list[Tensor], visits: str = "bounds") -> None:
    with torch.no_grad():
        [entry] = explain(fn, *args, options=OPTIONS).entries
        assert entry.plan is not None
        assert entry.plan.consumers in (2, 3), entry
        assert entry.plan.visits == visits, entry
        got = torch.compile(fn, backend="fusecomp", options=OPTIONS)(*args)
        exact, eager = fn(*(x.double() if x.is_floating_point() else x for x in args)), fn(*args)
    assert off(got, exact) <= max(4 * off(eager, exact), FLOOR[args[0].dtype])


EACH = [(64, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (128, torch.float16)]


@pytest.mark.parametrize(("size", "dtype"), EACH, ids=str)
@pytest.mark.parametrize("fn", [full, causal, window, alibi, documents, sink, prefix], ids=lambda f: f.__name__)
def test_each_variant(fn: Attend, size: int, dtype: torch.dtype) -> None:
    shapes = [(2, 4, 613, size), (2, 2, 613, size), (2, 2, 613, size)]
    compared(fn, [torch.randn(s, device="cuda", dtype=dtype) for s in shapes])


@pytest.mark.parametrize(("m", "n", "size"), [(37, 1000, 64), (128, 128, 64), (1000, 1001, 64), (300, 5000, 64),
                                              (129, 257, 64), (1000, 1001, 256), (129, 257, 256)])  # fmt: skip
@pytest.mark.parametrize("fn", [full, causal], ids=lambda f: f.__name__)
def test_other_lengths(fn: Attend, m: int, n: int, size: int) -> None:
    lengths = (m, n, n)
    compared(fn, [torch.randn(1, 3, x, size, device="cuda", dtype=torch.bfloat16) for x in lengths])


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


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("m", "n"), [(613, 744), (64, 8), (129, 1)])
def test_all_of_the_output_is_written_and_nothing_else(size: int, m: int, n: int) -> None:
    room = torch.full((2, 3, m + 64, size), float("nan"), device="cuda", dtype=torch.bfloat16)
    q, k, v = (torch.randn(2, 3, x, size, device="cuda", dtype=torch.bfloat16) for x in (m, n, n))
    region = attention(times(score, 0.125), dtype="bfloat16", d=size)
    source = emit(region, specialised(region, tiles(region)))
    load(source, directory("kernels")).launch(room[:, :, 32:-32], [q, k, v], [2, 3, m, n])
    exact = (q.double() @ k.double().mT * 0.125).softmax(-1) @ v.double()
    assert off(room[:, :, 32:-32], exact) <= FLOOR[torch.bfloat16]
    assert room[:, :, :32].isnan().all()
    assert room[:, :, -32:].isnan().all()


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


def packed(q: Tensor, k: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    i, j = places(q, k)
    return attend(scores(q, k), q, v, (labels[:, None, :, None] == labels[:, None, None, :]) & (j <= i))


def padded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return attend(scores(q, k), q, v, seen[:, None, None, :] > 0)


@pytest.mark.parametrize(("size", "n"), [(64, 613), (64, 640), (64, 100), (128, 1400), (256, 613)])
@pytest.mark.parametrize("fn", [packed, padded], ids=lambda f: f.__name__)
def test_tiles_by_a_table(
    fn: Callable[..., Tensor], size: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that only the run knows: which tiles of keys are visited, and which need no mask, is looked up."""
    monkeypatch.setattr(visits, "SHARE", float("inf"))
    ends = torch.tensor([[n // 3], [n - 3]])
    marks = torch.stack([(torch.arange(n) // 50), torch.arange(n) // 400]) if fn is packed else torch.arange(n) < ends
    args = [torch.randn(2, 4, n, size, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    compared(fn, [*args, marks.to("cuda", torch.int32)], visits="ranges")
