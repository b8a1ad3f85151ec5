"""Exported programs: fused as they stand, or compiled; strict or not, decomposed or not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import INF, attend, compiled
from torch import Tensor, nn, vmap
from torch.nn.functional import scaled_dot_product_attention

import fusecomp

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    fusecomp.reset()


class Block(nn.Module):
    """A projection, `core` on [B, 3, N, 8], and the heads joined again."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.qkv, self.core = nn.Linear(24, 72), core

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (t.view(b, n, 3, 8).transpose(1, 2) for t in self.qkv(x).split(c, 2))
        return self.core(q, k, v).transpose(1, 2).reshape(b, n, c)


def triangle(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhmn,bhnd->bhmd", torch.einsum("bhmd,bhnd->bhmn", q, k).softmax(-1), v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].repeat_interleave(3, 1) for x in (k, v))
    return attend(q, k, v)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s *= 0.3
    return s.masked_fill_(~triangle(q, k), -INF).softmax(-1) @ v


def without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return attend(q, k, v)


def cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return attend(q, k, v)


CORES: dict[str, Core] = {
    "causal": attend, "einsum": by_einsum, "grouped heads": grouped, "by hand": by_hand, "in place": in_place,
    "no_grad": without_gradient, "autocast": cast, "vmap": vmap(vmap(attend)),
    "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=triangle(q, k)),
    "additive sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=triangle(q, k).float().log()),
}  # fmt: skip


def program(core: Core, x: Tensor, strict: bool = False, dynamic: bool = False) -> tuple[nn.Module, Any]:
    model = Block(core).eval()
    shapes = {"x": {1: torch.export.Dim("n", min=2, max=63)}} if dynamic else None
    return model, torch.export.export(model, (x,), strict=strict, dynamic_shapes=shapes)


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("name", CORES)
def test_fused_as_it_stands(name: str, decomposed: bool) -> None:
    x = torch.randn(2, 13, 24)
    model, exported = program(CORES[name], x)
    exported = exported.run_decompositions() if decomposed else exported
    code = exported.module().code
    fused = fusecomp.fuse(exported.module(), (x,))
    assert fusecomp.counters()["fused"] == 1
    torch.testing.assert_close(fused(x), model(x), rtol=2e-2, atol=2e-2)
    assert exported.module().code == code


@pytest.mark.parametrize("name", ["causal", "sdpa", "vmap"])
def test_compiled_for_lengths_that_change(name: str) -> None:
    x = torch.randn(2, 13, 24)
    model, exported = program(CORES[name], x, strict=name != "vmap", dynamic=True)
    run = compiled(exported.module())
    for given in (x, torch.randn(2, 17, 24)):
        torch.testing.assert_close(run(given), model(given), rtol=1e-4, atol=1e-4)
    assert fusecomp.counters()["fused"] >= 1


def test_lifted_parameters_are_inputs() -> None:
    x = torch.randn(2, 13, 24)
    model, exported = program(attend, x)
    given = [*model.parameters(), x]
    fused = fusecomp.fuse(exported.graph_module, given)
    assert fusecomp.counters()["fused"] == 1
    torch.testing.assert_close(fused(*given)[0], model(x), rtol=1e-4, atol=1e-4)


class Learned(nn.Module):
    """Scales by numbers that it holds; the fill is a number of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.tensor(0.3)), nn.Linear(8, 8)
        self.register_buffer("cap", torch.tensor(2.0))
        self.register_buffer("mask", torch.ones(13, 13, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        s = torch.tanh(x @ x.mT * self.scale / self.cap) * self.cap
        return self.out(torch.where(self.mask, s, torch.tensor(-INF)).softmax(-1) @ x)


@pytest.mark.parametrize("exported", [True, False])
def test_what_the_module_holds_is_read_at_every_call(exported: bool) -> None:
    x, model = torch.randn(2, 3, 13, 8), Learned()
    graph = torch.export.export(model, (x,)).module() if exported else torch.fx.symbolic_trace(model)
    fused = fusecomp.fuse(graph, (x,))
    assert fusecomp.counters()["fused"] == 1
    assert fused.state_dict().keys() == graph.state_dict().keys()
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(fused(x).square().sum(), [fused.get_parameter(n) for n, _ in model.named_parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    changed = {name: value * 1.5 for name, value in model.state_dict().items()}
    for module in (model, fused):
        module.load_state_dict(changed, strict=False)
        module.mask[5:] = True
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)


def test_what_the_module_holds_is_pickled_with_it() -> None:
    x, model = torch.randn(2, 3, 13, 8), Learned()
    fused = fusecomp.fuse(torch.fx.symbolic_trace(model), (x,))
    again = pickle.loads(pickle.dumps(fused))
    assert again.state_dict().keys() == fused.state_dict().keys()
    torch.testing.assert_close(again(x), fused(x))


class Named(nn.Module):
    """Takes and returns structures."""

    def forward(self, pair: dict[str, Tensor], *, bias: Tensor) -> dict[str, Tensor]:
        out = (pair["q"] @ pair["k"].mT + bias).softmax(-1) @ pair["k"]
        return {"out": out, "bias": bias}


def test_the_fused_module_is_called_as_the_program_is() -> None:
    pair = {"q": torch.randn(2, 3, 13, 8), "k": torch.randn(2, 3, 21, 8)}
    how = {"bias": torch.randn(13, 21)}
    exported = torch.export.export(Named(), (pair,), how)
    fused = fusecomp.fuse(exported.module(), [*pair.values(), *how.values()])
    assert fusecomp.counters()["fused"] == 1
    torch.testing.assert_close(fused(pair, **how), Named()(pair, **how), rtol=1e-4, atol=1e-4)


def test_shapes_that_the_program_refuses_are_still_refused() -> None:
    x = torch.randn(2, 13, 24)
    _, exported = program(attend, x)
    fused = fusecomp.fuse(exported.module(), (x,))
    for module in (exported.module(), fused):
        with pytest.raises(AssertionError, match="Guard failed"):
            module(torch.randn(2, 14, 24))


def test_bodies_of_the_program_itself_are_left_alone() -> None:
    x = torch.randn(2, 13, 24)
    _, exported = program(without_gradient, x)
    module = exported.module()
    fused = fusecomp.fuse(module, (x,))
    assert fused is not module
    assert not any("fusecomp" in str(n.target) for m in module.modules() if isinstance(m, torch.fx.GraphModule)
                   for n in m.graph.nodes)  # fmt: skip


def test_what_is_no_graph_and_inputs_that_are_missing() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.fx\.GraphModule, such as"):
        fusecomp.fuse(attend, (torch.ones(2, 3),))  # type: ignore[arg-type]
    graph = torch.fx.symbolic_trace(lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
    with pytest.raises(TypeError, match="the graph takes q, k, v; 2 inputs were given"):
        fusecomp.fuse(graph, (torch.ones(2, 3), torch.ones(2, 3)))
