"""Filling the forward kernel for Hopper's tensor cores. (frame) -> text; the portable fillers' `tl` is `gl` here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from fusecomp.codegen import hopper_pairs as pairs
from fusecomp.codegen.base2 import may_be_minus_inf
from fusecomp.codegen.copied import COLUMNS
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.function import quoted
from fusecomp.codegen.hopper import GROUP_ROWS, blocks, expresses, holds_q, registers, shares
from fusecomp.codegen.hopper_functions import (
    APART,
    BARRIERS,
    BASE_2,
    BOUNDS,
    IMPORTS,
    KNOWN,
    OPENED,
    PACKED,
    TANH,
    WIDEN,
)
from fusecomp.codegen.hopper_keys import KEY_OF, walk
from fusecomp.codegen.hopper_launch import LAUNCH_HELPERS, launch
from fusecomp.codegen.hopper_skeletons import (
    ATTENTION,
    CONSUME,
    FIRST_TURN,
    HALF_LAYOUT,
    HELD,
    HELPERS,
    LAYOUTS,
    PRODUCE,
    STORE,
    WIDE,
)
from fusecomp.codegen.hopper_step import in_turns, rising, scored, sharing, weighed
from fusecomp.codegen.launcher import parameters, unspecialised, wrapped
from fusecomp.codegen.logsumexp import place, store_lse
from fusecomp.codegen.memory import element_pointers, fixed_loads, output_index
from fusecomp.codegen.printer import FLOAT_MAX, atom, literal, triton_dtype, triton_text
from fusecomp.codegen.program import ROW_INDICES, decoded, emptied, sink_text
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.slope import sloped
from fusecomp.codegen.source import names_read, tidy
from fusecomp.codegen.table import table_kernels
from fusecomp.codegen.table_ranges import range_kernels
from fusecomp.codegen.tile import of_full, tests_of_edge
from fusecomp.errors import KernelError
from fusecomp.ir.expr import Const, Expr, Load, Score, Var, parts
from fusecomp.ir.region import extent

Lines = list[str]
Holes = dict[str, str | Lines]
FIRST_BARRIER = 4
SHARED = ["next_smem", "q_ready", "k_ready", "v_ready", "next_ready", "next_taken", "all_tiles", "section"]
PRODUCER = ["q_desc", "k_desc", "v_desc", "q_smem", "k_smem", "v_smem", *SHARED, "counter_ptr"]
CONSUMER = ["out_desc", "q_smem", "k_smem", "v_smem", "o_smem", *SHARED]
TAKEN = ["q_desc", "k_desc", "v_desc", "out_desc", "counter_ptr", "all_tiles", "section"]
"""What the warps that copy, those that multiply, and the kernel are given whatever the region."""


def hopper(frame: Frame, saves_lse: bool = False) -> tuple[str, list[str]]:
    """(kernels, launcher)."""
    if not expresses(frame.region):
        raise KernelError("no kernel with warps that only copy expresses this attention; plan a portable one")
    length = "".join(f", {p}" for p in _sizes_of(frame))
    wide = ".to(tl.int64)" if frame.element.hoisted or frame.element.tiles else ""
    program = [f"outer = head{wide}", *decoded(frame, pairs.turning(frame))]
    shared: Holes = {"length": length, "program": program, "fixed": fixed_loads(frame), "counted": walk(frame).counted}
    more = pairs.memory(frame)
    descs = [f"{x.tensor}_desc" for _, x in frame.copied]
    produce, produced = _function(frame, PRODUCE, [*PRODUCER, *descs, *more], {**shared, **_copies(frame)})
    consume, consumed = _function(frame, CONSUME, [*CONSUMER, *more], {**shared, **_consumer(frame, saves_lse)})
    places = fill(HELPERS, {"length": length, "m": triton_text(frame.q_idx.size, frame.names)})
    attention, params = _attention(frame, produced, consumed)
    called = names_read(consume)
    functions = {"known": KNOWN, "tanh": TANH, "base_2": BASE_2, "widen": WIDEN, "apart": APART, "opened": OPENED}
    functions |= {"packed": _packed(frame), "key_of": KEY_OF, **BOUNDS}
    helpers = [BARRIERS, places, *(text for name, text in functions.items() if name in called)]
    texts = [*helpers, produce, consume, attention, LAUNCH_HELPERS]
    tables = range_kernels(frame.region, frame.plan) if frame.ranged else table_kernels(frame) if frame.listed else []
    written = [*(in_gluon(t.strip()) for t in texts), *(t.strip() for t in tables)]
    return "\n\n\n".join(written), launch(frame, params, saves_lse)


def in_gluon(text: str) -> str:
    """Gluon's functions for Triton's; what it takes the larger of, an edge, is never NaN."""
    return re.sub(r"\btl\.", "gl.", text.replace(", propagate_nan=tl.PropagateNan.ALL", ""))


def _packed(frame: Frame) -> str:
    kind = {"bfloat16": "bf16", "float16": "f16"}[frame.region.out_dtype]
    return fill(PACKED, {"kind": kind, "dtype": triton_dtype(frame.region.out_dtype)})


def header(frame: Frame) -> tuple[str, Lines]:
    """(imports, layouts)."""
    stages, groups, size = frame.plan.stages, frame.plan.consumers, extent(frame.region.dv)
    kinds = {"K_FREE": stages, "V_FREE": stages, "Q_FREE": groups, "MULTIPLY": groups * (not shares(frame.plan))}
    names = [name for name, count in kinds.items() if count]
    numbers = accumulate([FIRST_BARRIER, *kinds.values()])
    holes: Holes = {
        "block_n": str(frame.plan.block_n),
        "size": str(size),
        "stored": fill(HALF_LAYOUT, {"columns": str(COLUMNS)}) if size > COLUMNS else [],
        "wide": [WIDE] if any(x.dtype == "float32" for _, x in frame.copied) else [],
        "flags": pairs.flags(frame),
        "threads": str(128 * groups + 32),
        "names": ", ".join(names),
        "barriers": ", ".join(f"gl.constexpr({n})" for _, n in zip(names, numbers, strict=False)),
    }
    tables = "import triton\nimport triton.language as tl\n" if frame.tabled else ""
    return tables + IMPORTS, fill(LAYOUTS, holes).splitlines()


def _sizes_of(frame: Frame) -> list[str]:
    """Lengths that the number of query tiles depends on."""
    return sorted(names_read(triton_text(frame.q_idx.size, frame.names)) & set(frame.region.sizes))


def _function(frame: Frame, skeleton: str, own: Sequence[str], holes: Holes) -> tuple[str, list[str]]:
    """(text, what it is given): its `own`, and of the region's parameters those that it reads."""
    text = tidy(fill(skeleton, {**holes, "given": "given"}))
    given = [*own, *parameters(frame, names_read(text))]
    listed = wrapped(given, 4)
    opened = ["(", *("    " + line for line in listed), ")"]
    return text.replace("    given = given\n", "    " + "\n    ".join(opened) + " = given\n", 1), given


def block_at(frame: Frame, index: Sequence[Expr], row: Var, start: str, column: int = 0) -> str:
    """The coordinates of a block."""
    places = []
    for e in index[:-1]:
        body = start if e == row else triton_text(e, frame.names)
        places.append(body if e == row or isinstance(e, Const) else f"{atom(body)}.to(tl.int32)")
    return f"[{', '.join([*places, str(column)])}]"


def _copies(frame: Frame) -> Holes:
    """Bytes, coordinates and blocks of what is copied in."""
    region, size = frame.region, extent(frame.region.dv)
    product = region.products[0]
    found: Holes = {"q_bytes": f"{GROUP_ROWS * size * 2}", "k_bytes": f"BLOCK_N * {size * 2}"}
    for name, a, row, start in (
        ("q", product.q, frame.q_idx, "q_start + group * 64"),
        ("k", product.k, frame.kv_idx, "k_start"),
        ("v", region.v, frame.kv_idx, "k_start"),
    ):
        found[f"{name}_at"] = block_at(frame, a.index, row, start)
        found[f"{name}_block"] = _reinterpreted(frame, name)
    found["k_start"], found["v_start"] = (walk(frame).begin(block) for block in ("block", "(block - 1)"))
    found["expected"] = pairs.expected(frame, str(found["k_bytes"]))
    found["copy_pairs"] = pairs.copies(frame, lambda x: _pair_at(frame, x))
    return found


def _pair_at(frame: Frame, x: Load) -> str:
    """The coordinates of a block of pairs."""
    outer = block_at(frame, x.index[:-1], frame.q_idx, "").removesuffix("0]")
    return f"{outer}q_start + group * 64, k_start]"


def _reinterpreted(frame: Frame, name: str) -> str:
    """A buffer as the descriptor's block."""
    return f"{name}_desc.dtype, {blocks(frame)[name]}, {name}_desc.layout"


def _consumer(frame: Frame, saves_lse: bool) -> Holes:
    """What four warps do with a tile."""
    size, e = extent(frame.region.dv), frame.exponent
    slope = None if frame.tabled else sloped(e, frame.q_idx, frame.kv_idx, frame.moving)
    begun = pairs.start(frame)
    e = replace(e, score=slope.score if slope else Score(0) if begun else e.score)
    shared, keys, (plain, loose) = weighed(frame, e, slope), walk(frame), of_full(frame, e)
    tests = tests_of_edge(frame)
    edge = scored(frame, e, tests, slope, edge=True, masked=True)
    inside = scored(frame, e, tests, slope, edge=False, masked=True) if frame.listed else edge
    full = scored(frame, e if begun else plain, loose, slope, edge=False, masked=False)
    held = fill(HELD, {"scaled": pairs.scaled(frame)}).splitlines() if holds_q(frame.plan, size) else []
    walked = sharing if shares(frame.plan) else in_turns
    first_turn = [] if shares(frame.plan) else FIRST_TURN.splitlines()
    return {
        "rows": _rows(frame),
        "first_turn": first_turn,
        "query": held or ["q_tile = q_smem.index(group)"],
        "pointers": [*element_pointers(frame), *rising(frame, slope)],
        "parts": keys.parts,
        "keys": walked(frame, shared, edge, inside, full, _least(frame)),
        "dtype": triton_dtype(frame.region.out_dtype),
        "finish": _finish(frame, saves_lse),
        "store": _store(frame),
    }


def _store(frame: Frame) -> Lines:
    """O on its way out: at once, or half by half, so that Q of the next tile has its room."""
    size, index, start = extent(frame.region.dv), output_index(frame), "q_start + group * 64"
    halves = ["o"] if size <= COLUMNS else ["gl.convert_layout(left, HALF)", "gl.convert_layout(right, HALF)"]
    lines: Lines = []
    if len(halves) == 2:
        lines.append(f"left, right = o.reshape([{GROUP_ROWS}, 2, {COLUMNS}]).permute((0, 2, 1)).split()")
    for i, half in enumerate(halves):
        at = block_at(frame, index, frame.q_idx, start, i * COLUMNS)
        lines += fill(STORE, {"o": half, "o_at": at, "o_block": _reinterpreted(frame, "out")}).splitlines()
    return lines


def _rows(frame: Frame) -> Lines:
    """q_idx [64, 1] of each row. Rows past the end repeat the last query, and are not stored."""
    size = triton_text(frame.q_idx.size, frame.names)
    line = f"q_line = (q_start + group * {GROUP_ROWS} + tl.arange(0, {GROUP_ROWS}, layout=ROWS)).to(tl.float32)"
    return [f"q_row = tl.minimum(row, {size} - 1 - q_start)", *ROW_INDICES, line]


def _least(frame: Frame) -> str:
    """What a row's maximum begins at: finite, so that a row that has seen no key subtracts a number."""
    least = literal(-FLOAT_MAX)
    if frame.sink is None:
        return least
    sink = sink_text(frame, frame.exponent)
    return f"gl.maximum({sink}, {least})" if any(map(may_be_minus_inf, parts(frame.sink))) else sink


def _finish(frame: Frame, saves_lse: bool) -> Lines:
    """The sink's own weight, what is saved, and what an empty row gives."""
    lines, e = [], frame.exponent
    if frame.sink is not None:
        lines.append(f"row_sum = row_sum + {e.exp(f'{sink_text(frame, e)} - row_max')}")
    outer = "outer" if pairs.turning(frame) == frame.batch else f"({place(frame)})"
    lines += [f"outer = {outer}.to(tl.int64)", *store_lse(frame)] if saves_lse else []
    return [*lines, *emptied(frame, ["acc"], "gl.convert_layout(row_sum, gl.SliceLayout(1, OUTPUT))[:, None]")]


def _attention(frame: Frame, produced: list[str], consumed: list[str]) -> tuple[str, list[str]]:
    """(the kernel, what it takes)."""
    described = [f"{x.tensor}_desc" for _, x in frame.copied]
    params = [*TAKEN, *described, *parameters(frame, {*produced, *consumed})]
    sizes = quoted(["all_tiles", "section", *unspecialised(frame, params)])
    size, groups = extent(frame.region.dv), frame.plan.consumers
    _, multiplies, copies = registers(frame.plan)
    holes: Holes = {
        "sizes": sizes,
        "parameters": wrapped(params, 4),
        "dtype": triton_dtype(frame.region.out_dtype),
        "size": str(size),
        "columns": str(min(size, COLUMNS)),
        "pairs_smem": pairs.allocated(frame),
        "consumers": ", ".join(f"(consume, (consumed, {i}))" for i in range(groups)),
        "warps": str([4] * (groups - 1) + [1]),
        "registers": str([multiplies] * (groups - 1) + [copies]),
    }
    return tidy(fill(ATTENTION, {**holes, "consumed": wrapped(consumed, 8), "produced": wrapped(produced, 8)})), params
