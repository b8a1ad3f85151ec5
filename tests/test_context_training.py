"""Training as people write it: some of the gradients, twice, of second order, under checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import INF, agree, attend, compare, compiled, copies, plain, qkv
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusecomp

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()
    fusecomp.reset()
    torch.manual_seed(0)


class Block(nn.Module):
    """Causal self-attention with dropout, and an MLP."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.up = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, 24)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (3, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        s = (q @ k.mT / 8**0.5).masked_fill(hidden, float("-inf"))
        x = x + self.out((self.drop(s.softmax(-1)) @ v).transpose(1, 2).flatten(2))
        return x + self.up(nn.functional.gelu(x))


def both(fn: Callable[..., Any], args: list[Tensor]) -> Iterator[tuple[Callable[..., Any], list[Tensor]]]:
    """Eager, and compiled with fused attention, each with tensors of its own."""
    for run in (fn, compiled(fn)):
        yield run, copies(args)
    assert fusecomp.counters()["fused"]


# ----------------------------------------------------------------------------------------------------------------
# Which gradients, and how often


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_gradients_of_some_inputs(wanted: tuple[int, ...]) -> None:
    """All require a gradient, some are asked for; then only those require one."""
    found = []
    for run, args in both(attend, qkv(learn=True)):
        found.append(torch.autograd.grad(run(*args).square().sum(), [args[i] for i in wanted]))
    for e, g in zip(*found, strict=True):
        compare(g, e, 1e-4)
    agree(attend, [x.requires_grad_(i in wanted) for i, x in enumerate(qkv())], train=True)


def test_only_the_mask_learns() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 0.3 + mask).softmax(-1) @ v

    agree(fn, [*qkv(), torch.randn(13, 21, requires_grad=True)], train=True)


def test_what_learns_may_be_run_without_gradients() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    agree(fn, qkv(learn=True))
    args, run = qkv(learn=True), compiled(attend)
    with torch.no_grad():
        compare(run(*args), attend(*args), 1e-4)
    compare(run(*args), attend(*args), 1e-4)


def test_the_graph_is_kept_and_used_again() -> None:
    found = []
    for run, (q, k, v) in both(attend, qkv(learn=True)):
        out = run(q, k, v)
        first = torch.autograd.grad(out.sum(), [q, k, v], retain_graph=True)
        again = torch.autograd.grad(out.sum(), [q, k, v], retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        out.square().sum().backward(retain_graph=True)
        out.square().sum().backward()
        found.append((*first, q.grad, k.grad, v.grad))
    for e, g in zip(*found, strict=True):
        compare(g, e, 1e-3)


def test_one_kernel_is_used_twice() -> None:
    agree(lambda q, k, v: plain(q, k, v) + plain(plain(q, k, v), k, v), qkv(21, 21, learn=True), fused=3, train=True)
    agree(lambda q, k, v: plain(plain(q, q, q), k, plain(v, v, v)), qkv(21, 21, learn=True), fused=3, train=True)


def test_losses_at_once() -> None:
    """Two compiled calls, whose backward passes run in the other order."""
    found = []
    for run, (q, k, v) in both(attend, qkv(learn=True)):
        a, b = run(q, k, v), run(q.cos(), k, v)
        b.square().sum().backward()
        a.square().sum().backward()
        found.append((q.grad, k.grad, v.grad))
    for e, g in zip(*found, strict=True):
        compare(g, e, 1e-3)


def test_a_second_order_is_never_a_wrong_number() -> None:
    for fn in (attend, lambda q, k, v: attend(q, k, v) + attend(q, k, v).square()):
        q, k, v = qkv(learn=True)
        (first,) = torch.autograd.grad(compiled(fn)(q, k, v).square().sum(), [q], create_graph=True)
        for x in (q, k, v):
            with pytest.raises(RuntimeError, match="double backward"):
                torch.autograd.grad(first.square().sum(), [x], retain_graph=True)


# ----------------------------------------------------------------------------------------------------------------
# torch.func


def test_functional_gradients_inside() -> None:
    """Declined, and right."""

    def grads(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=(0, 1, 2))(q, k, v)

    def pulled_back(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, pull = torch.func.vjp(attend, q, k, v)
        return out, *pull(out)

    for fn in (grads, pulled_back):
        agree(fn, qkv(), fused=0, tolerance=1e-3)


# ----------------------------------------------------------------------------------------------------------------
# Checkpoints


def drops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.dropout((q @ k.mT * 0.3).softmax(-1), 0.3) @ v


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
def test_checkpoints_drop_the_same_again(reentrant: bool, around: bool) -> None:
    """Inside the compiled function or around it. O is linear in V: <dL/dV, V> = <dL/dO, O> under one mask."""
    inside = compiled(lambda *x: checkpoint(drops, *x, use_reentrant=reentrant), fullgraph=False)
    fn = compiled(drops) if around else inside
    args = qkv(learn=True)
    out = checkpoint(fn, *args, use_reentrant=reentrant) if around else fn(*args)
    assert fusecomp.counters()["fused"] == 1
    up = torch.randn_like(out)
    out.backward(up)
    torch.testing.assert_close((args[2].grad * args[2]).sum(), (up * out).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointed_layers(reentrant: bool) -> None:
    model = nn.ModuleList([Block(), Block()])

    def fn(x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    found = []
    for run in (fn, compiled(fn, fullgraph=False)):
        model.zero_grad()
        run(torch.ones(2, 21, 24, requires_grad=True).cumsum(1) / 21).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert fusecomp.counters()["fused"] == 2
    for e, g in zip(*found, strict=True):
        compare(g, e, 1e-4)


def test_selective_checkpoints_save_what_they_are_told() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(attend, q, k, v, use_reentrant=False, context_fn=contexts)

    agree(fn, qkv(learn=True), train=True)


# ----------------------------------------------------------------------------------------------------------------
# The generated kernels


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    """The same, by the generated kernels themselves."""
    chosen = "some_inputs or without_gradients or kept or around or only_the_mask"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parent, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_window_wider_than_the_keys() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        return (q @ k.mT).masked_fill((i - j).abs() > 8, -INF).softmax(-1) @ v

    agree(fn, qkv(5, 7, learn=True), train=True, lowering="cpu")
