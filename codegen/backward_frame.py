"""Every decision of a backward kernel, taken before a line of it is written.

    P  = exp(S - lse)        dV = sum over rows of  (weight P) dO
    dP = weight dO V^T       dS = P (dP - delta),   delta = rowsum(dO O)
    dQ_t, dK_t               dscore_t = dS * dS/dscore_t, times K_t and Q_t

dS/dscore_t = `factor` * `rest`: the factor multiplies the finished sum, the rest each element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fusecomp.codegen.base2 import Exponent, exponent
from fusecomp.codegen.cheaper import cheaper
from fusecomp.codegen.derivative import d_score, factored
from fusecomp.codegen.frame import Frame, merged
from fusecomp.codegen.printer import Names
from fusecomp.codegen.values import Values, element_values
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply, depends_on_score, substitute
from fusecomp.ir.expr import Apply, Const, Expr, Load, Score, Var, parts, transform, variables
from fusecomp.ir.poly import poly
from fusecomp.ir.ranges import Reach, reach
from fusecomp.ir.region import Access, AttentionRegion

INNER = 100
"""Score(INNER + i) stands for the i-th part that S and its derivative share."""


@dataclass(frozen=True)
class GradientFrame(Frame):
    """A region under the plan of one of its backward kernels; query heads are never packed."""

    @cached_property
    def raw(self) -> Expr:
        """S as it was written."""
        return merged(self.region.score)

    @cached_property
    def terms(self) -> tuple[int, ...]:
        """The products that S uses apart."""
        return (0,) if self.summed else tuple(range(len(self.region.products)))

    @cached_property
    def inner(self) -> tuple[tuple[str, Expr], ...]:
        """Costly parts of S that its derivative needs too, innermost first: tanh_score = tanh(score * 0.125 / 30)."""
        wanted = {x for t in self.terms for x in parts(d_score(self.raw, t))}
        found = [x for x in parts(self.raw) if x in wanted and _costly(x)]
        found.sort(key=lambda x: len(list(parts(x))))
        names: list[str] = []
        for x in found:
            stem = f"{x.op}_score"  # type: ignore[attr-defined]
            names.append(stem if stem not in names else f"{stem}_{len(names)}")
        return tuple(zip(names, found, strict=True))

    def shared(self, e: Expr, below: int | None = None) -> Expr:
        """`e` with its inner parts (the first `below` of them) by name, the rest in few instructions."""
        places = {x: Score(INNER + i) for i, (_, x) in enumerate(self.inner[:below])}
        return cheaper(transform(e, places.get))

    @cached_property
    def exponent(self) -> Exponent:
        found = exponent(self.shared(self.raw), self.moving)
        return Exponent(self.shared(self.raw), 1.0, True) if exponent(self.score, self.moving).natural else found

    @cached_property
    def derivative(self) -> dict[int, tuple[Expr, float]]:
        """(rest, factor) of dS/dscore_t."""
        found = {}
        for t in self.terms:
            rest, factor = factored(d_score(self.raw, t))
            found[t] = self.shared(rest), factor
        return found

    def d_name(self, product: int) -> str:
        """The gradient of one product's scores."""
        t = 0 if self.summed else product
        return f"d_score{t or ''}"

    def factor_of(self, product: int) -> float:
        return self.derivative[0 if self.summed else product][1]

    @cached_property
    def element(self) -> Values:
        """What S, its derivative, the mask and the weight read."""
        bounds = [x.edge for found in (self.reach, self.rows_reach) for x in (*found.lower, *found.upper)]
        inner = [self.shared(x, i) for i, (_, x) in enumerate(self.inner)]
        rests = [rest for rest, _ in self.derivative.values()]
        weight = [self.weight] if self.weight is not None else []
        return element_values(
            [self.exponent.score, *inner, *rests, *bounds, *self.region.keep, *weight], self.kv_idx.name
        )

    @cached_property
    def tile_names(self) -> Names:
        inner: dict[Expr, str] = {Score(INNER + i): name for i, (name, _) in enumerate(self.inner)}
        return super().tile_names.having(inner)

    @cached_property
    def may_be_empty(self) -> bool:
        """Whether some row may see no key."""
        return self.region.sink is None and replace_skeleton(self).needs_pivot

    # ------------------------------------------------------------------------------------------------------------
    # Keys: the axes that dK and dV have, and those they sum over

    @cached_property
    def rows_reach(self) -> Reach:
        """Bounds on q_idx, affine in kv_idx."""
        return reach(self.region.keep, self.kv_idx.name, self.q_idx.name)

    @cached_property
    def shares(self) -> dict[Var, int]:
        """axis -> values of it that read the same keys: 1, the heads of a group, or 0 for all of them."""
        accesses = [*(p.k for p in self.region.products), self.region.v]
        found = {v: {_share(a, v) for a in accesses} for v in self.region.batch}
        for v, shares in found.items():
            if len(shares) > 1:
                raise KernelError(f"no backward kernel: K and V are shared differently along {v.name}")
        return {v: shares.pop() for v, shares in found.items()}

    @cached_property
    def key_axes(self) -> tuple[Var, ...]:
        """The axes that one program of the key gradients has a single value of."""
        return tuple(_grouped(v, n) for v, n in self.shares.items() if n)

    @cached_property
    def members(self) -> tuple[Var, ...]:
        """The axes that such a program sums over."""
        found = [v if not n else Var(f"{v.name}_member", Const(n)) for v, n in self.shares.items()]
        return tuple(v for v, n in zip(found, self.shares.values(), strict=True) if n != 1)

    @cached_property
    def summed_axes(self) -> frozenset[str]:
        """The region's axes that vary inside a program of the key gradients."""
        return frozenset(v.name for v, n in self.shares.items() if n != 1)

    def key_access(self, a: Access) -> tuple[Expr, ...]:
        """The index of K or V in the axes of a program: h // 3 = h_group."""
        first: dict[Expr, Expr] = {v: apply("mul", _grouped(v, n), Const(n)) for v, n in self.shares.items() if n > 1}
        return tuple(substitute(e, first) for e in a.index)


def replace_skeleton(frame: Frame) -> Frame:
    """The frame of the forward kernel."""
    return Frame(frame.region, replace(frame.plan, skeleton="prefill"))


def _costly(e: Expr) -> bool:
    return isinstance(e, Apply) and bool(e.primitive.sfu) and e.op != "div" and depends_on_score(e)


def _grouped(v: Var, n: int) -> Var:
    return v if n == 1 else Var(f"{v.name}_group", apply("floordiv", v.size, Const(n)))


def _share(a: Access, v: Var) -> int:
    """How many values of an axis read the same element, 0 for all."""
    groups = {
        int(x.operands[1].value) if _is_group(x, v) else 1  # type: ignore[attr-defined]
        for e in a.index
        for x in _outermost(e, v)
    }
    return 0 if not groups else groups.pop() if len(groups) == 1 else 1


def _is_group(e: Expr, v: Var) -> bool:
    match e:
        case Apply("floordiv", (x, Const(int()))):
            return x == v
    return False


def _outermost(e: Expr, v: Var) -> list[Expr]:
    """v itself, or v // group, wherever it stands."""
    if e == v or _is_group(e, v):
        return [e]
    return [x for y in e.args for x in _outermost(y, v)]


# ----------------------------------------------------------------------------------------------------------------
# What can be written


def require_gradients(frame: GradientFrame) -> None:
    """Raise KernelError with the reason where no backward kernel is exact."""
    region = frame.region
    if region.filled_score is not None:
        raise KernelError("no backward kernel: rows that see no key average over all of them")
    if frame.addressed.tiles or frame.addressed.hoisted:
        raise KernelError("no backward kernel: keys are found through a table")
    for p in region.products:
        _require_apart(p.q, p.q.index, (*region.batch, region.q_idx, p.d))
        _require_apart(p.k, frame.key_access(p.k), (*frame.key_axes, region.kv_idx, p.d))
    _require_apart(region.v, frame.key_access(region.v), (*frame.key_axes, region.kv_idx, region.dv))
    accesses = roles(region)
    for i, a in enumerate(accesses):
        for b in accesses[i + 1 :]:
            if a.operand == b.operand and not _disjoint(a, b):
                raise KernelError(f"no backward kernel: {a} and {b} may be the same element")


def roles(region: AttentionRegion) -> tuple[Access, ...]:
    """Q and K of each product, and V."""
    return (*(a for p in region.products for a in (p.q, p.k)), region.v)


def _disjoint(a: Access, b: Access) -> bool:
    """Whether two accesses of one tensor provably never meet: constants that differ in one coordinate."""
    pairs = zip(a.index, b.index, strict=True)
    return any(isinstance(x, Const) and isinstance(y, Const) and x != y for x, y in pairs)


def _require_apart(a: Access, index: tuple[Expr, ...], axes: tuple[Var, ...]) -> None:
    """Each element of a gradient is written once: the index decides every axis."""
    if any(isinstance(x, Load) for e in index for x in parts(e)):
        raise KernelError(f"no backward kernel: {a} is read through a table")
    decided = {v for e in index for v in digits(e)}
    missing = [v.name for v in axes if v not in decided]
    if missing:
        raise KernelError(f"no backward kernel: the gradient of {a} is a sum over {', '.join(missing)}")


def digits(e: Expr) -> frozenset[Var]:
    """The indices that the value of `e` decides: those of h, b * H + h, kv_idx + 3."""
    moving = {m: c for m, c in poly(e).items() if any(variables(f) for f in m)}
    if len(moving) == 1:
        ((monomial, _),) = moving.items()
        factors = [f for f in monomial if variables(f)]
        return frozenset(f for f in factors if isinstance(f, Var)) if len(factors) == 1 else frozenset()
    for v in (x for x in parts(e) if isinstance(x, Var)):
        if apply("mod", e, v.size) == v:
            return frozenset({v}) | digits(apply("floordiv", e, v.size))
    return frozenset()


def covers(region: AttentionRegion, name: str) -> bool:
    """Whether the gradient of an operand is written whole: one access, a different whole index in each dimension."""
    accesses = [a for a in roles(region) if a.operand == name]
    if len(accesses) > 1:
        return False
    shape = region.operand(name).shape
    for e, size in zip(accesses[0].index, shape, strict=True):
        match e:
            case Var(_, own) if own == size:
                continue
            case Apply("floordiv", (Var(_, own), c)) if apply("floordiv", own, c) == size:
                continue
            case Const(0) if size == Const(1):
                continue
        return False
    return True
