"""A softmax that a loop over chunks of keys makes, with a maximum that runs along, as flash kernels do."""

from __future__ import annotations

from typing import Any

import torch
from corpus.table import FULL, INF, Table, places, scores
from torch import Tensor, einsum

CASES = Table()


def blocks(d: Any) -> list[Tensor]:
    return [d(2, 3, 24, 8) for _ in range(3)]


def chunks(k: Tensor, v: Tensor) -> Any:
    return zip(k.split(8, 2), v.split(8, 2), strict=True)


@CASES.fuse(blocks)
def from_minus_infinity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m = torch.full_like(q[..., :1], -INF)
    total, out = torch.zeros_like(m), torch.zeros_like(q)
    for x, y in chunks(k, v):
        s = scores(q, x)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, kept = (s - new).exp(), (m - new).exp()
        total, out, m = total * kept + p.sum(-1, keepdim=True), out * kept + p @ y, new
    return out / total


@CASES.fuse(blocks)
def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, _ = places(q, k)
    m = torch.full_like(q[..., 0], -INF)
    total, out = torch.zeros_like(m), torch.zeros_like(q)
    for n, (x, y) in enumerate(chunks(k, v)):
        s = scores(q, x).masked_fill(torch.arange(8 * n, 8 * n + 8, device=q.device) > i, -INF)
        new = torch.maximum(m, s.max(-1).values)
        p, kept = torch.exp(s - new[..., None]), torch.exp(m - new)
        total = total * kept + p.sum(-1)
        out = out * kept.unsqueeze(-1) + p @ y
        m = new
    return out * total.reciprocal()[..., None]


@CASES.fuse(lambda d: [*blocks(d), d.ints(24, 11)], dtypes=FULL, grad=())
def padded_on_the_left(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The first chunks of a row may be empty: m is finite all the same."""
    m, total, out = q.new_full((2, 3, 24), -1e30), q.new_zeros(2, 3, 24), 0.0
    for n, (x, y) in enumerate(chunks(k, v)):
        at = torch.arange(8 * n, 8 * n + 8, device=q.device)
        s = scores(q, x).masked_fill((at < 24 - lengths[:, None])[:, None, None], -INF)
        new = torch.maximum(m, s.amax(-1))
        p, kept = torch.exp(s - new[..., None]), torch.exp(m - new)
        total *= kept
        total += p.sum(-1)
        out = out * kept[..., None] + einsum("bhij,bhjd->bhid", p, y)
        m = new
    return out / total[..., None]


@CASES.fuse(blocks, count=2)
def by_blocks_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each chunk has a maximum of its own, as in the first flash attention."""
    outs = []
    for part in q.split(12, 2):
        m = total = out = None
        for x, y in chunks(k, v):
            s = torch.tanh(part @ x.mT) * 2
            own = s.amax(-1, keepdim=True)
            p = torch.exp(s - own)
            if m is None:
                m, total, out = own, p.sum(-1, keepdim=True), p @ y
                continue
            new = torch.maximum(m, own)
            old, now = torch.exp(m - new), torch.exp(own - new)
            m, total, out = new, old * total + now * p.sum(-1, keepdim=True), old * out + now * (p @ y)
        outs.append(out / total)
    return torch.cat(outs, 2)


@CASES.fuse(blocks, grad=())
def guarded_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m, total, out = torch.full_like(q[..., :1], -INF), 0, 0
    for x, y in chunks(k, v):
        s = scores(q, x)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        safe = new.masked_fill(new == -INF, 0.0)
        p, kept = torch.exp(s - safe), torch.exp(m - safe)
        total, out, m = kept * total + p.sum(-1, keepdim=True), kept * out + p @ y, new
    return out / total


def merged(tops: list[Tensor], totals: list[Tensor], outs: list[Tensor]) -> Tensor:
    """Sums of chunks, each above a maximum of its own."""
    m = torch.stack(tops)
    kept = torch.exp(m - m.max(0, keepdim=True).values)
    out = (torch.stack(outs) * kept.unsqueeze(-1)).sum(dim=0)
    return out / (torch.stack(totals) * kept).sum(dim=0).unsqueeze(-1)


@CASES.fuse(blocks)
def chunks_stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rabe and Staats: memory-efficient attention"""
    tops, totals, outs = [], [], []
    for x, y in chunks(k, v):
        s = einsum("bhid,bhjd->bhij", q * 8**-0.5, x)
        top = s.max(-1, keepdim=True)[0].detach()
        p = torch.exp(s - top)
        outs.append(einsum("bhjd,bhij->bhid", y, p))
        totals.append(p.sum(-1))
        tops.append(top.squeeze(-1))
    return merged(tops, totals, outs)


def divided_at_each_step(q: Tensor, k: Tensor, v: Tensor, miss: str = "") -> Tensor:
    """FlashAttention 1: O is normalised after every chunk, by what the next one multiplies it with."""
    out, total, m = torch.zeros_like(q), torch.zeros_like(q[..., :1]), torch.full_like(q[..., :1], -INF)
    i, _ = places(q, k)
    for n, (x, y) in enumerate(chunks(k, v)):
        s = scores(q, x)
        if miss == "causal":
            s = s.masked_fill(torch.arange(8 * n, 8 * n + 8, device=q.device) > i, -INF)
        own = s.amax(-1, keepdim=True)
        p = torch.exp(s - own)
        new = torch.maximum(m, own)
        kept, gained = torch.exp(m - new), torch.exp(own - new)
        before, total = total, kept * total + gained * p.sum(-1, keepdim=True)
        out = ((before + 0.5 if miss == "sum" else before) * kept * out + gained * (p @ y)) / total
        m = new
    return out


CASES.fuse(blocks, dtypes=FULL)(divided_at_each_step)


# ----------------------------------------------------------------------------------------------------------------
# Near misses


def run(q: Tensor, k: Tensor, v: Tensor, miss: str) -> Tensor:
    m = torch.full_like(q[..., :1], -1e30)
    total, out = torch.zeros_like(m), torch.zeros_like(q)
    for n, (x, y) in enumerate(chunks(k, v)):
        s = scores(q, x)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, kept = (s - new).exp(), (m - new).exp()
        total = total * (1 if miss == "sum" else kept) + (0 if miss == "chunk" and n == 2 else p.sum(-1, keepdim=True))
        out = out * ((new - m).clamp(max=4).exp() if miss == "sign" else kept) + p @ (x if miss == "values" else y)
        m = m if miss == "maximum" else new
    return out / total


@CASES.decline(blocks, dtypes=FULL)
def sum_is_not_rescaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return run(q, k, v, "sum")


@CASES.decline(blocks, dtypes=FULL)
def last_chunk_is_not_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return run(q, k, v, "chunk")


@CASES.decline(blocks, dtypes=FULL)
def rescaled_the_other_way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return run(q, k, v, "sign")


@CASES.decline(blocks, dtypes=FULL)
def maximum_that_stays(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return run(q, k, v, "maximum")


@CASES.fuse(blocks, dtypes=FULL)
def keys_are_the_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return run(q, k, v, "values")


@CASES.decline(lambda d: [*blocks(d), d.ints(24, 11)], dtypes=FULL, grad=())
def padded_on_the_left_from_minus_infinity(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """NaN where the first chunk has no key: -inf less -inf."""
    m, total, out = q.new_full((2, 3, 24, 1), -INF), 0, 0
    for n, (x, y) in enumerate(chunks(k, v)):
        at = torch.arange(8 * n, 8 * n + 8, device=q.device)
        s = scores(q, x).masked_fill((at < 24 - lengths[:, None])[:, None, None], -INF)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, kept = torch.exp(s - new), torch.exp(m - new)
        total, out, m = total * kept + p.sum(-1, keepdim=True), out * kept + p @ y, new
    return out / total


@CASES.decline(blocks, dtypes=FULL, grad=())
def own_maximum_of_a_chunk_without_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """NaN where the last chunk has no key."""
    i, _ = places(q, k)
    tops, totals, outs = [], [], []
    for n, (x, y) in enumerate(chunks(k, v)):
        s = scores(q, x).masked_fill(torch.arange(8 * n, 8 * n + 8, device=q.device) > i, -INF)
        top = s.amax(-1)
        p = torch.exp(s - top[..., None])
        tops.append(top)
        totals.append(p.sum(-1))
        outs.append(p @ y)
    return merged(tops, totals, outs)


@CASES.decline(blocks, dtypes=FULL)
def divided_by_another_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return divided_at_each_step(q, k, v, "sum")


@CASES.decline(blocks, dtypes=FULL, grad=())
def divided_at_each_step_where_a_chunk_has_no_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """NaN: -inf less -inf."""
    return divided_at_each_step(q, k, v, "causal")


@CASES.decline(blocks, dtypes=FULL)
def doubled_before_it_is_divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp() + 1e-3
    return (e @ v * 2.0) / e.sum(-1, keepdim=True)


def chunk_by_chunk(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, order: Any) -> Tensor:
    m, total, out = q.new_full((2, 3, 24, 1), -INF), 0, 0
    for n, (x, y) in order(enumerate(chunks(k, v))):
        at = torch.arange(8 * n, 8 * n + 8, device=q.device)
        s = scores(q, x).masked_fill((at >= lengths[:, None])[:, None, None], -INF)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, kept = torch.exp(s - new), torch.exp(m - new)
        total, out, m = total * kept + p.sum(-1, keepdim=True), out * kept + p @ y, new
    return out / total


@CASES.fuse(lambda d: [*blocks(d), d.ints(0, 11)], dtypes=FULL, grad=())
def padded_on_the_right_from_minus_infinity(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """NaN where the first chunk has no key, for none has."""
    return chunk_by_chunk(q, k, v, lengths, list)


@CASES.decline(lambda d: [*blocks(d), d.ints(24, 11)], dtypes=FULL, grad=())
def padded_on_the_right_and_read_from_there(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """NaN where the last chunk has no key"""
    return chunk_by_chunk(q, k, v, lengths, lambda pieces: [*pieces][::-1])
