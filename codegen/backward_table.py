"""The tables of tiles that gradients visit, where a mask is data: `codegen/table.py`, for two kernels of two tilings.

    dQ          a row a tile of queries: the tiles of keys that it sees
    dK and dV   a row a tile of keys: the tiles of queries that see it, from the same states turned round

    list_key_tiles     tiles [rows, 4 + k_tiles]     full_begin, full_end, count, tile, tile, ...
    list_query_tiles   tiles [rows, 4 + q_tiles]     the same, in tiles of BLOCK_M queries

What the end of the keys cuts is in no row of the first, what the end of the queries cuts in no row of the second: such
a tile is visited last. For the keys that their end cuts the second names every tile.
"""

from __future__ import annotations

from dataclasses import replace

from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_launcher import call, parameters
from fusecomp.codegen.launcher import by_name, rounded_up
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import factor
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.table import LARGER, TableFrame, listed, states_kernel, table
from fusecomp.codegen.table_ranges import gradient_kernels
from fusecomp.codegen.tile import indented
from fusecomp.codegen.visited import cut_keys, cut_queries, row_of
from fusecomp.ir.expr import Var

Lines = list[str]

HOST = '''\
def «name»(tensors, sizes):
    """«what», [«axes», 4 + tiles]: where full ones begin and end,
    the number of others, the others."""
    «unpack»
    units, q_tiles, k_tiles = «units», «q_tiles», «n» // «block_n»
    states = torch.empty(units * q_tiles * k_tiles, dtype=torch.int8, device=tensors[0].device)
    «states»
    «listed»
    return tiles
'''

KEYS_LISTED = """\
tiles = torch.empty([units * q_tiles, 4 + k_tiles], dtype=torch.int32, device=states.device)
width = triton.next_power_of_2(max(1, k_tiles))
list_key_tiles[(units * q_tiles,)](tiles, states, k_tiles, TILES=width)"""

QUERIES_LISTED = """\
rows, whole = {rows}, {m} // {block_m}  # tiles of keys, and those of queries that are listed
tiles = torch.empty([units * rows, 4 + whole], dtype=torch.int32, device=states.device)
width = triton.next_power_of_2(max(1, whole))
list_query_tiles[(units * rows,)](tiles, states, rows, whole, q_tiles, k_tiles, TILES=width)"""

TURNED = [
    "unit, k_tile = row // rows, row % rows",
    "at = states_ptr + (unit * q_tiles + tile) * k_tiles + k_tile",
    "held = tl.where(k_tile < k_tiles, whole, 0)",
    "state = tl.load(at, mask=tile < held, other=1)",
    "state = tl.where(tile < whole, state, 0)  # 1 throughout for keys that their end cuts",
]


def table_kernels(queries: GradientFrame, keys: GradientFrame) -> list[str]:
    """What makes the two tables, if there are some: kernels, then functions of the host."""
    if queries.ranged:
        return gradient_kernels(queries.region, queries.plan, keys.plan)
    if not queries.tabled:
        return []
    own = TableFrame(queries.region, queries.plan)
    kernel, params = states_kernel(own, lambda read: parameters(queries, read, ["states_ptr"]))
    return [
        kernel,
        LARGER,
        listed("list_key_tiles", ["k_tiles"]),
        listed("list_query_tiles", ["rows", "whole", "q_tiles", "k_tiles"], "whole", TURNED),
        _host(queries, params, "key_tiles", "The tiles of keys that each tile of queries visits", KEYS_LISTED),
        _host(keys, params, "query_tiles", "The tiles of queries that visit each tile of keys", QUERIES_LISTED),
    ]


def _host(frame: GradientFrame, params: list[str], name: str, what: str, how: str) -> str:
    made, plan = table(frame.region, replace(frame.plan, skeleton="prefill")), frame.plan
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    tile = {"m": m, "block_m": str(plan.block_m), "rows": rounded_up(n, plan.block_n)}
    axis = "query tiles" if name == "key_tiles" else "key tiles"
    return fill(HOST, {
        "n": n,
        "block_n": str(plan.block_n),
        "q_tiles": rounded_up(m, plan.block_m),
        "name": name,
        "what": what,
        "axes": " ".join([*(v.name for v in made.axes), axis]),
        "unpack": by_name(made.tensors, made.sizes),
        "units": " * ".join(factor(v.size, frame) for v in made.axes) or "1",
        "states": call(frame, "tile_states", ["units", "q_tiles", "k_tiles"], params, replace(plan, warps=4, stages=1)),
        "listed": how.format(**tile).splitlines(),
    })  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# The kernel of dK and dV, which visits by the second


def table_row(frame: GradientFrame) -> Lines:
    """Where this tile of keys has its row, and its run of full tiles."""
    row = row_of(frame)
    tile = "k_start // BLOCK_N"
    return [
        "# The tiles of queries that see these keys: a run of full ones, then the others by number",
        f"whole = {triton_text(frame.q_idx.size, frame.names)} // BLOCK_M",
        f"tiles = tiles_ptr + {f'({row} * k_tiles + {tile})' if row else tile} * (4 + whole)",
        "full_begin = tl.load(tiles) * BLOCK_M",
        "full_end = tl.load(tiles + 1) * BLOCK_M",
    ]


def other_tiles(frame: GradientFrame, tile: Lines, of: Var) -> Lines:
    """The tiles along `of` that the mask cuts, then the one that its end cuts; `tile` is what is done in the former."""
    keys = of == frame.kv_idx
    if frame.ranged:
        return (cut_keys if keys else cut_queries)(frame, tile)
    start, count, block = ("k_start", "k_tiles", "BLOCK_N") if keys else ("q_start", "whole", "BLOCK_M")
    return [
        "# The tiles that the mask cuts; each looks up the next, ahead of its loads",
        "next_tile = tl.load(tiles + 3)",
        "for other in range(4, 4 + tl.load(tiles + 2)):",
        f"    {start} = next_tile * {block}",
        "    next_tile = tl.load(tiles + other)",
        *indented(tile),
        "",
        f"# The tile that the end of the {'keys' if keys else 'queries'} cuts",
        f"for {start} in range({count} * {block}, {triton_text(of.size, frame.names)}, {block}):",
    ]

