"""Which dtype an operation computes in, by those of its operands.

    int64 <- int32 + int64          float32 <- float32 x float64, of which the latter is one number: no axis, no say
"""

from __future__ import annotations

from torch.fx import Node

from fusecomp.graph.facts import dtype, is_tensor, value
from fusecomp.ir.algebra import cast
from fusecomp.ir.expr import Expr, Load, dtype_kind, kind, parts


def widens(node: Node) -> bool:
    """Whether a number of fewer bits becomes an int64."""
    given = [dtype(n) for n in node.all_input_nodes if is_tensor(n)]
    return dtype(node) == "int64" and any(d != "int64" and dtype_kind(d) == "int" for d in given)


def promoted(node: Node, x: Node, e: Expr) -> Expr:
    """The operand x of a pointwise operation, e, in the dtype that it is computed in: a float64 without axes in that of
    others with axes, which kernels hold in float32."""
    if dtype(x) != "float64" or value(x).dim():
        return e
    others = {dtype(n) for n in node.all_input_nodes if is_tensor(n) and value(n).dim()}
    floats = {d for d in others if dtype_kind(d) == "float"}
    return single(e) if floats and "float64" not in floats else e


def single(e: Expr) -> Expr:
    """What is read of a float64 tensor, in float32: beside scores kernels compute in no other dtype."""
    longer = any(isinstance(x, Load) and x.dtype == "float64" for x in parts(e))
    return cast(e, "float32") if longer and kind(e) == "float" else e
