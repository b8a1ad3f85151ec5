"""The forward kernel for Hopper's tensor cores: which attention it can express, and in which tile.

One product in half precision, whose Q, K, V and O lie in rows of one head size; any score, mask and range of keys that
Gluon has functions for, which are those of the portable kernel, word for word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusecomp.codegen.cheaper import cheaper
from fusecomp.codegen.copied import COLUMNS, copied, fits
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.memory import output_index
from fusecomp.ir.expr import Apply, Const, Expr, Load, Var, parts, variables
from fusecomp.ir.ranges import reach
from fusecomp.ir.region import Access, AttentionRegion, extent
from fusecomp.planning.tile import TilePlan

NAMES = frozenset({
    "gl", "gluon", "tma", "mbarrier", "tile", "turn", "done", "last", "blocks", "block", "group", "count", "slot",
    "section", "weights", "counter", "written", "barrier", "copied", "sums", "o", "produce", "consume", "described",
    "inside", "instruction", "left", "right", "known", "given", "consumed", "produced", "above", "below",
    "tanh", "head", "hand", "handed", "key_of", "tail", "masked", "listed", "all_tiles", "q_line", "slope_n", "shift",
    "base_2", "unit", "top", "until", "since", "risen", "widen", "apart", "words", "packed", "unpacked", "even", "odd",
})  # fmt: skip
"""What the skeletons call their own variables."""
GROUP_ROWS = 64
"""Of a tile of queries, for each group of four warps."""
KEYS = {64: 128, 128: 128, 256: 64}
"""Of a tile, for each head size: registers hold S, P and O."""
NARROW = 64
"""The same where two of them leave no room for what is read for each pair. With D 64 and a bias in single precision
(B 4, H 16, N 4096) they leave it: 0.80 ms, where three of 64 keys take 0.90 (probes_h200.json)."""
STAGES = {64: 3, 128: 2, 256: 2}
"""Of K and of V, for each head size: as many as shared memory holds beside Q and O."""
REGISTERS = {(2, 1): (168, 240, 24), (3, 1): (128, 160, 32), (2, 2): (80, 104, 24)}
"""For each number of groups, and of programs on a multiprocessor: of a thread at launch; then of one that multiplies,
and of one that copies, which hands most of its own to the others."""
HALF = ("bfloat16", "float16")
UNKNOWN = ("max", "min", "random", "tanh", "sigmoid", "asinh", "atan")
"""What Gluon has no function for."""


def expresses(region: AttentionRegion) -> bool:
    """Whether the region is one product in half precision, of one head size, its tensors in rows."""
    accesses = (region.products[0].q, region.products[0].k, region.v)
    dtypes = {region.operand(a.operand).dtype for a in accesses}
    dtypes |= {region.products[0].dtype, region.pv_dtype, region.out_dtype}
    plain = region.filled_score is None and region.weight == Const(1.0) and len(region.products) == 1
    if not plain or len(dtypes) != 1 or not dtypes <= set(HALF) or extent(region.dv) not in KEYS:
        return False
    if region.head_size != extent(region.dv) or region.out_axes[-1] != region.dv.name:
        return False
    used = [x for e in (cheaper(region.score), *region.keep) for x in parts(e) if isinstance(x, Apply)]
    batch = {v.name for v in region.batch}
    sink = region.sink is None or (region.grounded and variables(region.sink) <= batch)
    known = not any(x.op in UNKNOWN for x in used)
    return sink and known and not ends_within(region) and all(in_rows(region, a) for a in accesses)


def ends_within(region: AttentionRegion) -> bool:
    """Whether the keys of all rows end at one number: what lies from there on is never read, so a program may have
    zeroed it (patterns/operands.py). Its descriptors end at N, known to the host."""
    ends = reach(region.keep, region.q_idx.name, region.kv_idx.name).upper
    return any(not x.slope and not variables(x.edge) for x in ends)


def in_rows(region: AttentionRegion, a: Access) -> bool:
    """operand[batch..., row, batch..., d], the whole of its last dimension."""
    *outer, last = a.index
    shape, rows = region.operand(a.operand).shape, {region.q_idx.name, region.kv_idx.name}
    columns = (region.products[0].d.name, region.dv.name)
    alone = isinstance(last, Var) and last.name in columns and shape[-1] == last.size
    placed = [isinstance(e, Var) and e.name in rows for e in outer]
    batch = {v.name for v in region.batch}
    others = all(p or variables(e) <= batch for p, e in zip(placed, outer, strict=True))
    return alone and sum(placed) == 1 and others and 1 <= len(outer) <= 4 and not _looks_up(outer)


def _looks_up(index: Sequence[Expr]) -> bool:
    return any(isinstance(x, Load) for e in index for x in parts(e))


def specialised(region: AttentionRegion, plan: TilePlan) -> TilePlan:
    """The plan with this kernel's own tile, the first that leaves room for what is read for each pair;
    planning/hopper.py predicts its cost."""
    size, n = extent(region.dv), 2 if plan.visits != "bounds" else groups(region)
    tile = replace(plan, block_m=n * GROUP_ROWS, block_n=KEYS[size], warps=4, stages=STAGES[size], pack=1)
    tile = replace(tile, loads="descriptor", consumers=n, resident=1, registers=0, cost=None, rejected=())
    if plan.visits == "ranges":  # what data hides is left out more closely
        stages = 3 if size <= COLUMNS else 2
        return replace(tile, block_n=NARROW, stages=stages, resident=2 if size == NARROW else 1)
    if not copied(region):
        return tile
    made = [replace(tile, block_n=keys, stages=stages) for keys in (KEYS[size], NARROW) for stages in (3, 2)]
    return next((t for t in made if fits(region, t)), made[-1])


def groups(region: AttentionRegion) -> int:
    """How many multiply: a third where its registers and its rows cost nothing, since tiles of 192 rows cut more tiles
    of keys along a diagonal, and what is loaded takes registers."""
    exprs = (region.score, *region.keep)
    loads = any(region.kv_idx.name in variables(x) for e in exprs for x in parts(e) if isinstance(x, Load))
    return 3 if extent(region.dv) == 64 and not _sloped(region) and not loads else 2


def _sloped(region: AttentionRegion) -> bool:
    """Whether keys end or begin along a diagonal."""
    found = reach(region.keep, region.q_idx.name, region.kv_idx.name)
    return any(x.slope for x in (*found.lower, *found.upper))


def registers(plan: TilePlan) -> tuple[int, int, int]:
    """As `REGISTERS` has them."""
    return REGISTERS[plan.consumers, plan.resident]


def holds_q(plan: TilePlan, size: int) -> bool:
    """Whether registers hold Q of a tile, so that the next one's can be copied in: not where they hold a tile of a mask
    too."""
    crowded = plan.visits == "table" and size * plan.block_n > 128 * 64
    return size <= COLUMNS and plan.consumers == 2 and not (crowded or shares(plan))


def shares(plan: TilePlan) -> bool:
    """Whether two programs share a multiprocessor: one multiplies while the other begins or ends a short row of tiles,
    and no group needs its turn."""
    return plan.resident == 2


def at_once(plan: TilePlan) -> bool:
    """Whether both products of a step are waited for together. With three groups one of the others multiplies
    meanwhile, and V and the registers of P are free sooner."""
    return plan.consumers == 3


def in_words(region: AttentionRegion, visits: str) -> bool:
    """Whether P is carried from step to step two in a register: at D 256, where O takes half of them, a loop beside one
    with a mask moves less. Causal 0.197 ms where 0.202, full 0.364 where 0.360 (B 2, H 8, N 4096; probes_h200.json)."""
    return visits == "table" or (extent(region.dv) > COLUMNS and _sloped(region))


def blocks(frame: Frame) -> dict[str, list[int]]:
    """The shape in which each tensor is copied."""
    region, size = frame.region, extent(frame.region.dv)
    product = region.products[0]
    rows = {
        "q": (product.q.index, frame.q_idx, GROUP_ROWS, size),
        "k": (product.k.index, frame.kv_idx, frame.plan.block_n, size),
        "v": (region.v.index, frame.kv_idx, frame.plan.block_n, size),
        "out": (output_index(frame), frame.q_idx, GROUP_ROWS, min(size, COLUMNS)),
    }
    found = {name: [n if e == row else 1 for e in index[:-1]] + [d] for name, (index, row, n, d) in rows.items()}
    pairs = {x.tensor: [1] * (len(x.index) - 2) + [GROUP_ROWS, frame.plan.block_n] for _, x in frame.copied}
    return {**found, **pairs}
