"""Graphs of attentions and views alone: called as they stand, for no other tensors and in no other mode than theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from agreement import attend, compare, copies, plain, qkv
from torch import Tensor
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fusecomp
from fusecomp import pipeline
from fusecomp.running import visits
from fusecomp.running.backward import gradients
from fusecomp.running.calls import fixed
from fusecomp.running.direct import direct
from fusecomp.running.lower import Lowered, lower

Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def compiled_by_inductor(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graphs that Inductor is given, which it runs uncompiled."""
    graphs: list[object] = []

    def compile_graph(gm: Any, *_: Any, **__: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compile_graph)
    torch._dynamo.reset()
    fusecomp.reset()
    torch.manual_seed(0)
    return graphs


@pytest.fixture(params=[False, True], ids=["as it is", "by a backward kernel"])
def how_it_learns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """On a CPU gradients are recomputed; here in the form of a generated kernel's, too."""

    def with_backward(match: Any, *more: Any) -> Lowered:
        def backward(grads: list[Tensor | None], out: Tensor, grad: Tensor, lse: Tensor, *rest: Any) -> None:
            wanted = [i for i, g in enumerate(grads) if g is not None]
            for i, found in zip(wanted, gradients(match.region, grad, *rest, wanted), strict=True):
                cast(Tensor, grads[i]).copy_(found)

        return replace(lower(match, *more), backward=backward)

    if request.param:
        monkeypatch.setattr(pipeline, "lower", with_backward)
    return bool(request.param)


def fast(fn: Fn, **how: Any) -> Fn:
    return torch.compile(fn, backend="fusecomp", **how)


def heads(x: Tensor) -> list[Tensor]:
    """q, k, v of [B, N, 3 H D]."""
    return [y.unflatten(-1, (3, 8)).transpose(1, 2) for y in x.chunk(3, -1)]


def packed(x: Tensor) -> Tensor:
    return attend(*heads(x)).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)


def summed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    return s.softmax(-1) @ v, s.logsumexp(-1)


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(plain(q, k, v), k, v.transpose(0, 1).transpose(0, 1))


ALONE: dict[str, tuple[Fn, Callable[[bool], list[Tensor]]]] = {
    "one": (attend, lambda learn: qkv(learn=learn)),
    "two": (twice, lambda learn: qkv(learn=learn)),
    "packed": (packed, lambda learn: [torch.randn(2, 13, 72, requires_grad=learn)]),
    "views returned": (lambda q, k, v: (attend(q, k, v).mT, q[:, 1], v), lambda learn: qkv(learn=learn)),
}


def outcome(run: Fn, args: list[Tensor], learn: bool) -> list[Tensor]:
    """What a call gives, and the gradients."""
    given = copies(args)
    found = run(*given)
    results = [found] if isinstance(found, Tensor) else list(found)
    if not learn:
        return results
    loss = sum((x.cos() * (i + 1)).sum() for i, x in enumerate(results))
    loss.backward()
    return [*results, *(x.grad for x in given)]


def same(run: Fn, fn: Fn, args: list[Tensor], learn: bool = False) -> None:
    for got, wanted in zip(outcome(run, args, learn), outcome(fn, args, learn), strict=True):
        compare(got, wanted, 1e-4 if wanted is None or wanted.dtype == torch.float32 else 2e-2)


@pytest.mark.usefixtures("how_it_learns")
@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_nothing_is_compiled(name: str, learn: bool, compiled_by_inductor: list[object]) -> None:
    fn, draw = ALONE[name]
    run = fast(fn)
    for _ in range(2):
        same(run, fn, draw(learn), learn)
    assert fusecomp.counters()["fused"] == (2 if name == "two" else 1)
    assert not compiled_by_inductor


def test_a_table_of_tiles_is_called_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    table, graph = torch.arange(12, dtype=torch.int32).view(2, 6), torch.fx.Graph()
    monkeypatch.setitem(visits.TABLES, "some", lambda masks, sizes: table + masks[0].sum() + sizes[0])
    mask, call = graph.placeholder("mask"), fixed([3], [1], [32, 32], 16, 16, "some")
    mask.meta["val"] = FakeTensorMode().from_tensor(torch.eye(32, dtype=torch.bool))
    made = graph.call_function(torch.ops.fusecomp.tile_visits_fixed.default, ([mask], call))
    graph.output((made,))
    run = direct(torch.fx.GraphModule(torch.nn.Module(), graph))
    assert run is not None
    assert torch.equal(run(torch.eye(32, dtype=torch.bool))[0], table + 35)
    with pytest.raises(AssertionError):
        run(torch.eye(31, dtype=torch.bool))


OTHERS = torch.library.Library("test_direct", "DEF")
OTHERS.define("attention_fixed(Tensor x, str call) -> Tensor")
OTHERS.impl("attention_fixed", lambda x, call: x + len(call), "CompositeExplicitAutograd")
torch.library.register_fake("test_direct::attention_fixed", lambda x, call: torch.empty_like(x), lib=OTHERS)

MORE: dict[str, tuple[Fn, dict[str, Any]]] = {
    "arithmetic": (lambda q, k, v: attend(q, k, v) + 1, {}),
    "another's operator": (lambda q, k, v: torch.ops.test_direct.attention_fixed(attend(q, k, v), "five!"), {}),
    "a write": (lambda q, k, v: attend(q, k, v).zero_(), {}),
    "its log-sum-exp": (summed, {}),
    "a cast": (lambda q, k, v: attend(q, k, v).half(), {}),
    "a mode": (attend, {"mode": "max-autotune-no-cudagraphs"}),
    "lengths that change": (attend, {"dynamic": True}),
    "a tensor made": (lambda q, k, v: (attend(q, k, v), torch.ones(3)), {}),
    "nothing fused": (lambda q, k, v: (q @ k.mT).cumsum(-1).softmax(-1) @ v, {}),
}


@pytest.mark.parametrize("name", MORE)
def test_what_is_more_goes_to_inductor(name: str, compiled_by_inductor: list[object]) -> None:
    fn, how = MORE[name]
    with torch.no_grad():
        same(fast(fn, **how), fn, qkv())
    assert compiled_by_inductor


def test_cuda_graphs_that_are_asked_for(compiled_by_inductor: list[object]) -> None:
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        same(fast(attend), attend, qkv())
    assert compiled_by_inductor


class Named(Tensor):
    """Changes no operator."""


def test_every_call_gets_its_own() -> None:
    """Other lengths, strides, dtypes, learners, modes and classes, in turn and again."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    run, calls = fast(attention, dynamic=False), dict[str, tuple[list[Tensor], bool]]()
    for learn in (False, True):
        calls |= {f"{n} {learn}": (qkv(13, n, learn), learn) for n in (21, 22)}
        calls[f"float16 {learn}"] = [x.half().detach().requires_grad_(learn) for x in qkv()], learn
    q, k, v = qkv(21, 21)
    calls["turned"] = [q, k.mT.contiguous().mT, v.transpose(0, 1).contiguous().transpose(0, 1)], False
    calls["only the keys learn"] = [q, k.clone().requires_grad_(), v], True
    calls["of a class"] = [x.as_subclass(Named) for x in (q, k, v)], False
    for args, learn in [*calls.values()] * 2:
        with torch._dynamo.config.patch(recompile_limit=32):
            same(run, attention, args, learn)
            with torch.no_grad(), torch.inference_mode(learn):
                assert not run(*args).requires_grad


def test_without_guards_tensors_that_lie_otherwise_are_refused() -> None:
    kept: list[Fn] = []

    def backend(gm: Any, inputs: Any) -> Fn:
        kept.append(fusecomp.backend.fusecomp(gm, inputs))
        return kept[-1]

    torch.compile(attend, backend=backend)(*qkv())
    q, k, v = qkv()
    compare(kept[0](q, k, v)[0], attend(q, k, v), 1e-4)
    for other in (qkv(13, 20), [q.mT.contiguous().mT, k, v]):
        with pytest.raises(AssertionError, match=r"stride|size"):
            kept[0](*other)


# ----------------------------------------------------------------------------------------------------------------
# Autograd, without AOTAutograd


@pytest.mark.usefixtures("how_it_learns")
def test_gradients_again_and_of_some() -> None:
    own = list[list[Tensor | None]]()
    for call in (fast(attend), attend):
        torch.manual_seed(0)
        given = qkv(learn=True)
        loss = call(*given).square().sum()
        some = [torch.autograd.grad(loss, given[i], retain_graph=True)[0] for i in (0, 2, 1)]
        loss.backward()
        own.append([*some, *(x.grad for x in given)])
    for got, wanted in zip(*own, strict=True):
        compare(got, wanted, 1e-4)


@pytest.mark.usefixtures("how_it_learns")
def test_the_gradient_of_a_sum_is_one_number() -> None:
    args = qkv(learn=True)
    got, wanted = (torch.autograd.grad(run(*args).sum(), args) for run in (fast(attend), attend))
    for g, w in zip(got, wanted, strict=True):
        compare(g, w, 1e-4)


@pytest.mark.usefixtures("how_it_learns")
def test_a_second_order_is_an_error() -> None:
    args = qkv(learn=True)
    loss = fast(attend)(*args).square().sum()
    first = torch.autograd.grad(loss, args[:1], create_graph=True)[0]
    for x in args:
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(first.square().sum() + x.sum(), [x], retain_graph=True)


@pytest.mark.usefixtures("how_it_learns")
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint(reentrant: bool) -> None:
    run = fast(attend)
    same(lambda *x: checkpoint(run, *x, use_reentrant=reentrant), attend, qkv(learn=True), True)


def test_what_is_saved_is_shown_to_hooks() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        args = qkv(learn=True)
        fast(attend)(*args)
    assert {x.data_ptr() for x in args} <= {x.data_ptr() for x in saved}


def test_what_is_saved_and_then_changed_is_an_error() -> None:
    args = qkv(learn=True)
    k = args[1] * 1
    loss = fast(attend)(args[0], k, args[2]).sum()
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("how_it_learns")
def test_a_backward_pass_that_is_compiled() -> None:
    run, args = fast(attend), qkv(learn=True)
    same(run, attend, args, True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        same(run, attend, args, True)


def test_functional_derivatives_around() -> None:
    args = qkv()
    run = fast(attend)
    own = [torch.func.vjp(of, *args)[1](args[0]) for of in (run, attend)]
    for got, wanted in zip(*own, strict=True):
        compare(got, wanted, 1e-4)
    stacked = [torch.stack([x, x.cos()]) for x in args]
    compare(torch.vmap(run)(*stacked), torch.vmap(attend)(*stacked), 1e-4)


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    """The same, by generated kernels."""
    chosen = "not backward and (nothing and one or again or second_order)"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parent, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
