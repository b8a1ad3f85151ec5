"""dQ on Hopper's tensor cores: a program has a tile of queries, and walks the keys that they see. (frame) -> text.

The masks, scores and derivatives are those of the portable kernel (codegen/backward_queries.py), word for word.
"""

from __future__ import annotations

from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_queries import read_by_tile
from fusecomp.codegen.backward_tile import mask, probabilities, scaled_by, scores
from fusecomp.codegen.hopper_backward import STAY, Holes, by_runs, copies, function, kernel_of, score_gradients
from fusecomp.codegen.hopper_backward_skeletons import (
    COPY_FOR_QUERIES,
    MULTIPLY_FOR_QUERIES,
    QUERY_STEP,
)
from fusecomp.codegen.memory import element_loads, element_pointers, fixed_loads
from fusecomp.codegen.printer import triton_dtype, triton_text
from fusecomp.codegen.program import CUT_BY_KEYS, ROW_INDICES, batch_axes, key_range, whole_tiles
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.tile import indented, places, tests_of_edge
from fusecomp.codegen.visited import in_run
from fusecomp.ir.expr import Expr, Var
from fusecomp.ir.region import extent


def query_gradient(frame: GradientFrame) -> tuple[str, list[str]]:
    """(functions, what the kernel takes)."""
    size = extent(frame.region.dv)
    shared: Holes = {"block_n": str(frame.plan.block_n), "program": batch_axes(frame), "fixed": fixed_loads(frame),
                     "key_range": key_range(frame)}  # fmt: skip
    copy, copied = function(frame, COPY_FOR_QUERIES, {
        **shared, "q_bytes": str(2 * STAY * size * 2), "k_bytes": f"BLOCK_N * {2 * size}",
        "begin": frame.k_begin, "end": frame.k_end, **copies(frame, "query_gradient", ["q", "do", "k", "v"]),
    })  # fmt: skip
    edge = query_step(frame, list(tests_of_edge(frame)), edge=True)
    begins = frame.k_begin != "0"
    said, end = f"# {CUT_BY_KEYS}:", frame.k_end
    before = [f"{said} before the full ones", f"for k_start in range(k_begin, tl.minimum(full_begin, {end}), BLOCK_N):"]
    after = [f"{said} after the full ones", f"for k_start in range(full_end, {end}, BLOCK_N):"]
    rows = f"q_row = tl.minimum(row, {triton_text(frame.q_idx.size, frame.names)} - 1 - q_start)"
    multiply, multiplied = function(frame, MULTIPLY_FOR_QUERIES, {
        **shared, "rows": [rows, *ROW_INDICES], "pointers": element_pointers(frame), "full_range": whole_tiles(frame),
        "before": [*before, *indented(edge.splitlines()), ""] if begins else [],
        "begin": "full_begin" if begins else "0", "end": "full_end",
        "step": query_step(frame, [] if frame.tabled else list(frame.reach.loose), edge=False),
        "after": [*after, *indented(edge.splitlines())],
        "size": str(size), "dtype": triton_dtype(frame.region.out_dtype), "factor": scaled_by("", frame.factor_of(0)),
        **copies(frame, "query_gradient", ["dq"]),
    })  # fmt: skip
    return kernel_of(frame, "query_gradient", [copy, multiply], {"multiplied": multiplied, "copied_in": copied})


def query_step(frame: GradientFrame, tests: list[Expr], edge: bool) -> str:
    """dQ += dS K."""
    live = Var("live", frame.kv_idx.size)
    plain = element_loads(frame, edge, read_by_tile(frame, []))
    more = [line for line in element_loads(frame, edge, tests) if line not in plain]
    masked = mask(frame, [*([live] if edge else []), *tests], {live: "live[None, :]"})
    if edge and frame.ranged:
        score = [*plain, *scores(frame), *by_runs(frame, mask(frame, in_run(frame.kv_idx), {}), [*more, *masked])]
    else:
        score = [*plain, *more, *scores(frame), *masked]
    gradients = score_gradients(frame, "")
    read = places(frame, "\n".join([*score, *gradients["slope"]]))
    return fill(QUERY_STEP, {
        "score": [*read, *score], "weights": probabilities(frame, ""), **gradients,
        "d_name": frame.d_name(0), "dtype": triton_dtype(frame.region.out_dtype),
    })  # fmt: skip
