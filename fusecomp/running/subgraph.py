"""Running the graph's own nodes of one attention: the judge of every kernel, in the model's dtype or in float64."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusecomp.graph.facts import op_name, reach
from fusecomp.graph.holding import held
from fusecomp.patterns.build import Match
from fusecomp.patterns.contraction import READERS
from fusecomp.patterns.naming import SizeSource


def run_original(
    match: Match, inputs: Sequence[Tensor], dtype: torch.dtype | None = None, result: Node | None = None
) -> Tensor:
    """O, or another `result`, from the nodes as the user wrote them, on `inputs` (in region.operands order).

    With `dtype`, every floating-point tensor and cast of the path becomes that dtype instead; but numbers that are made
    of integers are made as written, in bfloat16 with a gap between 256 and 258. A tensor off the path lends only its
    shape; it stands as zeros.
    """
    env = {n: _as(x, dtype) for n, x in zip(match.inputs, inputs, strict=True)}
    run, last = Run(match, dtype, inputs[0].device, env), result or match.output
    found: Tensor = run.value(last, run.readers(last))
    return found


@dataclass(frozen=True)
class Run:
    """The path of one attention, node by node."""

    match: Match
    dtype: torch.dtype | None
    device: torch.device
    env: dict[Node, Any]
    """The value of each node that is known."""

    def value(self, result: Node, readers: Mapping[Node, int] | None = None) -> Any:
        """The value of a node, after those above it: not recursively, as a path may be deeper than Python's stack.
        What all of its `readers` have read is not kept: as eager, so that no more memory is taken than it takes."""
        stack, left = [result], Counter(readers or {})
        while stack:
            node = stack[-1]
            if node in self.env:
                stack.pop()
            elif not self.computed(node):
                self.env[node] = self.given(node)
            elif waiting := [n for n in node.all_input_nodes if n not in self.env]:
                stack += waiting
            else:
                self.env[node] = self.call(node)
                left.subtract(node.all_input_nodes)
                for x in node.all_input_nodes:
                    if left[x] == 0:
                        del self.env[x]
        return self.env[result]

    def readers(self, result: Node) -> Counter[Node]:
        """How many of the nodes that `result` is made of read each of them."""
        made = [n for n in reach([result], self.reads) if self.reads(n)]
        return Counter(x for n in made for x in self.reads(n))

    def reads(self, node: Node) -> list[Node]:
        """What a node is made of here; nothing where its value is known or lent."""
        return node.all_input_nodes if node not in self.env and self.computed(node) else []

    def computed(self, node: Node) -> bool:
        val = node.meta.get("val")
        on_path = node in self.match.path or isinstance(val, list | tuple)
        return on_path and node.op == "call_function" and not fixed(val)

    def given(self, node: Node) -> Any:
        """What a node off the path lends."""
        known = _as(constant(node), self.dtype)
        return stand_in(node.meta.get("val"), self.dtype, self.device) if known is None else known

    def call(self, node: Node) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
        if self.dtype is None and op_name(node) in MIXED:
            args = _in_dtype(args, node.meta["val"].dtype)
        if op_name(node) == "detach_":
            return args[0].detach()
        if self.dtype is not None and not any(map(floating, torch.utils._pytree.tree_leaves((args, kwargs)))):
            return _as(node.target(*args, **kwargs), self.dtype)  # type: ignore[operator]
        return node.target(*_retyped(args, self.dtype, node), **_retyped(kwargs, self.dtype, node))  # type: ignore[operator]


def inside(match: Match, inputs: Sequence[Tensor]) -> bool:
    """Whether every index that the path makes of integers alone lies inside the tensor that it indexes: on a GPU, one
    outside ends the process."""
    run = Run(match, None, inputs[0].device, dict(zip(match.inputs, inputs, strict=True)))
    for node in match.path:
        for index, x, dim in indices(node):
            if whole(run, index):
                at, length = run.value(index), concrete(x.meta["val"].shape[dim])
                least = -length if bare(node) in FROM_THE_END else 0
                if at.numel() and (int(at.min()) < least or int(at.max()) >= length):
                    return False
    return True


def indices(node: Node) -> Iterator[tuple[Node, Node, int]]:
    """(positions, tensor, axis) of what a node reads or writes at positions."""
    name = bare(node)
    if name in ("index", "index_put"):
        given = list(enumerate(node.args[1]))  # type: ignore[arg-type]
        if not any(i is not None and i.meta["val"].dtype == torch.bool for _, i in given):
            yield from ((i, node.args[0], dim) for dim, i in given if i is not None)  # type: ignore[misc]
    elif name in BY_AXIS and isinstance(node.args[1], int):
        yield node.args[2], node.args[0], node.args[1]  # type: ignore[misc]
    elif name == "take_along_dim" and len(node.args) > 2:
        yield node.args[1], node.args[0], node.args[2]  # type: ignore[misc]
    elif name == "embedding":
        yield node.args[1], node.args[0], 0  # type: ignore[misc]


def bare(node: Node) -> str:
    """The operator, in place or not."""
    return op_name(node).removesuffix("_").removeprefix("_unsafe_")


FROM_THE_END = {"index", "index_put", "index_fill"}
"""What counts negative positions from the end; to all others they are outside."""
BY_AXIS = {"gather", "index_select", "index_add", "index_copy", "index_fill", "scatter", "scatter_add"}


def whole(run: Run, index: Node) -> bool:
    """Whether a node is made of integers and truth values alone: what a sort of scores finds lies inside anyway."""
    above = reach([index], lambda n: [x for x in n.all_input_nodes if run.computed(x)])
    values = (n.meta.get("val") for n in above)
    return not any(isinstance(v, Tensor) and v.is_floating_point() for v in values)


MIXED = {*READERS, "softmax", "log_softmax"}
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


def fixed(n: Any) -> bool:
    """Whether a node's value is a number that the graph is compiled for: what it is read from lends only its shape."""
    if isinstance(n, torch.SymInt | torch.SymFloat):
        return bool(n.node.expr.is_number)
    return isinstance(n, int | float)


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
