"""The host side of a backward file: parameters, grids and scratch. (frame, ...) -> lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusecomp.codegen.backward_frame import GradientFrame, covers, roles
from fusecomp.codegen.backward_keys import axis_size
from fusecomp.codegen.launcher import argument, outer_sizes, unpacked, wrapped
from fusecomp.codegen.logsumexp import saved
from fusecomp.codegen.printer import triton_text
from fusecomp.planning.tile import TilePlan

Lines = list[str]
DELTA_ROWS = 64
"""Queries of a program of the kernel that only reads O and dO."""


def learned(frame: GradientFrame) -> tuple[str, ...]:
    """The operands that gradients are written for."""
    return tuple(dict.fromkeys(a.operand for a in roles(frame.region)))


def parameters(frame: GradientFrame, read: Iterable[str]) -> list[str]:
    """What a kernel takes, of what it reads: pointers, strides, sizes, its tile."""
    names, region = set(read), frame.region
    ranks = {"out": len(region.out_axes), "grad_out": len(region.out_axes)}
    ranks |= {f"grad_{name}": len(region.operand(name).shape) for name in learned(frame)}
    ranks |= {o.name: len(o.shape) for o in region.operands}
    pointers = [*(f"{t}_ptr" for t in ranks), "lse_ptr", "delta_ptr"]
    strides = [f"{t}_stride_{i}" for t, rank in ranks.items() for i in range(rank)]
    return [p for p in (*pointers, *strides, *region.sizes, "BLOCK_M", "BLOCK_N") if p in names]


def declared(params: Sequence[str]) -> Lines:
    """Parameters as the kernel declares them."""
    return [f"{p}: tl.constexpr" if p.startswith("BLOCK_") else p for p in params]


def call(kernel: str, grid: Sequence[str], params: Sequence[str], plan: TilePlan, warps: int, stages: int) -> Lines:
    """kernel[grid](...) on the current stream."""
    tile = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n}
    given = [f"{p}={tile[p]}" if p in tile else argument(p) for p in params]
    lines = wrapped([*given, f"num_warps={warps}", f"num_stages={stages}"], 8)
    return [f"{kernel}[({' * '.join(grid)},)](", *("    " + line for line in lines), ")"]


def query_grid(frame: GradientFrame, block_m: int) -> Lines:
    return [*outer_sizes(frame), f"triton.cdiv({triton_text(frame.q_idx.size, frame.names)}, {block_m})"]


def key_grid(frame: GradientFrame, block_n: int) -> Lines:
    size = triton_text(frame.kv_idx.size, frame.names)
    return [*(axis_size(frame, v) for v in frame.key_axes), f"triton.cdiv({size}, {block_n})"]


def backward_launch(frames: dict[str, GradientFrame], params: dict[str, list[str]]) -> Lines:
    """delta, then dQ where it is wanted, then dK and dV where one of them is."""
    queries, keys = frames["query_gradient"], frames["key_gradients"]
    region, plan, other = queries.region, queries.plan, keys.plan
    names = learned(queries)
    asked = [n for n in names if n in {p.q.operand for p in region.products}]
    seen = [n for n in names if n in {*(p.k.operand for p in region.products), region.v.operand}]
    size = triton_text(queries.kv_idx.size, queries.names)
    lines = [*unpacked(region), *_gradients(queries, names)]
    lines += [
        f"if grad_out.numel() == 0 or {size} == 0:",
        "    for grad in grads:",
        "        if grad is not None:",
        "            grad.zero_()",
        "    return",
        f"delta = torch.empty_like({'lse[..., 0].contiguous()' if saved(region) else 'lse'})",
    ]
    block = TilePlan("", DELTA_ROWS, 0, (), (), 4, 1)
    lines += call("row_products", query_grid(queries, DELTA_ROWS), params["row_products"], block, 4, 1)
    grid = query_grid(queries, plan.block_m)
    kernel = call("query_gradient", grid, params["query_gradient"], plan, plan.warps, plan.stages)
    lines += _where_wanted(asked, kernel)
    grid = key_grid(keys, other.block_n)
    kernel = call("key_gradients", grid, params["key_gradients"], other, other.warps, other.stages)
    return [*lines, *_where_wanted(seen, kernel)]


def _gradients(frame: GradientFrame, names: Sequence[str]) -> Lines:
    """grad_q = grads[0]; zero where the kernels do not write the whole of it."""
    places = [o.name for o in frame.region.operands]
    lines: Lines = []
    for name in names:
        lines.append(f"grad_{name} = grads[{places.index(name)}]")
        if not covers(frame.region, name):
            lines += [f"if grad_{name} is not None:", f"    grad_{name}.zero_()  # not every element is read"]
    return lines


def _where_wanted(names: Sequence[str], kernel: Lines) -> Lines:
    """The call, if one of its gradients is wanted; the others then go to scratch."""
    lines = [f"if {' or '.join(f'grad_{n} is not None' for n in names)}:"]
    if len(names) > 1:
        lines += [f"    grad_{n} = torch.empty_like({n}) if grad_{n} is None else grad_{n}" for n in names]
    return [*lines, *("    " + line for line in kernel)]
