"""The table of tiles that a query tile visits, where its mask is data.

    tile_states   a program a tile: 0 where no query sees a key, 2 where each sees them all, else 1
    list_tiles    a program a row: the longest run of full tiles, then the others in which some query sees a key

    tiles [rows, 4 + k_tiles] int32:  full_begin, full_end, count, tile, tile, ...      in tiles of BLOCK_N keys

`rows` counts the batch axes that the mask differs along, and its query tiles: layers and heads that share a mask share
the table. The attention kernel walks the run without a mask, the others by their numbers, then a tile that the end of
the keys cuts, which is in no table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.function import Taken, function, quoted
from fusecomp.codegen.launcher import by_name, call, parameters, rounded_up
from fusecomp.codegen.memory import element_loads, element_pointers, fixed_loads
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import columns, decoded, query_rows
from fusecomp.codegen.selfcheck import Visits
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.tile import indented, masked_tile, places, run_tile
from fusecomp.codegen.values import Values, element_values
from fusecomp.codegen.visited import cut_keys, row_of
from fusecomp.errors import KernelError
from fusecomp.ir import data
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Expr, Load, Size, Var, parts
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.tile import TilePlan

Lines = list[str]
VERSION = 2
"""Part of every signature: raise it when the same masks and tiles give another table."""

STATES = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """Of one tile of queries and keys: 0 where no pair is seen, 1 where some are, 2 where all."""
    program = tl.program_id(0)
    «program»

    «rows»
    «columns»
    «fixed»
    «pointers»

    «loads»
    «tests»
    tl.store(states_ptr + program, («any» + «all»).to(tl.int8))
'''

LARGER = '''\
@triton.jit
def larger(a, b):
    return tl.maximum(a, b)
'''

LIST = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(tiles_ptr, states_ptr, «lengths», TILES: tl.constexpr):
    """One row of the table: the longest run of tiles that are seen whole, and the others that are seen."""
    row = tl.cast(tl.program_id(0), tl.int64)
    tile = tl.arange(0, TILES)
    «state»

    # Of the runs of full tiles that end at each tile, the longest
    run = tile - tl.associative_scan(tl.where(state == 2, -1, tile), 0, larger)
    full_end = tl.argmax(run, axis=0) + 1
    full_begin = full_end - tl.max(run, axis=0)

    other = (state > 0) & ((tile < full_begin) | (tile >= full_end))
    place = tl.cumsum(other.to(tl.int32), axis=0)
    tiles = tiles_ptr + row * (4 + «count»)
    tl.store(tiles, full_begin)
    tl.store(tiles + 1, full_end)
    tl.store(tiles + 2, tl.sum(other.to(tl.int32), axis=0))
    tl.store(tiles + 2 + place, tile, mask=other)
'''

HOST = '''\
def list_visits(tensors, sizes):
    """The tiles of keys that each tile of queries visits, [«axes», 4 + key tiles]: first full one, the end of
    those, number of others, the others."""
    «unpack»
    rows, k_tiles = «rows», «keys» // BLOCK_N.value
    states = torch.empty(rows * k_tiles, dtype=torch.int8, device=tensors[0].device)
    tiles = torch.empty([rows, 4 + k_tiles], dtype=torch.int32, device=tensors[0].device)
    «states»
    list_tiles[(rows,)](tiles, states, k_tiles, TILES=triton.next_power_of_2(max(1, k_tiles)))
    return tiles
'''


@dataclass(frozen=True)
class TableFrame(Frame):
    """The masks of a region, tile by tile."""

    @cached_property
    def batch(self) -> tuple[Var, ...]:
        return data.axes(self.region)

    @cached_property
    def element(self) -> Values:
        return element_values([*data.seen(self.region), *data.full(self.region)], self.kv_idx.name)

    @cached_property
    def addressed(self) -> Values:
        return Values((), ())

    @cached_property
    def copied(self) -> tuple[tuple[str, Load], ...]:
        return ()


@dataclass(frozen=True)
class Table:
    """What `list_visits` takes, and what it is made of."""

    tensors: tuple[str, ...]
    """Of the region's operands: what the masks read; where that is nothing, Q, which says where the table is made."""
    sizes: tuple[str, ...]
    """Of the region's lengths."""
    axes: tuple[Var, ...]
    signature: str
    """A hash of the masks and the tile: tables of one signature over the same tensors are the same."""


def table(region: AttentionRegion, plan: TilePlan) -> Table:
    """The table of a region under a plan that visits by one."""
    if plan.skeleton != "prefill" or plan.pack > 1 or not data.unknown(region):
        raise KernelError("only a prefill plan of unpacked heads, for a mask that is data, visits by a table")
    masks = [*data.seen(region), *data.full(region)]
    axes = data.axes(region)
    read = {x.tensor for x in data.reads(region)}
    lengths = {s.name for e in (*masks, *(v.size for v in (*axes, region.q_idx, region.kv_idx)))
               for s in parts(e) if isinstance(s, Size)}  # fmt: skip
    operands = tuple(o for o in region.operands if o.name in read)
    tile = plan.block_m, plan.block_n, plan.visits
    made = repr((VERSION, masks, axes, operands, region.q_idx, region.kv_idx, *tile))
    return Table(
        tuple(o.name for o in operands) or (region.products[0].q.operand,),
        tuple(name for name in region.sizes if name in lengths),
        axes,
        hashlib.sha256(made.encode()).hexdigest()[:16],
    )


def visits_of(region: AttentionRegion, plan: TilePlan) -> Visits:
    """What a file's own check has to know."""
    made = table(region, plan)
    return Visits(made.tensors, made.sizes, plan.block_m, plan.block_n)


# ----------------------------------------------------------------------------------------------------------------
# The kernels that make it


def table_kernels(frame: Frame) -> list[str]:
    """tile_states, list_tiles and what launches them."""
    made = table(frame.region, frame.plan)
    own = TableFrame(frame.region, frame.plan)
    kernel, params = states_kernel(own, partial(parameters, own))
    return [kernel, LARGER, listed("list_tiles", ["k_tiles"]), _host(own, made, params)]


def states_kernel(frame: TableFrame, taken: Taken) -> tuple[str, list[str]]:
    """(tile_states, its parameters)."""
    return function(frame, STATES, "tile_states", states(frame), taken)


BESIDE = ["state = tl.load(states_ptr + row * k_tiles + tile, mask=tile < k_tiles, other=0)"]
"""States of a row lie beside each other."""


def listed(name: str, lengths: Sequence[str], count: str = "k_tiles", state: Sequence[str] = BESIDE) -> str:
    """A kernel that lists the tiles of each row, `count` of them, by their states."""
    return fill(LIST, {"name": name, "sizes": quoted(lengths), "lengths": ", ".join(lengths), "count": count,
                       "state": list(state)})  # fmt: skip


def states(frame: TableFrame) -> dict[str, str | Lines]:
    seen, full = data.seen(frame.region), data.full(frame.region)
    tests = [f"seen = {triton_text(_all(seen), frame.tile_names)}"]
    if full != seen:
        tests.append(f"full = {triton_text(_all(full), frame.tile_names)}")
    body = [*element_loads(frame, False, [*seen, *full]), *tests]
    every = "full" if full != seen else "seen"
    return {
        "program": _program(frame),
        "rows": query_rows(frame),
        "columns": columns(frame),
        "fixed": fixed_loads(frame),
        "pointers": element_pointers(frame),
        "loads": [*places(frame, "\n".join(body)), *body[: -len(tests)]],
        "tests": tests,
        "any": "tl.max(tl.max(seen.to(tl.int32), axis=1), axis=0)",
        "all": f"tl.min(tl.min({every}.to(tl.int32), axis=1), axis=0)",
    }


def _all(terms: tuple[Expr, ...]) -> Expr:
    return reduce(lambda a, b: apply("and", a, b), terms)


def _program(frame: TableFrame) -> Lines:
    """program = (outer * q_tiles + query tile) * k_tiles + key tile."""
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    return [
        f"q_tiles = tl.cdiv({m}, BLOCK_M)",
        f"k_tiles = {n} // BLOCK_N",
        "k_start = program % k_tiles * BLOCK_N",
        "q_start = program // k_tiles % q_tiles * BLOCK_M",
        "outer = tl.cast(program // k_tiles // q_tiles, tl.int64)",
        *decoded(frame),
    ]


def _host(frame: TableFrame, made: Table, params: list[str]) -> str:
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    axes = [triton_text(v.size, frame.names) for v in made.axes]
    return fill(HOST, {
        "axes": " ".join([*(v.name for v in made.axes), "query tiles"]),
        "unpack": by_name(made.tensors if data.reads(frame.region) else (), made.sizes),
        "rows": " * ".join([*axes, rounded_up(m, "BLOCK_M.value")]),
        "keys": n,
        "states": call("tile_states", "rows * k_tiles", params, frame, warps=4),
    })  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# The kernel that visits by it


def table_row(frame: Frame) -> Lines:
    """Where this query tile's row begins."""
    row, tile = row_of(frame), "q_start // BLOCK_M"
    return [
        "# The tiles of keys that these queries see: a run of full ones, then the others by number",
        f"k_tiles = {triton_text(frame.kv_idx.size, frame.names)} // BLOCK_N",
        f"tiles = tiles_ptr + {f'({row} * q_tiles + {tile})' if row else tile} * (4 + k_tiles)",
    ]


def full_tiles() -> Lines:
    """[full_begin, full_end): keys that every query of the tile sees."""
    return ["full_begin = tl.load(tiles) * BLOCK_N", "full_end = tl.load(tiles + 1) * BLOCK_N"]


def other_tiles(frame: Frame) -> Lines:
    """The other tiles in which some query sees a key; then the tile that the end of the keys cuts."""
    if frame.ranged:
        return cut_keys(frame, run_tile(frame))
    size = triton_text(frame.kv_idx.size, frame.names)
    return [
        "# The tiles that the mask cuts; each looks up the next, ahead of its loads",
        "next_tile = tl.load(tiles + 3)",
        "for other in range(4, 4 + tl.load(tiles + 2)):",
        "    k_start = next_tile * BLOCK_N",
        "    next_tile = tl.load(tiles + other)",
        *indented(masked_tile(frame)),
        "",
        "# The tile that the end of the keys cuts",
        f"for k_start in range(k_tiles * BLOCK_N, {size}, BLOCK_N):",
    ]
