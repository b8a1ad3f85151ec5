"""Which rows and keys a program has, what it starts from and where its result goes. (frame) -> lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusecomp.codegen.base2 import LOG2E, Exponent, scaled
from fusecomp.codegen.bounds import chain, in_int32
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.memory import output_address, row_base, row_offsets
from fusecomp.codegen.philox import fours
from fusecomp.codegen.printer import atom, triton_dtype, triton_text
from fusecomp.codegen.turns import WHY, moves_alone, tile_of_turn
from fusecomp.codegen.visited import FULL, key_row, key_runs
from fusecomp.ir.expr import Expr, Var
from fusecomp.ir.poly import is_natural
from fusecomp.ir.ranges import Bound

Lines = list[str]


def tile_count(frame: Frame) -> str:
    """How many tiles the queries make, in the kernel."""
    return f"q_tiles = tl.cdiv({triton_text(frame.q_idx.size, frame.names)}, {frame.rows_per_tile_name})"


def batch_axes(frame: Frame) -> Lines:
    """program = outer * q_tiles + tile, query tiles fastest; outer = b * H + h."""
    lines, tile = ["program = tl.program_id(0)", tile_count(frame)], "program % q_tiles"
    if frame.heavy_last and not frame.tabled and moves_alone(frame.reach.upper, frame.reach.lower):
        taken = tile_of_turn("q_tiles")
        start = f"q_start = (q_tiles - 1 - inside // turns) * {frame.rows_per_tile_name}"
        return [*lines, WHY, *taken, start, *decoded(frame)]
    if frame.heavy_last or frame.tabled:
        lines.append("# The tiles with most keys first: the grid ends with short ones")
        tile = f"(q_tiles - 1 - {tile})"
    lines.append(f"q_start = {tile} * {frame.rows_per_tile_name}")
    return [*lines, "outer = tl.cast(program // q_tiles, tl.int64)", *decoded(frame)]


def decoded(frame: Frame, axes: Sequence[Var] = ()) -> Lines:
    """outer = (b * H + h) * G + g, or so in the order of `axes`."""
    lines, left = [], "outer"
    for place, v in reversed(list(enumerate(axes or frame.batch))):
        extent = factor(v.size, frame)
        lines.append(f"{v.name} = {left} % {extent}" if place else f"{v.name} = {left}")
        left = f"{left} // {extent}"
    return lines


def factor(e: Expr, frame: Frame) -> str:
    """The text of a size, to be multiplied or divided by."""
    return atom(triton_text(e, frame.names))


def query_rows(frame: Frame) -> Lines:
    """q_idx [BLOCK_M, 1] of each row. Rows past the end repeat the last query, and are not stored."""
    size = triton_text(frame.q_idx.size, frame.names)
    if frame.member is None:
        rows = ["row = tl.arange(0, BLOCK_M)[:, None]", f"q_row = tl.minimum(row, {size} - 1 - q_start)"]
    else:
        rows = [
            "row = tl.arange(0, BLOCK_M)[:, None] // PACK",
            f"q_row = tl.minimum(row, tl.minimum(Q_ROWS, {size} - q_start) - 1)",
            f"{frame.member.name} = tl.arange(0, BLOCK_M)[:, None] % PACK",
        ]
    return ["# Rows past the end repeat the last query, and are not stored", *rows, *ROW_INDICES]


ROW_INDICES = ["q_idx = q_start + q_row", "q_pos = q_idx.to(tl.float32)"]
"""Which query a row is, as an integer and as a number."""


def columns(frame: Frame) -> Lines:
    """d, dv and n, the places in a tile of keys."""
    products = range(len(frame.region.products))
    chunks = [*(c for t in products for c in frame.d_chunks(t)), *frame.dv_chunks]
    places = [f"{c.d} = {f'{c.first} + ' * bool(c.first)}tl.arange(0, {c.size})" for c in chunks]
    return [*places, "n = tl.arange(0, BLOCK_N)", "n_pos = n[None, :].to(tl.float32)", *fours(frame)]


# ----------------------------------------------------------------------------------------------------------------
# Keys


def key_range(frame: Frame) -> Lines:
    """[k_begin, k_end) is what the tile reaches; no key of [full_begin, full_end) is hidden by a bound."""
    if frame.ranged:
        return key_row(frame)
    return [
        *last_query(frame),
        *(_begin(frame) if frame.k_begin == "k_begin" else []),
        *(_end(frame) if frame.k_end == "k_end" else []),
    ]


def last_query(frame: Frame) -> Lines:
    """The last query of the tile, where the range depends on it."""
    sloped = any(x.slope for x in (*frame.reach.lower, *frame.reach.upper))
    size = triton_text(frame.q_idx.size, frame.names)
    return [f"q_last = tl.minimum(q_start + {frame.rows_per_tile_name}, {size}) - 1"] if sloped else []


def full_range(frame: Frame) -> Lines:
    """Whole tiles between the greatest lower and the least upper edge over the rows."""
    if frame.ranged:
        return [*FULL, *key_runs()]
    found, begin = frame.reach, frame.k_begin
    lines = []
    if begin != "0":
        edges = [_edge(frame, x, greatest=True) for x in found.lower]
        first = _int32(frame, chain("maximum", [*edges, begin]), found.lower)
        lines.append(f"full_begin = tl.cdiv({first}, BLOCK_N) * BLOCK_N")
    sloped = tuple(x for x in found.upper if x.slope)
    last = _int32(frame, chain("minimum", [*(_edge(frame, x, greatest=False) for x in sloped), frame.k_end]), sloped)
    if begin != "0":
        last = f"tl.maximum({last}, full_begin)"
    elif not all(_natural(frame, x, greatest=False) for x in found.upper):
        last = f"tl.maximum({last}, 0)"
    return [*lines, f"full_end = {last} // BLOCK_N * BLOCK_N"]


def whole_tiles(frame: Frame) -> Lines:
    """The same, with what it means where a mask decides it."""
    bounded = frame.reach.lower or frame.reach.upper or frame.ranged
    begin, full = frame.k_begin, "0" if frame.k_begin == "0" else "full_begin"
    seen = "what the rest of the mask shows" if frame.reach.loose and not frame.ranged else "all"
    said = f"# No query of the tile sees a key outside [{begin}, {frame.k_end}); in [{full}, full_end) each sees {seen}"
    return [*([said] if bounded else []), *full_range(frame)]


CUT_BY_KEYS = "The tiles that the mask or the end of the keys cuts"
LAST_KEYS = "The last keys, where they do not fill a tile"


def edge_loop(frame: Frame) -> Lines:
    """The tiles of [k_begin, k_end) outside [full_begin, full_end)."""
    if frame.k_begin == "0":
        bounded = frame.reach.upper or frame.ranged
        return [
            f"# {CUT_BY_KEYS if bounded else LAST_KEYS}",
            f"for k_start in range(full_end, {frame.k_end}, BLOCK_N):",
        ]
    return [
        f"# {CUT_BY_KEYS}, before and after the full ones",
        f"for edge in range(k_begin, {frame.k_end} - (full_end - full_begin), BLOCK_N):",
        "    k_start = tl.where(edge < full_begin, edge, edge + (full_end - full_begin))",
    ]


def _begin(frame: Frame) -> Lines:
    edges = [_edge(frame, x, greatest=False) for x in frame.reach.lower]
    if not edges:
        return ["k_begin = 0"]
    least = _int32(frame, chain("maximum", [*edges, "0"]), frame.reach.lower)
    return [f"k_begin = {least} // BLOCK_N * BLOCK_N"]


def _end(frame: Frame) -> Lines:
    size = triton_text(frame.kv_idx.size, frame.names)
    edges = [_edge(frame, x, greatest=True) for x in frame.reach.upper]
    return [f"k_end = {_int32(frame, chain('minimum', [*edges, size]), frame.reach.upper)}"]


def _ends(frame: Frame) -> tuple[Var, Var]:
    return Var("q_start", frame.q_idx.size), Var("q_last", frame.q_idx.size)


def _edge(frame: Frame, bound: Bound, greatest: bool) -> str:
    return triton_text(_extreme(frame, bound, greatest), frame.names)


def _extreme(frame: Frame, bound: Bound, greatest: bool) -> Expr:
    first, last = _ends(frame)
    return (bound.greatest if greatest else bound.least)(first, last, frame.q_idx)


def _int32(frame: Frame, body: str, bounds: tuple[Bound, ...]) -> str:
    return in_int32(body, bounds, frame.batch_names)


def _natural(frame: Frame, bound: Bound, greatest: bool) -> bool:
    return is_natural(_extreme(frame, bound, greatest))


# ----------------------------------------------------------------------------------------------------------------
# Begin and end


def state(frame: Frame) -> Lines:
    """row_max = -inf, row_sum = 0, acc = 0; with a sink row_max = sink, row_sum = exp(sink - row_max) = 1."""
    accs = [f"{c.name('acc')} = tl.zeros([BLOCK_M, {c.size}], tl.float32)" for c in frame.dv_chunks]
    if frame.sink is None or not frame.region.grounded:
        return [
            'row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)',
            "row_sum = tl.zeros([BLOCK_M], tl.float32)",
            *accs,
        ]
    e = frame.filled if frame.every_key and frame.filled else frame.exponent
    first = f"tl.zeros([BLOCK_M, 1], tl.float32) + {sink_text(frame, e)}"
    return [
        f"row_max = tl.sum({first}, axis=1)  # the sink, a logit without a value",
        "row_sum = tl.full([BLOCK_M], 1.0, tl.float32)",
        *accs,
    ]


def sink_text(frame: Frame, e: Exponent) -> str:
    """The sink, where there is one, in the unit of the row maximum."""
    assert frame.sink is not None
    return triton_text(frame.sink if e.natural else scaled(frame.sink, LOG2E, frame.moving), frame.names)


def beside(frame: Frame) -> Lines:
    """row_sum + c exp(max S - row_max), where that is what a sink adds; a row that sees no key has none. Or
    row_sum + exp(sink - row_max), where such a row gives NaN."""
    if frame.region.empty_row == "unsafe":
        weight = frame.exponent.exp(f"{sink_text(frame, frame.exponent)} - row_max")
        return [f"row_sum = tl.where(row_sum == 0.0, 0.0, row_sum + {weight})  # the sink; 0 where no key is seen"]
    c = frame.region.beside
    if c is None:
        return []
    return [f"row_sum = tl.where(row_sum == 0.0, 0.0, row_sum + {c!r})  # beside the largest weight, which is 1"]


def stored_rows(frame: Frame) -> str:
    """Which rows are queries of this tile."""
    size = triton_text(frame.q_idx.size, frame.names)
    return f"row < tl.minimum(Q_ROWS, {size} - q_start)" if frame.member else f"row < {size} - q_start"


def emptied(frame: Frame, accs: Iterable[str], sums: str) -> Lines:
    """0 for a row that sees no key, and maybe for one of whose scores the softmax is NaN, and so their sum; `sums` of
    the rows of `accs`."""
    match frame.region.empty_row:
        case "zero":
            return ["row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees no key gives 0"]
        case "guarded":
            rows = [f"{acc} = tl.where({sums} > 0.0, {acc}, 0.0)" for acc in accs]
            return [*rows, "row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)  # what sees no key, or a NaN, gives 0"]
    return []


def store(frame: Frame, rows: str = "") -> Lines:
    """O = acc / row_sum, rounded, for all rows of the tile or for `rows`."""
    lines = emptied(frame, [c.name("acc") for c in frame.dv_chunks], "row_sum[:, None]")
    a = output_address(frame)
    lines.append(f"out_base = {' + '.join(['out_ptr', *row_base(frame, a)])}")
    for c in frame.dv_chunks:
        live = rows or stored_rows(frame)
        live = f"({live}) & ({c.d}[None, :] < {c.limit})" if c.limit else live
        value = f"({c.name('acc')} / row_sum[:, None]).to({triton_dtype(frame.region.out_dtype)})"
        pointer = " + ".join(["out_base", *row_offsets(frame, a, {frame.region.dv: f"{c.d}[None, :]"})])
        lines.append(f"tl.store({pointer}, {value}, mask={live})")
    return lines
