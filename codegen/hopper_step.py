"""A step of the forward kernel for Hopper's tensor cores: scores of a tile of keys, their exponentials, and when its
products are waited for. (frame, ...) -> holes of STEP."""

from __future__ import annotations

from collections.abc import Sequence

from fusecomp.codegen import hopper_pairs as pairs
from fusecomp.codegen.base2 import Exponent
from fusecomp.codegen.bounds import chain
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.hopper import at_once, holds_q, in_words
from fusecomp.codegen.hopper_keys import walk
from fusecomp.codegen.hopper_sharing_skeletons import CUT_STEP, FULL_STEP, PRODUCTS, WALK
from fusecomp.codegen.hopper_skeletons import AT_ONCE, IN_TURNS, LATER, ONE_BY_ONE, STEP
from fusecomp.codegen.memory import element_loads
from fusecomp.codegen.printer import triton_dtype, triton_text
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.slope import Slope
from fusecomp.codegen.tile import indented, mask, parted, places, unmasked_scores
from fusecomp.codegen.visited import in_run
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Apply, Const, Expr, Load, Size, Var, parts, variables
from fusecomp.ir.region import extent

Lines = list[str]
Holes = dict[str, str | Lines]


def weighed(frame: Frame, e: Exponent, slope: Slope | None) -> Holes:
    """P of a tile, and what else every step has."""
    factor = f" * {frame.factor(e)}" if e.scale != 1.0 else ""
    once, dtype = at_once(frame.plan), triton_dtype(frame.region.out_dtype)
    words = in_words(frame.region, frame.plan.visits)
    return {
        "to_max": " + shift" if slope else factor,
        "rounded": "words = packed(weights)" if words else f"p = gl.convert_layout(weights.to({dtype}), P_TILE)",
        "whole": ["p = unpacked(words)"] if words else [],
        **_exponentials(e, f"score{factor}", slope),
        "scored": (AT_ONCE if once else ONE_BY_ONE).splitlines(),
        "known": [] if once else ["known(new_max)"],
        "multiplied": [] if once else LATER.splitlines(),
    }


def _exponentials(e: Exponent, score: str, slope: Slope | None) -> Holes:
    """P of a tile, with one multiply-add an element, and what a new maximum makes of the sums before."""
    if e.natural and slope is None:
        weights = ["unit, top = base_2(row_max)", f"weights = tl.exp2({score} * unit[:, None] - top[:, None])"]
        return {"weights": weights, "rescale": "risen(row_max, new_max)"}
    top = "(row_max - shift)" if slope else "row_max"
    return {"weights": f"weights = {e.exp(f'{score} - {top}[:, None]')}", "rescale": e.exp("row_max - new_max")}


def scored(frame: Frame, e: Exponent, tests: Sequence[Expr], slope: Slope | None, edge: bool, masked: bool) -> Holes:
    """S of a tile: what can be read ahead of the product, and the rest. `edge`: it may reach past the end of the keys;
    `masked`: the mask cuts it."""
    read = pairs.in_step(frame, masked)
    asked, tests = pairs.masks(frame, tests) if read["pairs"] else ([], tests)
    if edge and frame.ranged:
        first, rest = by_runs(frame, e, tests)
    else:
        first, rest = parted(frame, [*unmasked_scores(frame, e, tests, edge), *cut(frame, tests, edge)])
    return {"ahead": first, "score": [*asked, *rest, *_shift(frame, slope)], **read}


def cut(frame: Frame, tests: Sequence[Expr], edge: bool) -> Lines:
    """S = -inf where the query does not see the key: before the last lower bound, from the first upper one on, and by
    the rest of `tests`."""
    found, loose = frame.reach, frame.reach.loose
    lower, upper = (
        [x for x in side if x.term in tests and x.term not in loose and _in_places(frame, x.edge)]
        for side in (found.lower, found.upper)
    )
    begins, ends = ([triton_text(x.edge, frame.tile_names) for x in side] for side in (lower, upper))
    ends += [frame.k_end] if edge and not frame.ends_in_the_mask else []
    lines = [f"score = since(score, kv_idx, {chain('maximum', begins)})"] if begins else []
    lines += [f"score = until(score, kv_idx, {chain('minimum', ends)})"] if ends else []
    bounds = [x.term for x in (*lower, *upper)]
    return [*lines, *mask(frame, [t for t in tests if t not in bounds], False)]


def _in_places(frame: Frame, edge: Expr) -> bool:
    """Whether an edge is computed of places and lengths, which are int32."""
    plain = all(isinstance(x, Var | Const | Size | Apply) for x in parts(edge))
    return plain and variables(edge) <= {frame.q_idx.name}


def by_runs(frame: Frame, e: Exponent, tests: Sequence[Expr]) -> tuple[Lines, Lines]:
    """The same of a tile that the mask cuts: by places alone where each query sees one run of keys, else by `tests`."""
    read = unmasked_scores(frame, e, (), True)
    pairs = [line for line in element_loads(frame, True, tests) if line not in read] + mask(frame, tests, True)
    pairs.append("score = apart(score)")
    first, rest = parted(frame, [*read, *mask(frame, in_run(frame.kv_idx), False)])
    run, known = rest.pop(), [*first, *rest]
    more = [p for p in places(frame, "\n".join(pairs)) if p not in known]
    return first, [*rest, "if in_runs:", *indented([run]), "else:", *indented([*more, *pairs])]


def rising(frame: Frame, slope: Slope | None) -> Lines:
    """What a tile's scores rise by along its keys."""
    if slope is None:
        return []
    place = Load("n_pos", (), "float32")
    return [f"slope_n = {triton_text(apply('mul', slope.slope, place), frame.names.having({place: 'n_pos'}))}"]


def _shift(frame: Frame, slope: Slope | None) -> Lines:
    """What all keys of a row of a tile have besides, [64]."""
    if slope is None:
        return []
    first: dict[Expr, str] = {frame.q_idx: "q_line", frame.kv_idx: "k_start.to(tl.float32)"}
    return [f"shift = {triton_text(slope.shift, frame.names.having(first))}"]


# ----------------------------------------------------------------------------------------------------------------
# All tiles of keys of a tile of queries


def in_turns(frame: Frame, shared: Holes, edge: Holes, inside: Holes, full: Holes, least: str) -> Lines:
    """Groups take turns at the tensor cores; S of a tile and P V of the one before are under way together."""
    size, begin = extent(frame.region.dv), walk(frame).begin
    query_read = [] if holds_q(frame.plan, size) else ['barrier("arrive", Q_FREE + group, 160)']
    masked, whole = (fill(STEP, {**shared, **x, "k_start": begin("block")}) for x in (inside, full))
    return fill(IN_TURNS, {
        **{name: shared[name] for name in ("weights", "rounded", "whole")},
        **{name: edge[name] for name in ("pairs", "product", "freed")},
        **_loops(frame, masked, whole, "1"), "first_start": begin("0"), "ahead": edge["ahead"],
        "edge_score": edge["score"], "first_max": f"gl.maximum(gl.max(score, axis=1){shared['to_max']}, {least})",
        "query_read": query_read, "size": str(size),
    }).splitlines()  # fmt: skip


def sharing(frame: Frame, shared: Holes, edge: Holes, _: Holes, full: Holes, least: str) -> Lines:
    """A program that shares its multiprocessor does one thing after another, and its groups what their rows see."""
    same, begin = {name: shared[name] for name in ("to_max", "rescale", "weights", "rounded")}, walk(frame).begin

    def step(skeleton: str, own: Holes) -> str:
        products = fill(PRODUCTS, {**same, **{name: own[name] for name in ("ahead", "product", "score")}})
        return fill(skeleton, {"products": products.splitlines(), "k_start": begin("block")})

    loops = _loops(frame, step(CUT_STEP, edge), step(FULL_STEP, full), "0")
    return fill(WALK, {**loops, "least": least, "size": str(extent(frame.region.dv))}).splitlines()


def _loops(frame: Frame, masked: str, whole: str, first: str) -> Holes:
    """Over the tiles at the end that need their mask, from `first` on; those that do not; those at the beginning."""
    above, below = walk(frame).full
    return {
        "above_loop": _loop(f"for block in range({first}, above):", masked) if above == "above" else [],
        "below_loop": _loop("for block in range(below, blocks):", masked) if below == "below" else [],
        "full_begin": above, "full_end": below, "full_step": whole.splitlines(),
    }  # fmt: skip


def _loop(head: str, step: str) -> Lines:
    return [head, *indented(step.splitlines()), ""]
