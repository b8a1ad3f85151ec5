"""The host side of a backward file: parameters, grids and scratch. (frame, ...) -> lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusecomp.codegen.backward_exact import Fixed, covers
from fusecomp.codegen.backward_frame import GradientFrame, Leaf, roles
from fusecomp.codegen.backward_pairs import direct, kept_axes, members, walked_axes
from fusecomp.codegen.backward_sums import memory, totals
from fusecomp.codegen.launcher import arguments, outer_sizes, ranks_of, rounded_up, unpacked, wrapped
from fusecomp.codegen.logsumexp import saved
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import factor
from fusecomp.codegen.table import table
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.tile import TilePlan

Lines = list[str]
DELTA_ROWS = 64
"""Queries of a program of the kernel that only reads O and dO."""
WHOLE = "WHOLE"
"""Of a kernel: that no tile of keys goes past their end."""
PROGRAMS = 512
"""Enough to fill a GPU: where a tensor has fewer tiles, its sum is cut into parts."""


def learned(frame: GradientFrame) -> tuple[str, ...]:
    """The operands that gradients are written for."""
    others = (o.name for o in frame.region.operands if o.name in frame.learned)
    return tuple(dict.fromkeys([*(a.operand for a in roles(frame.region)), *others]))


def parameters(frame: GradientFrame, read: Iterable[str], more: Sequence[str] = ("tiles_ptr",)) -> list[str]:
    """What a kernel takes, of what it reads: pointers, `more` of them, strides, sizes, its tile."""
    names, region = set(read), frame.region
    ranks = with_gradients(frame)
    pointers = [*(f"{t}_ptr" for t in ranks), "lse_ptr", "grad_lse_ptr", "delta_ptr"]
    pointers += [*(f"{x.name}_sums_ptr" for x in frame.leaves), *more]
    strides = [f"{t}_stride_{i}" for t, rank in ranks.items() for i in range(rank)]
    return [p for p in (*pointers, *strides, *region.sizes, "splits", "BLOCK_M", "BLOCK_N", WHOLE) if p in names]


def with_gradients(frame: GradientFrame) -> dict[str, int]:
    """How many axes each tensor has."""
    ranks = ranks_of(frame)
    gradients = {f"grad_{name}": ranks[name] for name in ("out", *learned(frame))}
    return {"out": ranks.pop("out"), **gradients, **ranks, "row_values": 3, "dq_sums": 2}


def call(
    frame: GradientFrame, kernel: str, grid: Sequence[str], params: Sequence[str], plan: TilePlan
) -> Lines:
    """kernel[grid](...) on the current stream."""
    keys = triton_text(frame.kv_idx.size, frame.names)
    tile = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, WHOLE: f"{keys} % {plan.block_n} == 0"}
    given = [f"{p}={tile[p]}" if p in tile else p for p in arguments(params, with_gradients(frame))]
    lines = wrapped([*given, f"num_warps={plan.warps}", f"num_stages={plan.stages}"], 8)
    return [f"{kernel}[({' * '.join(grid)},)](", *("    " + line for line in lines), ")"]


def query_grid(frame: GradientFrame, block_m: int) -> Lines:
    return [*outer_sizes(frame), rounded_up(triton_text(frame.q_idx.size, frame.names), block_m)]


def key_grid(frame: GradientFrame, block_n: int) -> Lines:
    size = triton_text(frame.kv_idx.size, frame.names)
    return [*(factor(v.size, frame) for v in frame.key_axes), rounded_up(size, block_n)]


def backward_launch(frames: dict[str, GradientFrame], params: dict[str, list[str]], fixed: Fixed = ()) -> Lines:
    """delta, then dQ where it is wanted, then dK and dV where one of them is, then what else learns."""
    queries, keys = frames["query_gradient"], frames["key_gradients"]
    region, plan, other = queries.region, queries.plan, keys.plan
    asked = [*dict.fromkeys(p.q.operand for p in region.products), *_summed(queries, "queries")]
    seen = [*dict.fromkeys([*(p.k.operand for p in region.products), region.v.operand]), *_summed(keys, "keys")]
    lines = [
        *begun(queries, fixed),
        f"delta = {'lse.new_empty(lse.shape[:-1])' if saved(region) else 'torch.empty_like(lse)'}",
        *(line for leaf in queries.leaves if leaf.name not in frames for line in memory(queries, leaf)),
    ]
    block = TilePlan("", DELTA_ROWS, 0, (), (), 4, 1)
    lines += call(queries, "row_products", query_grid(queries, DELTA_ROWS), params["row_products"], block)
    grid = query_grid(queries, plan.block_m)
    kernel = [*listed(queries, "key_tiles"), *call(queries, "query_gradient", grid, params["query_gradient"], plan)]
    lines += where_wanted(asked, kernel, region)
    grid = key_grid(keys, other.block_n)
    kernel = [*listed(keys, "query_tiles"), *call(keys, "key_gradients", grid, params["key_gradients"], other)]
    lines += where_wanted(seen, kernel, region)
    for name in learned(queries):
        if name in queries.learned:
            lines += _others(frames, params, name)
    return lines


def begun(frame: GradientFrame, fixed: Fixed) -> Lines:
    """The tensors by name; over nothing, gradients are 0."""
    return [
        *unpacked(frame.region),
        *_gradients(frame, learned(frame), fixed),
        f"if grad_out.numel() == 0 or {triton_text(frame.kv_idx.size, frame.names)} == 0:",
        "    for grad in grads:",
        "        if grad is not None:",
        "            grad.zero_()",
        "    return",
    ]


def listed(frame: GradientFrame, function: str) -> Lines:
    """The table that a kernel visits by, of the masks as they are now."""
    if not frame.tabled:
        return []
    made = table(frame.region, replace(frame.plan, skeleton="prefill"))
    return [f"tiles = {function}([{', '.join(made.tensors)}], [{', '.join(made.sizes)}])"]


def _summed(frame: GradientFrame, along: str) -> list[str]:
    return list(dict.fromkeys(leaf.load.tensor for leaf in frame.summed_along(along)))


def _others(frames: dict[str, GradientFrame], params: dict[str, list[str]], operand: str) -> Lines:
    """The gradient of something that learns beside Q, K and V."""
    frame = frames["query_gradient"]
    mine = [leaf for leaf in frame.leaves if leaf.load.tensor == operand]
    lines = [line for leaf in mine if leaf.name in frames for line in _pairs(frames[leaf.name], leaf, params)]
    lines += totals(frame, operand) if mine else [f"grad_{operand}.zero_()"]
    return [f"if grad_{operand} is not None:", *("    " + line for line in lines)]


def _pairs(frame: GradientFrame, leaf: Leaf, params: dict[str, list[str]]) -> Lines:
    """The kernel of a leaf of every query and key."""
    region, plan = frame.region, frame.plan
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    kept = [factor(v.size, frame) for v in kept_axes(region, leaf)]
    grid = [*kept, rounded_up(m, plan.block_m), rounded_up(n, plan.block_n)]
    walked, lines = walked_axes(region, leaf), []
    if walked:
        fill = rounded_up(str(PROGRAMS), f"({' * '.join(grid)})")
        lines.append(f"splits = min({members(frame, leaf)}, {fill})")
        grid = ["splits", *grid]
    if not direct(frame, leaf):
        lines += memory(frame, leaf, "splits" if walked else "1")
    kernel = f"{leaf.name}_gradient"
    return [*lines, *call(frame, kernel, grid, params[kernel], plan)]


def _gradients(frame: GradientFrame, names: Sequence[str], fixed: Fixed) -> Lines:
    """grad_q = grads[0]; zero where the kernels do not write the whole of it."""
    places = [o.name for o in frame.region.operands]
    lines: Lines = []
    for name in names:
        lines.append(f"grad_{name} = grads[{places.index(name)}]")
        if name not in frame.learned and not covers(frame, name, fixed):
            lines += [f"if grad_{name} is not None:", f"    grad_{name}.zero_()  # not every element is read"]
    return lines


def where_wanted(names: Sequence[str], kernel: Lines, region: AttentionRegion) -> Lines:
    """The call, if one of its gradients is wanted; those that it writes itself then go to scratch."""
    lines = [f"if {' or '.join(f'grad_{n} is not None' for n in names)}:"]
    if len(names) > 1:
        written = [n for n in names if n in {a.operand for a in roles(region)}]
        lines += [f"    grad_{n} = torch.empty_like({n}) if grad_{n} is None else grad_{n}" for n in written]
    return [*lines, *("    " + line for line in kernel)]
