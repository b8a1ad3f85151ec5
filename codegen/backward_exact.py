"""Which regions have exact backward kernels: each element of a gradient of Q, K and V is written once."""

from __future__ import annotations

from fusecomp.codegen.backward_frame import GradientFrame, roles
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Apply, Const, Expr, Load, Var, parts, variables
from fusecomp.ir.poly import poly
from fusecomp.ir.region import Access, AttentionRegion


def require_gradients(frame: GradientFrame) -> None:
    """Raise KernelError with the reason where no backward kernel is exact."""
    region = frame.region
    if frame.rescue is not None and places(frame.rescue) != places(frame):
        raise KernelError("no backward kernel: rows that see no key read other things that learn than the rest do")
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


def places(frame: GradientFrame) -> list[tuple[str, Expr, str]]:
    """Where a pass reads what learns."""
    return [(leaf.name, leaf.load, leaf.source) for leaf in frame.leaves]


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
