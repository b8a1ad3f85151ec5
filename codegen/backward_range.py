"""Which queries a tile of keys is seen by: the bounds of the mask, read the other way round. (frame) -> lines."""

from __future__ import annotations

from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_table import table_row
from fusecomp.codegen.bounds import chain, in_int32
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.visited import FULL, query_row, query_runs
from fusecomp.ir.expr import Expr, Var
from fusecomp.ir.poly import is_natural
from fusecomp.ir.ranges import Bound

Lines = list[str]


def query_range(frame: GradientFrame) -> Lines:
    """[q_begin, q_end) are the queries that see a key of the tile; all of [full_begin, full_end) see all of it."""
    if frame.ranged:
        return [*query_row(frame), *FULL, *query_runs()]
    if frame.tabled:
        return table_row(frame)
    found, size = frame.rows_reach, triton_text(frame.q_idx.size, frame.names)
    sloped = any(x.slope for x in (*found.lower, *found.upper))
    last = f"k_last = tl.minimum(k_start + BLOCK_N, {triton_text(frame.kv_idx.size, frame.names)}) - 1"
    upper = [_edge(frame, x, greatest=True) for x in found.upper]
    lines = [last] if sloped else []
    if found.lower:
        edges = [_edge(frame, x, greatest=False) for x in found.lower]
        natural = any(is_natural(_extreme(frame, x, greatest=False)) for x in found.lower)
        least = chain("maximum", edges if natural else [*edges, "0"])
        lines.append(f"q_begin = {_int32(frame, least, found.lower)} // BLOCK_M * BLOCK_M")
    if found.upper:
        lines.append(f"q_end = {_int32(frame, chain('minimum', [*upper, size]), found.upper)}")
    begin, end = begin_name(frame), end_name(frame)
    if found.lower:
        most = chain("maximum", [*(_edge(frame, x, greatest=True) for x in found.lower), begin])
        lines.append(f"full_begin = tl.cdiv({_int32(frame, most, found.lower)}, BLOCK_M) * BLOCK_M")
    ends = _int32(frame, chain("minimum", [*(_edge(frame, x, greatest=False) for x in found.upper), end]), found.upper)
    if found.lower or found.upper:
        ends = f"tl.maximum({ends}, {full_begin(frame)})"
    return [*lines, f"full_end = {ends} // BLOCK_M * BLOCK_M"]


def begin_name(frame: GradientFrame) -> str:
    return "q_begin" if frame.rows_reach.lower or frame.ranged else "0"


def full_begin(frame: GradientFrame) -> str:
    return "full_begin" if frame.rows_reach.lower or frame.tabled else "0"


def end_name(frame: GradientFrame) -> str:
    return "q_end" if frame.rows_reach.upper or frame.ranged else triton_text(frame.q_idx.size, frame.names)


CUT_BY_QUERIES = "The tiles that the mask or the end of the queries cuts"
LAST_QUERIES = "The last queries, where they do not fill a tile"


def edge_loop(frame: GradientFrame) -> Lines:
    """The tiles of [q_begin, q_end) outside [full_begin, full_end)."""
    if begin_name(frame) == "0":
        bounded = frame.rows_reach.upper or frame.ranged
        return [
            f"# {CUT_BY_QUERIES if bounded else LAST_QUERIES}",
            f"for q_start in range(full_end, {end_name(frame)}, BLOCK_M):",
        ]
    return [
        f"# {CUT_BY_QUERIES}, before and after the full ones",
        f"for edge in range(q_begin, {end_name(frame)} - (full_end - full_begin), BLOCK_M):",
        "    q_start = tl.where(edge < full_begin, edge, edge + (full_end - full_begin))",
    ]


def _edge(frame: GradientFrame, bound: Bound, greatest: bool) -> str:
    return triton_text(_extreme(frame, bound, greatest), frame.names)


def _extreme(frame: GradientFrame, bound: Bound, greatest: bool) -> Expr:
    first, last = Var("k_start", frame.kv_idx.size), Var("k_last", frame.kv_idx.size)
    return (bound.greatest if greatest else bound.least)(first, last, frame.kv_idx)


def _int32(frame: GradientFrame, body: str, bounds: tuple[Bound, ...]) -> str:
    return in_int32(body, bounds, {v.name for v in (*frame.region.batch, *frame.key_axes)})
