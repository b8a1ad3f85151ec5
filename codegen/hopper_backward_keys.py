"""dK and dV on Hopper's tensor cores: a program has a tile of keys, and walks the queries that see them.

The masks, scores and derivatives are those of the portable kernel (codegen/backward_keys.py), word for word.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusecomp.codegen import backward_range as ranges
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_keys import member, member_name, members, program
from fusecomp.codegen.backward_memory import fixed_values, query_values
from fusecomp.codegen.backward_queries import read_by_tile
from fusecomp.codegen.backward_tile import mask, probabilities, scaled_by, scores
from fusecomp.codegen.hopper_backward import (
    STAY,
    Holes,
    Lines,
    by_runs,
    copies,
    function,
    held,
    kernel_of,
    score_gradients,
)
from fusecomp.codegen.hopper_backward_skeletons import (
    COPY_FOR_KEYS,
    COPY_QUERIES,
    KEY_STEP,
    MULTIPLY_FOR_KEYS,
    MULTIPLY_QUERIES,
)
from fusecomp.codegen.printer import triton_dtype, triton_text
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.tile import indented
from fusecomp.codegen.visited import in_run
from fusecomp.ir.expr import Expr, parts
from fusecomp.ir.region import extent

Function = tuple[str, list[str]]
"""(text, what it is given)."""


@dataclass(frozen=True)
class Share:
    """What a group that multiplies does about dQ, as lines: nothing where another kernel computes it."""

    begun: str = ""
    hand_over: str = ""
    """dS of a tile."""
    product: str = ""
    """Begins what is added, in `products` products."""
    products: int = 0
    added: str = ""
    last: str = ""


def key_gradients(frame: GradientFrame) -> tuple[str, list[str]]:
    """(functions, what the kernel takes)."""
    (copy, copied), (multiply, multiplied) = copying_queries(frame), multiplying_queries(frame, Share())
    return kernel_of(frame, "key_gradients", [copy, multiply], {"multiplied": multiplied, "copied_in": copied})


def copying_queries(frame: GradientFrame) -> Function:
    """What the warp that copies does."""
    size = extent(frame.region.dv)
    stream = fill(COPY_QUERIES, {
        "member": member(frame), "fixed": fixed_values(frame, inside=True), "query_range": ranges.query_range(frame),
        "begin": ranges.begin_name(frame), "end": ranges.end_name(frame),
        "q_bytes": f"BLOCK_M * {2 * size + 8}", "do_bytes": f"BLOCK_M * {2 * size}",
        **copies(frame, "key_gradients", ["q", "row", "do"]),
    })  # fmt: skip
    return function(frame, COPY_FOR_KEYS, {
        **placed(frame), "k_bytes": str(2 * STAY * size * 2), "queries": with_members(frame, stream),
        **copies(frame, "key_gradients", ["k", "v"]),
    })  # fmt: skip


def multiplying_queries(frame: GradientFrame, share: Share) -> Function:
    """What each group that multiplies does; `share`: and about dQ."""
    return function(frame, MULTIPLY_FOR_KEYS, {
        **placed(frame), "places": _key_places(frame), "size": str(extent(frame.region.dv)),
        "begun": share.begun.splitlines(), "held": held(frame)[0],
        "queries": with_members(frame, _walked_queries(frame, share)), "last": share.last.splitlines(),
        "factor": scaled_by("", frame.factor_of(0)), "dtype": triton_dtype(frame.region.out_dtype),
        **copies(frame, "key_gradients", ["dk", "dv"]),
    })  # fmt: skip


def placed(frame: GradientFrame) -> Holes:
    """Which tile of keys a program has."""
    fixed = fixed_values(frame, inside=False)
    return {"block_m": str(frame.plan.block_m), "program": program(frame), "fixed": fixed}


def _key_places(frame: GradientFrame) -> Lines:
    """kv_idx [64, 1] of each key. Keys past the end repeat the last one, and are not stored."""
    size = triton_text(frame.kv_idx.size, frame.names)
    return [
        f"k_row = tl.minimum(n, {size} - 1 - k_start)",
        "kv_idx = k_start + k_row",
        "kv_pos = kv_idx.to(tl.float32)",
    ]


def with_members(frame: GradientFrame, body: str) -> Lines:
    """The body, for each of the query heads that share the keys."""
    if not frame.members:
        return body.splitlines()
    return [f"for {member_name(frame)} in range({members(frame)}):", *indented(body.splitlines())]


def _walked_queries(frame: GradientFrame, share: Share) -> str:
    """The loops over the tiles of queries that see a key."""
    found = frame.rows_reach
    begin, end = ranges.begin_name(frame), ranges.end_name(frame)
    cut = bool(found.upper or query_values(frame, edge=True) or frame.tabled)  # else Q = dO = 0, P = 0 past the end
    tests = [*(x.term for x in (*found.lower, *found.upper)), *found.loose]
    tests, loose = (list(frame.region.keep), []) if frame.tabled else (tests, list(found.loose))
    edge = key_step(frame, tests, share, edge=True)
    said = f"# {ranges.CUT_BY_QUERIES}:"
    before = [f"{said} before the full ones", f"for q_start in range({begin}, tl.minimum(full_begin, {end}), BLOCK_M):"]
    after = [f"{said} after the full ones", f"for q_start in range(full_end, {end}, BLOCK_M):"]
    return fill(MULTIPLY_QUERIES, {
        "member": member(frame),
        "fixed": fixed_values(frame, inside=True),
        "query_range": ranges.query_range(frame),
        "before": [*before, *indented(edge.splitlines()), ""] if found.lower or frame.tabled else [],
        "begin": ranges.full_begin(frame),
        "end": "full_end" if cut else end,
        "step": key_step(frame, loose, share, edge=False),
        "after": [*after, *indented(edge.splitlines())] if cut else [],
    })  # fmt: skip


def key_step(frame: GradientFrame, tests: list[Expr], share: Share, edge: bool) -> str:
    """dV += P^T dO;  dK += dS^T Q."""
    plain, values = _read(frame, [], edge), _read(frame, tests, edge)
    masked = mask(frame, tests, {})
    if edge and frame.ranged:
        more = [line for line in values if line not in plain]
        values, masked = plain, by_runs(frame, mask(frame, in_run(frame.q_idx), {}), [*more, *masked])
    size = triton_text(frame.q_idx.size, frame.names)
    where = [
        "query = tl.cast(q_start, tl.int64)",
        "q_idx = q_start + m[None, :]",
        "q_pos = q_idx.to(tl.float32)",
        *([f"live = q_start + m < {size}"] if edge else []),
    ]
    return fill(KEY_STEP, {
        "values": [*where, *values], "score": [*scores(frame), *masked],
        "weights": probabilities(frame, "[None, :]"), **score_gradients(frame, "[None, :]"),
        "d_name": frame.d_name(0), "dtype": triton_dtype(frame.region.out_dtype), **held(frame)[1],
        "hand_over": share.hand_over.splitlines(), "share": share.product.splitlines(),
        "under_way": str(share.products), "added": share.added.splitlines(),
    })  # fmt: skip


def _read(frame: GradientFrame, tests: list[Expr], edge: bool) -> Lines:
    """Values of queries that a tile computes with, and those that `tests` read."""
    wanted = {x for e in read_by_tile(frame, tests) for x in parts(e)}
    named = [n for n, e in (*frame.element.hoisted, *frame.element.tiles) if e in wanted]
    return [line for line in query_values(frame, edge) if line.split(" = ")[0] in named]
