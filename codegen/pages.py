"""Keys behind a table: what a whole page, or a whole tile, has in common is worked out once.

    kv_idx = key + n,   0 <= n < BLOCK_N,   key a multiple of BLOCK_N

    the page divides the tile    kv_idx // page = key // page + n // page     kv_idx % page = n % page
    the tile divides the page    kv_idx // page = key // page                 kv_idx % page = key % page + n

What a tile looks up is a value with a name: one of each key, or, where the tile divides the page, one for all.
"""

from __future__ import annotations

from fusecomp.codegen.address import Address, address
from fusecomp.codegen.frame import Frame
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Apply, Const, Expr, Load, Var, parts, transform, variables

KEY = Var("key", Const(1 << 62))
"""The first key of a tile, int64."""


def place(frame: Frame) -> Var:
    """n, the place in a tile."""
    return Var("n", Const(frame.plan.block_n))


def in_tile(e: Expr, frame: Frame) -> Expr:
    """`e` with quotients and remainders of kv_idx by the page in terms of key and n, where one divides the other."""
    tile = frame.plan.block_n

    def rule(x: Expr) -> Expr | None:
        match x:
            case Load():
                return x
            case Apply("floordiv" | "mod", (index, Const(int(page)))) if index == frame.kv_idx:
                divided = apply(x.op, KEY, Const(page)), apply(x.op, place(frame), Const(page))
                if tile % page == 0:
                    return apply("add", *divided) if x.op == "floordiv" else divided[1]
                if page % tile == 0:
                    return apply("add", divided[0], place(frame)) if x.op == "mod" else divided[0]
        return None

    return transform(e, rule)


def looked_up(frame: Frame) -> dict[Expr, Load]:
    """What a tile looks up -> the value that has its name."""
    return {x: Load(name, (), x.dtype) for name, x in frame.addressed.tiles}


def of_each_key(frame: Frame) -> frozenset[Load]:
    """Those looked-up values that differ inside a tile."""
    named, found = looked_up(frame), set()
    for x, value in named.items():  # in an order in which they can be computed
        index = [in_tile(transform(e, named.get), frame) for e in x.args]
        vectors = {frame.kv_idx.name, place(frame).name}
        if any(variables(e) & vectors or found & set(parts(e)) for e in index):
            found.add(value)
    return frozenset(found)


def paged_address(frame: Frame, operand: str, index: tuple[Expr, ...]) -> Address:
    """The address of what lies behind a table, or of the table's own entries."""
    named, each = looked_up(frame), of_each_key(frame)
    index = tuple(in_tile(transform(e, named.get), frame) for e in index)
    vectors = frame.moving | {place(frame).name}
    whole = frozenset({KEY, *(x for x in named.values() if x not in each)})
    return address(operand, index, vectors, frozenset({frame.kv_idx.name}), each, whole)
