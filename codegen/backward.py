"""Region and plans to the text of its backward kernels: every hole of the skeletons is filled, nothing is decided here.

    source = emit_backward(region, backward_plan(region))
    launch(grads, out, grad_out, lse, tensors, sizes)
    launch(grads, out, grad_out, lse, grad_lse, tensors, sizes)         where the lse is a result of the region

`lse` is what `emit(region, plan, saves_lse=True)` saved, as codegen/logsumexp.py says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from fusecomp.codegen import backward_keys as keys
from fusecomp.codegen import backward_memory as memory
from fusecomp.codegen import backward_pairs as pairs
from fusecomp.codegen import backward_queries as queries
from fusecomp.codegen import backward_range as ranges
from fusecomp.codegen import turns
from fusecomp.codegen.backward_check import backward_selfcheck
from fusecomp.codegen.backward_exact import Fixed, require_gradients
from fusecomp.codegen.backward_frame import GradientFrame, Leaf
from fusecomp.codegen.backward_launcher import DELTA_ROWS, backward_launch, declared, parameters
from fusecomp.codegen.backward_skeletons import (
    BACKWARD_MODULE,
    KEY_GRADIENTS,
    PAIR_GRADIENT,
    QUERY_GRADIENT,
    ROW_PRODUCTS,
    SHARED_KEY_GRADIENTS,
    SHARED_PAIR_GRADIENT,
    spaced,
)
from fusecomp.codegen.base2 import LOG2E
from fusecomp.codegen.document import kernel_name, title
from fusecomp.codegen.emit import RESERVED, require_free_names
from fusecomp.codegen.launcher import unspecialised, wrapped
from fusecomp.codegen.logsumexp import saved
from fusecomp.codegen.memory import fixed_loads, query_tiles, tile_pointers
from fusecomp.codegen.philox import IN_TRITON
from fusecomp.codegen.program import batch_axes, columns, edge_loop, full_range, key_range, query_rows
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.source import KernelSource, check, names_read, tidy
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import draws
from fusecomp.ir.expr import Const, text
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.backward import BackwardPlan, pair_plan
from fusecomp.planning.tile import TilePlan

VERSION = 4
"""Part of every key: raise it when the same region and plan give another kernel."""

OWN = frozenset({
    "m", "first_row", "query", "k_row", "k_tiles", "k_start", "k_last", "q_begin", "q_end", "member", "lse", "delta",
    "log_sum", "logit", "d_p", "d_score", "d_logit", "grads", "grad", "grad_out", "row_products", "query_gradient",
    "key_gradients", "weight", "grad_lse", "d_lse",
})  # fmt: skip
"""What the backward skeletons call their own variables, beside `RESERVED`."""


@dataclass(frozen=True)
class BackwardSource(KernelSource):
    """A generated backward module. `plan` is that of dQ."""

    plans: BackwardPlan | None = None

    def plan_of(self, kernel: str) -> TilePlan:
        """The schedule of one kernel of the file."""
        if self.plans is None or kernel == "query_gradient":
            return self.plan
        if kernel == "row_products":
            return replace(self.plan, block_m=DELTA_ROWS, warps=4, stages=1)
        return self.plans.keys if kernel == "key_gradients" else pair_plan(self.plans.keys)


@lru_cache(maxsize=64)
def emit_backward(
    region: AttentionRegion, plan: BackwardPlan, learned: frozenset[str] = frozenset(), fixed: Fixed = ()
) -> BackwardSource:  # fmt: skip
    """The gradients of Q, K and V, and of the other operands that `learned` names. Raises KernelError, with the reason,
    for a region that has no exact kernel; at the lengths that are `fixed`, if it has one only there."""
    require_free_names(region)
    for name in (*(v.name for v in region.batch), *(o.name for o in region.operands), *region.sizes):
        if name in OWN - RESERVED:
            raise KernelError(f"a region's axis, operand or length cannot be called {name}; rename it")
    plans = (plan.queries, plan.keys, pair_plan(plan.keys))
    frame, other, both = (GradientFrame(region, p, learned=learned) for p in plans)
    leaves = both.summed_along("pairs")
    require_gradients(frame, fixed)
    key = backward_key(region, plan, learned)
    name = kernel_name(frame, key).replace("attention_", "attention_backward_", 1)
    made = {
        "row_products": row_products(frame),
        "query_gradient": query_gradient(frame),
        "key_gradients": key_gradients(other),
        **{f"{leaf.name}_gradient": pair_gradient(both, leaf) for leaf in leaves},
    }
    frames = {"query_gradient": frame, "key_gradients": other, **dict.fromkeys((x.name for x in leaves), both)}
    params = {kernel: p for kernel, (_, p) in made.items()}
    helpers = [IN_TRITON] if draws(region.weight) else []
    kernels = spaced([*helpers, *(body for body, _ in made.values())])
    rows = [v.name for v in (*region.batch, region.q_idx)]
    written = fill(
        BACKWARD_MODULE,
        {
            "title": title(region).replace("attention", "gradients of attention", 1),
            "document": document(frame, plan, key),
            "constants": constants(frame, kernels),
            "kernels": kernels,
            "out_axes": ", ".join(region.out_axes),
            "lse_axes": ", ".join([*rows, *map(str, saved(region))]),
            "grad_lse": "grad_lse, " if region.lse else "",
            "grad_lse_axes": f"; `grad_lse` is its gradient, [{', '.join(rows)}]" if region.lse else "",
            "launcher": backward_launch(frames, params, fixed),
            "selfcheck": backward_selfcheck(region, learned),
        },
    )
    check(name, written)
    return BackwardSource(name, written, key, plan.queries, region, plan)


def backward_key(region: AttentionRegion, plan: BackwardPlan, learned: frozenset[str] = frozenset()) -> str:
    """A hash of what decides the kernels' text."""
    tiles = [(p.block_m, p.block_n, p.d_chunks, p.dv_chunks, p.warps, p.stages) for p in (plan.queries, plan.keys)]
    return hashlib.sha256(repr((VERSION, "backward", region.key, tiles, sorted(learned))).encode()).hexdigest()[:16]


def row_products(frame: GradientFrame) -> tuple[str, list[str]]:
    """delta = rowsum(dO O), and what the sink's weight leaves."""
    plain = GradientFrame(replace(frame.region, keep=()), frame.plan)
    output = [
        *queries.output_tiles(plain, "out", "o", cast=False),
        *queries.output_tiles(plain, "grad_out", "do", cast=False),
    ]
    holes = {
        "program": batch_axes(plain),
        "rows": query_rows(plain),
        "columns": columns(plain),
        "fixed": fixed_loads(frame),
        "output": output,
        "first_row": queries.first_row(plain),
        "delta": queries.delta(plain, frame.may_be_empty),
        "sinks": queries.sinks(frame),
    }
    return finished(frame, ROW_PRODUCTS, "row_products", holes)


def query_gradient(frame: GradientFrame) -> tuple[str, list[str]]:
    """dQ: one program walks the keys of one query tile."""
    holes = {
        "program": batch_axes(frame),
        "rows": query_rows(frame),
        "columns": columns(frame),
        "fixed": fixed_loads(frame),
        "query": query_tiles(frame),
        "values": queries.query_values(frame),
        "pointers": tile_pointers(frame),
        "accs": queries.accumulators(frame),
        "key_range": key_range(frame),
        "full_range": full_range(frame),
        "full_begin": "full_begin" if frame.k_begin != "0" else "0",
        "full_tile": queries.full_tile(frame),
        "edge_loop": edge_loop(frame),
        "edge_tile": queries.edge_tile(frame),
        "rescue": queries.rescue(frame),
        "store": queries.store(frame),
    }
    return finished(frame, QUERY_GRADIENT, "query_gradient", holes)


def key_gradients(frame: GradientFrame) -> tuple[str, list[str]]:
    """dK and dV: one program walks the queries that see one tile of keys."""
    holes: dict[str, str | list[str]] = {
        "program": keys.program(frame),
        "columns": keys.columns(frame),
        "fixed": memory.fixed_values(frame, inside=False),
        "keys": memory.key_tiles(frame),
        "accs": keys.accumulators(frame),
        "pointers": memory.query_pointers(frame),
        "first_row": keys.first_row(frame),
        "sums": keys.sums(frame),
        "query_range": ranges.query_range(frame),
        "full_begin": ranges.full_begin(frame),
        "full_tile": keys.full_tile(frame),
        "edge_loop": ranges.edge_loop(frame),
        "edge_tile": keys.edge_tile(frame),
        "rescue": keys.rescue(frame),
        "store_sums": keys.store_sums(frame),
        "store": memory.store(frame),
    }
    if not frame.members:
        return finished(frame, KEY_GRADIENTS, "key_gradients", holes)
    holes |= {"member_name": keys.member_name(frame), "members": keys.members(frame), "member": keys.member(frame)}
    holes |= {"fixed_inside": memory.fixed_values(frame, inside=True)}
    return finished(frame, SHARED_KEY_GRADIENTS, "key_gradients", holes)


def pair_gradient(frame: GradientFrame, leaf: Leaf) -> tuple[str, list[str]]:
    """The gradient of what varies with query and key: one program has a tile of it."""
    walked = pairs.walked_axes(frame.region, leaf)
    holes: dict[str, str | list[str]] = {
        "program": pairs.program(frame, leaf),
        "rows": query_rows(frame),
        "columns": columns(frame),
        "sum": [f"{leaf.name}_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)"],
        "member": pairs.member(frame, leaf),
        "fixed": fixed_loads(frame),
        "query": query_tiles(frame),
        "values": queries.query_values(frame),
        "pointers": tile_pointers(frame),
        "key_range": key_range(frame),
        "begin": pairs.begin(frame),
        "end": pairs.end(frame),
        "tile": pairs.tile(frame, leaf),
        "rescue": pairs.rescue(frame, leaf),
        "store": pairs.store(frame, leaf),
    }
    if not walked:
        return finished(frame, PAIR_GRADIENT, f"{leaf.name}_gradient", holes)
    holes["members"] = pairs.members(frame, leaf)
    return finished(frame, SHARED_PAIR_GRADIENT, f"{leaf.name}_gradient", holes)


def finished(
    frame: GradientFrame, skeleton: str, name: str, holes: Mapping[str, str | list[str]]
) -> tuple[str, list[str]]:
    """The filled skeleton, taking only the parameters that it reads."""
    head, _, body = skeleton.partition("):\n")
    body = tidy("def kernel():\n" + fill(body, holes)).removeprefix("def kernel():\n")
    params = parameters(frame, names_read("def kernel():\n" + body))
    lengths = [*unspecialised(frame, params), *(p for p in params if p == "splits")]
    sizes = "[" + ", ".join(f'"{p}"' for p in lengths) + "]"
    filled = fill(head, {"sizes": sizes, "name": name, "parameters": wrapped(declared(params), 4)})
    return filled + "):\n" + body, params


def constants(frame: GradientFrame, kernels: str) -> list[str]:
    """The score's factors, as the kernels name them."""
    scale = frame.exponent.scale
    known = {
        "LOG2E": (LOG2E, "log2(e)"),
        "SCALE": (scale, f"log2(e) * {scale / LOG2E:.9g}"),
        **turns.constants(frame),
    }
    read = names_read(kernels)
    return [f"{name} = tl.constexpr({value!r})  # {what}" for name, (value, what) in known.items() if name in read]


def document(frame: GradientFrame, plan: BackwardPlan, key: str) -> list[str]:
    """The mathematics, what is read, the plans, and how to make this file again."""
    region = frame.region
    shapes = [f"    {o.name:<10} [{', '.join(map(text, o.shape))}]  {o.dtype}" for o in region.operands]
    named = [] if region.weight == Const(1.0) else [f"    W = {text(region.weight)}"]
    weight = "W " if named else ""
    return [
        *str(region).splitlines()[1:],
        *([f"    # {region.origin}  {region.source.strip()}"] if region.source else []),
        "",
        "Its gradients, for dO the gradient of O:",
        *named,
        "    P = exp(S - lse)",
        f"    dV = sum over queries of  {weight}P dO",
        f"    dS = P ({weight}dO V - delta),  delta = sum over dv of  O dO{' - dlse' if region.lse else ''}",
        "    dQ = sum over keys of  dS dS/dscore K,  dK = sum over queries of  dS dS/dscore Q",
        *(f"    d{leaf.load.tensor} = sum over its places of  {_share(leaf)}" for leaf in frame.leaves),
        "",
        "Tensors, through run-time strides:",
        *shapes,
        f"    {'out':<10} [{', '.join(region.out_axes)}]  {region.out_dtype}, and grad_out",
        "",
        *_plan("dQ", plan.queries),
        *_plan("dK, dV", plan.keys),
        *(line for leaf in frame.summed_along("pairs") for line in _plan(f"d{leaf.name}", pair_plan(plan.keys))),
        "",
        "Generated by fusecomp; `python THIS_FILE` compares it with autograd in plain PyTorch.",
        f"Key {key}.",
    ]


def _share(leaf: Leaf) -> str:
    """What a place adds to the gradient of something that learns."""
    x = text(leaf.load)
    return {
        "score": f"dS dS/d({x})",
        "weight": f"P dO V dW/d({x})",
        "sink": f"-exp(sink - lse) delta dsink/d({x})",
    }[leaf.source]


def _plan(what: str, plan: TilePlan) -> list[str]:
    device = f" for {plan.device}" if plan.device else ""
    tile = f"tiles of {plan.block_m} queries x {plan.block_n} keys, {plan.warps} warps, {plan.stages} stages"
    return [f"Plan{device} of {what}: {tile}."]
