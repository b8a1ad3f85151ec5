"""Region and plans to the text of its backward kernels: every hole of the skeletons is filled, nothing is decided here.

    source = emit_backward(region, backward_plan(region))
    launch(grads, out, grad_out, lse, tensors, sizes)
    launch(grads, out, grad_out, lse, grad_lse, tensors, sizes)         where the lse is a result of the region

`lse` is what `emit(region, plan, saves_lse=True)` saved, as codegen/logsumexp.py says.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from fusecomp.codegen import backward_keys as keys
from fusecomp.codegen import backward_memory as memory
from fusecomp.codegen import backward_pairs as pairs
from fusecomp.codegen import backward_queries as queries
from fusecomp.codegen import backward_range as ranges
from fusecomp.codegen import (
    hopper_backward,
    hopper_backward_keys,
    hopper_backward_launcher,
    hopper_backward_queries,
    hopper_once,
    hopper_once_skeletons,
)
from fusecomp.codegen.backward_check import backward_selfcheck
from fusecomp.codegen.backward_document import constants, document
from fusecomp.codegen.backward_exact import Fixed, require_gradients
from fusecomp.codegen.backward_frame import GradientFrame, Leaf
from fusecomp.codegen.backward_launcher import DELTA_ROWS, backward_launch, parameters
from fusecomp.codegen.backward_skeletons import (
    BACKWARD_MODULE,
    KEY_GRADIENTS,
    PAIR_GRADIENT,
    PIPELINED_PAIR_GRADIENT,
    QUERY_GRADIENT,
    ROW_PRODUCTS,
    ROW_VALUES,
    SHARED_KEY_GRADIENTS,
    SHARED_PAIR_GRADIENT,
    spaced,
)
from fusecomp.codegen.backward_table import other_tiles, table_kernels
from fusecomp.codegen.backward_tile import log_sums
from fusecomp.codegen.document import kernel_name, title
from fusecomp.codegen.emit import RESERVED, require_free_names
from fusecomp.codegen.function import Holes, function
from fusecomp.codegen.functions import called
from fusecomp.codegen.hopper_functions import IMPORTS
from fusecomp.codegen.logsumexp import saved
from fusecomp.codegen.memory import fixed_loads, query_tiles, tile_pointers
from fusecomp.codegen.program import batch_axes, columns, edge_loop, key_range, query_rows, stored_rows, whole_tiles
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.source import KernelSource, check
from fusecomp.codegen.table import full_tiles, table_row
from fusecomp.codegen.table_ranges import gradient_kernels
from fusecomp.errors import KernelError
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.backward import BackwardPlan
from fusecomp.planning.tile import TilePlan

VERSION = 11
"""Part of every key: raise it when the same region and plan give another kernel."""

OWN = frozenset({
    "m", "first_row", "query", "k_row", "k_tiles", "k_start", "k_last", "q_begin", "q_end", "member", "lse", "delta",
    "log_sum", "logit", "d_p", "d_score", "d_logit", "grads", "grad", "grad_out", "row_products", "query_gradient",
    "key_gradients", "weight", "grad_lse", "d_lse", "seen", "whole", "width", "key_tiles", "query_tiles",
    "column", "k_column",
}) | hopper_backward.NAMES  # fmt: skip
"""What the backward skeletons call their own variables, beside `RESERVED`."""


@dataclass(frozen=True)
class BackwardSource(KernelSource):
    """A generated backward module. `plan` is that of dQ."""

    plans: BackwardPlan | None = None

    def plan_of(self, kernel: str) -> TilePlan:
        """The schedule of one kernel of the file."""
        if self.plans is None or (kernel == "query_gradient" and not self.plans.once):
            return self.plan
        if kernel in ("row_products", "query_gradient"):
            rows = hopper_backward.STAY if self.plan.consumers else DELTA_ROWS
            rows = self.plan.block_m if kernel == "query_gradient" else rows
            return replace(self.plan, block_m=rows, warps=4, stages=1, consumers=0)
        return self.plans.keys if kernel in ("key_gradients", "all_gradients") else self.plans.pairs


@lru_cache(maxsize=64)
def emit_backward(
    region: AttentionRegion, plan: BackwardPlan, learned: frozenset[str] = frozenset(), fixed: Fixed = ()
) -> BackwardSource:  # fmt: skip
    """The gradients of Q, K and V, and of the other operands that `learned` names. Raises KernelError, with the reason,
    for a region that has no exact kernel; at the lengths that are `fixed`, if it has one only there."""
    require_free_names(region, RESERVED | OWN)
    plans = (plan.queries, plan.keys, plan.pairs)
    frame, other, both = (GradientFrame(region, p, learned=learned, fixed=fixed) for p in plans)
    require_gradients(frame, fixed)
    key = backward_key(region, plan, learned)
    name = kernel_name(frame, key).replace("attention_", "attention_backward_", 1)
    specialised = plan.queries.consumers > 0
    made, launcher, layouts = (
        hopper_kernels(frame, other, fixed, plan.once) if specialised else portable_kernels(frame, other, both, fixed)
    )
    kernels = spaced(made)
    written = fill(
        BACKWARD_MODULE,
        {
            "title": title(region).replace("attention", "gradients of attention", 1),
            "document": document(frame, plan, key),
            "language": IMPORTS if specialised else "",
            "constants": [*constants(frame, kernels), *layouts],
            "kernels": kernels,
            "out_axes": ", ".join(region.out_axes),
            **rows_of(region),
            "launcher": launcher,
            "selfcheck": backward_selfcheck(region, learned),
        },
    )
    check(name, written)
    return BackwardSource(name, written, key, plan.queries, region, plan)


def rows_of(region: AttentionRegion) -> dict[str, str]:
    """What a module says of the log-sum-exp and its gradient."""
    rows = [v.name for v in (*region.batch, region.q_idx)]
    return {
        "lse_axes": ", ".join([*rows, *map(str, saved(region))]),
        "grad_lse": "grad_lse, " if region.lse else "",
        "grad_lse_axes": f"; `grad_lse` is its gradient, [{', '.join(rows)}]" if region.lse else "",
    }


def portable_kernels(
    frame: GradientFrame, other: GradientFrame, both: GradientFrame, fixed: Fixed
) -> tuple[list[str], list[str], list[str]]:
    """(functions, launcher, layouts): there are none of the last."""
    leaves = both.summed_along("pairs")
    made = {
        "row_products": row_products(frame),
        "query_gradient": query_gradient(frame),
        "key_gradients": key_gradients(other),
        **{f"{leaf.name}_gradient": pair_gradient(both, leaf) for leaf in leaves},
    }
    frames = {"query_gradient": frame, "key_gradients": other, **dict.fromkeys((x.name for x in leaves), both)}
    params = {kernel: p for kernel, (_, p) in made.items()}
    bodies = [body for body, _ in made.values()]
    functions = [*called(frame.region.expressions()), *bodies, *table_kernels(frame, other)]
    return functions, backward_launch(frames, params, fixed), []


def hopper_kernels(
    frame: GradientFrame, other: GradientFrame, fixed: Fixed, once: bool
) -> tuple[list[str], list[str], list[str]]:
    """The same, for Hopper's tensor cores."""
    if not hopper_backward.expresses(frame.region, frame.learned):
        raise KernelError("no backward kernels with warps that only copy express this attention; plan portable ones")
    made = {"row_products": row_products(frame)}
    if once:
        made["all_gradients"] = hopper_once.all_gradients(other)
        made["query_gradient"] = rounded_sums(frame)
    else:
        made["query_gradient"] = hopper_backward_queries.query_gradient(frame)
        made["key_gradients"] = hopper_backward_keys.key_gradients(other)
    params = {kernel: p for kernel, (_, p) in made.items()}
    functions = hopper_backward.helpers([body for body, _ in made.values()])
    if frame.tabled:
        functions += gradient_kernels(frame.region, None if once else frame.plan, other.plan)
    own = hopper_once.layouts(other) if once else hopper_backward.query_layout(frame)
    launcher = hopper_backward_launcher.launch(frame, other, params, fixed, once)
    return functions, launcher, [*hopper_backward.header(other), *own]


def backward_key(region: AttentionRegion, plan: BackwardPlan, learned: frozenset[str] = frozenset()) -> str:
    """A hash of what decides the kernels' text."""
    tiles = [(p.block_m, p.block_n, p.d_chunks, p.dv_chunks, p.warps, p.stages) for p in (plan.queries, plan.keys)]
    more: list[int | str] = [plan.queries.consumers, plan.once] if plan.queries.consumers else []
    more += [plan.keys.visits] * (plan.keys.visits != "bounds") + [str(plan.bias)] * (plan.bias is not None)
    decided = (VERSION, "backward", region.key, tiles, sorted(learned), *more)
    return hashlib.sha256(repr(decided).encode()).hexdigest()[:16]


def row_products(frame: GradientFrame) -> tuple[str, list[str]]:
    """delta = rowsum(dO O), and what the sink's weight leaves."""
    plain = GradientFrame(replace(frame.region, keep=()), replace(frame.plan, visits="bounds"))
    output = [
        *queries.output_tiles(plain, "out", "o", cast=False),
        *queries.output_tiles(plain, "grad_out", "do", cast=False),
    ]
    holes: dict[str, str | list[str]] = {
        "program": batch_axes(plain),
        "rows": query_rows(plain),
        "columns": columns(plain),
        "fixed": fixed_loads(frame),
        "output": output,
        "first_row": queries.first_row(plain),
        "delta": queries.delta(plain, frame.may_be_empty, frame.may_be_hidden),
    }
    if frame.plan.consumers:
        holes |= {"lse": log_sums(frame, "rows", ""), "stored": stored_rows(plain)}
        return finished(frame, ROW_VALUES, "row_products", holes)
    holes |= {"stored": [queries.store_delta(plain)], "sinks": queries.sinks(frame)}
    return finished(frame, ROW_PRODUCTS, "row_products", holes)


def rounded_sums(frame: GradientFrame) -> tuple[str, list[str]]:
    """dQ from sums in float32."""
    plain = GradientFrame(replace(frame.region, keep=()), replace(frame.plan, visits="bounds"))
    return finished(frame, hopper_once_skeletons.QUERY_GRADIENT, "query_gradient", hopper_once.rounded_sums(plain))


def query_gradient(frame: GradientFrame) -> tuple[str, list[str]]:
    """dQ: one program walks the keys of one query tile."""
    holes = {
        "program": batch_axes(frame),
        "rows": query_rows(frame),
        "columns": columns(frame),
        "fixed": fixed_loads(frame),
        "query": query_tiles(frame, whole=True),
        "values": queries.query_values(frame),
        "pointers": tile_pointers(frame),
        "accs": queries.accumulators(frame),
        "key_range": table_row(frame) if frame.listed else key_range(frame),
        "full_range": full_tiles() if frame.listed else whole_tiles(frame),
        "full_begin": "full_begin" if frame.k_begin != "0" or frame.tabled else "0",
        "full_tile": queries.full_tile(frame),
        "edge_loop": other_tiles(frame, queries.masked_tile(frame), frame.kv_idx) if frame.tabled else edge_loop(frame),
        "edge_tile": queries.edge_tile(frame),
        "rescue": queries.rescue(frame),
        "store": queries.store(frame),
    }
    return finished(frame, QUERY_GRADIENT, "query_gradient", holes)


def key_gradients(frame: GradientFrame) -> tuple[str, list[str]]:
    """dK and dV: one program walks the queries that see one tile of keys."""
    cut = other_tiles(frame, keys.masked_tile(frame), frame.q_idx) if frame.tabled else ranges.edge_loop(frame)
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
        "edge_loop": cut,
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
    holes: dict[str, str | list[str]] = {
        "program": pairs.program(frame, leaf),
        "rows": query_rows(frame),
        "columns": pairs.keys_of_tile(frame),
        "sum": [f"{leaf.name}_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)"],
        "member": pairs.member(frame, leaf),
        "fixed": fixed_loads(frame),
        "query": query_tiles(frame, whole=True),
        "values": pairs.row_statistics(frame),
        "pointers": tile_pointers(frame),
        "tile": pairs.tile(frame, leaf),
        "store": pairs.store(frame, leaf),
    }
    name = f"{leaf.name}_gradient"
    if pairs.pipelined(frame, leaf):
        holes |= {"bounds": pairs.bounds(frame, leaf), "last": pairs.last(frame, leaf)}
        return finished(frame, PIPELINED_PAIR_GRADIENT, name, holes | {"key_range": pairs.own_range(frame, leaf)})
    holes |= {"key_range": [*key_range(frame), *pairs.hidden(frame)], "rescue": pairs.rescue(frame, leaf)}
    holes |= {"begin": pairs.begin(frame), "end": pairs.end(frame)}
    if not pairs.walked_axes(frame.region, leaf):
        return finished(frame, PAIR_GRADIENT, name, holes)
    return finished(frame, SHARED_PAIR_GRADIENT, name, holes | {"members": pairs.members(frame, leaf)})


def finished(frame: GradientFrame, skeleton: str, name: str, holes: Holes) -> tuple[str, list[str]]:
    """(kernel, parameters): pointers, strides, sizes and its tile, as far as it reads them."""
    return function(frame, skeleton, name, holes, partial(parameters, frame))
