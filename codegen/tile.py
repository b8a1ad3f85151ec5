"""One tile of keys: scores, online softmax, accumulation. (frame, ...) -> lines; the docstring is the equation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fusecomp.codegen.base2 import LOG2E, Exponent, may_be_minus_inf
from fusecomp.codegen.cheaper import cheaper, explained
from fusecomp.codegen.descriptors import described_keys, described_values, descriptors
from fusecomp.codegen.frame import Frame, merged, score_name
from fusecomp.codegen.logsumexp import natural_max
from fusecomp.codegen.memory import element_loads, key_loads, next_rows, row_loads, value_loads
from fusecomp.codegen.philox import kept
from fusecomp.codegen.printer import literal, show, triton_dtype, triton_text
from fusecomp.codegen.program import state
from fusecomp.codegen.slope import PLACED
from fusecomp.codegen.visited import in_run
from fusecomp.ir.algebra import apply
from fusecomp.ir.data import unmasked
from fusecomp.ir.expr import Expr, Score, Var, parts, variables
from fusecomp.ir.primitives import TIMES

Lines = list[str]


def indented(lines: Sequence[str], by: int = 4) -> Lines:
    return [" " * by + line if line else "" for line in lines]


def full_tile(frame: Frame) -> Lines:
    """A tile whose every key is inside the bounds: only the loose terms of the mask are tested. One that the table
    calls full needs no mask at all."""
    e, tests = of_full(frame, frame.exponent)
    pivot = any(map(may_be_minus_inf, parts(e.score))) if frame.tabled else frame.needs_pivot
    return visit(frame, e, tests, edge=False, pivot=pivot)


def of_full(frame: Frame, e: Exponent) -> tuple[Exponent, Sequence[Expr]]:
    """(S of such a tile, its tests)."""
    if not frame.tabled:
        return e, frame.reach.loose
    plain = frame.packed(cheaper(merged(unmasked(frame.region), frame.summed)))
    return replace(e, score=plain) if e.natural else e, ()


def masked_tile(frame: Frame) -> Lines:
    """A tile that the table calls neither full nor empty."""
    return visit(frame, frame.exponent, _kept(frame), edge=False, pivot=frame.needs_pivot)


def run_tile(frame: Frame) -> Lines:
    """A tile of which each query sees one run of keys."""
    return visit(frame, frame.exponent, in_run(frame.kv_idx), edge=False, pivot=frame.needs_pivot)


def edge_tile(frame: Frame) -> Lines:
    """A tile that a bound, or the end of the keys, cuts."""
    return visit(frame, frame.exponent, tests_of_edge(frame), edge=True, pivot=frame.needs_pivot)


def tests_of_edge(frame: Frame) -> Sequence[Expr]:
    """What such a tile tests besides the end of the keys."""
    return _kept(frame) if frame.tabled else frame.reach.tested


def _kept(frame: Frame) -> list[Expr]:
    """Every term of the mask."""
    return [frame.packed(e) for e in frame.region.keep]


def visit(frame: Frame, e: Exponent, tests: Sequence[Expr], edge: bool, pivot: bool) -> Lines:
    """S of a tile, its softmax under the running maximum, its part of P V. `edge`: the tile may reach past k_end."""
    described = frame.plan.loads == "descriptor"
    body = [
        *(next_rows(frame) if frame.looks_ahead and not edge else row_loads(frame, edge)),
        *(described_keys(frame) if described else key_loads(frame, edge)),
        *products(frame),
        "",
        *scores(frame, e, tests, edge),
        "",
        *softmax(frame, e, pivot),
        "",
        *(described_values(frame) if described else value_loads(frame, edge)),
        *accumulate(frame),
    ]
    return [*places(frame, "\n".join(body)), *body]


def scores(frame: Frame, e: Exponent, tests: Sequence[Expr], edge: bool) -> Lines:
    """S of the products, -inf where the query does not see the key."""
    return [*unmasked_scores(frame, e, tests, edge), *mask(frame, tests, edge)]


def unmasked_scores(frame: Frame, e: Exponent, tests: Sequence[Expr], edge: bool) -> Lines:
    """S wherever it is seen, and what `tests` read."""
    weight = [frame.weight] if frame.weight else []
    names = frame.tile_names.having({PLACED: PLACED.tensor})
    said = explained(frame.region.score, e.score)
    return [
        *element_loads(frame, edge, [e.score, *tests, *weight]),
        *kept(frame, weight),
        *([] if e.score == Score(0) else [*said, f"score = {triton_text(e.score, names)}"]),
    ]


def ahead(frame: Frame, e: Exponent, tests: Sequence[Expr], edge: bool) -> tuple[Lines, Lines]:
    """The same in two: what it reads of the keys alone, which can be on its way before the product is; the rest."""
    return parted(frame, scores(frame, e, tests, edge))


def parted(frame: Frame, lines: Lines) -> tuple[Lines, Lines]:
    """(the loads among `lines` that vary with the keys alone, the rest), each with its places."""
    names = [name for name, x in frame.element.tiles if frame.q_idx.name not in variables(x)]
    first = [line for line in lines if any(line.startswith(f"{name} = tl.load(") for name in names)]
    first = [*places(frame, "\n".join(first)), *first]
    rest = [line for line in lines if line not in first]
    return first, [*(p for p in places(frame, "\n".join(rest)) if p not in first), *rest]


def places(frame: Frame, body: str) -> Lines:
    """What `body` reads of the keys' places: int64 for addresses, int32 [1, BLOCK_N] for masks, float32 for scores."""
    known = {
        "live": f"kv < {frame.k_end}",
        "kv_pos": "tl.cast(k_start, tl.float32) + n_pos",
        "kv_idx": "kv[None, :]",
        "kv": "k_start + n",
        "key": "tl.cast(k_start, tl.int64)",
    }
    lines: Lines = []
    for name, value in known.items():
        if re.search(rf"\b{name}\b", body + "".join(lines)):
            lines.insert(0, f"{name} = {value}")
    return lines


def products(frame: Frame) -> Lines:
    """score_t = Q_t K_t^T, chunk by chunk."""
    lines: Lines = []
    for t, product in enumerate(frame.region.products):
        into = score_name(0 if frame.summed else t)
        how = precision(frame, product.dtype)
        for i, c in enumerate(frame.d_chunks(t)):
            first = i == 0 and not (frame.summed and t)
            onto = "" if first else f", {into}"
            shape = "  # [BLOCK_M, BLOCK_N]" if first else ""
            lines.append(f"{into} = tl.dot({c.name('q_tile')}, {c.name('k_tile')}{onto}{how}){shape}")
    return lines


def precision(frame: Frame, dtype: str) -> str:
    """float32 products say how exact they are; narrower ones have no choice."""
    return f', input_precision="{frame.region.precision}"' if dtype == "float32" else ""


def mask(frame: Frame, tests: Sequence[Expr], edge: bool) -> Lines:
    """S = -inf where the query does not see the key."""
    live = Var("live", frame.kv_idx.size)
    terms: list[Expr] = [*([live] if edge and not frame.ends_in_the_mask else []), *tests]
    if not terms:
        return []
    keep = terms[0]
    for term in terms[1:]:
        keep = apply("and", keep, term)
    names = frame.tile_names.having({live: "live[None, :]"})
    return [f'score = tl.where({triton_text(keep, names)}, score, float("-inf"))']


def softmax(frame: Frame, e: Exponent, pivot: bool) -> Lines:
    """m' = max(m, max S);  P = exp(S - m');  l' = l exp(m - m') + sum P."""
    factor = f" * {frame.factor(e)}" if e.scale != 1.0 else ""
    under = "pivot" if pivot else "new_max"
    p = f"score{factor} - {under}[:, None]"
    finite = 'pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # finite in a row that has seen no key yet'
    return [
        f"new_max = tl.maximum(row_max, tl.max(score, axis=1){factor})",
        *([finite] if pivot else []),
        f"p = {e.exp(p)}",
        f"rescale = {e.exp(f'row_max - {under}')}",
        "row_sum = row_sum * rescale + tl.sum(p, axis=1)",
        "row_max = new_max",
    ]


def accumulate(frame: Frame) -> Lines:
    """acc = acc exp(m - m') + (weight P) V."""
    dtype = frame.region.pv_dtype
    lines: Lines = []
    if frame.weight:
        body, level = show(frame.weight, frame.tile_names)
        lines.append(f"p = p * {f'({body})' if level >= TIMES else body}")
    rounded = f"p.to({triton_dtype(dtype)})" if dtype != "float32" else "p"
    how = precision(frame, dtype)
    for c in frame.dv_chunks:
        acc = c.name("acc")
        lines.append(f"{acc} = tl.dot({rounded}, {c.name('v_tile')}, {acc} * rescale[:, None]{how})")
    return lines


def unseen_below(frame: Frame) -> str:
    """The largest maximum of a row that is taken to see no key, in the kernel's base."""
    return literal(frame.region.rescue_below * (1.0 if frame.exponent.natural else LOG2E))


def rounded_sum(frame: Frame) -> Lines:
    """sum = exp(L - max), L = log sum exp(S) as it is rounded, where that is what the scores are reduced by."""
    if frame.filled is None or not frame.region.subtracted:
        return []
    top = natural_max(frame.filled)
    return [f"row_sum = tl.exp({top} + tl.log(row_sum) - {top})  # as much of the logarithm as the fill leaves"]


def rescue(frame: Frame, saves_lse: bool = False) -> Lines:
    """Rows whose largest live score is at most rescue_below: softmax of the filled scores, over every key."""
    if frame.filled is None:
        return []
    before = [f"lse_max = {natural_max(frame.exponent)}"] if saves_lse else []
    after = [f"    lse_max = tl.where(unseen, {natural_max(frame.filled)}, lse_max)"] if saves_lse else []
    size = triton_text(frame.kv_idx.size, frame.names)
    accs = [c.name("acc") for c in frame.dv_chunks]
    every = Frame(frame.region, frame.plan, every_key=True)
    return [
        "# Rows that see no key, or only keys near the fill, take part in every key",
        f"unseen = row_max <= {unseen_below(frame)}",
        *before,
        "if tl.max(unseen.to(tl.int32), axis=0) > 0:",
        f"    seen_sum, {', '.join(f'seen_{a}' for a in accs)} = row_sum, {', '.join(accs)}",
        *indented(state(every)),
        *indented(descriptors(every)),
        f"    for k_start in range(0, {size}, BLOCK_N):",
        *indented(visit(every, frame.filled, [], edge=True, pivot=True), 8),
        *indented(rounded_sum(frame)),
        *after,
        "    row_sum = tl.where(unseen, row_sum, seen_sum)",
        *(f"    {a} = tl.where(unseen[:, None], {a}, seen_{a})" for a in accs),
    ]
