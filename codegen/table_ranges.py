"""The table of ranges, where a mask is known of queries and of keys apart: documents, padding, prefixes.

    tiles [rows, 5 + 2 BLOCK_M] int32:  begin, full_begin, full_end, end, in_runs,        codegen/visited.py
                                        the first and the last of each query

A program a row reads what the mask does of its queries, then of all keys, and judges each tile by the least and the
greatest of them (ir/intervals.py): outside [begin, end) no pair is seen, inside [full_begin, full_end), the longest
such run, all are. What lies between is tested pair by pair, once for all heads: where each query sees all keys from a
first to a last, `in_runs`, attention compares places there and reads nothing; elsewhere it reads what the mask reads.
For dK and dV queries and keys change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from fusecomp.codegen.function import function
from fusecomp.codegen.launcher import arguments, by_name, ranks_of, rounded_up, wrapped
from fusecomp.codegen.printer import Names, atom, triton_text
from fusecomp.codegen.program import decoded, factor
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.table import LARGER, TableFrame, table
from fusecomp.codegen.visited import HEAD, pitch
from fusecomp.ir import data
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Expr, Load, Var, dtype_kind, variables
from fusecomp.ir.intervals import Pair, truth
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.tile import TilePlan

Lines = list[str]
WARPS, ELEMENTS = 8, 4096
"""Of a program, and how many keys it looks at together."""
STEP = 32
"""Of what is cut, how many it tests together with all of its own. With 16 warps and twice as many the table of the
packed documents in probes_h200.json takes 20 us for tiles of 128 queries, not 14."""

KERNEL = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    rows = tl.cdiv(«own_size», «own_block»)
    row = tl.program_id(0)
    first = row % rows * «own_block»
    last = tl.minimum(first + «own_block», «own_size») - 1
    outer = tl.cast(row // rows, tl.int64)
    «axes»
    own = tl.cast(tl.minimum(first + tl.arange(0, «own_block»), last), tl.int64)
    «own»

    count = tl.cdiv(«size», «block»)
    begin, end, length, full_end, unlike = count, 0, 0, 0, -1  # in tiles; the last that is not full
    for start in range(0, count, TILES):
        tile = start + tl.arange(0, TILES)
        near = tile * «block»
        far = tl.minimum(near + «block», «size») - 1
        each = tl.cast(tl.minimum(near[:, None] + tl.arange(0, «block»)[None, :], «size» - 1), tl.int64)
        «each»
        some = (tile < count) & «some»
        every = (near + «block» <= «size») & «every»
        begin = tl.minimum(begin, tl.min(tl.where(some, tile, count), axis=0))
        end = tl.maximum(end, tl.max(tl.where(some, tile + 1, 0), axis=0))
        before = tl.where(every, unlike, tile)
        run = tile - tl.associative_scan(before, 0, larger)
        longest = tl.max(run, axis=0)
        full_end = tl.where(longest > length, start + tl.argmax(run, axis=0) + 1, full_end)
        length = tl.maximum(longest, length)
        unlike = tl.max(before, axis=0)
    begin = tl.minimum(begin, end)
    full_end = tl.where(length > 0, full_end, begin)  # an empty run at the beginning where there is none
    tiles = tiles_ptr + row * («pitch»)
    tl.store(tiles, begin * «block»)
    tl.store(tiles + 1, (full_end - length) * «block»)
    tl.store(tiles + 2, full_end * «block»)
    tl.store(tiles + 3, tl.minimum(end * «block», «size»))
    «runs»
'''

RUNS = '''\

# Of the tiles that are cut, pair by pair: the first and the last that each sees, and how many
place = tl.cast(own, tl.int32)[:, None]
first_seen = tl.full([«own_block», «step»], «size», tl.int32)
last_seen = tl.full([«own_block», «step»], -1, tl.int32)
number = tl.full([«own_block», «step»], 0, tl.int32)
stop = tl.minimum(end * «block», «size») - length * «block»
for edge in range(begin * «block», stop, «step»):
    cut = edge + tl.arange(0, «step»)
    at = tl.where(cut < (full_end - length) * «block», cut, cut + length * «block»)
    pair = tl.cast(tl.minimum(at, «size» - 1), tl.int64)
    «pairs»
    seen = (cut < stop)[None, :] & «keep»
    first_seen = tl.minimum(first_seen, tl.where(seen, at[None, :], «size»))
    last_seen = tl.maximum(last_seen, tl.where(seen, at[None, :], -1))
    number += seen.to(tl.int32)
# And all of the full ones
run_first, run_last = tl.min(first_seen, axis=1), tl.max(last_seen, axis=1)
run_first = tl.where(length > 0, tl.minimum(run_first, (full_end - length) * «block»), run_first)
run_last = tl.where(length > 0, tl.maximum(run_last, full_end * «block» - 1), run_last)
in_runs = tl.sum(number, axis=1) + length * «block» == tl.maximum(run_last + 1 - run_first, 0)
beside = tl.arange(0, «own_block»)
tl.store(tiles + 4, tl.min(in_runs.to(tl.int32), axis=0))
tl.store(tiles + «head» + beside, run_first)
tl.store(tiles + «head» + «own_block» + beside, run_last)
'''

HOST = '''\
def «name»(tensors, sizes):
    """«what», [«axes», «pitch»]: from the first
    to the last of which a pair may be seen, between them those of which all are;
    whether each is in one run, where these begin, and where they end."""
    «unpack»
    rows = «rows»
    tiles = torch.empty([rows, «pitch»], dtype=torch.int32, device=tensors[0].device)
    «launch»
    return tiles
'''


@dataclass(frozen=True)
class Side:
    """A table of rows along one axis: those of `own`, which visit `other`."""

    region: AttentionRegion
    own: Var
    other: Var
    name: str
    """Of what launches it."""

    @property
    def kernel(self) -> str:
        return "key_ranges" if self.own == self.region.q_idx else "query_ranges"

    def block(self, v: Var) -> str:
        return "BLOCK_M" if v == self.region.q_idx else "BLOCK_N"


def forward(region: AttentionRegion) -> Side:
    return Side(region, region.q_idx, region.kv_idx, "list_visits")


def range_kernels(region: AttentionRegion, plan: TilePlan) -> list[str]:
    """The kernel that makes the table of the forward kernel, and what launches it."""
    return [LARGER, *_made(forward(region), plan, plan.block_m, plan.block_n)]


def gradient_kernels(region: AttentionRegion, queries: TilePlan | None, keys: TilePlan) -> list[str]:
    """Of dQ, unless it is computed with the others, and of dK and dV."""
    sides = [(Side(region, region.kv_idx, region.q_idx, "query_tiles"), keys)]
    if queries is not None:
        sides.insert(0, (Side(region, region.q_idx, region.kv_idx, "key_tiles"), queries))
    return [LARGER, *(text for side, plan in sides for text in _made(side, plan, plan.block_m, plan.block_n))]


def _made(side: Side, plan: TilePlan, block_m: int, block_n: int) -> list[str]:
    """(kernel, its launch)"""
    frame = TableFrame(side.region, replace(plan, skeleton="prefill", visits="ranges"))
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    kernel, params = _kernel(frame, side)
    return [kernel, _host(frame, side, params, blocks)]


# ----------------------------------------------------------------------------------------------------------------
# The kernel


def _kernel(frame: TableFrame, side: Side) -> tuple[str, list[str]]:
    """(text, parameters)"""
    read = sorted(data.reads(side.region), key=str)
    of_other = [x for x in read if side.other.name in variables(x)]
    of_own = [x for x in read if x not in of_other]
    ends: dict[Expr, Pair] = {x: _ends_of(side, read.index(x), x) for x in read}
    ends |= {v: _ends_of_axis(v, end) for v, end in ((side.own, ("first", "last")), (side.other, ("near", "far")))}
    known: dict[Expr, Pair] = {v: (v, v) for v in side.region.batch}
    symbols = (x for pair in ends.values() for x in pair)
    names = frame.names.having({x: x.tensor for x in symbols if isinstance(x, Load)})

    def holds(terms: Sequence[Expr], which: int) -> str:
        found = truth(reduce(lambda a, b: apply("and", a, b), terms), {**ends, **known}.get)[which]
        return f"({triton_text(found, names)})"

    return function(frame, KERNEL, side.kernel, {
        "own_size": triton_text(side.own.size, frame.names), "own_block": side.block(side.own),
        "pitch": pitch(side.block(side.own)),
        "size": triton_text(side.other.size, frame.names), "block": side.block(side.other),
        "axes": _decoded(frame),
        "own": [line for x in of_own for line in _read(frame, side, x, ends[x], "own", "0")],
        "each": [line for x in of_other for line in _read(frame, side, x, ends[x], "each", "1")],
        "some": holds(data.seen(side.region), 0), "every": holds(data.full(side.region), 1),
        "runs": _runs(frame, side, read),
    }, partial(_parameters, frame))  # fmt: skip


def _runs(frame: TableFrame, side: Side, read: Sequence[Load]) -> Lines:
    """Which run of `other` each of `own` sees."""
    names, lines = dict[Expr, str]({side.own: "place", side.other: "at[None, :]"}), Lines()
    for i, x in enumerate(read):
        stem, axes = f"{x.tensor}_{i}", variables(x)
        if side.other.name in axes:
            stem = f"{stem}_pair"
            lines.append(f"{stem} = {_value(frame, side, x, 'pair')}")
        placed = "[None, :]" if side.other.name in axes else "[:, None]" if side.own.name in axes else ""
        names[x] = f"({stem}{placed} != 0)" if dtype_kind(x.dtype) == "bool" else f"{stem}{placed}"
    keep = reduce(lambda a, b: apply("and", a, b), data.seen(side.region))
    size, block = triton_text(side.other.size, frame.names), side.block(side.other)
    text = fill(RUNS, {
        "own_block": side.block(side.own), "size": size, "block": block, "step": str(STEP), "head": str(HEAD),
        "pairs": lines, "keep": f"({triton_text(keep, Names(names))})",
    })  # fmt: skip
    return text.splitlines()


def _ends_of(side: Side, number: int, x: Load) -> Pair:
    """Names of the least and the greatest of a load, over a tile."""
    dtype = x.dtype if dtype_kind(x.dtype) == "int" else "int32"
    stem = f"{x.tensor}_{number}"
    if not variables(x) & {side.own.name, side.other.name}:
        return Load(stem, (), dtype), Load(stem, (), dtype)
    return Load(f"{stem}_low", (), dtype), Load(f"{stem}_high", (), dtype)


def _ends_of_axis(v: Var, names: tuple[str, str]) -> Pair:
    return Load(names[0], (v.size,), "int32"), Load(names[1], (v.size,), "int32")


def _read(frame: TableFrame, side: Side, x: Load, ends: Pair, place: str, axis: str) -> Lines:
    """load0_0_low, load0_0_high = the least and the greatest of load0[...]"""
    value = _value(frame, side, x, place)
    low, high = (e.tensor for e in ends)  # type: ignore[attr-defined]
    if low == high:
        return [f"{low} = {value}"]
    stem = low.removesuffix("_low")
    return [
        f"{stem} = {value}",
        f"{low}, {high} = tl.min({stem}, axis={axis}), tl.max({stem}, axis={axis})",
    ]


def _value(frame: TableFrame, side: Side, x: Load, place: str) -> str:
    """A load at the places of that name, truth values as 0 and 1."""
    names = frame.names.having({side.own: place, side.other: place})
    at = [f"{atom(triton_text(e, names))} * {x.tensor}_stride_{i}" for i, e in enumerate(x.index)]
    wide = ".to(tl.int32)" if dtype_kind(x.dtype) == "bool" else ""
    return f"tl.load({' + '.join([f'{x.tensor}_ptr', *at])}){wide}"


def _decoded(frame: TableFrame) -> Lines:
    """outer = b * H + h, of the axes that the masks differ along."""
    return decoded(frame) if frame.batch else []


def _parameters(frame: TableFrame, read: frozenset[str]) -> list[str]:
    ranks = ranks_of(frame)
    pointers = ["tiles_ptr", *(f"{t}_ptr" for t in ranks)]
    strides = [f"{t}_stride_{i}" for t, rank in ranks.items() for i in range(rank)]
    return [p for p in (*pointers, *strides, *frame.region.sizes, *TILE) if p in read]


TILE = ("BLOCK_M", "BLOCK_N", "TILES")


# ----------------------------------------------------------------------------------------------------------------
# The host


def _host(frame: TableFrame, side: Side, params: list[str], blocks: dict[str, int]) -> str:
    made = table(side.region, frame.plan)
    own = triton_text(side.own.size, frame.names)
    axes = [factor(v.size, frame) for v in made.axes]
    tile = {**blocks, "TILES": ELEMENTS // blocks[side.block(side.other)]}
    given = [f"{p}={tile[p]}" if p in tile else p for p in arguments(params, ranks_of(frame))]
    keys = side.own == side.region.q_idx
    return fill(HOST, {
        "name": side.name,
        "what": "The keys that each tile of queries visits" if keys else "The queries that visit each tile of keys",
        "axes": " ".join([*(v.name for v in made.axes), "query tiles" if keys else "key tiles"]),
        "pitch": str(HEAD + 2 * blocks[side.block(side.own)]),
        "unpack": by_name(made.tensors if data.reads(side.region) else (), made.sizes),
        "rows": " * ".join([*axes, rounded_up(own, str(blocks[side.block(side.own)]))]),
        "launch": [f"{side.kernel}[(rows,)](", *("    " + x for x in wrapped([*given, f"num_warps={WARPS}"], 8)), ")"],
    })  # fmt: skip
