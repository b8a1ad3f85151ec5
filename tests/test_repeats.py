"""Equal calls traced once give the graph that tracing it whole gives; what is more than plain calls is traced whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from variants import VARIANTS

from fusecomp.codegen.emit import emit
from fusecomp.graph import repeats
from fusecomp.graph.capture import fake_mode, placeholder_values, traced_whole
from fusecomp.graph.facts import storage
from fusecomp.pipeline import Compilation, compile_graph
from fusecomp.planning import plan
from fusecomp.running import verify
from fusecomp.settings import Options


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def captured(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> tuple[GraphModule | None, GraphModule]:
    """The graph of fn(*args), by repeats and traced whole."""
    found: list[Any] = []

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        values = placeholder_values(gm)
        mode = fake_mode(values)
        assert mode is not None
        with mode:
            found.append((repeats.expanded(gm, values), traced_whole(gm, values)))
        return gm.forward

    torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    assert len(found) == 1
    return found[0]  # type: ignore[no-any-return]


def story(module: GraphModule) -> list[Any]:
    """Each node: call, arguments, result, which memory that lies in, and the user's line."""
    numbers = {n: f"%{i}" for i, n in enumerate(module.graph.nodes)}
    memories: dict[int | None, int] = {}
    told = []
    for n in module.graph.nodes:
        args = torch.fx.map_arg((n.args, dict(n.kwargs)), numbers.__getitem__)
        if "enter_autocast" in str(n.target):  # a trace fills in the defaults of its own time
            args = args[0][0], args[0][2]
        memory = memories.setdefault(storage(n), len(memories))
        line = n.op == "call_function" and (n.meta.get("stack_trace") or "")
        target = "" if n.op == "placeholder" else str(n.target)
        told.append((n.op, target, str(args), str(pytree.tree_map(described, n.meta.get("val"))), memory, line))
    return told


def described(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device) if isinstance(x, Tensor) else x


def check(fn: Callable[..., Any], *args: Any) -> None:
    short, whole = captured(fn, *args)
    assert short is not None
    assert story(short) == story(whole)
    results = [module(*given(module)) for module in (short, whole)]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)


def given(module: GraphModule) -> list[Tensor]:
    """Inputs of the graph: fresh ones, of the shapes that it has."""
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    generator = torch.Generator().manual_seed(0)
    found = []
    for v in (n.meta["val"] for n in nodes):
        memory = torch.randn(v.shape, generator=generator) if v.is_floating_point() else torch.ones(v.shape)
        found.append(memory.to(v.dtype))
    return found


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_every_variant_reads_the_same(variant: Any) -> None:
    short, whole = captured(variant.fn, *variant.make_args())
    assert short is not None
    assert story(short) == story(whole)


# ----------------------------------------------------------------------------------------------------------------
# Programs in which memory, modes and constants matter


def write_in_a_view(x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4)
    mask[1:, 0] = 2.0
    mask.view(16)[3] = 1.0
    return (x + mask).softmax(-1)


def write_then_read(x: Tensor) -> Tensor:
    y = x * 2
    z = y.transpose(0, 1)
    y.mul_(3).add_(1)
    return z + y


def write_an_input(x: Tensor) -> Tensor:
    x[0] = 1.0
    x.masked_fill_(x > 0, 2.0)
    return x.exp()


def constant(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.tensor(-1.0)) + torch.tensor(-1.0)


def many_results(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    top, at = x.max(-1, keepdim=True)
    p, q = torch.split(x + 1, 2)
    return (a + b) * top + at + torch.cat([p, q])[:, :2]


def nothing_to_do(x: Tensor) -> Tensor:
    y = x.contiguous().to(torch.float32)
    return y.expand(4, 4) + x.reshape(4, 4).float()


def autocasts(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x
        with torch.autocast("cpu", enabled=False):
            z = x @ x
    return y + z + x @ x


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = (x * 2).cos()
    return x.detach() * y + (x * 2).cos()


def equal_but_for_a_number(x: Tensor) -> Tensor:
    return x.pow(2) + x.pow(2.0) + (x + 1) + (x + True) + x[0:1] + x[0:2].sum(0) + x.sum(0, True) + x.sum(1, True)


def one_tensor_twice(x: Tensor) -> Tensor:
    y = x + 1
    return torch.add(x, x) + torch.add(x, y) + torch.add(y, x) + torch.cat([x, y]).sum() + torch.cat([x, x]).sum()


def repeated_layers(x: Tensor) -> Tensor:
    for _ in range(3):
        scores = (x @ x.T).masked_fill(torch.ones(4, 4).tril() == 0, -torch.inf)
        x = functional.layer_norm(x + functional.dropout(scores.softmax(-1), 0.0) @ x, (4,))
    return x


PROGRAMS = [write_in_a_view, write_then_read, write_an_input, constant, many_results, nothing_to_do, autocasts,
            without_gradient, equal_but_for_a_number, one_tensor_twice, repeated_layers]  # fmt: skip


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_programs_read_the_same(program: Callable[[Tensor], Tensor], learns: bool) -> None:
    x = torch.randn(4, 4)
    check(program, x.requires_grad_() if learns and program is not write_an_input else x)


def test_a_module_of_torch_s_own_reads_the_same() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    short, whole = captured(layer, torch.randn(2, 5, 8))
    assert short is not None
    assert story(short) == story(whole)


# ----------------------------------------------------------------------------------------------------------------
# What is traced whole


def vmapped(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.softmax(-1))(x)


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(torch.softmax, x, -1, use_reentrant=False)  # type: ignore[no-any-return]


def turned_in_place(x: Tensor) -> Tensor:
    y = x + 1
    z = y.exp()
    y.unsqueeze_(0)
    return y + z


def written_out(x: Tensor) -> Tensor:
    y = torch.empty(4, 4)
    torch.add(x, 1, out=y)
    return y.exp()


@pytest.mark.parametrize("program", [vmapped, checkpointed, turned_in_place, written_out], ids=lambda p: p.__name__)
def test_more_than_plain_calls_is_traced_whole(program: Callable[[Tensor], Tensor]) -> None:
    assert captured(program, torch.randn(4, 4, requires_grad=program is checkpointed))[0] is None


def test_symbolic_lengths_are_traced_whole() -> None:
    assert captured(lambda x: x.softmax(-1), torch.randn(4, 5), dynamic=True)[0] is None


def test_modes_are_left_where_a_graph_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(node: Node, *_: Any) -> None:
        assert torch.is_autocast_enabled("cpu")
        raise repeats.Unusual("for a test")

    monkeypatch.setattr(repeats, "record", give_up)
    short, _ = captured(autocasts, torch.randn(4, 4))
    assert short is None
    assert not torch.is_autocast_enabled("cpu")


# ----------------------------------------------------------------------------------------------------------------
# What it saves


def test_more_layers_trace_no_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    record = repeats.record
    monkeypatch.setattr(repeats, "record", lambda node, *args: traced.append(node.name) or record(node, *args))
    counts = []
    for layers in (2, 8):
        traced.clear()
        block = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(layers)))
        assert captured(block, torch.randn(5, 2, 8))[0] is not None
        counts.append(len(traced))
        torch._dynamo.reset()
    assert counts[0] == counts[1]


def test_only_repetitive_graphs_take_the_quick_way() -> None:
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    def layers(x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = (x @ x.T).softmax(-1) @ x
        return x

    for count in (1, 9):
        torch.compile(layers, backend=keep, dynamic=False)(torch.randn(4, 4), count)
    assert [repeats.repetitive(g) for g in graphs] == [False, True]


def eight_layers(x: Tensor) -> Tensor:
    for _ in range(8):
        scores = (x @ x.transpose(-1, -2)) * 0.25
        x = scores.masked_fill(torch.ones(37, 37, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ x
    return x


@pytest.mark.parametrize("lowering", ["cpu", "triton"])
def test_equal_layers_cost_one(lowering: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(tmp_path))
    compared: list[Any] = []
    compare = verify.compare
    monkeypatch.setattr(verify, "compare", lambda *args: compared.append(args) or compare(*args))
    plan._ranked.cache_clear()
    emit.cache_clear()
    done: list[Compilation] = []

    def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
        options = Options(lowering=lowering, verify=lowering == "cpu", strict=True)  # no GPU here to run a kernel on
        done.append(compile_graph(gm, placeholder_values(gm), options))
        return gm.forward

    with torch.no_grad():
        torch.compile(eight_layers, backend=backend, dynamic=False)(torch.randn(2, 37, 16))
    assert done[0].fused == 8
    assert plan._ranked.cache_info().misses == 1
    assert emit.cache_info().misses == (lowering == "triton")
    assert len(compared) == (lowering == "cpu")
    assert len({n.args[-1] for n in done[0].module.graph.nodes if "fusecomp" in str(n.target)}) == 1
