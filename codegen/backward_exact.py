"""Which regions have exact backward kernels: each element of a gradient of Q, K and V is written once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial, reduce

from fusecomp.codegen.backward_frame import GradientFrame, roles
from fusecomp.codegen.backward_pieces import own_keys, vanishes
from fusecomp.codegen.derivative import derivative
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import TRUE, apply, substitute
from fusecomp.ir.expr import Apply, Const, Expr, Load, Score, Size, Var, dtype_kind, parts, transform, variables
from fusecomp.ir.poly import from_poly, is_natural, poly, upper
from fusecomp.ir.region import Access, AttentionRegion

Fixed = tuple[tuple[str, int], ...]


def require_gradients(frame: GradientFrame, fixed: Fixed = ()) -> None:
    """Raise KernelError with the reason where no backward kernel is exact. `fixed`: lengths that never change."""
    region = frame.region
    known = values_of(fixed)
    if frame.rescue is not None and places(frame.rescue) != places(frame):
        raise KernelError("no backward kernel: rows that see no key read other things that learn than the rest do")
    if frame.addressed.tiles or frame.addressed.hoisted:
        raise KernelError("no backward kernel: keys are found through a table")
    for t, p in enumerate(region.products):
        _require_apart(p.q, p.q.index, (*region.batch, region.q_idx), (p.d,), known)
        keys, _ = own_keys(frame.key_access(p.k), region.kv_idx)
        _require_apart(p.k, keys, frame.key_axes, (region.kv_idx, p.d), known)
        _require_own(frame, p.k, t, known)
    _require_apart(region.v, frame.key_access(region.v), frame.key_axes, (region.kv_idx, region.dv), known)
    accesses = roles(region)
    for x in differentiated(region):
        if x.tensor in {a.operand for a in accesses}:
            raise KernelError(f"no backward kernel: {x} is part of the scores or weights too, and its gradient a sum")
    for i, a in enumerate(accesses):
        for b in accesses[i + 1 :]:
            if a.operand == b.operand and not _disjoint(a, b, known):
                raise KernelError(f"no backward kernel: {a} and {b} may be the same element")


def differentiated(region: AttentionRegion) -> list[Load]:
    """What else S, the weights and the sink have a derivative by."""
    held = [e for e in (region.score, region.filled_score, region.weight, region.sink) if e is not None]
    reads = [(e, x) for e in held for x in parts(e) if isinstance(x, Load) and dtype_kind(x.dtype) == "float"]
    return [x for e, x in reads if derivative(e, x) != Const(0.0)]


def places(frame: GradientFrame) -> list[tuple[str, Expr, str]]:
    """Where a pass reads what learns."""
    return [(leaf.name, leaf.load, leaf.source) for leaf in frame.leaves]


def _disjoint(a: Access, b: Access, fixed: dict[Expr, Expr]) -> bool:
    """Whether two accesses of one tensor provably never meet: in some coordinate one stays below the other, or does so
    within every period, as heads of Q, K and V side by side do."""
    mine, other = sized(a.index, fixed), sized(b.index, fixed)
    other = tuple(transform(e, lambda x: Var(f"{x.name}'", x.size) if isinstance(x, Var) else None) for e in other)
    return any(_apart(x, y) for x, y in zip(mine, other, strict=True))


def _apart(x: Expr, y: Expr) -> bool:
    periods = sorted({c for e in (x, y) for m, c in poly(e).items() if m and c > 1})
    pairs = [(x, y), *((apply("mod", x, Const(c)), apply("mod", y, Const(c))) for c in periods)]
    return any(below(a, b) or below(b, a) for a, b in pairs)


def sized(index: Iterable[Expr], fixed: dict[Expr, Expr]) -> tuple[Expr, ...]:
    """The coordinates with the lengths that are known, those of their indices too."""

    def rule(x: Expr) -> Expr | None:
        return Var(x.name, substitute(x.size, fixed)) if isinstance(x, Var) else fixed.get(x)

    return tuple(transform(e, rule, apply) for e in index)


def below(x: Expr, y: Expr) -> bool:
    """x < y for all values of their indices."""
    return is_natural(apply("sub", apply("sub", y, x), Const(1)))


def _require_apart(
    a: Access, index: tuple[Expr, ...], axes: tuple[Var, ...], places: tuple[Var, ...], fixed: dict[Expr, Expr]
) -> None:
    """Each element of a gradient is written once: the index decides every axis that is longer than 1, and every place
    in a tile."""
    if any(isinstance(x, Load) for e in index for x in parts(e)):
        raise KernelError(f"no backward kernel: {a} is read through a table")
    known = decided(sized(index, fixed))
    every = (*axes, *places)
    missing = [v.name for v, w in zip(every, sized(every, fixed), strict=True)
               if w not in known and (v in places or w.size != Const(1))]  # type: ignore[attr-defined]  # fmt: skip
    if missing:
        raise KernelError(f"no backward kernel: the gradient of {a} is a sum over {', '.join(missing)}")


def _require_own(frame: GradientFrame, a: Access, product: int, fixed: dict[Expr, Expr]) -> None:
    """S does not vary with what K's tensor holds where it is read for keys that it does not have."""
    _, tests = own_keys(a.index, frame.kv_idx)
    (kv_idx,) = sized([frame.kv_idx], fixed)
    left = [t for t in sized(tests, fixed) if t != TRUE]
    passes = [frame, *([frame.rescue] if frame.rescue is not None else [])]
    slopes = sized([derivative(f.raw, Score(0 if frame.summed else product)) for f in passes], fixed)
    assert isinstance(kv_idx, Var)
    if not all(vanishes(e, left, kv_idx) for e in slopes):
        raise KernelError(f"no backward kernel: keys past its ends read {a} again, and its gradient is a sum")


def decided(index: tuple[Expr, ...]) -> frozenset[Expr]:
    """The indices whose values follow from that of `index`: h of (b, h), of b * H + h, of (h // 3, h mod 3)."""
    known: frozenset[Expr] = frozenset()
    while True:
        more = known.union(*(digits(e, known) for e in index))
        more |= {x for e in more for x in _whole(e, more)}
        if more == known:
            return known
        known = more


def digits(e: Expr, known: frozenset[Expr] = frozenset()) -> frozenset[Expr]:
    """The factors that the value of `e` decides, one after the other as in a number of mixed radix."""
    moving = {m: c for m, c in poly(e).items() if any(_varies(f, known) for f in m)}
    if len(moving) == 1:
        ((monomial, _),) = moving.items()
        factors = [f for f in monomial if _varies(f, known)]
        return frozenset(factors) if len(factors) == 1 else frozenset()
    step = math.gcd(*moving.values())
    rest = from_poly({m: c // step for m, c in moving.items()})
    for f in {f for m in moving for f in m if _varies(f, known)}:
        radix = _radix(f)
        if radix is not None and apply("mod", rest, radix) == f:
            return frozenset({f}) | digits(apply("floordiv", rest, radix), known)
    return frozenset()


def _varies(f: Expr, known: frozenset[Expr]) -> bool:
    """Whether the factor of a monomial is not known yet."""
    return f not in known and not variables(f) <= {v.name for v in known if isinstance(v, Var)}


def _radix(f: Expr) -> Expr | None:
    """What a factor stays below."""
    match f:
        case Var(_, size):
            return size
        case Apply("mod", (_, c)):
            return c
        case Apply("floordiv", (x, Const(int(c)))) if (top := upper(x)) is not None:
            return Const(top // c + 1)
    return None


def _whole(e: Expr, known: frozenset[Expr]) -> frozenset[Expr]:
    """What x decides, where x // c and x mod c are known."""
    match e:
        case Apply("mod", (x, c)) if apply("floordiv", x, c) in known:
            return digits(x, known)
    return frozenset()


def values_of(fixed: Fixed) -> dict[Expr, Expr]:
    """Lengths that never change, as what they are."""
    return {Size(name): Const(n) for name, n in fixed}


def covers(frame: GradientFrame, name: str, fixed: Fixed = ()) -> bool:
    """Whether the gradient of an operand is written whole: no element is written twice, so that they need only be as
    many as it has."""
    region, known = frame.region, values_of(fixed)
    of_queries = [(p.q, (*region.batch, region.q_idx, p.d)) for p in region.products]
    of_keys = [*((p.k, p.d) for p in region.products), (region.v, region.dv)]
    if any(a.operand == name and own_keys(a.index, region.kv_idx)[1] for a, _ in of_keys):
        return False
    written = [axes for a, axes in of_queries if a.operand == name]
    written += [(*frame.key_axes, region.kv_idx, d) for a, d in of_keys if a.operand == name]
    total: Expr = Const(0)
    for axes in written:
        total = apply("add", total, product(v.size for v in axes))
    (total,), (whole,) = sized([total], known), sized([product(region.operand(name).shape)], known)
    return poly(total) == poly(whole)


def product(sizes: Iterable[Expr]) -> Expr:
    """How many elements there are."""
    one: Expr = Const(1)
    return reduce(partial(apply, "mul"), sizes, one)
