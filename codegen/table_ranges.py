"""The table of the kernels for Hopper: of each row the range of tiles that hold a pair the mask shows, and in it the
longest run of those that it shows whole.

    tile_states   a program a tile, as for a list (codegen/table.py); what the ends cut is a tile too, and never full
    list_ranges   a program a row

    tiles [rows, 4] int32:  begin, full_begin, full_end, end             of keys or queries, the last one at most N or M

A tile inside the range that shows no pair is visited like one that the mask cuts. With documents, padding and whatever
else is known of queries and keys apart there is seldom one, and a list would have to be looked up tile by tile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fusecomp.codegen import launcher
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_launcher import call, parameters
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import factor
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.table import LARGER, TableFrame, states_kernel, table

Lines = list[str]

LIST = '''\
@triton.jit(do_not_specialize=["count", "rows", "row_step", "tile_step", "end"])
def list_ranges(
    tiles_ptr, states_ptr, count, rows, row_step, tile_step, end, BLOCK: tl.constexpr, TILES: tl.constexpr
):
    """Of `rows` rows a mask, `count` tiles of BLOCK in each; `end`: of what they are tiles of."""
    row = tl.cast(tl.program_id(0), tl.int64)
    tile = tl.arange(0, TILES)
    first = row // rows * rows * count + row % rows * row_step
    state = tl.load(states_ptr + first + tile * tile_step, mask=tile < count, other=0)
    end_tile = tl.max(tl.where(state > 0, tile + 1, 0), axis=0)
    begin_tile = tl.minimum(tl.min(tl.where(state > 0, tile, TILES), axis=0), end_tile)

    # Of the runs of full tiles that end at each tile, the longest; where there is none, an empty one at the beginning
    run = tile - tl.associative_scan(tl.where(state == 2, -1, tile), 0, larger)
    length = tl.max(run, axis=0)
    full_end = tl.where(length > 0, tl.argmax(run, axis=0) + 1, begin_tile)

    tiles = tiles_ptr + row * 4
    tl.store(tiles, begin_tile * BLOCK)
    tl.store(tiles + 1, (full_end - length) * BLOCK)
    tl.store(tiles + 2, full_end * BLOCK)
    tl.store(tiles + 3, tl.minimum(end_tile * BLOCK, end))
'''

HOST = '''\
def «name»(tensors, sizes):
    """«what», [«axes», 4]:
    from the first to the last of which a pair is seen, and between them those of which all are."""
    «unpack»
    units, q_tiles, k_tiles = «units», «q_tiles», «k_tiles»
    states = torch.empty(units * q_tiles * k_tiles, dtype=torch.int8, device=tensors[0].device)
    tiles = torch.empty([units * «rows», 4], dtype=torch.int32, device=tensors[0].device)
    «states»
    width = triton.next_power_of_2(max(1, «count»))
    list_ranges[(units * «rows»,)](
        tiles, states, «count», «rows», «steps», «end», BLOCK=«block», TILES=width
    )
    return tiles
'''
KEYS = {
    "what": "The keys that each tile of queries visits",
    "axes": "query tiles", "rows": "q_tiles", "count": "k_tiles", "steps": "k_tiles, 1",
}
QUERIES = {
    "what": "The queries that each tile of keys is visited by",
    "axes": "key tiles", "rows": "k_tiles", "count": "q_tiles", "steps": "1, k_tiles",
}
WARPS = 8
"""Of a program of `tile_states`: a tile has up to 128 queries and as many keys."""


def range_kernels(frame: Frame) -> list[str]:
    """tile_states, list_ranges and what launches them, for the forward kernel."""
    own = TableFrame(frame.region, frame.plan)
    kernel, params = states_kernel(own, partial(launcher.parameters, own))
    states = launcher.call("tile_states", "units * q_tiles * k_tiles", params, own, WARPS)
    return [kernel, LARGER, LIST, _host(own, "list_visits", KEYS, states, "BLOCK_M.value", "BLOCK_N.value")]


def gradient_kernels(queries: GradientFrame, keys: GradientFrame, once: bool) -> list[str]:
    """The same for dQ, and for dK and dV, whose tiles differ."""
    if not queries.tabled:
        return []
    own = TableFrame(queries.region, queries.plan)
    kernel, params = states_kernel(own, lambda read: parameters(queries, read, ["states_ptr"]))
    tables = {"query_tiles": (keys, QUERIES), **({} if once else {"key_tiles": (queries, KEYS)})}
    hosts = [_of_gradient(frame, name, what, params) for name, (frame, what) in tables.items()]
    return [kernel, LARGER, LIST, *hosts]


def _of_gradient(frame: GradientFrame, name: str, what: dict[str, str], params: list[str]) -> str:
    plan, grid = frame.plan, ["units", "q_tiles", "k_tiles"]
    states = call(frame, "tile_states", grid, params, replace(plan, warps=WARPS, stages=1))
    return _host(frame, name, what, states, str(plan.block_m), str(plan.block_n))


def _host(frame: Frame, name: str, what: dict[str, str], states: Lines, block_m: str, block_n: str) -> str:
    made = table(frame.region, replace(frame.plan, skeleton="prefill"))
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    return fill(HOST, {
        **what,
        "name": name,
        "axes": " ".join([*(v.name for v in made.axes), what["axes"]]),
        "unpack": launcher.by_name(made.tensors, made.sizes),
        "units": " * ".join(factor(v.size, frame) for v in made.axes) or "1",
        "q_tiles": launcher.rounded_up(m, block_m),
        "k_tiles": launcher.rounded_up(n, block_n),
        "states": states,
        "end": n if what is KEYS else m,
        "block": block_n if what is KEYS else block_m,
    })  # fmt: skip
