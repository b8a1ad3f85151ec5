"""What lies past a sequence's end is never read: NaN in its pages and wild numbers in its table change no bit.

For every spelling of the paged corpus that fuses, on the tensors that its program really hands to the kernel, split
or not, in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from corpus import paged, paged_fetched, paged_latent, paged_masked, paged_more, paged_served, paged_written
from corpus.table import Case
from kernels import Interpreter, tiles
from paging import cache_of, filled, more, run
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.codegen.emit import emit
from fusecomp.codegen.logsumexp import saved
from fusecomp.graph.capture import capture, placeholder_values
from fusecomp.ir.algebra import substitute
from fusecomp.ir.expr import Expr, Load, parts, variables
from fusecomp.ir.ranges import reach
from fusecomp.ir.reference import Env, bind, evaluate_expr
from fusecomp.ir.region import Access, AttentionRegion
from fusecomp.paged import Step
from fusecomp.patterns.attention import recognise
from fusecomp.patterns.build import Match
from fusecomp.patterns.written import write_out
from fusecomp.pipeline import seen_sizes

WILD = 2_000_000_000


class Values(torch.fx.Interpreter):
    """Runs a graph and remembers the value of each node."""

    def run_node(self, n: Node) -> Any:
        self.seen = getattr(self, "seen", {})
        self.seen[n] = super().run_node(n)
        return self.seen[n]


def bound(fn: Callable[..., Any], *args: Tensor) -> tuple[AttentionRegion, list[Tensor], dict[str, int]]:
    """The region of the attention in `fn`, the tensors that its kernel would be given, the lengths."""
    found: list[tuple[AttentionRegion, list[Tensor], dict[str, int]]] = []

    def look(gm: GraphModule, _: Any) -> Callable[..., Any]:
        captured = capture(gm, placeholder_values(gm))
        write_out(captured)
        matches = [m for m in recognise(captured) if isinstance(m, Match)]

        def run(*inputs: Any) -> Any:
            values = Values(captured)
            out = values.run(*inputs)
            m = matches[0]
            found.append((m.region, [values.seen[n].detach().clone() for n in m.inputs], seen_sizes(m)))
            return out

        return run

    torch._dynamo.reset()
    torch.compile(fn, backend=look)(*args)
    torch._dynamo.reset()
    return found[0]


def ends(region: AttentionRegion, env: Env) -> Tensor | None:
    """For each of the batch axes, where the last of its rows ends; None where the mask says no end."""
    bounds = reach(region.keep).upper
    if not bounds:
        return None
    over = env.over(*(v.name for v in region.batch), region.q_idx.name)
    edges = [evaluate_expr(b.edge, over).expand(over.shape).amax(-1) for b in bounds]
    return torch.stack(edges).amin(0)


def coordinates(index: tuple[Expr, ...], env: Env) -> list[Tensor]:
    return [evaluate_expr(e, env).expand(env.shape) for e in index]


def touched(region: AttentionRegion, access: Access | Load, env: Env, end: Tensor, d: str | None) -> Tensor:
    """Which elements of a tensor some row of some sequence reads before its end."""
    axes = [*(v.name for v in region.batch), region.kv_idx.name, *([d] if d else [])]
    over = env.over(*axes)
    before = over.index(region.kv_idx.name) < end[(..., None, None) if d else (..., None)]
    before = before.expand(over.shape)
    used = torch.zeros(
        env.tensors[access.operand if isinstance(access, Access) else access.tensor].shape, dtype=torch.bool
    )
    used[tuple(c[before] for c in coordinates(access.index, over))] = True
    return used


def poison(region: AttentionRegion, tensors: list[Tensor], sizes: dict[str, int]) -> tuple[list[Tensor], set[str]]:
    """The tensors with everything spoilt that only keys past the end lead to; the names of those that changed."""
    env = bind(region, tensors, sizes)
    end = ends(region, env)
    if end is None:
        return tensors, set()
    reads: dict[str, Tensor] = {}

    def note(name: str, used: Tensor) -> None:
        reads[name] = reads[name] | used if name in reads else used

    (product, *_), accesses = region.products, [*((p.k, p.d.name) for p in region.products), (region.v, region.dv.name)]
    for access, d in accesses:
        note(access.operand, touched(region, access, env, end, d))
        for table in tables(access.index, region):
            note(table.tensor, touched(region, table, env, end, None))
    for scale in tables((region.score, region.weight), region):
        note(scale.tensor, touched(region, scale, env, end, None))
    kept = {o.name for o in region.operands} - set(reads) | {product.q.operand}
    spoilt = []
    for operand, tensor in zip(region.operands, tensors, strict=True):
        bad = float("nan") if tensor.dtype.is_floating_point else WILD
        dead = torch.zeros(tensor.shape, dtype=torch.bool) if operand.name in kept else ~reads[operand.name]
        spoilt.append(torch.where(dead, torch.tensor(bad).to(tensor.dtype), tensor))
    return spoilt, {o.name for o in region.operands if o.name in reads and not reads[o.name].all()} - kept


def tables(held: tuple[Expr, ...], region: AttentionRegion) -> Iterator[Load]:
    """What is read at the key, for all queries: a page's number, a token's scale."""
    for x in (x for e in held for x in parts(e)):
        at_key = isinstance(x, Load) and substitute(x, {region.kv_idx: region.q_idx}) != x
        if at_key and region.q_idx.name not in variables(x):
            yield x


QUICK = {"table_index", "ragged_queries", "nan_past_the_length", "draft_soft_cap_window", "int8_scale_of_each_token",
         "tree_of_drafts", "split_head_size", "latent_rows"}  # fmt: skip
ENDLESS = {
    "hf_flat_batch", "static_cache_row", "one_row_of_slots", "rolled", "ring_by_age", "ring_unrolled", "pages_chosen",
    "pages_chosen_by_head", "tokens_chosen_by_head", "one_row_by_owner", "pages_beside_new_tokens",
}  # fmt: skip
"""Programs without a length, or with keys in no order: what is in the table, or before a tensor's mask, is read."""
EMPTY = {"sequence_without_keys"}
"""Programs that give NaN."""
FUSING = [
    pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow)
    for table in (paged, paged_fetched, paged_masked, paged_more, paged_served, paged_latent, paged_written)
    for c in table.CASES
    if c.expect == "fuse" and c.name not in ENDLESS | EMPTY
]


def kernel(
    interpreter: Interpreter, region: AttentionRegion, skeleton: str, tensors: list[Tensor], sizes: dict[str, int]
) -> Tensor:
    plan = tiles(region, 16, 16, "prefill") if skeleton == "unsplit" else tiles(region, 16, 16, skeleton)
    plan = replace(plan, resident=0) if skeleton == "unsplit" else plan
    env = bind(region, tensors, sizes)
    axes = [len(env.spans[name]) for name in region.out_axes]
    out = torch.full(axes, 123.0, dtype=getattr(torch, region.out_dtype))
    rows = [len(env.spans[v.name]) for v in (*region.batch, region.q_idx)]
    lse = [torch.zeros(*rows, *saved(region))] if region.lse else []
    lengths = [sizes[name] for name in region.sizes]
    written, _, _, *sums = interpreter.launch(emit(region, plan, region.lse), out, tensors, lengths, *lse)
    return torch.cat([x.flatten() for x in (written, *sums)])


def unread(interpreter: Interpreter, skeleton: str, fn: Callable[..., Any], *args: Tensor) -> None:
    region, tensors, sizes = bound(fn, *args)
    spoilt, changed = poison(region, tensors, sizes)
    assert {region.products[0].k.operand, region.v.operand} <= changed
    paged = {x.tensor for x in tables(region.v.index, region)}
    assert paged <= changed
    clean = kernel(interpreter, region, skeleton, tensors, sizes)
    assert clean.isfinite().all()
    assert torch.equal(kernel(interpreter, region, skeleton, spoilt, sizes), clean)


@pytest.mark.parametrize("skeleton", ["prefill", "decode", "unsplit"])
@pytest.mark.parametrize("case", FUSING)
def test_nothing_past_the_end_is_read(interpreter: Interpreter, case: Case, skeleton: str) -> None:
    unread(interpreter, skeleton, case.fn, *case.make_args(case.dtypes[0]))


@pytest.mark.parametrize("skeleton", ["prefill", "decode", "unsplit"])
@pytest.mark.parametrize("columns", [1, 3, None], ids=["decode", "drafts", "packed"])
def test_the_cache_reads_nothing_past_the_end(interpreter: Interpreter, columns: int | None, skeleton: str) -> None:
    cache = cache_of()
    seqs = filled(cache)
    more(cache, seqs, (2, 3, 1) if columns != 1 else (1, 1, 1))
    asked: list[tuple[Tensor, Step]] = []

    def attend(layer: int, q: Tensor, step: Step) -> Tensor:
        asked.append((q.nan_to_num(), step))
        return cache.attend(layer, q, step)

    run(cache, seqs, attend, columns=columns)
    (q, step), *_ = asked
    unread(interpreter, skeleton, lambda q: cache.attend(1, q, step), q)
