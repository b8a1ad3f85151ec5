"""Which tile a program takes where tiles differ in work: those with most first, over many heads. (frame) -> lines.

Programs begin in the order of their numbers. Were a head's tiles to come one after another, the last head's longest
would begin when the device is nearly done, and the others would wait for it. So heads take turns, as many as L2 holds
what their programs read alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusecomp.codegen.descriptors import BYTES
from fusecomp.codegen.frame import Frame
from fusecomp.ir.ranges import Bound
from fusecomp.ir.region import AttentionRegion, extent

Lines = list[str]
SECTION = 32 * 2**20
"""B of what the heads that take turns read: what stays in L2 (Hopper has 50 MB)."""
WHY = "# The tiles with most work first, of as many heads as stay in L2: the grid's tail is short"


def moves_alone(here: Sequence[Bound], other: Sequence[Bound]) -> bool:
    """Whether one end of a tile's range moves with it and the other stays: later tiles have more, or fewer."""
    return any(x.slope for x in here) and not any(x.slope for x in other)


def tile_of_turn(tiles: str, turn: str, length: str) -> Lines:
    """`outer`, and `inside // turns`, the number of its tile by work."""
    return [
        f"outers = tl.num_programs(0) // {tiles}",
        f"section = tl.minimum(tl.cast({turn}, tl.int32) // {length} + 1, outers)",
        f"first = program // (section * {tiles}) * section",
        "turns = tl.minimum(section, outers - first)",
        f"inside = program - first * {tiles}",
        "outer = tl.cast(first + inside % turns, tl.int64)",
    ]


def row_bytes(region: AttentionRegion) -> int:
    """B of a key's K and V, or of a query's Q and dO."""
    size = BYTES.get(region.operand(region.v.operand).dtype, 2)
    return size * (sum(extent(p.d) for p in region.products) + extent(region.dv))


def constants(frame: Frame) -> dict[str, tuple[int, str]]:
    """How long the ranges of the heads that take turns are, in all."""
    group, size = frame.region.q_per_kv() if frame.region.batch else 1, row_bytes(frame.region)
    shared = max(1, group // frame.plan.pack)
    return {
        "K_TURN": (SECTION * shared // size, "keys, over the query heads that take turns, whose K and V stay in L2"),
        "Q_TURN": (SECTION // group // size, "queries, over the KV heads that take turns, whose Q and dO stay in L2"),
    }
