"""On a GPU: kernels that are launched again, with whatever tensors, streams and graphs a call comes with.

    pytest -n 0 -m gpu tests/test_gpu_launching.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import fusecomp
from fusecomp.running import hopper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
Attend = Callable[..., Tensor]
TOLERANCE = 2 * 2.0**-7
"""Of bfloat16, relative to the largest value."""


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    s = q @ k.mT * q.shape[-1] ** -0.5
    return s.masked_fill(i[None] > i[:, None], float("-inf")).softmax(-1) @ v


def draw(n: int = 768) -> list[Tensor]:
    return [torch.randn(2, 4, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def right(got: Tensor, args: list[Tensor]) -> None:
    exact = causal(*(x.double() for x in args))
    assert (got.double() - exact).abs().max() <= TOLERANCE * exact.abs().max()


@pytest.fixture(params=[0.0, 1.0], ids=["as much as possible", "portable"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attend]:
    """Compiled for the kernel for Hopper where there is one, or for the portable one."""
    monkeypatch.setattr(hopper, "LEAST_SECONDS", request.param)
    monkeypatch.setattr(hopper, "LEAST_TILES", 0)
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
