"""Running the graph's own nodes of one attention: the judge of every kernel, in the model's dtype or in float64."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusecomp.graph.facts import op_name, value
from fusecomp.graph.holding import held
from fusecomp.graph.learning import records
from fusecomp.graph.program import Call, Program, fixed
from fusecomp.patterns.contraction import READERS
from fusecomp.patterns.naming import SizeSource


@dataclass(frozen=True)
class Section:
    """Calls between the values that are given and a result."""

    given: tuple[tuple[Node, ...], ...]
    """The nodes that hold each of them."""
    calls: tuple[Call, ...]
    result: Node
    program: Program
    what: str = "the program"
    """Whose calls they are."""

    def run(self, inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """The result. With `dtype`, every floating-point tensor and cast becomes that dtype instead; but numbers that
        are made of integers are made as written, in bfloat16 with a gap between 256 and 258. A tensor that no call
        makes lends only its shape; it stands as zeros."""
        env = {n: _as(x, dtype) for nodes, x in zip(self.given, inputs, strict=True) for n in nodes}
        run = Run(dtype, inputs[0].device, env)
        return run.through(self.calls, self.result)  # type: ignore[no-any-return]

    def stale(self) -> Node | None:
        """What the calls read before the program writes into it."""
        return self.program.stale([n for nodes in self.given for n in nodes], self.calls)

    def text(self) -> str:
        """The calls, nodes numbered in order, so that equal layers have equal texts."""
        names = {n: f"in{i}" for i, nodes in enumerate(self.given) for n in nodes}
        lines = []
        for i, call in enumerate(self.calls):
            names[call.node], target = f"n{i}", call.target
            args = torch.fx.map_arg((call.args, call.kwargs), lambda n: names.get(n, "?"))
            lines.append(f"n{i} = {getattr(target, '__qualname__', target)}{args}")
        return "\n".join(lines)

    def inside(self, inputs: Sequence[Tensor]) -> bool:
        """Whether every index that is made of integers alone lies inside the tensor that it indexes: on a GPU, one
        outside ends the process."""
        given = {n: x for nodes, x in zip(self.given, inputs, strict=True) for n in nodes}
        within = {call.node for call in self.calls}
        for call in self.calls:
            for index, x, dim in indices(call):
                above = self.program.between(given, [index], within)
                if any(map(floats, (index, *(n for c in above for n in (c.node, *c.reads()))))):
                    continue  # what a sort of scores finds lies inside anyway
                at = Run(None, inputs[0].device, dict(given)).through(above, index)
                length = concrete(value(x).shape[dim])
                least = -length if bare(call.node) in FROM_THE_END else 0
                if at.numel() and (int(at.min()) < least or int(at.max()) >= length):
                    return False
        return True


@dataclass(frozen=True)
class Run:
    """Calls, one after the other."""

    dtype: torch.dtype | None
    device: torch.device
    env: dict[Node, Any]
    """The value of each node that is known."""

    def through(self, calls: Sequence[Call], result: Node) -> Any:
        """The value of a node, each other one being kept while it is read."""
        last = {n: i for i, call in enumerate(calls) for n in (call.node, *call.nodes())}
        for i, call in enumerate(calls):
            for n in call.nodes():
                if n not in self.env:
                    self.env[n] = self.lent(n)
            self.env[call.node] = self.call(call)
            for n in (call.node, *call.nodes()):
                if last[n] == i and n is not result:
                    self.env.pop(n, None)
        return self.env[result] if result in self.env else self.lent(result)

    def lent(self, node: Node) -> Any:
        """What a node lends that no call makes."""
        known = _as(constant(node), self.dtype)
        return stand_in(node.meta.get("val"), self.dtype, self.device) if known is None else known

    def call(self, call: Call) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and records(call.node)):
            return self.computed(call)

    def computed(self, call: Call) -> Any:
        node = call.node
        args, kwargs = torch.fx.map_arg((call.args, call.kwargs), self.env.__getitem__)
        if self.dtype is None and op_name(node) in MIXED:
            args = _in_dtype(args, node.meta["val"].dtype)
        if op_name(node) == "detach_":
            return args[0].detach()
        if self.dtype is not None and not any(map(floating, torch.utils._pytree.tree_leaves((args, kwargs)))):
            return _as(call.target(*args, **kwargs), self.dtype)
        return call.target(*_retyped(args, self.dtype, node), **_retyped(kwargs, self.dtype, node))


def indices(call: Call) -> Iterator[tuple[Node, Node, int]]:
    """(positions, tensor, axis) of what a call reads or writes at positions."""
    name, args = bare(call.node), call.args
    if name in ("index", "index_put"):
        given = list(enumerate(args[1]))
        if not any(i is not None and i.meta["val"].dtype == torch.bool for _, i in given):
            yield from ((i, args[0], dim) for dim, i in given if i is not None)
    elif name in BY_AXIS and isinstance(args[1], int):
        yield args[2], args[0], args[1]
    elif name == "take_along_dim" and len(args) > 2:
        yield args[1], args[0], args[2]
    elif name == "embedding":
        yield args[1], args[0], 0


def bare(node: Node) -> str:
    """The operator, in place or not."""
    return op_name(node).removesuffix("_").removeprefix("_unsafe_")


FROM_THE_END = {"index", "index_put", "index_fill"}
"""What counts negative positions from the end; to all others they are outside."""
BY_AXIS = {
    "gather", "index_select", "index_add", "index_copy", "index_fill", "index_reduce", "scatter", "scatter_add",
    "scatter_reduce",
}  # fmt: skip


MIXED = {*READERS, "softmax", "log_softmax", "scaled_dot_product_attention", "cdist", "cosine_similarity"}
"""Operations that autocast runs in another dtype than their arguments': the recorded dtype of the result tells."""


def _in_dtype(args: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in the dtype that autocast had them in."""
    return torch.utils._pytree.tree_map(lambda x: _as(x, dtype), args)


def constant(node: Node) -> Any:
    """The value of a get_attr node; None for any other."""
    if node.op != "get_attr":
        return None
    return held(node.graph.owning_module, node.target)


def stand_in(val: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    """Zeros of a fake tensor's shape; a symbolic number's hint."""
    if isinstance(val, Tensor):
        shape = [concrete(s) for s in val.shape]
        return _as(torch.zeros(shape, dtype=val.dtype, device=device), dtype)
    return concrete(val)


def concrete(n: Any) -> Any:
    """A symbolic number as the number it was seen with, or has been fixed to."""
    if not isinstance(n, torch.SymInt | torch.SymFloat):
        return n
    kind = int if isinstance(n, torch.SymInt) else float
    if n.node.expr.is_number:
        return kind(n.node.expr)
    if n.node.hint is not None:
        return kind(n.node.hint)
    return kind(n.node.expr.xreplace({s: assumed(s, n.node.shape_env) for s in n.node.expr.free_symbols}))


def assumed(symbol: Any, env: Any) -> Any:
    """A value for a number that is known only at run time: small, within its bounds, unlike that of other symbols."""
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    if symbol in known:
        return known[symbol]
    bounds, number = env.var_to_range[symbol], int("".join(c for c in str(symbol) if c.isdigit()))
    return min(max(37 + 4 * number, bounds.lower), bounds.upper)


def seen(source: SizeSource) -> int:
    """The value of a run-time length when the graph was captured."""
    return int(concrete(length(source)))


def known(source: SizeSource) -> bool:
    """Whether the graph is compiled for one value of a length."""
    return fixed(length(source))


def length(source: SizeSource) -> Any:
    """A length, symbolic where it changes."""
    if isinstance(source, tuple):
        return source[0].meta["val"].shape[source[1]]
    return source.meta["val"] if isinstance(source, Node) else source


def floats(node: Node) -> bool:
    """Whether a node is a tensor of floating-point numbers."""
    return floating(value(node))


def floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _as(x: Any, dtype: torch.dtype | None) -> Any:
    return x.to(dtype) if dtype is not None and floating(x) else x


def _retyped(args: Any, dtype: torch.dtype | None, node: Node) -> Any:
    """Arguments that name a floating-point dtype name `dtype` instead."""
    if dtype is None or node.target is operator.getitem:
        return args

    def retype(x: Any) -> Any:
        return dtype if isinstance(x, torch.dtype) and x.is_floating_point else x

    return torch.utils._pytree.tree_map(retype, args)
