"""Products over an axis, in every spelling, as one: out[letters] = scale * sum_contracted left * right (+ added).

    matmul, bmm, mm, mv    einsum of two operands, tensordot    addmm, baddbmm (beta = 0 ignores their input)
    linear, inner          (a * b).sum(axis), vecdot
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.fx import Node

from fusecomp.graph.facts import dtype, is_tensor, number, op_name, said, shape, value
from fusecomp.ir.algebra import const
from fusecomp.ir.expr import Const, Expr, length


@dataclass(frozen=True)
class Contraction:
    """Letters name the axes of each tensor; "." marks an axis of length 1 that is broadcast."""

    left: Node
    right: Node
    left_axes: str
    right_axes: str
    out_axes: str
    scale: Expr = Const(1.0)
    added: Node | None = None
    added_scale: Expr = Const(1.0)

    @property
    def contracted(self) -> str:
        """Letters in both operands and not in the result."""
        return "".join(a for a in self.left_axes if a in self.right_axes and a != "." and a not in self.out_axes)

    def swapped(self) -> Contraction:
        return Contraction(self.right, self.left, self.right_axes, self.left_axes, self.out_axes, self.scale,
                           self.added, self.added_scale)  # fmt: skip

    def size(self, letter: str) -> Expr:
        """Length of an axis, as the side says it that says it shorter; 1 where it is broadcast on both."""
        sides = (self.left, self.left_axes), (self.right, self.right_axes)
        said = [shape(node)[axes.index(letter)] for node, axes in sides if letter in axes]
        return min(said, key=length, default=const(1))


def contraction(node: Node) -> Contraction | None:
    """The contraction that a node computes, or None."""
    return _read(node, tuple(node.all_input_nodes)) if op_name(node) in READERS else None


@lru_cache(maxsize=4096)
def _read(node: Node, inputs: tuple[Node, ...]) -> Contraction | None:
    """Remembered for as long as the node reads the same inputs: graphs are rewritten."""
    return READERS[op_name(node)](node)  # type: ignore[no-any-return]


def _matmul(node: Node) -> Contraction | None:
    """[..., m, k] @ [..., k, n], leading axes broadcast."""
    a, b = node.args[:2]
    ra, rb = len(shape(a)), len(shape(b))
    if min(ra, rb) == 0 or (ra == 1 and rb == 1):
        return None
    batch = string.ascii_lowercase[: max(ra, rb) - 2]
    left = _batch_axes(a, batch, ra - 2) + ("MK" if ra > 1 else "K")
    right = _batch_axes(b, batch, rb - 2) + ("KN" if rb > 1 else "K")
    out = batch + ("M" if ra > 1 else "") + ("N" if rb > 1 else "")
    return Contraction(a, b, left, right, out)


def _batch_axes(x: Node, batch: str, count: int) -> str:
    """Letters of the leading axes of one operand, right-aligned; "." where it is broadcast."""
    letters = batch[len(batch) - max(count, 0) :]
    return "".join("." if s == const(1) else a for a, s in zip(letters, shape(x), strict=False))


def _einsum(node: Node) -> Contraction | None:
    """Two-operand einsum in explicit or implicit form, without repeated letters."""
    equation, operands = node.args[0], list(node.args[1])
    if len(operands) != 2 or not isinstance(equation, str):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    if not arrow:
        once = sorted(a for a in set(left + right) if (left + right).count(a) == 1 and a != ".")
        out = "..." * ("..." in inputs) + "".join(once)
    if any(len(set(x)) != len(x) for x in (t.replace("...", "") for t in (left, right, out))):
        return None
    (left, right), more = _without_ellipsis(operands, [left, right])
    out = out.replace("...", more)
    left, right = _without_lone_ones(operands[0], left, right + out), _without_lone_ones(operands[1], right, left + out)
    spec = Contraction(operands[0], operands[1], left, right, out)
    return spec if _summed_alone(spec) else None


def _without_lone_ones(x: Node, axes: str, rest: str) -> str:
    """The axes of one operand; one of length 1 that nothing else has is summed, which leaves all as it is."""
    return "".join("." if n == const(1) and a not in rest else a for a, n in zip(axes, shape(x), strict=True))


def _without_ellipsis(operands: list[Node], terms: list[str]) -> tuple[list[str], str]:
    """The terms with "..." replaced by letters that no equation uses, right-aligned; and those letters."""
    both = list(zip(operands, terms, strict=True))
    counts = [len(shape(x)) - len(t.replace("...", "")) if "..." in t else 0 for x, t in both]
    more = "αβγδεζ"[: max(counts)]
    found = []
    for (x, t), count in zip(both, counts, strict=True):
        first = t.find("...")
        lengths = shape(x)[first : first + count] if count else ()
        letters = zip(more[len(more) - count :], lengths, strict=True)
        found.append(t.replace("...", "".join("." if s == const(1) else a for a, s in letters)))
    return found, more


def _tensordot(node: Node) -> Contraction | None:
    """Sums over the given axes of both; the others follow each other."""
    a, b, over_a, over_b = node.args[:4]
    left, right = list(string.ascii_lowercase[: len(shape(a))]), list(string.ascii_uppercase[: len(shape(b))])
    for i, j in zip(over_a, over_b, strict=True):
        right[j] = left[i]
    out = [x for x in left if x not in right] + [x for x in right if x not in left]
    spec = Contraction(a, b, "".join(left), "".join(right), "".join(out))
    return spec if _summed_alone(spec) else None


def _summed_alone(spec: Contraction) -> bool:
    """No letter is summed within one operand, and no axis of length 1 stands against a longer one."""
    for axes, other in ((spec.left_axes, spec.right_axes), (spec.right_axes, spec.left_axes)):
        if any(a != "." and a not in other and a not in spec.out_axes for a in axes):
            return False
    both = [a for a in spec.left_axes if a in spec.right_axes and a != "."]
    sizes = [
        (shape(spec.left)[spec.left_axes.index(a)], shape(spec.right)[spec.right_axes.index(a)]) for a in both
    ]
    return all((a == const(1)) == (b == const(1)) for a, b in sizes)


def without_ones(x: Tensor, axes: str) -> Tensor:
    """A side without its axes of length 1 that are broadcast."""
    for n in reversed([n for n, a in enumerate(axes) if a == "."]):
        x = x.squeeze(n)
    return x


def _baddbmm(node: Node) -> Contraction | None:
    """beta * input + alpha * (a @ b) of two or three axes; beta = 0 ignores the input, even NaN in it."""
    words = ("batch1", "batch2") if op_name(node) == "baddbmm" else ("mat1", "mat2")
    added = node.args[0]
    a, b = (node.args[i] if len(node.args) > i else node.kwargs[w] for i, w in enumerate(words, 1))
    alpha, beta = (number(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))
    if alpha is None or beta is None:
        return None
    keep = None if beta in (Const(0), Const(0.0)) else added
    batch = "a" * (len(shape(a)) - 2)
    return Contraction(a, b, batch + "MK", batch + "KN", batch + "MN", _float(alpha), keep, _float(beta))


def _linear(node: Node) -> Contraction | None:
    """x @ w.T + bias"""
    x, w = node.args[:2]
    bias = said(node.args, node.kwargs, 2, "bias")
    if len(shape(w)) != 2:
        return None
    batch = string.ascii_lowercase[: len(shape(x)) - 1]
    return Contraction(x, w, batch + "K", "NK", batch + "N", added=bias)


def _sum_of_product(node: Node) -> Contraction | None:
    """(a * b).sum(axis): a contraction over a broadcast product."""
    source = node.args[0]
    dims = node.args[1] if len(node.args) > 1 else None
    if op_name(source) != "mul" or not isinstance(dims, list | tuple) or len(dims) != 1:
        return None
    a, b = source.args[:2]
    if not (is_tensor(a) and is_tensor(b)) or value(source).dtype != value(node).dtype:
        return None
    rank = len(shape(source))
    letters = string.ascii_lowercase[:rank]
    summed = int(dims[0]) % rank
    left, right = (_batch_axes(x, letters, len(shape(x))) for x in (a, b))
    keepdim = said(node.args, node.kwargs, 2, "keepdim", False)
    spec = Contraction(a, b, left, right, letters.replace(letters[summed], "." if keepdim else ""))
    if letters[summed] not in left or letters[summed] not in right or normalises(spec) or normalises(spec.swapped()):
        return None
    return spec


EXPONENTIAL = ("exp", "exp2", "exp_", "softmax", "_softmax")


def normalises(spec: Contraction) -> bool:
    """Whether a sum adds up exponentials times a mask, or anything that truth values choose: the right factor has no
    axis of its own."""
    own = set(spec.right_axes) - {"."} <= set(spec.left_axes)
    return own and (dtype(spec.right) == "bool" or exponential_above(spec.left))


def exponential_above(node: Node) -> bool:
    """Whether an exponential of the same shape lies above a tensor, behind at most a few operations."""
    level = [node]
    for _ in range(6):
        if any(op_name(n) in EXPONENTIAL for n in level):
            return True
        level = [x for n in level for x in n.all_input_nodes if is_tensor(x) and shape(x) == shape(node)]
    return False


def _vecdot(node: Node) -> Contraction | None:
    """(a * b).sum(axis), the last one unless another is given"""
    a, b = node.args[:2]
    rank = len(shape(node)) + 1
    letters = string.ascii_lowercase[:rank]
    dim = said(node.args, node.kwargs, 2, "dim", -1)
    left, right = (_batch_axes(x, letters, len(shape(x))) for x in (a, b))
    summed = letters[int(dim) % rank]
    return Contraction(a, b, left, right, letters.replace(summed, "")) if summed in left and summed in right else None


def _inner(node: Node) -> Contraction | None:
    """Sums over the last axis of both"""
    a, b = node.args[:2]
    left, right = string.ascii_lowercase[: len(shape(a))], string.ascii_uppercase[: len(shape(b))]
    if min(len(left), len(right)) == 0 or max(len(left), len(right)) == 1:
        return None
    return Contraction(a, b, left[:-1] + "K", right[:-1].replace("K", "L") + "K", left[:-1] + right[:-1])


def _float(e: Expr) -> Expr:
    return const(float(e.value)) if isinstance(e, Const) else e


READERS: dict[str, Any] = {
    "matmul": _matmul, "bmm": _matmul, "mm": _matmul, "mv": _matmul, "linalg_matmul": _matmul,
    "einsum": _einsum, "tensordot": _tensordot, "baddbmm": _baddbmm, "addmm": _baddbmm, "linear": _linear,
    "sum": _sum_of_product, "linalg_vecdot": _vecdot, "inner": _inner,
}  # fmt: skip
