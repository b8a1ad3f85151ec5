"""Attention on the CPU by blocks of query rows, over the keys [first, stop) that a block can reach.

rows, heads     as many as keep rows * heads * N scores in cache
S, P            of the block, exactly: a whole row is present, so no running maximum is needed
O[block]        = (weight * P) V[first:stop]
lse[block]      = log sum exp(S), where it is asked for
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from fusecomp.ir.algebra import depends_on_score, substitute, swallows
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Score, dtype_kind, parts, transform, variables
from fusecomp.ir.logsumexp import log_sum, log_sums
from fusecomp.ir.primitives import PRIMITIVES
from fusecomp.ir.ranges import Bound, Reach, reach
from fusecomp.ir.reference import Env, attend, evaluate_expr, kept, operand, softmax
from fusecomp.ir.region import AttentionRegion, extent

BUDGET = 1 << 18
"""Scores of a block, per thread: 1 MiB of float32, a core's second-level cache."""
ROWS = 128
"""Query rows of a block, at most: finer blocks follow a causal edge closer, coarser ones multiply faster."""
IN_PLACE = frozenset(p.name for p in PRIMITIVES.values() if p.kind in ("float", "same")) - {"where"}
"""Primitives whose PyTorch function can write over its argument."""


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
        case Cast(x, dtype) if dtype_kind(dtype) == "float" and depends_on_score(x) and not swallows(e):
            return transform(x, _unrounded)
    return None


def _fold(score: Expr, term: Score) -> tuple[float, Expr]:
    """(c, S) with c * term taken out, where the term stands nowhere else."""
    for e in parts(score):
        match e:
            case Apply("mul", (x, Const(float(c)))) | Apply("mul", (Const(float(c)), x)) if x == term:
                factor = c
            case Apply("div", (x, Const(float(c)))) if x == term and c:
                factor = 1.0 / c
            case _:
                continue
        if not math.isfinite(factor):  # of Q, its sum over D would be of infinities of both signs
            continue
        alone = term not in parts(substitute(score, {e: Const(0.0)}))
        return (factor, substitute(score, {e: term})) if alone else (1.0, score)
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

    def run(self, out: Tensor, env: Env, lse: Tensor | None = None) -> None:
        """Fill `out` (batch axes, q_idx, dv), and `lse` without dv, a group of heads and a block of rows at a time."""
        m, batch = len(env.spans[self.region.q_idx.name]), len(self.region.batch)
        rows, sizes, groups = self._division(env)
        room = _room(env, rows, sizes)
        for spans in groups:
            heads = env.at(**spans)
            reached = range(self._visited(heads)[1])
            held = self._hold(heads.at(**{self.region.kv_idx.name: reached}), room)
            place = tuple(slice(s.start, s.stop) for s in spans.values())
            part, sums = out[place], None if lse is None else lse[place]
            for start in range(0, m, rows):
                block = range(start, min(start + rows, m))
                part.narrow(batch, start, len(block)).copy_(
                    self._block(
                        heads.at(**{self.region.q_idx.name: block}), held,
                        None if sums is None else sums.narrow(batch, start, len(block)),
                    )
                )  # fmt: skip

    def _division(self, env: Env) -> tuple[int, int, Iterator[dict[str, range]]]:
        """(rows of a block, heads at most, the ranges of batch axes that go together).

        Batch axes with lengths of their own go apart, so that what lies past a length is not read; groups of heads go
        apart, so that the keys that they share are not repeated.
        """
        r, budget = self.region, BUDGET * torch.get_num_threads()
        m, n = (max(1, len(env.spans[v.name])) for v in (r.q_idx, r.kv_idx))
        group = r.q_per_kv()
        rows = min(m, ROWS, max(16, budget // (n * group)))
        left = max(1, budget // (rows * n))
        apart = {name for b in (*self.reach.lower, *self.reach.upper) for name in variables(b.edge)}
        pieces: list[list[range]] = []
        for v in reversed(r.batch):
            size, step = len(env.spans[v.name]), 1 if v.name in apart else group if group > 1 else left
            pieces.insert(0, [range(i, min(i + step, size)) for i in range(0, size, step)])
            left, group = max(1, left // size), 1
        names = [v.name for v in r.batch]
        heads = math.prod(len(ranges[0]) for ranges in pieces if ranges)
        return rows, heads, (dict(zip(names, choice, strict=True)) for choice in product(*pieces))

    def _hold(self, env: Env, room: tuple[Tensor, Tensor]) -> Held:
        """The operands of some heads in the working dtype, Q scaled, K transposed."""
        r, (*batch, row, key) = self.region, env.axes
        *shape, m, n = env.shape
        q, k = [], []
        for p, c in zip(r.products, self.factors, strict=True):
            x = operand(r, p.q, p.dtype, env.over(*batch, row, p.d.name)).expand(*shape, -1, -1)
            q.append(_flat(_of_each(m, x * c if c != 1.0 else x), shape))
            x = operand(r, p.k, p.dtype, env.over(*batch, key, p.d.name))
            k.append(_flat(_of_each(n, x), shape).transpose(-2, -1))
        v = _flat(_of_each(n, operand(r, r.v, r.pv_dtype, env.over(*batch, key, r.dv.name))), shape)
        return Held(tuple(q), tuple(k), v, room)

    def _block(self, env: Env, held: Held, lse: Tensor | None) -> Tensor:
        """O (batch axes, rows, dv) of one block of rows; their log-sum-exp goes into `lse`."""
        r, key, whole = self.region, self.region.kv_idx.name, env
        first, stop, inner = self._visited(env)
        if lse is not None and first == stop:
            nothing = torch.full((*env.shape[:-1], 1), -math.inf, device=env.device)
            lse.copy_(log_sum(r, nothing, env) if r.filled_score is None else log_sums(self.exact, env))
        if first == stop:
            return self._unseen(env, held)
        env = env.at(**{key: range(first, stop)})
        env = replace(env, scores=held.scores(env.spans[r.q_idx.name], env.spans[key], env.shape))
        weight = None if r.weight == Const(1.0) else evaluate_expr(r.weight, env)
        logits = self._masked(_logits(r.score, env), inner, env)
        if lse is not None:
            lse.copy_(log_sum(r, logits, env))
        p = softmax(r, logits, env, held.second(env.shape))
        out = held.values(p if weight is None else p * weight, env.spans[key])
        if not r.keep or r.filled_score is None:
            return out
        needs = logits.amax(-1, keepdim=True) <= r.rescue_below
        if lse is not None and needs.any():
            lse.copy_(torch.where(needs.squeeze(-1), log_sums(self.exact, whole), lse))
        return torch.where(needs, attend(self.exact, whole), out) if needs.any() else out

    def _visited(self, env: Env) -> tuple[int, int, range]:
        """(first, stop) of the keys that some row reaches, and those that the bounds leave every row."""
        *batch, row, key = env.axes
        rows, n = env.spans[row], len(env.spans[key])
        ends = env.at(**{row: torch.tensor([rows[0], rows[-1]], device=env.device)}).over(*batch, row)

        def edges(bounds: tuple[Bound, ...]) -> list[tuple[int, int]]:
            """(least, greatest) of each edge, which is monotone in the row."""
            values = [evaluate_expr(bound.edge, ends) for bound in bounds]
            return [(int(e.min()), int(e.max())) for e in values]

        lower, upper = edges(self.reach.lower), edges(self.reach.upper)
        first = min(n, max([0, *(least for least, _ in lower)]))
        stop = max(first, min([n, *(greatest for _, greatest in upper)]))
        inner = min(stop, max([first, *(greatest for _, greatest in lower)]))
        return first, stop, range(inner, max(inner, min([stop, *(least for least, _ in upper)])))

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
        nan = n and not r.grounded and r.empty_row in ("nan", "unsafe")
        return held.v.new_full((*env.shape[:-1], extent(r.dv)), math.nan if nan else 0.0)


@dataclass(frozen=True)
class Held:
    """Operands of some heads: q[t] [heads, M, D], k[t] [heads, D, N], v [heads, N, Dv]; one head where all share it."""

    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: Tensor
    room: tuple[Tensor, Tensor]
    """Memory for S and for P of one block: fresh memory would cost a page fault every 4 KiB."""

    def second(self, shape: tuple[int, ...]) -> Tensor:
        """The memory of P."""
        return self.room[1][: math.prod(shape)].view(shape)

    def scores(self, rows: range, keys: range, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Each score_t of some rows and keys, as (batch axes, rows, keys)."""
        q = [x.narrow(1, rows.start, len(rows)) for x in self.q]
        k = [x.narrow(2, keys.start, len(keys)) for x in self.k]
        first = self.room[0][: math.prod(shape)].view(len(q[0]), *shape[-2:]) if len(q) == 1 else None
        return tuple(_multiply(x, y, first).view(shape) for x, y in zip(q, k, strict=True))

    def values(self, p: Tensor, keys: range) -> Tensor:
        """p V over (batch axes, rows, dv)."""
        v = self.v.narrow(1, keys.start, len(keys))
        return _multiply(p.reshape(-1, *p.shape[-2:]), v).view(*p.shape[:-1], v.shape[-1])


def _of_each(n: int, x: Tensor) -> Tensor:
    """Q, K or V with its rows, where they may all be the same."""
    return x.expand(*x.shape[:-2], n, x.shape[-1])


def _flat(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Batch axes as one, which has size 1 where nothing depends on them."""
    if x.shape[:-2].numel() == 1:
        return x.reshape(1, *x.shape[-2:])
    return x.expand(*shape, -1, -1).reshape(math.prod(shape), *x.shape[-2:])


def _multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b over heads, as one product where they share b."""
    if len(b) > 1:
        return torch.bmm(a, b, out=out)
    flat = None if out is None else out.view(-1, b.shape[-1])
    return torch.mm(a.reshape(-1, a.shape[-1]), b[0], out=flat).view(*a.shape[:-1], b.shape[-1])


def _room(env: Env, rows: int, heads: int) -> tuple[Tensor, Tensor]:
    """Memory for the scores and the probabilities of one block."""
    scores = rows * heads * len(env.spans[env.axes[-1]])
    first, second = (torch.empty(scores, dtype=env.dtype, device=env.device) for _ in range(2))
    return first, second


def _logits(score: Expr, env: Env) -> Tensor:
    """S of a block, in the memory of score_0 where S is a chain of functions of it; to be written to."""
    if (chain := _chain(score)) is None or env.scores[0].shape != env.shape:
        x = evaluate_expr(score, env)
        return x if x.shape == env.shape else x.expand(env.shape).clone()
    x = env.scores[0]
    for e, place in chain:
        args = [x if i == place else evaluate_expr(y, env) for i, y in enumerate(e.operands)]
        x = e.primitive.evaluate(*args, out=x) if e.op in IN_PLACE else e.primitive.evaluate(*args)
    return x


def _chain(e: Expr) -> list[tuple[Apply, int]] | None:
    """The functions from the score outwards, each with the place of its argument; None where the score branches."""
    chain: list[tuple[Apply, int]] = []
    while e != Score(0):
        inner = [i for i, x in enumerate(e.args) if depends_on_score(x)]
        if not isinstance(e, Apply) or len(inner) != 1:
            return None
        chain.insert(0, (e, inner[0]))
        e = e.args[inner[0]]
    return chain
