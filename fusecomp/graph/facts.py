"""What an FX graph says about itself: order, shapes, storages, writes, and the user's source lines."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fusecomp.ir.algebra import apply, const
from fusecomp.ir.expr import Cast, Const, Expr, Size

KEPT = "fusecomp_kept"
"""In the meta of calls that are no tensor operations."""


@dataclass(frozen=True)
class Place:
    """A line of the user's code."""

    where: str = ""
    """"model.py:18"."""
    source: str = ""
    """The text of the line."""


class Facts:
    """Read-only knowledge of one graph, computed on demand."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.order)}
        self.names = {node.name: node for node in graph.nodes}

    @cached_property
    def writes(self) -> dict[int, list[int]]:
        """Storage -> positions of the nodes that write into it."""
        written = defaultdict(list)
        for node, place in self.position.items():
            for target in written_arguments(node):
                if (s := storage(target)) is not None:
                    written[s].append(place)
        return written

    def written_between(self, node: Node, first: int, last: int) -> bool:
        """Whether some node at a position in (first, last) writes into the memory of `node`."""
        return self.first_write(node, first, last) is not None

    def first_write(self, node: Node, first: int, last: int) -> Node | None:
        """The first node at a position in (first, last) that writes into the memory of `node`."""
        s = storage(node) if self.writes else None
        at = min((p for p in self.writes.get(s, ()) if first < p < last), default=None) if s is not None else None
        return None if at is None else self.order[at]


def word(node: Node) -> str:
    """What a Dynamo or ATen node calls, as a lower-case word."""
    target = node.target
    if isinstance(target, str):
        return target.rpartition(".")[2].lower()
    return str(getattr(target, "__name__", target)).lower()


def noticed(node: Node) -> bool:
    """Whether somebody may notice that a node ran, though nothing reads it."""
    return node.is_impure() or KEPT in node.meta


def erase_dead(graph: Graph) -> None:
    """Erase what nothing reads and nobody notices.

    `Graph.eliminate_dead_code` goes on into the bodies of operators with a graph of their own, which are Dynamo's, and
    takes their in-place methods for dead.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and not noticed(node):
            graph.erase_node(node)


def recorded_value(node: Node) -> Any:
    """The fake tensor or number that Dynamo or make_fx found a node to be."""
    return node.meta.get("example_value", node.meta.get("val"))


def op_name(node: Node) -> str:
    """The ATen name without overload: "add", "softmax", "copy_", "getitem"; "" for what is no call."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return getattr(target, "__name__", "") if node.op == "call_function" else ""


def value(node: Any) -> Any:
    """The fake tensor, symbolic number or tuple that a node stands for."""
    return node.meta.get("val") if isinstance(node, Node) else node


def copy_of(gm: GraphModule) -> GraphModule:
    """Another graph with the same nodes, over the same submodules and tensors."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(gm.graph._codegen)
    made = GraphModule(gm, graph)
    made.meta.update(gm.meta)
    return made


def is_tensor(node: Any) -> bool:
    return isinstance(value(node), torch.Tensor)


def shape(node: Node) -> tuple[Expr, ...]:
    """Lengths of a tensor node's axes."""
    return tuple(size_expr(s) for s in value(node).shape)


def dtype(node: Node) -> str:
    """Short torch name of a tensor node's dtype."""
    return short(value(node).dtype)


def short(t: torch.dtype) -> str:
    return str(t).removeprefix("torch.")


def storage(node: Node) -> int | None:
    """Which memory a tensor node lies in: views share it."""
    v = value(node)
    if not isinstance(v, torch.Tensor):
        return None
    try:
        return int(v.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def reach(start: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Everything reachable from `start`, itself included."""
    seen = set(start)
    stack = list(seen)
    while stack:
        for n in step(stack.pop()):
            if n not in seen:
                seen.add(n)
                stack.append(n)
    return seen


def said(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    """An argument of a call, positional or by keyword."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def written_arguments(node: Node) -> list[Node]:
    """The tensor arguments that a node writes into (`detach_` changes no value).

    An operator with a graph of its own writes into all of them where some node of that graph writes; a launch of the
    user's Triton kernel always does.
    """
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return [n for n in node.all_input_nodes if is_tensor(n)] if body_writes(node) else []
    if not isinstance(node.target, torch._ops.OpOverload) or op_name(node) == "detach_":
        return []
    found = []
    for i, name in written_places(node.target):
        passed = said(node.args, node.kwargs, i, name)
        found += [x for x in (passed if isinstance(passed, list | tuple) else [passed]) if isinstance(x, Node)]
    return found


def overwritten(node: Node, place: Node) -> bool:
    """Whether something after `place` writes into the memory of `node`."""
    memory, later = storage(node), place
    while memory is not None and later.op != "root":
        if any(storage(target) == memory for target in written_arguments(later)):
            return True
        later = later.next
    return False


@cache
def written_places(op: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes into."""
    infos = [(i, a.name, a.alias_info) for i, a in enumerate(op._schema.arguments)]
    return tuple((i, name) for i, name, info in infos if info is not None and info.is_write)


def body_writes(node: Node) -> bool:
    """Whether a higher-order operator may write into its arguments."""
    held = [n for n in node.all_input_nodes if n.op == "get_attr" and not is_tensor(n)]
    found = [getattr(n.graph.owning_module, str(n.target), None) for n in held]
    bodies = [b for b in found if isinstance(b, GraphModule)]
    return "mutation" in str(node.target) or any(writes(n) for b in bodies for n in b.graph.nodes)


IN_PLACE = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
            operator.imod, operator.ipow}  # fmt: skip


def writes(node: Node) -> bool:
    """Whether a node of Dynamo's or of an ATen graph writes: x.add_(1), x[0] = 1, x += 1, out=x, aten.copy_(x, y)."""
    if node.op not in ("call_function", "call_method"):
        return False
    method = word(node).endswith("_") and not word(node).endswith("__")
    return method or node.target in IN_PLACE or "out" in node.kwargs or bool(written_arguments(node))


def size_expr(n: Any) -> Expr:
    """A Python or symbolic integer as an expression in Sizes."""
    if isinstance(n, int):
        return Const(n)
    ranges = n.node.shape_env.var_to_range
    signed = frozenset(s for s in n.node.expr.free_symbols if s not in ranges or not ranges[s].lower >= 0)
    return sympy_expr(n.node.expr, signed)


def sympy_expr(e: Any, signed: frozenset[Any] = frozenset()) -> Expr:
    """A shape environment's sympy expression as ours. Raises ValueError for what index arithmetic does not need.

    A symbol that may be negative stands under a cast, which hides from the algebra that a Size is natural.
    """
    if e.is_Integer:
        return Const(int(e))
    if e.is_Symbol:
        return Cast(Size(str(e)), "int64") if e in signed else Size(str(e))
    name = type(e).__name__
    if name in SYMPY_OPS:
        op, args = SYMPY_OPS[name], [sympy_expr(a, signed) for a in e.args]
        total = args[0]
        for a in args[1:]:
            total = apply(op, total, a)
        return total
    if name == "Pow" and e.args[1].is_Integer and 0 < int(e.args[1]) < 5:
        base = sympy_expr(e.args[0], signed)
        total = base
        for _ in range(int(e.args[1]) - 1):
            total = apply("mul", total, base)
        return total
    raise ValueError(f"a length of the form {e}")


SYMPY_OPS = {
    "Add": "add", "Mul": "mul", "FloorDiv": "floordiv", "CleanDiv": "floordiv", "Mod": "mod", "PythonMod": "mod",
    "Max": "max", "Min": "min",
}  # fmt: skip


def number(x: Any) -> Expr | None:
    """A Python or symbolic number, or a node that stands for one, as an expression; None for anything else."""
    v = value(x)
    if isinstance(v, bool | int | float):
        return const(v)
    if isinstance(v, torch.SymInt):
        return size_expr(v)
    if isinstance(v, torch.SymFloat):
        return const(float(v)) if not unbacked(v) else None
    return None


def unbacked(v: Any) -> bool:
    """Whether a symbolic number is known only at run time (it came out of a tensor)."""
    env = v.node.shape_env
    return any(s not in env.var_to_range or str(s).startswith(("u", "zuf")) for s in v.node.expr.free_symbols)


TORCH = str(Path(torch.__file__).parent)
FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def place(node: Node) -> Place:
    """The user's line that a node came from: the innermost frame of its stack trace that is not PyTorch's own."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return Place()
    outside = [f for f in frames if not f[0].startswith(TORCH)]
    path, line, source = (outside or frames)[-1]
    return Place(f"{path}:{line}", source.strip())


LABEL = "fusecomp_label"


def label(node: Node) -> str:
    """What the program calls an input of the graph; empty of what the graph computes, and where it has no name."""
    return str(node.meta.get(LABEL, ""))


def is_getitem(node: Node) -> bool:
    return node.target is operator.getitem
