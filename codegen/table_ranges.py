"""The table of ranges, where a mask is known of queries and of keys apart: documents, padding, prefixes.

    tiles [rows, 5 + 2 BLOCK_M] int32:  begin, full_begin, full_end, end, in_runs,        codegen/visited.py
                                        the first and the last of each query

A program a row judges for each of its queries each tile of keys, by what the mask reads of the query and the least and
the greatest of what it reads of the tile (codegen/table_ends.py, ir/intervals.py): outside [begin, end) no pair is
seen, inside [full_begin, full_end), the longest such run, all are. A tile of which a query may see a part is tested
pair by pair, once for all heads: where each query sees all keys from a first to a last, `in_runs`, attention compares
places there and reads nothing; elsewhere it reads what the mask reads. For dK and dV queries and keys change places.

Nine documents in 4096 places, 128 queries a row: 10 us, where 15 were taken when each row read all keys; eight in 16384
places: 22, not 58 (probes_h200.json). Loops are two deep at most: Triton 3.6 and 3.7 drop what a loop carries where
only the bounds of a loop inside it read it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce

from fusecomp.codegen.function import function
from fusecomp.codegen.launcher import arguments, by_name, ranks_of, rounded_up, wrapped
from fusecomp.codegen.printer import Names, triton_text
from fusecomp.codegen.program import factor
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.table import LARGER, TableFrame, table
from fusecomp.codegen.table_ends import (
    CONSTANTS,
    Side,
    axes,
    end_kernel,
    launch_ends,
    parameters,
    read_ends,
    value,
)
from fusecomp.codegen.visited import HEAD, pitch
from fusecomp.ir import data
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Expr, Load, dtype_kind, variables
from fusecomp.ir.intervals import Pair, truth
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.tile import TilePlan

Lines = list[str]
WARPS, TILES = 8, 32
"""Of a program; how many tiles it judges together, and how many of a tile that is cut it tests together: what each of
its own sees is kept of both in one place."""
KERNEL = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """One row of the table: the tiles that it visits, and what each of its own sees of them."""
    rows = tl.cdiv(«own_size», «own_block»)
    row = tl.program_id(0)
    first = row % rows * «own_block»
    last = tl.minimum(first + «own_block», «own_size») - 1
    outer = tl.cast(row // rows, tl.int64)
    «axes»
    own = tl.cast(tl.minimum(first + tl.arange(0, «own_block»), last), tl.int64)
    place = tl.cast(own, tl.int32)[:, None]
    «own»

    count = tl.cdiv(«size», «block»)
    length, full_end, unlike = 0, 0, -1  # in tiles; the last that is not full
    begin = tl.full([TILES], «size», tl.int32)
    end = tl.full([TILES], 0, tl.int32)
    first_seen = tl.full([«own_block», TILES], «size», tl.int32)
    last_seen = tl.full([«own_block», TILES], -1, tl.int32)
    number = tl.full([«own_block», TILES], 0, tl.int32)
    for start in range(0, count, TILES):
        tile = start + tl.arange(0, TILES)
        near = tile * «block»
        far = tl.minimum(near + «block», «size») - 1
        «ends»
        some = (place >= 0) & (tile < count)[None, :] & «some»
        every = (place >= 0) & (near + «block» <= «size»)[None, :] & «every»

        # Of all together: the tiles that one of them visits, and the longest run of those that all see whole
        visited = tl.max(some.to(tl.int32), axis=0) > 0
        begin = tl.where(visited, tl.minimum(begin, near), begin)
        end = tl.where(visited, far + 1, end)
        before = tl.where(tl.min(every.to(tl.int32), axis=0) > 0, unlike, tile)
        run = tile - tl.associative_scan(before, 0, larger)
        longest = tl.max(run, axis=0)
        full_end = tl.where(longest > length, start + tl.argmax(run, axis=0) + 1, full_end)
        length = tl.maximum(longest, length)
        unlike = tl.max(before, axis=0)

        # Of each: the tiles that all see or do not, and pair by pair those of which one sees a part
        part = tl.max((some & ~every).to(tl.int32), axis=0) > 0
        whole = every & ~part[None, :]
        first_seen = tl.where(whole, tl.minimum(first_seen, near[None, :]), first_seen)
        last_seen = tl.where(whole, far[None, :], last_seen)
        number += tl.where(whole, «block», 0)
        next_tile = start - 1
        for _ in range(tl.sum(part.to(tl.int32), axis=0)):
            next_tile = tl.min(tl.where(part & (tile > next_tile), tile, count), axis=0)
            for step in tl.static_range(«block» // TILES):
                at = next_tile * «block» + step * TILES + tl.arange(0, TILES)
                pair = tl.cast(tl.minimum(at, «size» - 1), tl.int64)
                «pairs»
                seen = (place >= 0) & (at < «size»)[None, :] & «keep»
                first_seen = tl.where(seen, tl.minimum(first_seen, at[None, :]), first_seen)
                last_seen = tl.where(seen, tl.maximum(last_seen, at[None, :]), last_seen)
                number += seen.to(tl.int32)
    last_end = tl.max(end, axis=0)
    first_begin = tl.minimum(tl.min(begin, axis=0), last_end)
    run_first, run_last = tl.min(first_seen, axis=1), tl.max(last_seen, axis=1)
    in_runs = tl.sum(number, axis=1) == tl.maximum(run_last + 1 - run_first, 0)
    full_end = tl.where(length > 0, full_end * «block», first_begin)  # an empty run at the beginning: there is none
    tiles = tiles_ptr + row * («pitch»)
    tl.store(tiles, first_begin)
    tl.store(tiles + 1, full_end - length * «block»)
    tl.store(tiles + 2, full_end)
    tl.store(tiles + 3, last_end)
    tl.store(tiles + 4, tl.min(in_runs.to(tl.int32), axis=0))
    beside = tl.arange(0, «own_block»)
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
    «ends»
    «launch»
    return tiles
'''


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
    """(kernels, their launch)"""
    frame = TableFrame(side.region, replace(plan, skeleton="prefill", visits="ranges"))
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    (ends, of_ends), (kernel, params) = end_kernel(frame, side), _kernel(frame, side)
    return [*([ends] if ends else []), kernel, _host(frame, side, of_ends, params, blocks)]


# ----------------------------------------------------------------------------------------------------------------
# The kernel


def _kernel(frame: TableFrame, side: Side) -> tuple[str, list[str]]:
    """(text, parameters)"""
    names, of_other = side.loads(), side.of_other()
    some, every = _judged(frame, side, names)
    pairs = {x: f"{name}_pair" for x, name in of_other.items()}
    return function(frame, KERNEL, f"{side.visited}_ranges", {
        "own_size": triton_text(side.own.size, frame.names), "own_block": side.block(side.own),
        "pitch": pitch(side.block(side.own)), "head": str(HEAD),
        "size": triton_text(side.other.size, frame.names), "block": side.block(side.other),
        "axes": axes(frame),
        "own": [f"{name} = {value(frame, side, x, 'own')}" for x, name in names.items() if x not in of_other],
        "ends": read_ends(side), "some": some, "every": every,
        "pairs": [f"{name} = {value(frame, side, x, 'pair')}" for x, name in pairs.items()],
        "keep": _kept(side, {**names, **pairs}),
    }, partial(parameters, frame))  # fmt: skip


def _judged(frame: TableFrame, side: Side, names: dict[Load, str]) -> tuple[str, str]:
    """Whether each of `own` sees some pair of a tile, and whether all, [own, tiles]: from what it reads itself, and
    the least and the greatest of what the tile does."""
    symbols: dict[Expr, Pair] = {x: _ends(side, x, name) for x, name in names.items()}
    symbols |= {side.own: (place := _symbol("place"), place), side.other: (_symbol("near"), _symbol("far"))}
    known: dict[Expr, Pair] = {v: (v, v) for v in side.region.batch}
    found = [(e, of) for of, pair in symbols.items() for e in pair if isinstance(e, Load)]
    text: dict[Expr, str] = {e: _placed(side, of, e.tensor) for e, of in found}
    terms = reduce(lambda a, b: apply("and", a, b), data.seen(side.region))
    some, every = truth(terms, {**symbols, **known}.get)
    return (f"({triton_text(some, frame.names.having(text))})", f"({triton_text(every, frame.names.having(text))})")


def _ends(side: Side, x: Load, name: str) -> Pair:
    """Names of the least and the greatest of a load, over a tile: one of what each of `own` reads."""
    if side.other.name in variables(x):
        return _symbol(f"{name}_low", "int64"), _symbol(f"{name}_high", "int64")
    own = _symbol(name, x.dtype if dtype_kind(x.dtype) == "int" else "int32")
    return own, own


def _symbol(name: str, dtype: str = "int32") -> Load:
    return Load(name, (), dtype)


def _placed(side: Side, of: Expr, name: str) -> str:
    """A name as a column of `own`, or a row of `other`."""
    if side.other.name in variables(of):
        return f"{name}[None, :]"
    return f"{name}[:, None]" if side.own.name in variables(of) and of != side.own else name


def _kept(side: Side, names: dict[Load, str]) -> str:
    """Whether each of `own` sees each of a tile."""
    text: dict[Expr, str] = {side.own: "place", side.other: "at[None, :]"}
    for x, name in names.items():
        placed = _placed(side, x, name)
        text[x] = f"({placed} != 0)" if dtype_kind(x.dtype) == "bool" else placed
    return f"({triton_text(reduce(lambda a, b: apply('and', a, b), data.seen(side.region)), Names(text))})"


# ----------------------------------------------------------------------------------------------------------------
# The host


def _host(frame: TableFrame, side: Side, of_ends: list[str], params: list[str], blocks: dict[str, int]) -> str:
    made = table(side.region, frame.plan)
    batches = [factor(v.size, frame) for v in made.axes]
    own, other = (blocks[side.block(v)] for v in (side.own, side.other))
    rows, tiles = (
        " * ".join([*batches, rounded_up(triton_text(v.size, frame.names), str(n))])
        for v, n in ((side.own, own), (side.other, other))
    )
    tile = {**blocks, "TILES": min(TILES, other)}
    given = [f"{p}={tile[p]}" if p in CONSTANTS else p for p in arguments(params, ranks_of(frame))]
    keys, kernel = side.visited == "key", f"{side.visited}_ranges"
    return fill(HOST, {
        "name": side.name,
        "what": "The keys that each tile of queries visits" if keys else "The queries that visit each tile of keys",
        "axes": " ".join([*(v.name for v in made.axes), "query tiles" if keys else "key tiles"]),
        "pitch": str(HEAD + 2 * own),
        "unpack": by_name(made.tensors if data.reads(side.region) else (), made.sizes),
        "rows": rows,
        "ends": launch_ends(frame, side, of_ends, tiles, other),
        "launch": [f"{kernel}[(rows,)](", *("    " + x for x in wrapped([*given, f"num_warps={WARPS}"], 8)), ")"],
    })  # fmt: skip
