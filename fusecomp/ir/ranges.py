"""Which keys a query tile can reach: the one account of skipped work, for the cost model and the kernels alike.

A mask term that is linear in kv_idx with coefficient +-1 bounds it:

    q_idx >= kv_idx              kv_idx <  q_idx + 1
    q_idx - kv_idx < W           kv_idx >= q_idx - W + 1
    kv_idx < lengths[b]          kv_idx <  lengths[b]
    kv_idx // 16 < pages[b]      kv_idx <  16 pages[b]
    kv_idx < P or q_idx >= kv_idx  kv_idx < max(P, q_idx + 1)

Every other term is `loose`: it is tested on each tile that is visited. An alternative still ends where the later of its
sides does, and what rises with the query where it ends for the last one:

    kv_idx < L - 4  or  kv_idx < L and tree[...]        kv_idx <  L
    kv_idx < L + q_idx // 8                             kv_idx <  L + (M - 1) // 8
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fusecomp.ir.algebra import COMPARE, apply, substitute
from fusecomp.ir.expr import Apply, Const, Expr, Var, kind, parts, variables
from fusecomp.ir.poly import Poly, from_poly, poly


@dataclass(frozen=True)
class Bound:
    """kv_idx >= edge (a lower bound) or kv_idx < edge (an upper one); edge is affine in q_idx, or the larger or smaller
    of two such that grow alike."""

    edge: Expr
    slope: int
    """d edge / d q_idx, at its steepest. The edge is monotone in q_idx, so its extremes over a tile lie at the tile's
    ends."""
    term: Expr
    """The mask term it came from."""

    def least(self, first: Expr, last: Expr, q_idx: Var) -> Expr:
        """The smallest edge over the query rows first..last (both included)."""
        return substitute(self.edge, {q_idx: first if self.slope >= 0 else last})

    def greatest(self, first: Expr, last: Expr, q_idx: Var) -> Expr:
        """The largest edge over the query rows first..last."""
        return substitute(self.edge, {q_idx: last if self.slope >= 0 else first})


@dataclass(frozen=True)
class Reach:
    """What the keep terms say about kv_idx.

    A query tile visits [max lower.least, min upper.greatest); inside [max lower.greatest, min upper.least) only the
    `loose` terms still need a test (none: no mask at all).
    """

    lower: tuple[Bound, ...] = ()
    upper: tuple[Bound, ...] = ()
    loose: tuple[Expr, ...] = ()

    @property
    def tested(self) -> tuple[Expr, ...]:
        """The terms that a tile cut by a bound tests: an upper bound that all rows share is where its keys end."""
        sloped = (x for x in self.upper if x.slope)
        return (*(x.term for x in (*self.lower, *sloped)), *self.loose)


@lru_cache(maxsize=1024)
def reach(keep: tuple[Expr, ...], q_idx: str = "q_idx", kv_idx: str = "kv_idx") -> Reach:
    """Sort mask terms into bounds on kv_idx and loose ones."""
    lower: list[Bound] = []
    upper: list[Bound] = []
    loose: list[Expr] = []
    for term in keep:
        match bound_of(term, q_idx, kv_idx):
            case "lower", bound:
                lower.append(bound)
            case "upper", bound:
                upper.append(bound)
            case _:
                loose.append(term)
                upper += ends(term, q_idx, kv_idx)
    return Reach(tuple(lower), tuple(upper), tuple(loose))


def ends(term: Expr, q_idx: str, kv_idx: str) -> tuple[Bound, ...]:
    """The upper bounds, the same for all queries, that follow from a term."""
    match term:
        case Apply("and", (a, b)):
            return (*ends(a, q_idx, kv_idx), *ends(b, q_idx, kv_idx))
        case Apply("or", (a, b)):
            return tuple(later(x, y) for x in ends(a, q_idx, kv_idx) for y in ends(b, q_idx, kv_idx))
        case Apply("not", (Apply("and" | "or" as op, (a, b)),)):
            return ends(Apply("or" if op == "and" else "and", (apply("not", a), apply("not", b))), q_idx, kv_idx)
        case Apply("where", (c, x, y)) if kind(term) == "bool":
            return ends(Apply("or", (Apply("and", (c, x)), Apply("and", (apply("not", c), y)))), q_idx, kv_idx)
    match bound_of(at_last(term, q_idx), q_idx, kv_idx):
        case "upper", bound if not bound.slope:
            return (replace(bound, term=term),)
    return ()


def at_last(term: Expr, q_idx: str) -> Expr:
    """The term for the last query, where it holds for that one whenever it does for another."""
    row = next((x for x in parts(term) if isinstance(x, Var) and x.name == q_idx), None)
    match term:
        case Apply(op, (a, b)) if row is not None and op in COMPARE and kind(a) != "float" and kind(b) != "float":
            slack = poly(apply("sub", b, a) if COMPARE[op][0] > 0 else apply("sub", a, b))
            if all(c > 0 and rises(m, row) for m, c in slack.items() if any(q_idx in variables(f) for f in m)):
                return substitute(term, {row: apply("sub", row.size, Const(1))})
    return term


def rises(monomial: tuple[Expr, ...], row: Var) -> bool:
    """Whether a product never falls as the row rises: the row itself, or a quotient of a sum that rises."""
    match monomial:
        case (Var(name, _),):
            return name == row.name
        case (Apply("floordiv", (x, Const(int(c)))),) if c > 0:
            inside = {m: k for m, k in poly(x).items() if any(row.name in variables(f) for f in m)}
            return all(k > 0 and rises(m, row) for m, k in inside.items())
    return False


def later(x: Bound, y: Bound) -> Bound:
    """kv_idx < the larger of two edges."""
    if x.edge == y.edge or apply("le", y.edge, x.edge) == Const(True):
        return x
    return y if apply("le", x.edge, y.edge) == Const(True) else Bound(apply("max", x.edge, y.edge), 0, x.term)


def bound_of(term: Expr, q_idx: str, kv_idx: str) -> tuple[str, Bound] | None:
    """The bound that one term puts on kv_idx, or None."""
    match term:
        case Apply("or", (a, b)):
            return _either(term, bound_of(a, q_idx, kv_idx), bound_of(b, q_idx, kv_idx))
        case Apply(op, (a, b)) if op in COMPARE and kind(a) != "float" and kind(b) != "float":
            sign, strict = COMPARE[op]
        case _:
            return None
    # slack = sign (b - a) - strict >= 0, split as  c kv_idx + slope q_idx + rest
    difference = apply("sub", b, a) if sign > 0 else apply("sub", a, b)
    slack = poly(apply("sub", difference, Const(strict)))
    if (page := _page(slack, kv_idx)) is not None:
        return _by_page(slack, page, term, {q_idx, kv_idx})
    c, slack = _coefficient(slack, kv_idx)
    slope, rest = _coefficient(slack, q_idx)
    if c not in (1, -1) or any(variables(f) & {q_idx, kv_idx} for m in rest for f in m):
        return None
    if c == -1:  # kv_idx <= slope q_idx + rest
        edge = from_poly({**slack, (): slack.get((), 0) + 1})
        return "upper", Bound(edge, slope, term)
    edge = from_poly({m: -k for m, k in slack.items()})  # kv_idx >= -(slope q_idx + rest)
    return "lower", Bound(edge, -slope, term)


def _either(term: Expr, x: tuple[str, Bound] | None, y: tuple[str, Bound] | None) -> tuple[str, Bound] | None:
    """kv_idx < e or kv_idx < f: kv_idx < max(e, f); kv_idx >= e or kv_idx >= f: kv_idx >= min(e, f)."""
    if x is None or y is None or x[0] != y[0] or x[1].slope * y[1].slope < 0:
        return None
    (side, one), (_, other) = x, y
    wider = "le" if side == "upper" else "ge"
    for a, b in ((one, other), (other, one)):
        if apply(wider, a.edge, b.edge) == Const(True):
            return side, replace(b, term=term)
    edge = apply("max" if side == "upper" else "min", one.edge, other.edge)
    return side, Bound(edge, max(one.slope, other.slope, key=abs), term)


def _coefficient(p: Poly, name: str) -> tuple[int, Poly]:
    """(coefficient of the index alone, the polynomial without that monomial)."""
    for monomial, c in p.items():
        if len(monomial) == 1 and isinstance(monomial[0], Var) and monomial[0].name == name:
            return c, {m: k for m, k in p.items() if m != monomial}
    return 0, p


def _page(slack: Poly, kv_idx: str) -> Expr | None:
    """kv_idx // n, where that is how the key stands in a sum."""
    for monomial in slack:
        match monomial:
            case (Apply("floordiv", (Var(name, _), Const(int(n)))) as page,) if name == kv_idx and n > 0:
                return page
    return None


def _by_page(slack: Poly, page: Expr, term: Expr, moving: set[str]) -> tuple[str, Bound] | None:
    """c kv_idx // n + rest >= 0:  kv_idx < n (rest + 1) for c = -1,  kv_idx >= -n rest for c = 1"""
    c, size = slack[(page,)], page.args[1]
    rest = {m: k for m, k in slack.items() if m != (page,)}
    if c not in (1, -1) or any(variables(f) & moving for m in rest for f in m):
        return None
    if c == -1:
        return "upper", Bound(apply("mul", from_poly({**rest, (): rest.get((), 0) + 1}), size), 0, term)
    return "lower", Bound(apply("mul", from_poly({m: -k for m, k in rest.items()}), size), 0, term)
