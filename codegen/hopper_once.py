"""Filling the backward kernel for Hopper's tensor cores that computes the scores once. (frame) -> text or lines.

The masks, scores and derivatives are those of the portable kernel (codegen/backward_keys.py), word for word.
"""

from __future__ import annotations

from fusecomp.codegen import backward_range as ranges
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_keys import member, outer
from fusecomp.codegen.backward_memory import fixed_values
from fusecomp.codegen.backward_queries import store
from fusecomp.codegen.hopper_backward import Holes, Lines, function, kernel_of
from fusecomp.codegen.hopper_backward_keys import (
    Share,
    copying_queries,
    multiplying_queries,
    placed,
    with_members,
)
from fusecomp.codegen.hopper_once_skeletons import (
    ADD,
    ADD_FOR_QUERIES,
    ADD_LAST,
    ADD_QUERIES,
    HAND_OVER,
    KEEP,
    LAYOUT,
    PLACES,
    READY,
    SHARE,
)
from fusecomp.codegen.hopper_text import FIRST_BARRIER
from fusecomp.codegen.printer import triton_dtype
from fusecomp.codegen.program import batch_axes, columns, query_rows
from fusecomp.codegen.skeletons import fill
from fusecomp.ir.region import extent

REGISTERS = [208, 72, 24]
"""Of a thread of the second group that multiplies, of the one that adds, of the warp that copies."""
BUFFERS = 4
"""Tiles of dS where a group adds a tile later: one is written, one is read, and a group may be one ahead."""


def layouts(frame: GradientFrame) -> Lines:
    """Constants of this kernel alone."""
    free = FIRST_BARRIER + 2 * frame.plan.stages
    if _apart(frame):
        names = [f"GIVEN, TAKEN, K_READ = {', '.join(f'gl.constexpr({free + i})' for i in (0, 2, 4))}"]
    else:
        names = [f"K_READ = gl.constexpr({free})", f"BUFFERS = gl.constexpr({BUFFERS})  # tiles of dS"]
    return [*LAYOUT.splitlines(), *names]


def _apart(frame: GradientFrame) -> bool:
    """Whether a third group adds."""
    return frame.plan.consumers == 3


def all_gradients(frame: GradientFrame) -> tuple[str, list[str]]:
    """dK and dV of a tile of keys, and its share in the sums of dQ: (functions, what the kernel takes)."""
    copy, copied = copying_queries(frame)
    multiply, multiplied = multiplying_queries(frame, _handed_over(frame) if _apart(frame) else _added_later(frame))
    if not _apart(frame):
        given = {"multiplied": multiplied, "copied_in": copied}
        return kernel_of(frame, "all_gradients", [copy, SHARE, multiply], given, memory=_memory(frame, "BUFFERS"),
                         ready=READY.splitlines())  # fmt: skip
    add, added = _adding(frame)
    given = {"multiplied": multiplied, "added": added, "copied_in": copied}
    return kernel_of(frame, "all_gradients", [copy, multiply, add], given, memory=_memory(frame, "2"),
                     more="(query_sums, (added,)), ", warps="[4, 4, 1]", registers=str(REGISTERS))  # fmt: skip


def _memory(frame: GradientFrame, buffers: str) -> Lines:
    """Room for tiles of dS, 64 keys of each group."""
    dtype = triton_dtype(frame.region.out_dtype)
    return [f"ds_smem = gl.allocate_shared_memory({dtype}, [{buffers} * 2, 64, {frame.plan.block_m}], SHARED)"]


def _dtypes(frame: GradientFrame) -> Holes:
    return {"d_name": frame.d_name(0), "dtype": triton_dtype(frame.region.out_dtype)}


def _handed_over(frame: GradientFrame) -> Share:
    """What the groups that multiply do for the one that adds."""
    return Share(hand_over=fill(HAND_OVER, _dtypes(frame)), last='barrier("sync", K_READ, 384)')


def _added_later(frame: GradientFrame) -> Share:
    """What the groups that multiply do for the tile of queries before."""
    return Share(
        begun=f"{PLACES}sums = dq_sums_ptr  # of the tile of queries before",
        hand_over=fill(KEEP, _dtypes(frame)),
        product="added = share(ds_smem, k_smem, ds_ready, count, group)",
        products=2,
        added=fill(ADD, {"head": f"({outer(frame)})"}),
        last=ADD_LAST,
    )


def _adding(frame: GradientFrame) -> tuple[str, list[str]]:
    """What the group that adds does."""
    stream = fill(ADD_QUERIES, {
        "member": member(frame), "fixed": fixed_values(frame, inside=True), "query_range": ranges.query_range(frame),
        "begin": ranges.begin_name(frame), "end": ranges.end_name(frame), "head": f"({outer(frame)})",
    })  # fmt: skip
    where = placed(frame)
    return function(frame, ADD_FOR_QUERIES, {
        "program": where["program"], "fixed": where["fixed"], "places": PLACES.splitlines(),
        "queries": with_members(frame, stream),
    })  # fmt: skip


def rounded_sums(frame: GradientFrame) -> Holes:
    """dQ = factor * sums, rounded."""
    return {"program": batch_axes(frame), "rows": query_rows(frame), "columns": columns(frame), "store": store(frame),
            "size": str(extent(frame.region.dv))}  # fmt: skip
