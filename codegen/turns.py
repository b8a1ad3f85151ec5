"""Which tile a program takes where tiles differ in work: those with most first, over several heads. -> lines.

Programs begin in the order of their numbers. Were a head's tiles to come one after another, the last head's longest
would begin when the device is nearly done, and the others would wait for it. So heads take turns: few, for programs
that run beside each other then read the same K and V, or Q and dO, from L2, but enough to fill the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusecomp.codegen.descriptors import BYTES
from fusecomp.codegen.frame import Frame
from fusecomp.ir.ranges import Bound
from fusecomp.ir.region import extent

Lines = list[str]
TURN = 512
"""Programs: about two rounds of an H200. With four times as many, dK and dV of D64 read too much past L2."""
SECTION = 32 * 2**20
"""B of K and V of the heads that take turns where programs stay (Hopper's kernel): what stays in L2 of 50 MB."""
KEYS = 1 << 16
"""Of them all, at least. At D 256 sixteen heads of 4,096 keys took less time than eight, though their K and V are 64
MB: the fewer sections, the fewer times the longest tiles begin late."""
WHY = "# Section by section of the heads, in each the tiles with most work first: the grid ends with short ones"


def moves_alone(here: Sequence[Bound], other: Sequence[Bound]) -> bool:
    """Whether one end of a tile's range moves with it and the other stays: later tiles have more, or fewer."""
    return any(x.slope for x in here) and not any(x.slope for x in other)


def tile_of_turn(tiles: str) -> Lines:
    """`outer`, and `inside // turns`, the number of its tile by work."""
    return [
        f"outers = tl.num_programs(0) // {tiles}",
        f"section = tl.minimum(({tiles} + TURN - 1) // {tiles}, outers)",
        f"first = program // (section * {tiles}) * section",
        "turns = tl.minimum(section, outers - first)",
        f"inside = program - first * {tiles}",
        "outer = tl.cast(first + inside % turns, tl.int64)",
    ]


def constants(frame: Frame) -> dict[str, tuple[int, str]]:
    """How many heads take turns: by programs, or by keys."""
    region, group = frame.region, frame.region.q_per_kv() if frame.region.batch else 1
    size = BYTES.get(region.operand(region.v.operand).dtype, 2)
    size *= sum(extent(p.d) for p in region.products) + extent(region.dv)
    keys = max(KEYS, SECTION // size) * max(1, group // frame.plan.pack)
    return {
        "TURN": (TURN, "programs of a section of heads: enough to fill a device"),
        "K_TURN": (keys, "keys of a section of heads: their K and V stay in L2"),
    }
