"""On a GPU: kernels that are launched again, with whatever tensors, streams and graphs a call comes with.

    pytest -n 0 -m gpu tests/test_gpu_launching.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import fusecomp
from fusecomp.codegen import hopper_choice
from fusecomp.planning import visits
from fusecomp.running import replay
from fusecomp.running.replay import recorded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
Attend = Callable[..., Tensor]
TOLERANCE = 2 * 2.0**-7
"""Of bfloat16, relative to the largest value."""


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    s = q @ k.mT * q.shape[-1] ** -0.5
    return s.masked_fill(j > i[:, None], float("-inf")).softmax(-1) @ v


def draw(n: int = 768) -> list[Tensor]:
    return [torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def right(got: Tensor, args: list[Tensor]) -> None:
    exact = causal(*(x.double() for x in args))
    assert (got.double() - exact).abs().max() <= TOLERANCE * exact.abs().max()


@pytest.fixture(params=[float("inf"), 0.0], ids=["as much as possible", "portable"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attend]:
    """Compiled for the kernel for Hopper where there is one, or for the portable one."""
    monkeypatch.setattr(hopper_choice, "AT_MOST", request.param)
    torch._dynamo.reset()
    fusecomp.reset()
    with torch.no_grad():
        yield torch.compile(causal, backend="fusecomp", dynamic=False, options={"inner": "aot_eager", "strict": True})
    counts = fusecomp.counters()
    assert counts["fused"] == counts["candidates"] > 0


def test_memory_that_is_used_again(fast: Attend) -> None:
    for _ in range(6):
        args = draw()
        right(fast(*args), args)
        del args


def test_another_stream(fast: Attend) -> None:
    args, stream = draw(), torch.cuda.Stream()
    right(fast(*args), args)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = fast(*args)
    torch.cuda.synchronize()
    right(got, args)


def test_a_graph_that_is_replayed(fast: Attend) -> None:
    args, graph = draw(), torch.cuda.CUDAGraph()
    fast(*args)
    with torch.cuda.graph(graph):
        got = fast(*args)
    for _ in range(3):
        for x in args:
            x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        right(got, args)


def test_a_tensor_that_is_not_aligned(fast: Attend) -> None:
    args = draw()
    right(fast(*args), args)
    for offset in (1, 0, 3):
        room = torch.empty(args[0].numel() + 8, device="cuda", dtype=torch.bfloat16)
        moved = [room[offset : offset + args[0].numel()].view_as(args[0]).copy_(args[0]), *args[1:]]
        right(fast(*moved), moved)


@pytest.mark.parametrize("rows", [300, 768])
def test_gradients_in_memory_that_is_used_again(fast: Attend, rows: int) -> None:
    for _ in range(4):
        args = [x[:, :, :n].requires_grad_() for x, n in zip(draw(), (rows, 768, 768), strict=True)]
        up = torch.randn(2, 4, rows, 64, device="cuda", dtype=torch.bfloat16)
        exact = [x.detach().double().requires_grad_() for x in args]
        with torch.enable_grad():
            found = torch.autograd.grad(fast(*args), args, up)
            wanted = torch.autograd.grad(causal(*exact), exact, up.double())
        for mine, best in zip(found, wanted, strict=True):
            assert (mine.double() - best).abs().max() <= 2 * TOLERANCE * best.abs().max()


def test_tensors_that_lie_otherwise(fast: Attend) -> None:
    args = draw()
    right(fast(*args), args)
    for a, b in ((1, 1), (-1, -2), (1, 2)):
        turned = [x.transpose(a, b).contiguous().transpose(a, b) for x in args]
        for _ in range(3):
            right(fast(*turned), turned)


def test_a_step_that_cuda_graphs_hold() -> None:
    fusecomp.reset()
    torch._dynamo.reset()
    fast = torch.compile(causal, backend="fusecomp", dynamic=False, options={"mode": "reduce-overhead", "strict": True})
    for grad in (False, True):
        for _ in range(5):
            args = [x.requires_grad_(grad) for x in draw()]
            torch.compiler.cudagraph_mark_step_begin()
            with torch.set_grad_enabled(grad):
                got = fast(*args)
                right(got.detach(), [x.detach() for x in args])
                if not grad:
                    continue
                up = torch.randn_like(got)
                found = torch.autograd.grad(got, args, up)
                exact = [x.detach().double().requires_grad_() for x in args]
                wanted = torch.autograd.grad(causal(*exact), exact, up.double())
            for mine, best in zip(found, wanted, strict=True):
                assert (mine.double() - best).abs().max() <= 2 * TOLERANCE * best.abs().max()


def packed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    s = q @ k.mT * q.shape[-1] ** -0.5
    return s.masked_fill(ids[:, None, :, None] != ids[:, None, None, :], float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("most", [float("inf"), 0.0], ids=["as much as possible", "portable"])
def test_documents_that_change_in_place(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their table is made at every call, also in a CUDA graph, by launches that are recorded once."""
    monkeypatch.setattr(hopper_choice, "AT_MOST", most)
    monkeypatch.setattr(visits, "SHARE", float("inf"))
    torch._dynamo.reset()
    fusecomp.reset()
    fast = torch.compile(packed, backend="fusecomp", dynamic=False, options={"inner": "aot_eager", "strict": True})
    args, ids, graph = draw(), torch.zeros(2, 768, dtype=torch.int64, device="cuda"), torch.cuda.CUDAGraph()
    seen: list[str] = []
    monkeypatch.setattr(replay, "recorded", lambda *x: seen.append("") or recorded(*x))
    with torch.no_grad():
        for _ in range(3):
            got = fast(*args, ids)
        assert len(seen) <= 4  # of the table and of the attention, with what they were first given
        with torch.cuda.graph(graph):
            got = fast(*args, ids)
        for length in (1, 50, 200, 768):
            ids.copy_(torch.arange(768, device="cuda") // length)
            ids[1] = ids[1].flip(0)
            exact = packed(*(x.double() for x in args), ids)
            graph.replay()
            for found in (got, fast(*args, ids)):
                assert (found.double() - exact).abs().max() <= TOLERANCE * exact.abs().max()
