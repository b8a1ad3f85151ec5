"""The kernels that have a program for each tile of queries: delta = rowsum(dO O), and dQ. (frame) -> lines."""

from __future__ import annotations

from fusecomp.codegen.address import Address, address
from fusecomp.codegen.backward_frame import GradientFrame, Leaf
from fusecomp.codegen.backward_tile import (
    accumulated,
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
    times,
    value_products,
    weights,
)
from fusecomp.codegen.frame import Chunk
from fusecomp.codegen.logsumexp import saved
from fusecomp.codegen.memory import element_loads, key_loads, output_index, row_base, row_offsets, value_loads
from fusecomp.codegen.philox import kept
from fusecomp.codegen.printer import show, triton_text
from fusecomp.codegen.program import stored_rows
from fusecomp.codegen.tile import indented, places
from fusecomp.codegen.visited import in_run
from fusecomp.ir.algebra import depends_on_score
from fusecomp.ir.expr import Expr, Var
from fusecomp.ir.primitives import PLUS

Lines = list[str]


def _address(frame: GradientFrame, operand: str, index: tuple[Expr, ...]) -> Address:
    return address(operand, index, frame.moving, frozenset({frame.q_idx.name}))


def first_row(frame: GradientFrame) -> Lines:
    """Where lse and delta [batch axes, M] hold this tile's queries."""
    size = triton_text(frame.q_idx.size, frame.names)
    return [f"rows = outer * {size} + q_start + q_row  # [BLOCK_M, 1], in lse and delta"]


def output_tiles(frame: GradientFrame, operand: str, stem: str, cast: bool) -> Lines:
    """stem_tile [BLOCK_M, Dv] of each chunk, from a tensor of the output's shape."""
    a = _address(frame, operand, output_index(frame))
    lines = [f"{stem}_base = {' + '.join([f'{operand}_ptr', *row_base(frame, a)])}"]
    for c in frame.dv_chunks:
        pointer = " + ".join([f"{stem}_base", *row_offsets(frame, a, {frame.region.dv: f"{c.d}[None, :]"})])
        live = f", mask={c.d}[None, :] < {c.limit}, other=0.0" if c.limit else ""
        body = f"tl.load({pointer}{live})"
        body = rounded(body, frame.region.pv_dtype, frame.region.out_dtype) if cast else f"{body}.to(tl.float32)"
        lines.append(f"{c.name(f'{stem}_tile')} = {body}  # [BLOCK_M, {c.size}]")
    return lines


def delta(frame: GradientFrame, may_be_empty: bool, may_be_hidden: bool) -> Lines:
    """delta = sum over dv of O dO, less dlse, for dlse/dS = P."""
    terms = [f"tl.sum({c.name('o_tile')} * {c.name('do_tile')}, axis=1)" for c in frame.dv_chunks]
    stored, less = stored_rows(frame), frame.region.lse
    lines = [f"delta = {' + '.join(terms)}"]
    if less:
        lines.append(f"d_lse = tl.load(grad_lse_ptr + rows, mask={stored}, other=0.0)")
    if may_be_hidden or (less and may_be_empty):
        at = "lse_ptr + 2 * rows" if saved(frame.region) else "lse_ptr + rows"
        lines.append(f"lse = tl.load({at}, mask={stored})")
    if less and may_be_empty:
        lines.append('d_lse = tl.where(lse == float("-inf"), 0.0, d_lse)  # of a row that saw no key it may be NaN')
    if less:
        lines.append("delta -= tl.sum(d_lse, axis=1)")
    if may_be_hidden:
        lines.append("# A row that saw no key may have a NaN in O: it adds nothing to any gradient")
        lines.append('delta = tl.where(tl.sum(lse, axis=1) == float("-inf"), 0.0, delta)')
    return lines


def store_delta(frame: GradientFrame) -> str:
    return f"tl.store(delta_ptr + rows, delta[:, None], mask={stored_rows(frame)})"


def sinks(frame: GradientFrame) -> Lines:
    """What a sink's weight, exp(sink - lse), adds to the gradients of what it reads, for each query."""
    leaves = [leaf for leaf in frame.leaves if leaf.source == "sink"]
    if not leaves:
        return []
    assert frame.sink is not None
    body, level = show(frame.sink, frame.names)
    at, log_sum = ("2 * rows", " - tl.load(lse_ptr + 2 * rows + 1) * LOG2E") if saved(frame.region) else ("rows", "")
    logit = f"({body})" if level > PLUS else body
    lines = [
        f"sink_weight = tl.exp2(({logit} - tl.load(lse_ptr + {at})) * LOG2E{log_sum})  # it has no value",
        "d_sink = -sink_weight * delta[:, None]",
    ]
    for leaf in leaves:
        value = scaled_by("d_sink" + times(frame, leaf.rest), leaf.factor)
        lines.append(f"tl.store({leaf.name}_sums_ptr + rows, {value}, mask={stored_rows(frame)})")
    return lines


def query_values(frame: GradientFrame) -> Lines:
    """dO, lse and delta of the tile's queries."""
    return [*output_tiles(frame, "grad_out", "do", cast=True), *first_row(frame), *row_values(frame, "rows", "")]


def accumulators(frame: GradientFrame) -> Lines:
    queries = [f"{c.name('dq_acc')} = tl.zeros([BLOCK_M, {c.size}], tl.float32)" for c in _chunks(frame)]
    vectors = ["d_sum"] * any(centred(frame, leaf) for leaf in frame.leaves)
    for leaf in frame.summed_along("queries"):
        vectors += [f"{leaf.name}_sum", *[f"{leaf.name}_mean"] * centred(frame, leaf)]
    return [*queries, *(f"{name} = tl.zeros([BLOCK_M], tl.float32)" for name in vectors)]


def centred(frame: GradientFrame, leaf: Leaf) -> bool:
    """Whether the gradient is summed around a mean, for what few keys with nearly all the weight add up to cancels, and
    delta is of a rounded O:

        sum over keys of  dS (dS/dx)  =  sum of  dS (dS/dx - mean),  mean = sum of  P dS/dx,  as dS has the sum 0
    """
    region, of_row = frame.region, leaf.source == "score" and frame.along(leaf) == "queries"
    return of_row and region.sink is None and not region.lse and depends_on_score(leaf.rest)


def _chunks(frame: GradientFrame) -> list[Chunk]:
    return [c for t in range(len(frame.region.products)) for c in frame.d_chunks(t)]


def full_tile(frame: GradientFrame) -> Lines:
    """A tile whose every key is inside the bounds: only the loose terms of the mask are tested, and none where the
    table calls it full."""
    return _tile(frame, [] if frame.tabled else list(frame.reach.loose), edge=False)


def masked_tile(frame: GradientFrame) -> Lines:
    """A tile that the table calls neither full nor empty."""
    return _tile(frame, in_run(frame.kv_idx) if frame.ranged else list(frame.region.keep), edge=False)


def edge_tile(frame: GradientFrame) -> Lines:
    """A tile that a bound, or the end of the keys, cuts."""
    return _tile(frame, list(frame.region.keep if frame.tabled else frame.reach.tested), edge=True)


def rescue(frame: GradientFrame) -> Lines:
    """The rows that see no key, over every key."""
    again = frame.rescue
    if again is None:
        return []
    size = triton_text(frame.kv_idx.size, frame.names)
    return [
        "# Rows that see no key, or only keys near the fill, take part in every key",
        *log_sums(again, "rows", ""),
        f'last = tl.where(tl.min(lse) < float("inf"), {size}, 0)',
        f"for k_start in {seldom('0', 'last', 'BLOCK_N')}:",
        *indented(_tile(again, [], edge=True)),
    ]


def _tile(frame: GradientFrame, tests: list[Expr], edge: bool) -> Lines:
    """dQ_t += dscore_t K_t, and the sums over keys of what learns and does not vary with them."""
    body = score_gradient(frame, tests, edge)
    for t, product in enumerate(frame.region.products):
        for c in frame.d_chunks(t):
            left = rounded(frame.d_name(t), product.dtype)
            body.append(accumulated(frame, c.name("dq_acc"), left, f"tl.trans({c.name('k_tile')})", product.dtype))
    if any(centred(frame, leaf) for leaf in frame.leaves):
        body.append("d_sum += tl.sum(d_logit, axis=1)")
    for leaf in frame.summed_along("queries"):
        body.append(f"{leaf.name}_sum += tl.sum({leaf_gradient(frame, leaf)}, axis=1)")
        if centred(frame, leaf):
            body.append(f"{leaf.name}_mean += tl.sum(p{times(frame, leaf.rest)}, axis=1)")
    return [*places(frame, "\n".join(body)), *body]


def score_gradient(frame: GradientFrame, tests: list[Expr], edge: bool, rows: str = "") -> Lines:
    """dscore_t of a tile, [BLOCK_M, BLOCK_N]. `rows`: how lse and delta meet it, where they are vectors."""
    live = Var("live", frame.kv_idx.size)
    return [
        *key_loads(frame, edge),
        *products_of(frame, "{0}", "{1}", "[BLOCK_M, BLOCK_N]"),
        "",
        *element_loads(frame, edge, read_by_tile(frame, tests)),
        *kept(frame, read_by_tile(frame, tests)),
        *scores(frame),
        *mask(frame, [*([live] if edge else []), *tests], {live: "live[None, :]"}),
        *probabilities(frame, rows),
        "",
        *value_loads(frame, edge),
        *value_products(frame, "{0}", "tl.trans({1})", "[BLOCK_M, BLOCK_N]"),
        *weights(frame),
        *score_gradients(frame, rows),
    ]


def read_by_tile(frame: GradientFrame, tests: list[Expr]) -> list[Expr]:
    """The expressions that a tile computes."""
    inner = [frame.shared(x, i) for i, (_, x) in enumerate(frame.inner)]
    rests = [rest for rest, _ in frame.derivative.values()]
    rests += [leaf.rest for leaf in frame.leaves if leaf.source != "sink"]
    return [frame.exponent.score, *inner, *rests, *tests, *([frame.weight] if frame.weight is not None else [])]


def store(frame: GradientFrame) -> Lines:
    """dQ_t = factor dq_acc, rounded; the sums of what learns, for the host to add up."""
    lines: Lines = []
    for t, product in enumerate(frame.region.products):
        a = _address(frame, f"grad_{product.q.operand}", product.q.index)
        base = f"dq{t or ''}_base"
        lines.append(f"{base} = {' + '.join([f'grad_{product.q.operand}_ptr', *row_base(frame, a)])}")
        for c in frame.d_chunks(t):
            live = stored_rows(frame)
            live = f"({live}) & ({c.d}[None, :] < {c.limit})" if c.limit else live
            value = scaled_by(c.name("dq_acc"), frame.factor_of(t))
            value = rounded(value if " " not in value else f"({value})", frame.region.operand(product.q.operand).dtype)
            pointer = " + ".join([base, *row_offsets(frame, a, {product.d: f"{c.d}[None, :]"}, whole=True)])
            lines.append(f"tl.store({pointer}, {value}, mask={live})")
    for leaf in frame.summed_along("queries"):
        total = f"({leaf.name}_sum - d_sum * {leaf.name}_mean)" if centred(frame, leaf) else f"{leaf.name}_sum"
        value = scaled_by(f"{total}[:, None]", leaf.factor)
        lines.append(f"tl.store({leaf.name}_sums_ptr + rows, {value}, mask={stored_rows(frame)})")
    return lines
