"""Several bounds of the keys or the queries that a tile visits as one, in Triton text."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from fusecomp.ir.expr import Cast, Load, Var, parts
from fusecomp.ir.ranges import Bound


def chain(op: str, texts: Sequence[str]) -> str:
    """tl.minimum(tl.minimum(a, b), c)."""
    total, *others = texts
    for body in others:
        total = f"tl.{op}({total}, {body})"
    return total


def in_int32(body: str, bounds: Iterable[Bound], axes: Container[str]) -> str:
    """Positions are int32; a bound read from an int64 tensor, or computed from a number of the program's own or one of
    the batch `axes`, is not."""
    used = [x for bound in bounds for x in parts(bound.edge)]
    numbers = any(isinstance(x, Load | Cast) and x.dtype == "int64" for x in used)
    wide = numbers or any(isinstance(x, Var) and x.name in axes for x in used)
    return f"tl.cast({body}, tl.int32)" if wide else body
