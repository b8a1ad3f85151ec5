"""Keys behind a table: what depends on the place in a tile alone is worked out once, before the loop over keys.

    kv_idx = key + n,   0 <= n < BLOCK_N,   key a multiple of BLOCK_N

    where a page divides the tile    kv_idx // page = key // page + n // page     kv_idx % page = n % page

What a tile looks up is a value with a name, one for each key, also where the tile divides the page: vectors are fetched
ahead of their tile, single numbers are not.
"""

from __future__ import annotations

from fusecomp.codegen.address import Address, address
from fusecomp.codegen.frame import Frame
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Apply, Const, Expr, Load, Var, transform

KEY = Var("key", Const(1 << 62))
"""The first key of a tile, int64."""


def place(frame: Frame) -> Var:
    """n, the place in a tile."""
    return Var("n", Const(frame.plan.block_n))


def in_tile(e: Expr, frame: Frame) -> Expr:
    """`e` with quotients and remainders of kv_idx by the page in terms of key and n, where the page divides a tile."""

    def rule(x: Expr) -> Expr | None:
        match x:
            case Load():
                return x
            case Apply("floordiv", (index, Const(int(page)))) if index == frame.kv_idx and _fits(page, frame):
                return apply("add", *(apply("floordiv", v, Const(page)) for v in (KEY, place(frame))))
            case Apply("mod", (index, Const(int(page)))) if index == frame.kv_idx and _fits(page, frame):
                return apply("mod", place(frame), Const(page))
        return None

    return transform(e, rule)


def _fits(page: int, frame: Frame) -> bool:
    return page < frame.plan.block_n and frame.plan.block_n % page == 0


def looked_up(frame: Frame) -> dict[Expr, Load]:
    """What a tile looks up -> the value that has its name."""
    return {x: Load(name, (), x.dtype) for name, x in frame.addressed.tiles}


def paged_address(frame: Frame, operand: str, index: tuple[Expr, ...]) -> Address:
    """The address of what lies behind a table, or of the table's own entries."""
    named = looked_up(frame)
    index = tuple(in_tile(transform(e, named.get), frame) for e in index)
    each = frozenset({place(frame), *named.values()})
    return address(operand, index, frame.moving, frozenset({frame.kv_idx.name}), each, KEY)
