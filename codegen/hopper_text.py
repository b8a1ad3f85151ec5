"""Filling the forward kernel for Hopper's tensor cores. (frame) -> text; the portable fillers' `tl` is `gl` here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fusecomp.codegen.frame import Frame, may_be_minus_inf
from fusecomp.codegen.hopper import KEYS, REGISTERS, blocks, expresses
from fusecomp.codegen.hopper_skeletons import (
    ATTENTION,
    CONSUME,
    HELPERS,
    IMPORTS,
    LAUNCH_HELPERS,
    LAYOUTS,
    PRODUCE,
    STEP,
    TANH,
)
from fusecomp.codegen.launcher import (
    arguments,
    no_keys,
    outer_sizes,
    parameters,
    ranks_of,
    rounded_up,
    unpacked,
    unspecialised,
    wrapped,
)
from fusecomp.codegen.logsumexp import store_lse
from fusecomp.codegen.memory import element_pointers, fixed_loads, output_index
from fusecomp.codegen.printer import FLOAT_MAX, literal, triton_dtype, triton_text
from fusecomp.codegen.program import ROW_INDICES, decoded, full_range, key_range, sink_text
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.source import names_read, tidy
from fusecomp.codegen.tile import scored
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Var, parts
from fusecomp.ir.poly import poly
from fusecomp.ir.region import extent

Lines = list[str]
Holes = dict[str, str | Lines]
FIRST_BARRIER = 4
SHARED = ["next_smem", "q_ready", "k_ready", "v_ready", "next_ready", "next_taken", "tiles", "section"]
PRODUCER = ["q_desc", "k_desc", "v_desc", "q_smem", "k_smem", "v_smem", *SHARED, "counter_ptr"]
CONSUMER = ["out_desc", "q_smem", "k_smem", "v_smem", "o_smem", *SHARED]
TAKEN = ["q_desc", "k_desc", "v_desc", "out_desc", "counter_ptr", "tiles", "section"]
"""What the warps that copy, those that multiply, and the kernel are given whatever the region."""


def hopper(frame: Frame, saves_lse: bool = False) -> tuple[str, list[str]]:
    """(kernels, launcher)."""
    if not expresses(frame.region):
        raise KernelError("no kernel with warps that only copy expresses this attention; plan a portable one")
    length = "".join(f", {p}" for p in _sizes_of(frame))
    wide = ["outer = outer.to(tl.int64)"] if frame.element.hoisted or frame.element.tiles else []
    shared: Holes = {"length": length, "program": [*wide, *decoded(frame)], "fixed": fixed_loads(frame),
              "key_range": key_range(frame), "last": _last(frame)}  # fmt: skip
    produce, produced = _function(frame, PRODUCE, PRODUCER, {**shared, **_copies(frame)})
    consume, consumed = _function(frame, CONSUME, CONSUMER, {**shared, **_consumer(frame, saves_lse)})
    helpers = fill(HELPERS, {"length": length, "m": triton_text(frame.q_idx.size, frame.names)})
    attention, params = _attention(frame, produced, consumed)
    functions = [TANH] if "tanh" in names_read(consume) else []
    texts = [helpers, *functions, produce, consume, attention, LAUNCH_HELPERS]
    return in_gluon("\n\n\n".join(t.strip() for t in texts)), _launch(frame, params, saves_lse)


def in_gluon(text: str) -> str:
    return re.sub(r"\btl\.", "gl.", text)


def header(frame: Frame) -> tuple[str, Lines]:
    """(imports, layouts)."""
    stages, first = frame.plan.stages, FIRST_BARRIER
    numbers = (first, first + stages, first + 2 * stages, first + 2 * stages + 2)
    barriers = ", ".join(f"gl.constexpr({n})" for n in numbers)
    size = str(extent(frame.region.dv))
    return IMPORTS, fill(LAYOUTS, {"block_n": str(KEYS), "size": size, "barriers": barriers}).splitlines()


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


def _at(frame: Frame, index: Sequence[Expr], row: Var, start: str) -> str:
    """The coordinates of a block."""
    places = []
    for e in index[:-1]:
        body = start if e == row else triton_text(e, frame.names)
        body = body if body.isidentifier() or e == row else f"({body})"
        places.append(body if e == row or isinstance(e, Const) else f"{body}.to(tl.int32)")
    return f"[{', '.join([*places, '0'])}]"


def _copies(frame: Frame) -> Holes:
    """Bytes, coordinates and blocks of what is copied in."""
    region, size = frame.region, extent(frame.region.dv)
    product = region.products[0]
    found: Holes = {"q_bytes": f"{64 * size * 2}", "k_bytes": f"BLOCK_N * {size * 2}"}
    for name, a, row, start in (
        ("q", product.q, frame.q_idx, "q_start + group * 64"),
        ("k", product.k, frame.kv_idx, "k_start"),
        ("v", region.v, frame.kv_idx, "k_start"),
    ):
        found[f"{name}_at"] = _at(frame, a.index, row, start)
        found[f"{name}_block"] = _reinterpreted(frame, name)
    return found


def _reinterpreted(frame: Frame, name: str) -> str:
    """A buffer as the descriptor's block."""
    return f"{name}_desc.dtype, {blocks(frame)[name]}, {name}_desc.layout"


def _last(frame: Frame) -> Lines:
    """The first key of the last tile, and how many tiles there are: at least one."""
    span = "last" if frame.k_begin == "0" else f"(last - {frame.k_begin})"
    return [
        f"last = tl.maximum({frame.k_end} - 1, {frame.k_begin}) // BLOCK_N * BLOCK_N",
        f"blocks = {span} // BLOCK_N + 1",
    ]


def _consumer(frame: Frame, saves_lse: bool) -> Holes:
    """What four warps do with a tile."""
    size, e = extent(frame.region.dv), frame.exponent
    dtype, factor = triton_dtype(frame.region.out_dtype), f" * {frame.factor(e)}" if e.scale != 1.0 else ""
    edge = scored(frame, e, frame.reach.tested, edge=True)
    shared = {"factor": factor, "dtype": dtype, "weights": _exp2(frame, f"score{factor} - row_max[:, None]"),
              "rescale": _exp2(frame, "row_max - new_max")}  # fmt: skip
    edge_step = fill(STEP, {**shared, "score": edge})
    full_step = fill(STEP, {**shared, "score": scored(frame, e, frame.reach.loose, edge=False)})
    index, window = output_index(frame), frame.k_begin != "0"
    sloped = not _cuts_one_tile(frame)
    above = "gl.maximum((last - full_end) // BLOCK_N + 1, 1)  # tiles at the end that need their mask"
    begin = f"gl.maximum((last - full_begin) // BLOCK_N + 1, {'above' if sloped else '1'})"
    return {
        "rows": _rows(frame),
        "pointers": element_pointers(frame),
        "full_range": full_range(frame),
        "above": [f"above = {above}"] if sloped else [],
        "below": [f"below = {begin}  # the others at the beginning"] if window else [],
        "above_loop": _loop("for block in range(1, above):", edge_step) if sloped else [],
        "below_loop": _loop("for block in range(below, blocks):", edge_step) if window else [],
        "full_begin": "above" if sloped else "1",
        "full_end": "below" if window else "blocks",
        "edge_score": edge,
        "full_step": full_step.splitlines(),
        "first_max": f"gl.maximum(gl.max(score, axis=1){factor}, {_least(frame)})",
        "weights": shared["weights"],
        "dtype": dtype,
        "size": str(size),
        "finish": _finish(frame, saves_lse),
        "o_at": _at(frame, index, frame.q_idx, "q_start + group * 64"),
        "o_block": _reinterpreted(frame, "out"),
    }


def _cuts_one_tile(frame: Frame) -> bool:
    """Whether no more than the last tile of keys needs its mask at the end: kv_idx <= q_idx + c, c whole tiles."""
    sloped = [poly(apply("sub", x.edge, frame.q_idx)) for x in frame.reach.upper if x.slope]
    return all(x.slope in (0, 1) for x in frame.reach.upper) and all(
        set(rest) <= {()} and (int(rest.get((), 0)) - 1) % KEYS == 0 for rest in sloped
    )


def _loop(head: str, step: str) -> Lines:
    return [head, *("    " + line for line in step.splitlines()), ""]


def _exp2(frame: Frame, difference: str) -> str:
    return f"tl.exp2(({difference}) * LOG2E)" if frame.exponent.natural else f"tl.exp2({difference})"


def _rows(frame: Frame) -> Lines:
    """q_idx [64, 1] of each row. Rows past the end repeat the last query, and are not stored."""
    size = triton_text(frame.q_idx.size, frame.names)
    return [f"q_row = tl.minimum(row, {size} - 1 - q_start)", *ROW_INDICES]


def _least(frame: Frame) -> str:
    """What a row's maximum begins at: finite, so that a row that has seen no key subtracts a number."""
    least = literal(-FLOAT_MAX)
    if frame.sink is None:
        return least
    sink = sink_text(frame, frame.exponent)
    return f"gl.maximum({sink}, {least})" if any(map(may_be_minus_inf, parts(frame.sink))) else sink


def _finish(frame: Frame, saves_lse: bool) -> Lines:
    """The sink's own weight, what is saved, and what an empty row gives."""
    lines = []
    if frame.sink is not None:
        lines.append(f"row_sum = row_sum + {_exp2(frame, f'{sink_text(frame, frame.exponent)} - row_max')}")
    lines += ["outer = outer.to(tl.int64)", *store_lse(frame)] if saves_lse else []
    if frame.region.empty_row == "zero":
        lines.append("row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a row that sees no key gives 0")
    return lines


def _attention(frame: Frame, produced: list[str], consumed: list[str]) -> tuple[str, list[str]]:
    """(the kernel, what it takes)."""
    params = [*TAKEN, *parameters(frame, {*produced, *consumed})]
    sizes = "[" + ", ".join(f'"{p}"' for p in ("tiles", "section", *unspecialised(frame, params))) + "]"
    size, dtype = str(extent(frame.region.dv)), triton_dtype(frame.region.out_dtype)
    holes: Holes = {"sizes": sizes, "parameters": wrapped(params, 4), "dtype": dtype, "size": size}
    return tidy(fill(ATTENTION, {**holes, "consumed": wrapped(consumed, 8), "produced": wrapped(produced, 8)})), params


def _launch(frame: Frame, params: list[str], saves_lse: bool) -> Lines:
    """Programs that stay, one for each multiprocessor, and a counter of the tiles that are taken."""
    region, size = frame.region, extent(frame.region.dv)
    product = region.products[0]
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    names = dict.fromkeys((product.q.operand, product.k.operand, region.v.operand))
    outer = " * ".join(outer_sizes(frame)) or "1"
    keys = f"{n} * {4 * size // region.q_per_kv()}"
    section = f"section_of({outer}, {keys})" if frame.heavy_last else "1"
    tensors = {"q": product.q.operand, "k": product.k.operand, "v": region.v.operand, "out": "written"}
    rows = {"q": m, "k": n, "v": n, "out": m}
    described = [f"{t}_desc = described({tensors[t]}, {block}, {rows[t]})" for t, block in blocks(frame).items()]
    given = wrapped([*arguments(params, ranks_of(frame)), f"num_warps={frame.plan.warps}", f"maxnreg={REGISTERS}"], 8)
    return [
        *unpacked(region),
        *no_keys(frame, saves_lse),
        f"{', '.join(names)} = {', '.join(f'in_rows({name})' for name in names)}",
        "written = in_rows(out)",
        *described,
        f"tiles = {outer} * {rounded_up(m, 'BLOCK_M.value')}",
        f"section = {section}",
        "counter = torch.zeros(1, dtype=torch.int32, device=out.device)",
        "programs = min(tiles, torch.cuda.get_device_properties(out.device).multi_processor_count)",
        "attention[(programs,)](",
        *("    " + line for line in given),
        ")",
        "if written is not out:",
        "    out.copy_(written)",
    ]
