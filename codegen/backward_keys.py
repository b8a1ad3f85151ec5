"""dK and dV: a program has a tile of keys of one KV head, and walks the queries that see them. (frame) -> lines.

The tile is [BLOCK_N, BLOCK_M]: P^T and dS^T are left factors of the products that they enter. Beside a bias, not a mask
of bytes, it is [BLOCK_M, BLOCK_N], as that lies, and turned before them. Heads that share the keys are summed inside
the program, so that nothing is added atomically and the result is the same every time.
"""

from __future__ import annotations

from collections.abc import Callable

from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_memory import query_loads, query_values
from fusecomp.codegen.backward_queries import read_by_tile
from fusecomp.codegen.backward_tile import (
    accumulated,
    deltas,
    leaf_gradient,
    log_sums,
    mask,
    probabilities,
    products_of,
    rounded,
    row_values,
    scaled_by,
    score_gradients,
    scores,
    seldom,
    value_products,
    weighted,
    weights,
)
from fusecomp.codegen.frame import Chunk
from fusecomp.codegen.philox import fours, kept
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import factor
from fusecomp.codegen.tile import indented
from fusecomp.codegen.turns import WHY, moves_alone, tile_of_turn
from fusecomp.codegen.visited import in_run
from fusecomp.ir.expr import Expr, parts
from fusecomp.planning.backward import reads_pairs

Lines = list[str]
ROWS = "first_row + q_start + m"
"""Where lse and delta hold a tile's queries."""
LONG = 128
"""Keys of a tile from which on heads take turns, as they do where some share the keys: there programs are few and long.
Causal, 64 heads of 4,096, examples/bench/records/turns_h200.json: D128 1.11 to 1.05 ms, D64 in groups of four 0.77 to
0.68, but D64 with tiles of 64 keys 0.66 to 0.71."""


# ----------------------------------------------------------------------------------------------------------------
# The program


def program(frame: GradientFrame) -> Lines:
    """program = outer * k_tiles + tile, key tiles fastest unless heads take turns; outer counts the KV heads."""
    size = triton_text(frame.kv_idx.size, frame.names)
    lines, left = [], "outer"
    for place, v in reversed(list(enumerate(frame.key_axes))):
        extent = factor(v.size, frame)
        lines.append(f"{v.name} = {left} % {extent}" if place else f"{v.name} = {left}")
        left = f"{left} // {extent}"
    tile, taken = "program % k_tiles", ["outer = tl.cast(program // k_tiles, tl.int64)"]
    long = bool(frame.members) or frame.plan.block_n >= LONG
    if long and moves_alone(frame.rows_reach.lower, frame.rows_reach.upper):
        tile, taken = "inside // turns", [WHY, *tile_of_turn("k_tiles")]
    counted = ["program = tl.program_id(0)", f"k_tiles = tl.cdiv({size}, BLOCK_N)"]
    return [*counted, *taken, f"k_start = {tile} * BLOCK_N", *lines]


def columns(frame: GradientFrame) -> Lines:
    """The places in a tile of keys and in a tile of queries."""
    size = triton_text(frame.kv_idx.size, frame.names)
    products = range(len(frame.region.products))
    chunks = [*(c for t in products for c in frame.d_chunks(t)), *frame.dv_chunks]
    return [
        "# Keys past the end repeat the last one, and are not stored",
        "n = tl.arange(0, BLOCK_N)[:, None]",
        *(across(size) if frame.queries_down else down(size, reads_pairs(frame.region))),
        "kv_pos = kv_idx.to(tl.float32)",
        *fours(frame),
        "m = tl.arange(0, BLOCK_M)",
        *(f"{c.d} = {f'{c.first} + ' * bool(c.first)}tl.arange(0, {c.size})" for c in chunks),
    ]


def down(size: str, read: bool) -> Lines:
    """The keys of a tile. `read`: a mask is, with each query."""
    repeated = f"tl.minimum(n, {size} - 1 - k_start)"
    whole = f"n if WHOLE else {repeated}  # whole tiles are read in vectors"
    return [f"k_row = {whole if read else repeated}", "kv_idx = k_start + k_row"]


def across(size: str) -> Lines:
    """The keys of K and V, and once more across a tile."""
    end = f"{size} - 1 - k_start)"
    column = "column = tl.arange(0, BLOCK_N)[None, :]"
    whole = f"k_column = column if WHOLE else tl.minimum(column, {end}  # whole tiles are read in vectors"
    return [f"k_row = tl.minimum(n, {end}", column, whole, "kv_idx = k_start + k_column"]


def member_name(frame: GradientFrame) -> str:
    """The index of the loop over query heads that share the keys: the axis itself where there is one."""
    return frame.members[0].name if len(frame.members) == 1 else "member"


def members(frame: GradientFrame) -> str:
    """How many query heads share the keys."""
    return " * ".join(factor(v.size, frame) for v in frame.members)


def member(frame: GradientFrame) -> Lines:
    """h = h_group * 3 + h_member, from the number of the member."""
    lines, left = [], "member"
    for place, v in reversed(list(enumerate(frame.members)) if len(frame.members) > 1 else []):
        extent = factor(v.size, frame)
        lines.append(f"{v.name} = {left} % {extent}" if place else f"{v.name} = {left}")
        left = f"{left} // {extent}"
    for v, n in frame.shares.items():
        if n > 1:
            lines.append(f"{v.name} = {v.name}_group * {n} + {v.name}_member")
    return lines


def accumulators(frame: GradientFrame) -> Lines:
    keys = [f"{c.name('dk_acc')} = tl.zeros([BLOCK_N, {c.size}], tl.float32)" for _, c in _key_chunks(frame)]
    return [*keys, *(f"{c.name('dv_acc')} = tl.zeros([BLOCK_N, {c.size}], tl.float32)" for c in frame.dv_chunks)]


def _key_chunks(frame: GradientFrame) -> list[tuple[int, Chunk]]:
    return [(t, c) for t in range(len(frame.region.products)) for c in frame.d_chunks(t)]


# ----------------------------------------------------------------------------------------------------------------
# A tile of queries


def first_row(frame: GradientFrame) -> Lines:
    """Where lse and delta [batch axes, M] hold this head's queries, and sums [batch axes, N] its keys."""
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    head = outer(frame)
    head = f"tl.cast({head}, tl.int64)" if not frame.key_axes else f"({head})" if " " in head else head
    return [
        f"first_row = {head} * {m}  # of this head, in lse and delta",
        *([f"first_key = {head} * {n} + k_start"] if frame.summed_along("keys") else []),
    ]


def outer(frame: GradientFrame) -> str:
    """b * H + h."""
    body = ""
    for v in frame.region.batch:
        head = f"({body})" if " " in body else body
        body = f"{head} * {factor(v.size, frame)} + {v.name}" if body else v.name
    return body or "0"


def sums(frame: GradientFrame) -> Lines:
    """Sums over queries of what learns and does not vary with them, for each query head."""
    return [f"{leaf.name}_sum = tl.zeros([BLOCK_N], tl.float32)" for leaf in frame.summed_along("keys")]


def store_sums(frame: GradientFrame) -> Lines:
    size = triton_text(frame.kv_idx.size, frame.names)
    lines = []
    for leaf in frame.summed_along("keys"):
        value = scaled_by(f"{leaf.name}_sum[:, None]", leaf.factor)
        lines.append(f"tl.store({leaf.name}_sums_ptr + first_key + n, {value}, mask=n < {size} - k_start)")
    return lines


def full_tile(frame: GradientFrame) -> Lines:
    """Queries that all see the whole tile of keys, as far as bounds say, or as the table does."""
    return _tile(frame, [] if frame.tabled else list(frame.rows_reach.loose), edge=False)


def masked_tile(frame: GradientFrame) -> Lines:
    """Queries some of which see some of the keys, as the table says."""
    return _tile(frame, in_run(frame.q_idx) if frame.ranged else list(frame.region.keep), edge=False)


def edge_tile(frame: GradientFrame) -> Lines:
    """Queries that a bound, or their end, cuts. Those past the end have lse = inf, so that P = 0."""
    if frame.tabled:
        return _tile(frame, list(frame.region.keep), edge=True)
    found = frame.rows_reach
    return _tile(frame, [x.term for x in (*found.lower, *found.upper)] + list(found.loose), edge=True)


def rescue(frame: GradientFrame) -> Lines:
    """The queries that see no key, which see these too."""
    again = frame.rescue
    if again is None:
        return []
    size = triton_text(frame.q_idx.size, frame.names)
    return [
        "# Queries that see no key, or only keys near the fill, take part in every key",
        f"for q_start in {seldom('0', size, 'BLOCK_M')}:",
        f"    live = q_start + m < {size}",
        *indented(log_sums(again, ROWS, "live")),
        '    if tl.min(lse) < float("inf"):',
        *indented(_tile(again, [], edge=True, known=deltas(ROWS, "live")), 8),
    ]


def rows_of(frame: GradientFrame) -> str:
    """How a vector over the queries meets a tile."""
    return "[:, None]" if frame.queries_down else "[None, :]"


def tile_products(frame: GradientFrame, made: Callable[[GradientFrame, str, str, str], Lines]) -> Lines:
    """Q K^T or dO V^T as a tile lies."""
    if frame.queries_down:
        return made(frame, "{0}", "tl.trans({1})", "[BLOCK_M, BLOCK_N]")
    return made(frame, "{1}", "tl.trans({0})", "[BLOCK_N, BLOCK_M]")


def turned(frame: GradientFrame, tile: str) -> str:
    """A tile as the left factor of a sum over queries."""
    return f"tl.trans({tile})" if frame.queries_down else tile


def _tile(frame: GradientFrame, tests: list[Expr], edge: bool, known: Lines | None = None) -> Lines:
    """dV += (weight P)^T dO;  dK_t += dscore_t^T Q_t. `known`: what is left to read where lse was read before."""
    wanted = {x for e in read_by_tile(frame, tests) for x in parts(e)}
    values = query_values(frame, edge)
    named = [n for n, e in (*frame.element.hoisted, *frame.element.tiles) if e in wanted]
    body = [
        "query = tl.cast(q_start, tl.int64)",
        f"q_idx = q_start + m{rows_of(frame)}",
        "q_pos = q_idx.to(tl.float32)",
        *([f"live = q_start + m < {triton_text(frame.q_idx.size, frame.names)}"] if edge and known is None else []),
        *query_loads(frame, edge, "q"),
        *tile_products(frame, products_of),
        "",
        *(line for line in values if line.split(" = ")[0] in named),
        *kept(frame, wanted, "q_start + m[:, None]", not frame.queries_down),
        *scores(frame),
        *mask(frame, tests, {}),
        *(known or row_values(frame, ROWS, "live" if edge else "")),
        *probabilities(frame, rows_of(frame)),
        *weights(frame),
        "",
        *query_loads(frame, edge, "do"),
    ]
    pv = frame.region.pv_dtype
    left = turned(frame, weighted(frame))
    body += [accumulated(frame, c.name("dv_acc"), left, c.name("do_tile"), pv) for c in frame.dv_chunks]
    body += tile_products(frame, value_products)
    body += score_gradients(frame, rows_of(frame))
    for t, c in _key_chunks(frame):
        dtype = frame.region.products[t].dtype
        left = turned(frame, rounded(frame.d_name(t), dtype))
        body.append(accumulated(frame, c.name("dk_acc"), left, c.name("q_tile"), dtype))
    for leaf in frame.summed_along("keys"):
        body.append(f"{leaf.name}_sum += tl.sum({leaf_gradient(frame, leaf)}, axis={0 if frame.queries_down else 1})")
    return body
