"""What a loop over blocks puts together, as one function of the block's number.

    cat([f(0), f(1), ..])[i] = f(i // n)[i mod n]     stack([f(0), f(1), ..])[k] = f(k)

as in  cat([pool[table[:, k]] for k in range(pages)], 1),  where f is a read whose numbers grow by equal steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusecomp.ir.algebra import apply, const, substitute
from fusecomp.ir.expr import Expr, Var, kind, rebuild
from fusecomp.ir.poly import poly


def series(terms: Sequence[Expr]) -> tuple[Var, Expr] | None:
    """(k, f(k)) with f(0), f(1), .. the terms; None where they are no such series."""
    k = Var("~k", const(len(terms)))
    found = terms[0] if len(terms) == 1 else line(terms[0], terms[1], k)
    if found is None or any(substitute(found, {k: const(n)}) != e for n, e in enumerate(terms)):
        return None
    return k, found


def line(first: Expr, second: Expr, k: Var) -> Expr | None:
    """f with f(0) = first and f(1) = second: numbers that differ are linear in k, all else is alike."""
    if first == second:
        return first
    if kind(first) == kind(second) == "int" and (between := difference(first, second)) is not None:
        return apply("add", first, apply("mul", const(between), k))
    alike = type(first) is type(second) and len(first.args) == len(second.args) > 0
    if not alike or rebuild(first, second.args) != second:
        return None
    parts = [line(a, b, k) for a, b in zip(first.args, second.args, strict=True)]
    return None if None in parts else rebuild(first, tuple(p for p in parts if p is not None), apply)


def difference(first: Expr, second: Expr) -> int | None:
    """second - first where it is a number."""
    rest = poly(apply("sub", second, first))
    return rest[()] if set(rest) == {()} else None

