"""dK and dV on Hopper's tensor cores: a program has a tile of keys, and walks the queries that see them.

The masks, scores and derivatives are those of the portable kernel (codegen/backward_keys.py), word for word.
"""

from __future__ import annotations

from fusecomp.codegen import backward_range as ranges
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_keys import member, member_name, members, program
from fusecomp.codegen.backward_memory import fixed_values, query_values
from fusecomp.codegen.backward_queries import read_by_tile
from fusecomp.codegen.backward_tile import mask, probabilities, scaled_by, score_gradients, scores
from fusecomp.codegen.hopper_backward import STAY, Holes, Lines, copies, function, kernel_of
from fusecomp.codegen.hopper_backward_skeletons import (
    COPY_FOR_KEYS,
    COPY_QUERIES,
    KEY_GRADIENTS,
    KEY_STEP,
    MULTIPLY_FOR_KEYS,
    MULTIPLY_QUERIES,
)
from fusecomp.codegen.printer import triton_dtype, triton_text
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.tile import indented
from fusecomp.ir.expr import Expr, parts
from fusecomp.ir.region import extent


def key_gradients(frame: GradientFrame) -> tuple[str, list[str]]:
    """(functions, what the kernel takes)."""
    plan, size = frame.plan, extent(frame.region.dv)
    shared: Holes = {"block_m": str(plan.block_m), "program": program(frame)}
    stream = fill(COPY_QUERIES, {
        "member": member(frame), "fixed": fixed_values(frame, inside=True), "query_range": ranges.query_range(frame),
        "begin": ranges.begin_name(frame), "end": ranges.end_name(frame),
        "q_bytes": f"BLOCK_M * {2 * size + 8}", "do_bytes": f"BLOCK_M * {2 * size}",
        **copies(frame, "key_gradients", ["q", "row", "do"]),
    })  # fmt: skip
    copy, copied = function(frame, COPY_FOR_KEYS, {
        **shared, "fixed": fixed_values(frame, inside=False), "k_bytes": str(2 * STAY * size * 2),
        "queries": _members(frame, stream), **copies(frame, "key_gradients", ["k", "v"]),
    })  # fmt: skip
    multiply, multiplied = function(frame, MULTIPLY_FOR_KEYS, {
        **shared, "places": _key_places(frame), "fixed": fixed_values(frame, inside=False), "size": str(size),
        "queries": _members(frame, _walked_queries(frame)), "dtype": triton_dtype(frame.region.out_dtype),
        "factor": scaled_by("", frame.factor_of(0)), **copies(frame, "key_gradients", ["dk", "dv"]),
    })  # fmt: skip
    return kernel_of(frame, KEY_GRADIENTS, plan.block_m, [copy, multiply], copied, multiplied)


def _key_places(frame: GradientFrame) -> Lines:
    """kv_idx [64, 1] of each key. Keys past the end repeat the last one, and are not stored."""
    size = triton_text(frame.kv_idx.size, frame.names)
    return [
        f"k_row = tl.minimum(n, {size} - 1 - k_start)",
        "kv_idx = k_start + k_row",
        "kv_pos = kv_idx.to(tl.float32)",
    ]


def _members(frame: GradientFrame, body: str) -> Lines:
    """The body, for each of the query heads that share the keys."""
    if not frame.members:
        return body.splitlines()
    return [f"for {member_name(frame)} in range({members(frame)}):", *indented(body.splitlines())]


def _walked_queries(frame: GradientFrame) -> str:
    """The loops over the tiles of queries that see a key."""
    found = frame.rows_reach
    begin, end = ranges.begin_name(frame), ranges.end_name(frame)
    cut = bool(found.upper or query_values(frame, edge=True))  # else Q = dO = 0 and P = 0 past the end
    tests = [*(x.term for x in (*found.lower, *found.upper)), *found.loose]
    edge = key_step(frame, tests, edge=True)
    before = f"for q_start in range({begin}, tl.minimum(full_begin, {end}), BLOCK_M):"
    after = f"for q_start in range(full_end, {end}, BLOCK_M):"
    return fill(MULTIPLY_QUERIES, {
        "member": member(frame),
        "fixed": fixed_values(frame, inside=True),
        "query_range": ranges.query_range(frame),
        "before": [before, *indented(edge.splitlines()), ""] if found.lower else [],
        "begin": ranges.full_begin(frame),
        "end": "full_end" if cut else end,
        "step": key_step(frame, list(found.loose), edge=False),
        "after": [after, *indented(edge.splitlines())] if cut else [],
    })  # fmt: skip


def key_step(frame: GradientFrame, tests: list[Expr], edge: bool) -> str:
    """dV += P^T dO;  dK += dS^T Q."""
    wanted = {x for e in read_by_tile(frame, tests) for x in parts(e)}
    named = [n for n, e in (*frame.element.hoisted, *frame.element.tiles) if e in wanted]
    values = [line for line in query_values(frame, edge) if line.split(" = ")[0] in named]
    size = triton_text(frame.q_idx.size, frame.names)
    where = [
        "query = tl.cast(q_start, tl.int64)",
        "q_idx = q_start + m[None, :]",
        "q_pos = q_idx.to(tl.float32)",
        *([f"live = q_start + m < {size}"] if edge else []),
    ]
    return fill(KEY_STEP, {
        "values": [*where, *values], "score": [*scores(frame), *mask(frame, tests, {})],
        "weights": probabilities(frame, "[None, :]"), "gradients": score_gradients(frame, "[None, :]"),
        "d_name": frame.d_name(0), "dtype": triton_dtype(frame.region.out_dtype),
    })  # fmt: skip
