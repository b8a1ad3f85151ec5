"""Region and plan to the text of a kernel: every hole of a skeleton is filled, nothing is decided here."""

from __future__ import annotations

import hashlib
import keyword
from collections.abc import Set
from functools import lru_cache, partial

from fusecomp.codegen import hopper, hopper_text, turns
from fusecomp.codegen.base2 import LOG2E
from fusecomp.codegen.decode import (
    MULTIPROCESSORS,
    NEXT,
    PREVIOUS,
    combined_columns,
    decode_launch,
    first_share,
    keep_max,
    overlap,
    row_of_output,
    store_combined,
    store_parts,
    width,
)
from fusecomp.codegen.descriptors import HELPERS, descriptors
from fusecomp.codegen.document import document, kernel_name, title
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.function import Holes, function
from fusecomp.codegen.functions import called
from fusecomp.codegen.launcher import parameters, prefill_launch
from fusecomp.codegen.logsumexp import combined_lse, rescued_lse, store_lse
from fusecomp.codegen.memory import first_rows, fixed_loads, query_tiles, tile_pointers
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import (
    batch_axes,
    beside,
    columns,
    edge_loop,
    full_range,
    key_range,
    last_query,
    query_rows,
    state,
    store,
    stored_rows,
    whole_tiles,
)
from fusecomp.codegen.schedule import decoded, reach_of, schedule, share
from fusecomp.codegen.selfcheck import selfcheck
from fusecomp.codegen.skeletons import COMBINE, DECODE, MODULE, PREFILL, RESCUE, fill
from fusecomp.codegen.source import KernelSource, check, names_read
from fusecomp.codegen.table import full_tiles, other_tiles, table_kernels, table_row, visits_of
from fusecomp.codegen.table_ranges import range_kernels
from fusecomp.codegen.tile import edge_tile, full_tile, rescue, rounded_sum, unseen_below, visit
from fusecomp.errors import KernelError
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.tile import TilePlan

VERSION = 6
"""Part of every key: raise it when the same region and plan give another kernel."""


@lru_cache(maxsize=64)
def emit(region: AttentionRegion, plan: TilePlan, saves_lse: bool = False) -> KernelSource:
    """The kernel of `region` under `plan`, as a file that a person can read, run and check.

    `saves_lse`: launch(out, tensors, sizes, lse) also saves what `emit_backward` needs, as `logsumexp` says. So it does
    where the lse is a result of the region.
    """
    require_free_names(region)
    saves_lse = saves_lse or region.lse
    key = kernel_key(region, plan, saves_lse)
    frame = Frame(region, plan)
    name = kernel_name(frame, key)
    language, layouts = hopper_text.header(frame) if plan.consumers else (PORTABLE, [])
    kernels, launcher = kernels_of(frame, saves_lse)
    read = names_read(f"{kernels}\n\n\ndef launch():\n    " + "\n    ".join(launcher))
    text = fill(
        MODULE,
        {
            "language": language,
            "title": title(region),
            "document": document(region, plan, key),
            "constants": [*constants(frame, read), *layouts],
            "kernels": kernels,
            "out_axes": ", ".join(region.out_axes),
            "launcher": launcher,
            "lse": ", lse" if saves_lse else "",
            "selfcheck": selfcheck(region, saves_lse, visits_of(region, plan) if frame.tabled else None),
        },
    )
    check(name, text)
    return KernelSource(name, text, key, plan, region)


def kernels_of(frame: Frame, saves_lse: bool) -> tuple[str, list[str]]:
    """(kernels, launcher) by the skeleton that the plan names."""
    if frame.plan.consumers:
        return hopper_text.hopper(frame, saves_lse)
    kernels, launcher = (decode if frame.plan.skeleton == "decode" else prefill)(frame, saves_lse)
    kernels = "\n\n\n".join([*called(frame.region.expressions()), kernels])
    if frame.plan.loads == "descriptor":
        kernels = f"{kernels.rstrip()}\n\n\n{HELPERS.rstrip()}"
    return kernels, launcher


PORTABLE = "import triton\nimport triton.language as tl"

RESERVED = frozenset({
    "d", "dv", "n", "n_pos", "row", "q_row", "q_idx", "q_pos", "q_start", "q_last", "q_tiles", "outer", "program",
    "units", "rows", "split", "splits", "share", "shares", "part", "inside", "request", "requests", "free", "place",
    "programs", "tiles", "keys", "first", "grid", "kv", "kv_idx", "kv_pos", "key", "live",
    "score", "p", "acc", "row_max", "row_sum", "new_max", "pivot", "rescale", "edge", "k_begin", "k_end", "full_begin",
    "full_end", "out", "lse", "lse_max", "lse_row", "lse_rows", "sizes", "tensors", "torch", "triton", "tl",
    "attention", "combine", "log_sum", "maxima", "unseen", "multiprocessors", "key_range", "tiles_of", "unit",
    "place_of", "share_of", "in_rows", "scratch", "states", "tile_states", "list_tiles", "list_visits", "larger",
    "other", "next_tile", "outers", "section", "turns",
    "own", "near", "far", "each", "some", "every", "begin", "end", "length", "run", "longest", "unlike", "before",
    "key_ranges", "query_ranges", "last", "count", "whole", "together", "in_runs", "run_first", "run_last",
    "visited", "first_seen", "last_seen", "last_end", "first_begin", "number", "at", "pair", "beside", "ends", "step",
    "key_ends", "query_ends", "group_first", "group_last",
    "k_tiles", "seen", "full", "four", "random", "keeps", "kept_tile",
}) | hopper.NAMES  # fmt: skip
"""What the skeletons call their own variables."""


def require_free_names(region: AttentionRegion, taken: Set[str] = RESERVED) -> None:
    """Axes, operands and lengths become variables of the kernel: they must be identifiers of their own."""
    names = [*(v.name for v in region.batch), *(o.name for o in region.operands), *region.sizes]
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name in taken:
            raise KernelError(f"a region's axis, operand or length cannot be called {name}; rename it")


def kernel_key(region: AttentionRegion, plan: TilePlan, saves_lse: bool = False) -> str:
    """A hash of what decides the kernel's text: the region's meaning, the tile, the generator."""
    tile = (plan.block_m, plan.block_n, plan.d_chunks, plan.dv_chunks, plan.warps, plan.stages, plan.pack, plan.loads)
    visits = (plan.visits,) if plan.visits != "bounds" else ()
    more: tuple[object, ...] = ("lse",) if saves_lse else ()
    if plan.consumers:
        more = (*more, plan.consumers, *([plan.resident] if plan.resident > 1 else []))
    if plan.registers and plan.skeleton == "prefill":
        more = (*more, "registers", plan.registers)
    if not plan.resident:
        more = (*more, "unsplit")
    if plan.skeleton == "decode":
        more = (*more, plan.resident, plan.registers, plan.share, plan.splits, plan.looks, plan.overlap)
    return hashlib.sha256(repr((VERSION, region.key, plan.skeleton, tile, *visits, *more)).encode()).hexdigest()[:16]


def prefill(frame: Frame, saves_lse: bool = False) -> tuple[str, list[str]]:
    """(kernel, launcher) where one program walks the keys of one query tile."""
    holes: dict[str, str | list[str]] = {**common(frame), "program": batch_axes(frame), "state": state(frame)}
    holes["rescue"] = rescue(frame, saves_lse)
    holes["store"] = [*beside(frame), *(store_lse(frame) if saves_lse else []), *store(frame)]
    full_begin = "full_begin" if frame.k_begin != "0" or frame.tabled else "0"
    holes |= {"full_begin": full_begin, "first_rows": first_rows(frame, full_begin)}
    kernel, params = finished(frame, PREFILL, "attention", holes)
    if frame.tabled:
        made = range_kernels(frame.region, frame.plan) if frame.ranged else table_kernels(frame)
        kernel = "\n\n".join([kernel, *made])
    return kernel, prefill_launch(frame, "attention", params, saves_lse)


def decode(frame: Frame, saves_lse: bool = False) -> tuple[str, list[str]]:
    """(kernels, launcher) where several programs share the keys of one query tile."""
    functions, taken = schedule(frame)
    begin = first_share(state(frame)) if frame.region.grounded else state(frame)
    holes: dict[str, str | list[str]] = {**common(frame), "program": decoded(frame), "state": begin}
    holes |= {"share": share(frame, taken), "range": taken, "next_kernel": overlap(frame, NEXT)}
    holes |= {"stored_rows": stored_rows(frame), "store_parts": store_parts(frame), "first_rows": first_rows(frame)}
    holes |= {"key_range": reach_of("request", frame, taken), "full_range": [*last_query(frame), *full_range(frame)]}
    attention, params = finished(frame, DECODE, "attention", holes)
    combine, combine_params = finished(
        frame,
        COMBINE,
        "combine",
        {
            "program": row_of_output(frame),
            "length": triton_text(frame.q_idx.size, frame.names),
            "width": str(width(frame)),
            "share": share(frame, taken),
            "range": taken,
            "previous_kernel": overlap(frame, PREVIOUS),
            "weight": frame.exponent.exp("part_max - pivot"),
            "rescale": frame.exponent.exp("row_max - pivot"),
            "keep": [*beside(frame), *(combined_lse(frame) if saves_lse else []), *keep_max(frame)],
            "store": store_combined(frame),
        },
    )
    last, last_params = rescue_kernel(frame, saves_lse) if frame.filled else ("", [])
    called = {"attention": params, "combine": combine_params, "rescue": last_params}
    helpers = [] if frame.plan.share else [MULTIPROCESSORS]
    texts = [functions, attention, combine, *([last] if last else []), *helpers]
    return "\n\n\n".join(t.rstrip() for t in texts), decode_launch(frame, called, saves_lse)


def rescue_kernel(frame: Frame, saves_lse: bool) -> tuple[str, list[str]]:
    """(kernel, parameters) of the rows that saw no key in any share."""
    every, shared = Frame(frame.region, frame.plan, every_key=True), common(frame)
    assert frame.filled is not None
    holes: dict[str, str | list[str]] = {
        **{name: shared[name] for name in ("rows", "columns", "fixed", "query", "pointers")},
        "program": decoded(frame),
        "stored_rows": stored_rows(frame),
        "level": unseen_below(frame),
        "state": state(every),
        "keys": triton_text(frame.kv_idx.size, frame.names),
        "every_tile": visit(every, frame.filled, [], edge=True, pivot=True),
        "store": [*(rescued_lse(frame) if saves_lse else []), *rounded_sum(frame), *store(frame, "unseen")],
    }
    return finished(frame, RESCUE, "rescue", holes)


def common(frame: Frame) -> dict[str, list[str]]:
    """The holes that both skeletons have, and fill alike."""
    return {
        "rows": query_rows(frame),
        "columns": columns(frame),
        "fixed": fixed_loads(frame),
        "query": query_tiles(frame),
        "pointers": tile_pointers(frame),
        "key_range": table_row(frame) if frame.listed else key_range(frame),
        "full_range": full_tiles() if frame.listed else whole_tiles(frame),
        "descriptors": descriptors(frame),
        "full_tile": full_tile(frame),
        "edge_loop": other_tiles(frame) if frame.tabled else edge_loop(frame),
        "edge_tile": edge_tile(frame),
    }


def finished(frame: Frame, skeleton: str, name: str, holes: Holes) -> tuple[str, list[str]]:
    """(kernel, parameters): pointers, scratch, strides and sizes that it reads."""
    return function(frame, skeleton, name, holes, partial(parameters, frame))


def constants(frame: Frame, read: Set[str]) -> list[str]:
    """The tile and the score's factors, as the kernel names them."""
    plan, language = frame.plan, "gl" if frame.plan.consumers else "tl"
    filled = frame.filled.scale if frame.filled else 1.0
    known = {
        "BLOCK_M": (plan.block_m, "query rows of a tile"),
        "BLOCK_N": (plan.block_n, "keys of a tile"),
        "PACK": (plan.pack, "query heads of one KV head, side by side in the rows of a tile"),
        "Q_ROWS": (frame.rows_per_tile, "queries of a tile"),
        "RESIDENT": (plan.resident, "programs of a multiprocessor at once"),
        "SHARE": (plan.share, "tiles of keys of one program"),
        "REQUESTS": (plan.looks, "requests that are looked through at a time"),
        "SPLITS": (plan.splits, "shares that are combined at a time"),
        "COLUMNS": (combined_columns(frame), "of the output, combined by one program"),
        "GROUPS": (plan.consumers, "of four warps that multiply, 64 rows of a tile each"),
        "STAGES": (plan.stages, "tiles of K, and of V, in shared memory"),
        **turns.constants(frame),
        "LOG2E": (LOG2E, "log2(e)"),
        "SCALE": (frame.exponent.scale, f"log2(e) * {frame.exponent.scale / LOG2E:.9g}"),
        "FILLED_SCALE": (filled, f"log2(e) * {filled / LOG2E:.9g}"),
    }
    used = {name: row for name, row in known.items() if name in read}
    return [f"{name} = {language}.constexpr({value!r})  # {what}" for name, (value, what) in used.items()]
