"""The gradient of a tensor of every query and key: a program has one tile of it. (frame, leaf) -> lines.

    dx[h, q_idx, kv_idx] = sum over b of  g[b, h, q_idx, kv_idx]

The axes that the tensor does not have are walked inside the program, or by several programs in equal parts, which the
host then adds up: nothing is added atomically, and the result is the same every time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce

from fusecomp.codegen.address import Address, address, at_tile, sum_text
from fusecomp.codegen.backward_exact import sized, values_of
from fusecomp.codegen.backward_frame import GradientFrame, Leaf
from fusecomp.codegen.backward_keys import outer
from fusecomp.codegen.backward_queries import output_tiles, score_gradient
from fusecomp.codegen.backward_tile import leaf_gradient, log_sums, rounded, row_values, scaled_by, seldom
from fusecomp.codegen.memory import element_loads, row_base
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import columns, factor, key_range
from fusecomp.codegen.tile import indented, places
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Load, Var, parts, variables
from fusecomp.ir.region import AttentionRegion

Lines = list[str]


def kept_axes(region: AttentionRegion, leaf: Leaf) -> tuple[Var, ...]:
    """The batch axes that a leaf varies with."""
    return tuple(v for v in region.batch if v.name in variables(leaf.load))


def walked_axes(region: AttentionRegion, leaf: Leaf) -> tuple[Var, ...]:
    """The batch axes that its gradient is summed over."""
    return tuple(v for v in region.batch if v.name not in variables(leaf.load))


def whole(frame: GradientFrame, leaf: Leaf) -> bool:
    """Whether each element of the tensor is read at one place of the leaf's axes: an axis of it in each dimension."""
    known, shape = values_of(frame.fixed), frame.region.operand(leaf.load.tensor).shape
    pairs = list(zip(sized(leaf.load.index, known), sized(shape, known), strict=True))
    own = [e for e, size in pairs if isinstance(e, Var) and e.size == size]
    rest = [e for e, size in pairs if e == Const(0) and size == Const(1)]
    return len(own) + len(rest) == len(pairs) and len(set(own)) == len(own)


def direct(frame: GradientFrame, leaf: Leaf) -> bool:
    """Whether a kernel writes the gradient itself: nothing is left to be added up."""
    alone = sum(x.load.tensor == leaf.load.tensor for x in frame.leaves) == 1
    every = frame.along(leaf) == "pairs" and not walked_axes(frame.region, leaf)
    return alone and every and whole(frame, leaf)


def program(frame: GradientFrame, leaf: Leaf) -> Lines:
    """program = (unit * q_tiles + query tile) * k_tiles + key tile; unit = split * kept + (b * H + h)."""
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    lines, left = [], "unit"
    for v in reversed(kept_axes(frame.region, leaf)):
        lines += [f"{v.name} = {left} % {factor(v.size, frame)}"]
        left = f"{left} // {factor(v.size, frame)}"
    return [
        "program = tl.program_id(0)",
        f"q_tiles = tl.cdiv({m}, BLOCK_M)",
        f"k_tiles = tl.cdiv({n}, BLOCK_N)",
        "k_first = program % k_tiles * BLOCK_N",
        "q_start = program // k_tiles % q_tiles * BLOCK_M",
        "unit = tl.cast(program // (k_tiles * q_tiles), tl.int64)",
        *lines,
        f"split = {left}",
    ]


def keys_of_tile(frame: GradientFrame) -> Lines:
    """The places in a tile. Those past the end of the keys repeat the last one, so that nothing tests them inside."""
    lines, size = columns(frame), triton_text(frame.kv_idx.size, frame.names)
    at = lines.index("n = tl.arange(0, BLOCK_N)")
    repeated = f"n = column if WHOLE else tl.minimum(column, {size} - 1 - k_first)"
    return [*lines[:at], "column = tl.arange(0, BLOCK_N)", repeated, *lines[at + 1 :]]


def row_statistics(frame: GradientFrame) -> Lines:
    """dO, lse and delta of the queries, the last two as vectors: a thread then reads a number once."""
    size = triton_text(frame.q_idx.size, frame.names)
    rows = f"rows = outer * {size} + q_start + tl.minimum(tl.arange(0, BLOCK_M), {size} - 1 - q_start)"
    return [*output_tiles(frame, "grad_out", "do", cast=True), rows, *row_values(frame, "rows", "")]


def members(frame: GradientFrame, leaf: Leaf) -> str:
    """How many heads, of all requests, read the same tile."""
    return " * ".join(factor(v.size, frame) for v in walked_axes(frame.region, leaf))


def member(frame: GradientFrame, leaf: Leaf) -> Lines:
    """The axes that are walked, from the number of the member."""
    walked, lines, left = walked_axes(frame.region, leaf), [], "tl.cast(member, tl.int64)"
    for place, v in reversed(list(enumerate(walked))):
        extent = factor(v.size, frame)
        lines.append(f"{v.name} = {left} % {extent}" if place else f"{v.name} = {left}")
        left = f"{left} // {extent}"
    return [*lines, f"outer = {outer(frame)}"]


def pipelined(frame: GradientFrame, leaf: Leaf) -> bool:
    """Whether a member is visited in one step: nothing that it reads says that it need not be."""
    reads = any(isinstance(x, Load) for term in frame.reach.loose for x in parts(term))
    return bool(walked_axes(frame.region, leaf)) and frame.rescue is None and not reads


def common(frame: GradientFrame, leaf: Leaf) -> GradientFrame:
    """The frame under those terms of the mask that are the same for all members."""
    axes = {v.name for v in walked_axes(frame.region, leaf)}
    keep = [t for t in frame.region.keep
            if not variables(t) & axes and not any(isinstance(x, Load) for x in parts(t))]  # fmt: skip
    return replace(frame, region=replace(frame.region, keep=tuple(keep)))


def bounds(frame: GradientFrame, leaf: Leaf) -> Lines:
    """Which members a tile visits: none where it lies outside of the bounds that they share."""
    shared, every = common(frame, leaf), members(frame, leaf)
    lines = ["k_start = k_first", *key_range(shared)]
    return [*lines, f"last = tl.where({begin(shared)} < {_end(shared)}, {every}, 0)"] if shared.region.keep else lines


def last(frame: GradientFrame, leaf: Leaf) -> str:
    return "last" if common(frame, leaf).region.keep else members(frame, leaf)


def own_range(frame: GradientFrame, leaf: Leaf) -> Lines:
    """Where the keys of one member end."""
    return key_range(frame) if common(frame, leaf).region.keep != frame.region.keep else []


def begin(frame: GradientFrame) -> str:
    """The tile's own keys, or none of them: a tile that the mask hides whole is not visited."""
    return "tl.maximum(k_first, k_begin)" if frame.k_begin == "k_begin" else "k_first"


def end(frame: GradientFrame) -> str:
    return "k_last" if frame.reach.loose else _end(frame)


def _end(frame: GradientFrame) -> str:
    return f"tl.minimum(k_first + BLOCK_N, {frame.k_end})"


def hidden(frame: GradientFrame) -> Lines:
    """Where a term of the mask is data: the tile of it, for what it hides whole is not visited."""
    if not frame.reach.loose:
        return []
    live: Expr = Var("live", frame.kv_idx.size)
    sees = reduce(partial(apply, "and"), frame.region.keep, live)
    names = frame.tile_names.having({live: "live[None, :]"})
    body = [*element_loads(frame, True, [sees]), f"seen = {triton_text(sees, names)}"]
    return [
        "# A tile that the mask hides from all of the queries is not visited",
        "k_start = k_first",
        *places(frame, "\n".join(body)),
        *body,
        f"k_last = tl.where(tl.max(tl.max(seen.to(tl.int32), axis=1), axis=0) > 0, {_end(frame)}, k_first)",
    ]


def tile(frame: GradientFrame, leaf: Leaf) -> Lines:
    """sum += g."""
    return _tile(frame, leaf, list(frame.region.keep))


def _tile(frame: GradientFrame, leaf: Leaf, tests: list[Expr]) -> Lines:
    body = score_gradient(frame, tests, edge=False, rows="[:, None]")
    body.append(f"{leaf.name}_sum += {leaf_gradient(frame, leaf)}")
    return [*places(frame, "\n".join(body)), *body]


def rescue(frame: GradientFrame, leaf: Leaf) -> Lines:
    """The queries that see no key, which see these too."""
    again = frame.rescue
    twin = next((x for x in again.leaves if x.load == leaf.load and x.source == leaf.source), None) if again else None
    if again is None or twin is None:
        return []
    return [
        "# Queries that see no key, or only keys near the fill, take part in every key",
        *log_sums(again, "rows", ""),
        'last = tl.where(tl.min(lse) < float("inf"), k_first + BLOCK_N, k_first)',
        f"for k_start in {seldom('k_first', 'last', 'BLOCK_N')}:",
        *indented(_tile(again, twin, [])),
    ]


def store(frame: GradientFrame, leaf: Leaf) -> Lines:
    """dx, or this program's part of it, which lies in [split, kept axes, M, N]."""
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    live = f"row < {m} - q_start"
    stored = f"stored = {live} if WHOLE else ({live}) & (column[None, :] < {n} - k_first)"
    value = scaled_by(f"{leaf.name}_sum", leaf.factor)
    if not direct(frame, leaf):
        width = f"width = k_tiles * BLOCK_N if WHOLE else {n}  # then the compiler sees that rows are aligned"
        at = f"(unit * {m} + q_start + q_row) * width + k_first + n[None, :]"
        return [width, stored, f"tl.store({leaf.name}_sums_ptr + {at}, {value}, mask=stored)"]
    name = f"grad_{leaf.load.tensor}"
    found = address(name, leaf.load.index, frame.moving, frozenset({frame.q_idx.name, frame.kv_idx.name}))
    starts: dict[Expr, Expr] = {frame.kv_idx: Var("k_first", frame.kv_idx.size)}
    base = row_base(frame, Address(found.base, at_tile(found.start, starts), {}, {}))
    inside = frame.names.having({frame.q_idx: "q_row", frame.kv_idx: "n[None, :]"})
    value = rounded(f"({value})" if " " in value else value, leaf.load.dtype)
    pointer = " + ".join([f"{name}_ptr", *base, sum_text(found.offsets, inside, wide=False)])
    return [stored, f"tl.store({pointer}, {value}, mask=stored)"]
