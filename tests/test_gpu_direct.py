"""On a GPU: graphs of attentions alone, called without Inductor, with kernels that are launched again.

    pytest -n 0 -m gpu tests/test_gpu_direct.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusecomp
from fusecomp import backend
from fusecomp.codegen import hopper_choice

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TOLERANCE = 4 * 2.0**-7
"""Of bfloat16, relative to the largest value."""


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    s = q @ k.mT * q.shape[-1] ** -0.5
    return s.masked_fill(j > i[:, None], float("-inf")).softmax(-1) @ v


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def draw(n: int, learn: bool, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(2, 4, n, 64, device="cuda", dtype=dtype, requires_grad=learn) for _ in range(3)]


def near(got: Tensor, exact: Tensor) -> None:
    assert (got.double() - exact).abs().max() <= TOLERANCE * exact.abs().max()


def right(run: Any, fn: Any, args: list[Tensor], spread: bool = False) -> None:
    """`spread`: the gradient of the result is one number, wherever it is read."""
    exact = [x.detach().double().requires_grad_() for x in args]
    best = fn(*exact)
    got = run(*args)
    near(got.detach(), best.detach())
    if got.requires_grad:
        up = torch.ones((), device="cuda").expand(got.shape) if spread else torch.randn_like(got)
        found = torch.autograd.grad(got, args, up.to(got.dtype))
        for mine, wanted in zip(found, torch.autograd.grad(best, exact, up.double()), strict=True):
            near(mine, wanted)


@pytest.mark.parametrize("fn", [causal, full])
@pytest.mark.parametrize("portable", [False, True])
def test_calls_in_turn(fn: Any, portable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, dtypes, learners, strides and streams that change, memory that is used again."""
    monkeypatch.setattr(hopper_choice, "AT_MOST", 0.0 if portable else float("inf"))
    monkeypatch.setattr(backend, "_inductor", None)
    torch._dynamo.reset()
    fusecomp.reset()
    run = torch.compile(fn, backend="fusecomp", dynamic=False, options={"strict": True})
    for _ in range(3):
        for n, learn, dtype in ((768, False, torch.bfloat16), (300, True, torch.bfloat16), (300, False, torch.float16)):
            args = draw(n, learn, dtype)
            right(run, fn, args)
            right(run, fn, args, spread=True)
            with torch.no_grad():
                right(run, fn, args)
            del args
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(768, False)]
    right(run, fn, turned)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        right(run, fn, turned)
    counts = fusecomp.counters()
    assert counts["fused"] == counts["candidates"] > 0


def documents(q: Tensor, k: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    s = q @ k.mT * q.shape[-1] ** -0.5
    keep = (j <= i[:, None]) & (labels[:, None] == labels)
    return s.masked_fill(~keep, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("learn", [False, True])
def test_tiles_are_found_anew_at_every_call(learn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_inductor", None)
    torch._dynamo.reset()
    fusecomp.reset()
    run = torch.compile(documents, backend="fusecomp", dynamic=False, options={"strict": True})
    for seed in range(5):
        torch.manual_seed(seed)
        labels = (torch.rand(2048, device="cuda") < 0.004).cumsum(0)
        args = draw(2048, learn)
        right(lambda *x, of=labels: run(*x, of), lambda *x, of=labels: documents(*x, of), args)
    assert fusecomp.counters()["fused"] == 1


def test_a_training_step_that_a_graph_holds() -> None:
    torch._dynamo.reset()
    fusecomp.reset()
    run = torch.compile(causal, backend="fusecomp", dynamic=False, options={"strict": True})
    args, up = draw(512, True), torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        torch.autograd.grad(run(*args), args, up)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(run(*args), args, up)
    with torch.no_grad():
        for x in args:
            x.copy_(torch.randn_like(x))
    graph.replay()
    exact = [x.detach().double().requires_grad_() for x in args]
    for mine, wanted in zip(found, torch.autograd.grad(causal(*exact), exact, up.double()), strict=True):
        near(mine, wanted)
