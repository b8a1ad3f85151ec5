"""The host side of the backward kernels for Hopper's tensor cores. (frames, parameters) -> lines."""

from __future__ import annotations

from fusecomp.codegen.backward_exact import Fixed
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_launcher import (
    begun,
    call,
    key_grid,
    listed,
    query_grid,
    where_wanted,
    with_gradients,
)
from fusecomp.codegen.hopper import registers
from fusecomp.codegen.hopper_backward import STAY, blocks
from fusecomp.codegen.launcher import arguments, rounded_up, wrapped
from fusecomp.codegen.printer import triton_text
from fusecomp.ir.region import extent
from fusecomp.planning.tile import TilePlan

Lines = list[str]


def launch(
    queries: GradientFrame, keys: GradientFrame, params: dict[str, list[str]], fixed: Fixed, once: bool
) -> Lines:
    """lse and delta of each row; then all gradients `once`, or dQ where it is wanted, and dK and dV where one is."""
    region = queries.region
    p, m = region.products[0], triton_text(queries.q_idx.size, queries.names)
    seen = [*dict.fromkeys((p.k.operand, region.v.operand))]
    both = [*dict.fromkeys((p.q.operand, *seen))]
    read = [*dict.fromkeys((*both, "grad_out"))]
    heads, rows = " * ".join(query_grid(queries, STAY)[:-1]) or "1", f"{rounded_up(m, STAY)} * {STAY}"
    made = [f"row_values = torch.empty(2, {heads}, {rows}, dtype=torch.float32, device=out.device)"]
    if once:
        sums = f"{heads}, {rows} * {extent(region.dv)}"
        made.append(f"dq_sums = torch.zeros({sums}, dtype=torch.float32, device=out.device)")
        kernels = where_wanted(both, [
            *listed(keys, "query_tiles"), *_launched(keys, "all_gradients", params, key_grid(keys, STAY)),
            *_by_rows(queries, "query_gradient", params, queries.plan.block_m),
        ], region)  # fmt: skip
    else:
        query_gradient = _launched(queries, "query_gradient", params, query_grid(queries, STAY))
        key_gradients = _launched(keys, "key_gradients", params, key_grid(keys, STAY))
        kernels = [
            *where_wanted([p.q.operand], [*listed(queries, "key_tiles"), *query_gradient], region),
            *where_wanted(seen, [*listed(keys, "query_tiles"), *key_gradients], region),
        ]
    return [
        *begun(queries, fixed),
        *made,
        *_by_rows(queries, "row_products", params, STAY),
        f"{', '.join(read)} = {', '.join(f'in_rows({name})' for name in read)}",
        *kernels,
    ]


def _by_rows(frame: GradientFrame, kernel: str, params: dict[str, list[str]], rows: int) -> Lines:
    """A kernel in Triton, of so many queries a program."""
    return call(frame, kernel, query_grid(frame, rows), params[kernel], TilePlan("", rows, 0, (), (), 4, 1))


def _launched(frame: GradientFrame, kernel: str, params: dict[str, list[str]], grid: Lines) -> Lines:
    """Descriptors of what is copied, then the kernel."""
    taken = params[kernel]
    given = [*arguments(taken, with_gradients(frame)), "num_warps=4", f"maxnreg={registers(frame.plan)[0]}"]
    return [
        *(line for p in taken if p.endswith("_desc") for line in _described(frame, kernel, p.removesuffix("_desc"))),
        f"{kernel}[({' * '.join(grid)},)](",
        *("    " + line for line in wrapped(given, 8)),
        ")",
    ]


def _described(frame: GradientFrame, kernel: str, name: str) -> Lines:
    """q_desc = described(q, [1, 1, 64, 128], M)."""
    block, p = blocks(frame, kernel)[name], frame.region.products[0]
    if name == "row":
        shape = "list(row_values.shape), list(row_values.stride())"
        return [f"row_desc = TensorDescriptor(row_values, {shape}, {block}, ROW_BOX)"]
    operand = {"q": p.q.operand, "k": p.k.operand, "v": frame.region.v.operand}.get(name[-1], "out")
    tensor = f"grad_{operand}" if name[0] == "d" else operand
    rows = frame.q_idx if name in ("q", "dq", "do") else frame.kv_idx
    return [f"{name}_desc = described({tensor}, {block}, {triton_text(rows.size, frame.names)})"]
