"""A region on CPU tensors, without ever holding S: M x N elements for a head.

Where the region is what SDPA's flash kernel computes, that kernel runs. Everything else is evaluated a block of query
rows at a time with PyTorch's own operators, over the keys [first, stop) that the block can reach:

    rows, heads     as many as keep rows * heads * (stop - first) scores in cache
    S, P            of the block, exactly: a whole row is present, so no running maximum is needed
    O[block]        = (weight * P) V[first:stop]

Floats are worked in float32 (float64 if an operand is), so half inputs are rounded only once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusecomp.ir.algebra import apply, depends_on_score
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Score, Var, dtype_kind, parts, transform, variables
from fusecomp.ir.ranges import Bound, Reach, reach
from fusecomp.ir.reference import NEAR, Env, Span, attend, bind, evaluate_expr, kept, operand, read, softmax
from fusecomp.ir.region import Access, AttentionRegion, extent

Kernel = Callable[[Tensor, Sequence[Tensor], "Mapping[str, int] | Sequence[int]"], None]
"""kernel(out, tensors, sizes): fills `out`, of any strides; tensors and sizes in the region's orders."""

BUDGET = 1 << 18
"""Scores of a block, per thread: 1 MiB of float32, a core's second-level cache."""
ROWS = 128
"""Query rows of a block, at most: finer blocks follow a causal edge closer, coarser ones multiply faster."""


def lower(region: AttentionRegion) -> Kernel:
    """The CPU kernel of a region."""
    blocks, flash = Blocks.of(region), flash_form(region)

    @torch.no_grad()
    def kernel(out: Tensor, tensors: Sequence[Tensor], sizes: Mapping[str, int] | Sequence[int]) -> None:
        env = bind(region, tensors, sizes, torch.promote_types(tensors[0].dtype, torch.float32))
        target = _by_axis(region, out)
        if out.numel() and not (flash and flash.run(target, env)):
            blocks.run(target, env)

    return kernel


def _by_axis(region: AttentionRegion, out: Tensor) -> Tensor:
    """`out` seen as (batch axes, q_idx, dv)."""
    axes = [*(v.name for v in region.batch), region.q_idx.name, region.dv.name]
    return out.permute([region.out_axes.index(name) for name in axes])


# ----------------------------------------------------------------------------------------------------------------
# SDPA's flash kernel


@dataclass(frozen=True)
class Flash:
    """softmax(scale * score [+ mask], causal or not) V: what SDPA's CPU flash kernel computes."""

    region: AttentionRegion
    scale: float
    causal: bool
    mask: Load | None

    def run(self, out: Tensor, env: Env) -> bool:
        """Fill `out` (batch axes, q_idx, dv); False where the layout or a row without keys rules the kernel out."""
        r = self.region
        mask = None if self.mask is None else self._mask(env)
        if self.mask is not None and (mask is None or (mask == -math.inf).all(-1).any()):
            return False  # a row without keys is NaN in eager, 0 in SDPA
        q, k, v = (self._heads(a, d, env) for a, d in _factors(r))
        grouped = q.shape[-3] != k.shape[-3]
        if any(x.stride(-1) != 1 for x in (q, k, v)) or 0 in k.shape:
            return False
        out4 = out.view([1] * (4 - out.ndim) + list(out.shape)) if out.ndim < 4 else out
        out4.copy_(
            scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, scale=self.scale, enable_gqa=grouped)
        )
        return True

    def _mask(self, env: Env) -> Tensor | None:
        """The mask with four dimensions, in the operands' dtype: SDPA takes no other."""
        assert self.mask is not None
        mask = read(env.tensors[self.mask.tensor], self.mask.index, env)
        same = mask.dtype == env.tensors[self.region.products[0].q.operand].dtype
        return _four(mask) if same else None

    def _heads(self, access: Access, d: Var, env: Env) -> Tensor:
        """An operand with four dimensions; one whose heads are read at h // group keeps its own heads."""
        row = self.region.q_idx if access.operand == self.region.products[0].q.operand else self.region.kv_idx
        batch, index = self.region.batch, access.index
        spans: dict[str, Span] = {}
        if (group := _group(self.region, access)) > 1:
            head = batch[-1]
            ratio = apply("floordiv", head, Const(group))
            index = tuple(head if e == ratio else e for e in index)
            spans[head.name] = range(len(env.spans[head.name]) // group)
        env = env.at(**spans).over(*(v.name for v in batch), row.name, d.name)
        return _four(read(env.tensors[access.operand], index, env).expand(env.shape))


def _four(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.ndim)]


def _factors(region: AttentionRegion) -> list[tuple[Access, Var]]:
    (p,) = region.products
    return [(p.q, p.d), (p.k, p.d), (region.v, region.dv)]


def _group(region: AttentionRegion, access: Access) -> int:
    """Query heads per head of this operand: G where it is read at h // G, and at h nowhere else."""
    for e in access.index:
        match e:
            case Apply("floordiv", (Var(name, _), Const(int(group)))) if name == region.batch[-1].name:
                return group
    return 1


def flash_form(region: AttentionRegion) -> Flash | None:
    """The region as SDPA computes it, or None where it is anything else: SDPA would hold S, or mean something else."""
    plain = region.sink is None and region.weight == Const(1.0) and region.filled_score is None
    if not plain or len(region.products) != 1 or len(region.batch) > 2:
        return None
    dtypes = {region.operand(a.operand).dtype for a, _ in _factors(region)}
    if (
        dtypes != {region.pv_dtype}
        or dtypes != {region.products[0].dtype}
        or len({extent(d) for _, d in _factors(region)}) > 1
    ):
        return None
    groups = {_group(region, a) for a, _ in _factors(region)[1:]}
    causal = region.keep == (apply("ge", region.q_idx, region.kv_idx),)
    if len(groups) > 1 or (region.keep and not causal):
        return None
    score, (scale,) = folded(region)
    match score:
        case Score(0):
            return Flash(region, scale, causal, None)
        case Apply("add", (Score(0), Load() as mask)) | Apply("add", (Load() as mask, Score(0))) if not causal:
            return Flash(region, scale, False, mask)
    return None


# ----------------------------------------------------------------------------------------------------------------
# Scores


def folded(region: AttentionRegion) -> tuple[Expr, tuple[float, ...]]:
    """(S without roundings, c) where Score(t) stands for c[t] * score_t: scaling Q costs M D, scaling S costs M N."""
    score, factors = transform(region.score, _unrounded), []
    for t in range(len(region.products)):
        c, score = _fold(score, Score(t))
        factors.append(c)
    return score, tuple(factors)


def _unrounded(e: Expr) -> Expr | None:
    """A rounded score is the score: float32 is the finer value."""
    match e:
        case Cast(x, dtype) if dtype_kind(dtype) == "float" and depends_on_score(x):
            return transform(x, _unrounded)
    return None


def _fold(score: Expr, term: Score) -> tuple[float, Expr]:
    """(c, S) with c * term taken out, where the term stands nowhere else."""
    for e in parts(score):
        match e:
            case Apply("mul", (x, Const(float(c)))) | Apply("mul", (Const(float(c)), x)) if x == term:
                rest = transform(score, {e: Const(0.0)}.get)
                return (1.0, score) if term in parts(rest) else (c, transform(score, {e: term}.get))
            case Apply("div", (x, Const(float(c)))) if x == term and c:
                rest = transform(score, {e: Const(0.0)}.get)
                return (1.0, score) if term in parts(rest) else (1.0 / c, transform(score, {e: term}.get))
    return 1.0, score


# ----------------------------------------------------------------------------------------------------------------
# Blocks of rows


@dataclass(frozen=True)
class Blocks:
    """The blockwise evaluation of a region."""

    region: AttentionRegion
    exact: AttentionRegion
    """The region as it was, for rows that need their fill."""
    factors: tuple[float, ...]
    reach: Reach

    @staticmethod
    def of(region: AttentionRegion) -> Blocks:
        score, factors = folded(region)
        bounds = reach(region.keep, region.q_idx.name, region.kv_idx.name)
        return Blocks(replace(region, score=score), region, factors, bounds)

    def run(self, out: Tensor, env: Env) -> None:
        """Fill `out` (batch axes, q_idx, dv), a group of heads and a block of rows at a time."""
        m, batch = len(env.spans[self.region.q_idx.name]), len(self.region.batch)
        rows, groups = self._division(env)
        for spans in groups:
            heads = env.at(**spans)
            held = self._hold(heads)
            part = out[tuple(slice(s.start, s.stop) for s in spans.values())]
            for start in range(0, m, rows):
                block = range(start, min(start + rows, m))
                part.narrow(batch, start, len(block)).copy_(
                    self._block(heads.at(**{self.region.q_idx.name: block}), held)
                )

    def _division(self, env: Env) -> tuple[int, Iterator[dict[str, range]]]:
        """(rows of a block, the ranges of batch axes that go together): those with lengths of their own go apart, so
        that what lies past a length is not read.
        """
        r, budget = self.region, BUDGET * torch.get_num_threads()
        m, n = (max(1, len(env.spans[v.name])) for v in (r.q_idx, r.kv_idx))
        group = r.q_per_kv()
        rows = min(m, ROWS, max(16, budget // (n * group)))
        left = max(1, budget // (rows * n))
        apart = {name for b in (*self.reach.lower, *self.reach.upper) for name in variables(b.edge)}
        pieces: list[list[range]] = []
        for v in reversed(r.batch):
            size, step = len(env.spans[v.name]), 1 if v.name in apart else max(group, left // group * group)
            pieces.insert(0, [range(i, min(i + step, size)) for i in range(0, size, step)])
            left, group = max(1, left // size), 1
        names = [v.name for v in r.batch]
        return rows, (dict(zip(names, choice, strict=True)) for choice in product(*pieces))

    def _hold(self, env: Env) -> Held:
        """The operands of some heads in the working dtype, Q scaled, K transposed."""
        r, (*batch, row, key) = self.region, env.axes
        shape = env.shape[:-2]
        q, k = [], []
        for p, c in zip(r.products, self.factors, strict=True):
            x = operand(r, p.q, p.dtype, env.over(*batch, row, p.d.name)).expand(*shape, -1, -1)
            q.append(_flat(x * c if c != 1.0 else x, shape))
            k.append(_flat(operand(r, p.k, p.dtype, env.over(*batch, key, p.d.name)), shape).transpose(-2, -1))
        return Held(tuple(q), tuple(k), _flat(operand(r, r.v, r.pv_dtype, env.over(*batch, key, r.dv.name)), shape))

    def _block(self, env: Env, held: Held) -> Tensor:
        """O (batch axes, rows, dv) of one block of rows."""
        r, key, whole = self.region, self.region.kv_idx.name, env
        first, stop, inner = self._visited(env)
        if first == stop:
            return self._unseen(env, held)
        env = env.at(**{key: range(first, stop)})
        env = replace(env, scores=held.scores(env.spans[r.q_idx.name], env.spans[key], env.shape))
        weight = None if r.weight == Const(1.0) else evaluate_expr(r.weight, env)
        logits = self._masked(_owned(evaluate_expr(r.score, env), env.shape), inner, env)
        p = softmax(r, logits, env)
        out = held.values(p if weight is None else p * weight, env.spans[key])
        if not r.keep or r.filled_score is None:
            return out
        needs = logits.amax(-1, keepdim=True) <= r.fill + NEAR
        return torch.where(needs, attend(self.exact, whole), out) if needs.any() else out

    def _visited(self, env: Env) -> tuple[int, int, range]:
        """(first, stop) of the keys that some row reaches, and those that the bounds leave every row."""
        *batch, row, key = env.axes
        rows, n = env.spans[row], len(env.spans[key])
        ends = env.at(**{row: torch.tensor([rows[0], rows[-1]])}).over(*batch, row)

        def edges(bounds: tuple[Bound, ...]) -> list[tuple[int, int]]:
            """(least, greatest) of each edge, which is monotone in the row."""
            values = [evaluate_expr(bound.edge, ends) for bound in bounds]
            return [(int(e.min()), int(e.max())) for e in values]

        lower, upper = edges(self.reach.lower), edges(self.reach.upper)
        first = min(n, max([0, *(least for least, _ in lower)]))
        stop = max(first, min([n, *(greatest for _, greatest in upper)]))
        inner = max([first, *(greatest for _, greatest in lower)]), min([stop, *(least for least, _ in upper)])
        return first, stop, range(inner[0], max(inner))

    def _masked(self, logits: Tensor, inner: range, env: Env) -> Tensor:
        """S with -inf at dead keys, in place; keys in `inner` are tested only if a term is no bound."""
        key = self.region.kv_idx.name
        span = env.spans[key]
        tested = [span] if self.reach.loose else [range(span[0], inner.start), range(inner.stop, span[-1] + 1)]
        for part in tested:
            if len(part) and (live := kept(self.region, env.at(**{key: part}))) is not None:
                logits.narrow(-1, part.start - span[0], len(part)).masked_fill_(~live, -math.inf)
        return logits

    def _unseen(self, env: Env, held: Held) -> Tensor:
        """O of rows that reach no key at all."""
        r, n = self.region, len(env.spans[self.region.kv_idx.name])
        if n and r.filled_score is not None:
            return attend(self.exact, env)
        nan = n and r.sink is None and r.empty_row == "nan"
        return held.v.new_full((*env.shape[:-1], extent(r.dv)), math.nan if nan else 0.0)


@dataclass(frozen=True)
class Held:
    """Operands of some heads: q[t] [heads, M, D], k[t] [heads, D, N], v [heads, N, Dv]; one head where all share it."""

    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: Tensor

    def scores(self, rows: range, keys: range, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Each score_t of some rows and keys, as (batch axes, rows, keys)."""
        q = [x.narrow(1, rows.start, len(rows)) for x in self.q]
        k = [x.narrow(2, keys.start, len(keys)) for x in self.k]
        return tuple(_multiply(x, y).view(shape) for x, y in zip(q, k, strict=True))

    def values(self, p: Tensor, keys: range) -> Tensor:
        """p V over (batch axes, rows, dv)."""
        v = self.v.narrow(1, keys.start, len(keys))
        return _multiply(p.reshape(-1, *p.shape[-2:]), v).view(*p.shape[:-1], v.shape[-1])


def _flat(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Batch axes as one, which has size 1 where nothing depends on them."""
    if x.shape[:-2].numel() == 1:
        return x.reshape(1, *x.shape[-2:])
    return x.expand(*shape, -1, -1).reshape(-1, *x.shape[-2:])


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b over heads, as one product where they share b."""
    if len(b) == 1:
        return (a.reshape(-1, a.shape[-1]) @ b[0]).view(*a.shape[:-1], b.shape[-1])
    return torch.bmm(a, b)


def _owned(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x in full, to be written to."""
    return x if x.shape == shape else x.expand(shape).clone()
