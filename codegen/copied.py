"""What the score or the mask reads for each pair, copied in blocks as K and V are: operand[batch..., q_idx, kv_idx].

Read element by element in the layout of an accumulator, each instruction of a warp touches eight rows for 16 bytes of
each; a block comes through shared memory whole, ahead of who needs it.
"""

from __future__ import annotations

from fusecomp.ir.expr import Load, Var, parts, variables
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.tile import TilePlan

COLUMNS = 128
"""Of O that are on their way out at once, at most."""
MEMORY = 232_448 - 1024
"""B of a program's shared memory, less what its barriers take."""
WIDTHS = {"bool": 1, "bfloat16": 2, "float16": 2, "float32": 4}
"""B of what can come in blocks."""


def pair_loads(region: AttentionRegion) -> tuple[Load, ...]:
    """Every load that differs from pair to pair."""
    pair = {region.q_idx.name, region.kv_idx.name}
    loads = [x for e in (region.score, *region.keep) for x in parts(e) if isinstance(x, Load)]
    return tuple(dict.fromkeys(x for x in loads if pair <= variables(x)))


def copied(region: AttentionRegion) -> tuple[Load, ...]:
    """Those of them that are copied in blocks."""
    return tuple(x for x in pair_loads(region) if _in_rows(region, x))


def _in_rows(region: AttentionRegion, x: Load) -> bool:
    """Queries and keys are its last two coordinates. Where it is larger than they are, what lies beyond is masked."""
    *outer, row, key = x.index if len(x.index) > 1 else (None, None)
    batch = {v.name for v in region.batch}
    inner = isinstance(row, Var) and isinstance(key, Var) and (row, key) == (region.q_idx, region.kv_idx)
    known = all(variables(e) <= batch and not any(isinstance(y, Load) for y in parts(e)) for e in outer)
    return inner and known and len(outer) <= 3 and x.dtype in WIDTHS


def fits(region: AttentionRegion, plan: TilePlan) -> bool:
    """Whether shared memory has room for one of their tiles beside each of K.

    2 B (rows (D + min(D, COLUMNS)) + 2 stages keys D) + stages wide rows keys  <=  MEMORY
    """
    wide, d = sum(WIDTHS[x.dtype] for x in copied(region)), region.head_size
    if not plan.consumers or not wide or plan.visits == "ranges":
        return False
    held = 2 * (plan.block_m * (d + min(d, COLUMNS)) + 2 * plan.stages * plan.block_n * d)
    return held + plan.stages * wide * plan.block_m * plan.block_n <= MEMORY
