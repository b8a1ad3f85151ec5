"""Masks that only the data knows: what a tile of them can be found to be before any kernel visits it.

    seen   every mask term holds, and no tensor that is added to S is -inf
    full   seen, and what is added is 0: there S is `unmasked`, with no mask at all

A tile of keys that no query of a tile sees adds nothing; one that is full for all of them reads no mask. A tensor that
differs from head to head is a bias, not a mask, and is not looked into.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusecomp.ir.algebra import apply, substitute
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Var, dtype_kind, parts, variables
from fusecomp.ir.ranges import reach
from fusecomp.ir.region import AttentionRegion


def unknown(region: AttentionRegion) -> bool:
    """Whether something hides keys that no bound speaks of."""
    return bool(reach(region.keep, region.q_idx.name, region.kv_idx.name).loose or added(region))


def seen(region: AttentionRegion) -> tuple[Expr, ...]:
    """The terms that hold at (q_idx, kv_idx) where the query sees the key."""
    tested = {t.operands[0] for t in region.keep if isinstance(t, Apply) and t.op == "gt"}
    return (*region.keep, *(apply("ne", x, Const(float("-inf"))) for x in added(region) if x not in tested))


def full(region: AttentionRegion) -> tuple[Expr, ...]:
    """The terms that hold where S is `unmasked`."""
    return (*region.keep, *(apply("eq", x, Const(0.0)) for x in added(region)))


def unmasked(region: AttentionRegion) -> Expr:
    """S where `full` holds."""
    return substitute(region.score, {x: Const(0.0) for x in added(region)})


def axes(region: AttentionRegion) -> tuple[Var, ...]:
    """The batch axes along which the masks differ."""
    names = frozenset().union(*(variables(e) for e in seen(region)))
    return tuple(v for v in region.batch if v.name in names)


def reads(region: AttentionRegion) -> frozenset[Load]:
    """What the masks load."""
    return frozenset(x for e in (*seen(region), *full(region)) for x in parts(e) if isinstance(x, Load))


def apart(region: AttentionRegion) -> bool:
    """Whether every number that the masks read is an integer of a query, of a key, or of all of them, at its place."""
    sides = {region.q_idx.name, region.kv_idx.name}
    plain = (dtype_kind(x.dtype) != "float" and not sides <= variables(x) for x in reads(region))
    return all(plain) and not any(isinstance(y, Load) for x in reads(region) for e in x.index for y in parts(e))


def added(region: AttentionRegion) -> tuple[Load, ...]:
    """The tensors L with S = ... + L, of every query and key: S is -inf where L is."""
    heads = region.batch[-1].name if len(region.batch) > 1 else ""
    found = dict.fromkeys(summands(region.score))
    return tuple(x for x in found if region.kv_idx.name in variables(x) and heads not in variables(x))


def summands(e: Expr) -> Iterator[Load]:
    """L of e = ... + L"""
    match e:
        case Apply("add", (x, y)):
            yield from summands(x)
            yield from summands(y)
        case Apply("sub", (x, _)) | Apply("mul" | "div", (x, Const(int() | float()))) if _keeps_infinity(e):
            yield from summands(x)
        case Cast(x, dtype) if dtype_kind(dtype) == "float":
            yield from summands(x)
        case Load(_, _, dtype) if dtype_kind(dtype) == "float":
            yield e


def _keeps_infinity(e: Apply) -> bool:
    """Whether e is -inf where its first operand is."""
    last = e.operands[-1]
    return e.op == "sub" or (isinstance(last, Const) and 0 < last.value < float("inf"))
