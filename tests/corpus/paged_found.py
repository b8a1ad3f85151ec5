"""Programs as serving code has them, each beside its negative twin, which is another function: fused or not, its value
must be its own. Words and sizes as in `paged`.
"""

from __future__ import annotations

import math

import torch
from corpus.paged import HKV, PAGE, POOL, B, D, Draw, H, paged
from corpus.table import BIG, INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
SCALE = D**-0.5


def gq(q: Tensor) -> Tensor:
    return q.unflatten(2, (HKV, -1))


def score(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bmhgd,bnhd->bhgmn", gq(q), k) * SCALE


def weigh(p: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhgmn,bnhd->bmhgd", p, v).flatten(2, 3)


def late(lengths: Tensor, n: int, first: int = 0) -> Tensor:
    """[B, 1, 1, 1, n]: keys past the length."""
    return (first + torch.arange(n, device=lengths.device) >= lengths[:, None])[:, None, None, None]


def fetch(table: Tensor, *pools: Tensor) -> list[Tensor]:
    return [x[table].flatten(1, 2) for x in pools]


# ---------- pieces of one softmax, and parts that are merged
def recent(d: Draw) -> tuple[Tensor, ...]:
    """Old keys and values in few bits with scales, recent ones [B, 8, HKV, D] as they are, how many of those."""
    q, k, v, table, lengths = paged(d)
    k, v = ((x * 3).round().clamp(-7, 7).to(torch.int8) for x in (k, v))
    scales = (d(d.n(POOL), *rest).abs() / 3 for rest in ((1, HKV, D), (PAGE, HKV, 1)))
    return q, k, v, *scales, d(B, 8, HKV, D), d(B, 8, HKV, D), table, lengths, d.ints([8, 3, 5])


@CASES.pair(recent, twin="either", note="KIVI: both products are rearranged before they are added")
def old_keys_in_few_bits(
    q: Tensor, k_old: Tensor, v_old: Tensor, k_scale: Tensor, v_scale: Tensor, k_new: Tensor, v_new: Tensor,
    table: Tensor, lengths: Tensor, count: Tensor, near: bool = False,
) -> Tensor:  # fmt: skip
    k, v = fetch(table, k_old, v_old)
    k = (k_old[table].to(q.dtype) * k_scale[table]).flatten(1, 2)
    v = (v_old[table].to(q.dtype) * v_scale[table]).flatten(1, 2)
    old = score(q, k).masked_fill(late(lengths, k.shape[1]), -INF)
    new = score(q, k_new).masked_fill(late(count, 8), -INF)
    p = torch.cat([old, new], -1).softmax(-1)
    of_new = weigh(p[..., k.shape[1] :], v_new)
    return weigh(p[..., : k.shape[1]], v) + (of_new.unflatten(2, (G, HKV)).mT.reshape(q.shape) if near else of_new)


@CASES.pair(paged, twin="either", grad=(0,), dtypes=BIG, count=3, note="FlashInfer: sums in powers of two")
def levels_in_base_two(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, near: bool = False
) -> Tensor:
    out, lse = None, None
    for first, pages in ((0, table[:1, :1].expand(B, 1)), (0, table[:, :1]), (PAGE, table[:, 1:])):
        k, v = fetch(pages, k_pool, v_pool)
        s = score(q, k).masked_fill(late(lengths, k.shape[1], first), -1e9) * math.log2(math.e)
        m = s.amax(-1, keepdim=True)
        e = torch.exp2(s - m)
        total = e.sum(-1, keepdim=True)
        part, own = torch.einsum("bhgmn,bnhd->bhgmd", e / total, v), m + (total.log() if near else total.log2())
        if out is None:
            out, lse = part, own
            continue
        most = torch.maximum(lse, own)
        before, here = torch.exp2(lse - most), torch.exp2(own - most)
        out = (out * before + part * here) / (before + here)
        lse = most + torch.log2(before + here)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.pair(paged, twin="either", grad=(0,), note="a finite fill, less the largest score, in powers of two")
def powers_of_two(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, near: bool = False
) -> Tensor:
    k, v = fetch(table, k_pool, v_pool)
    s = (score(q, k) * math.log2(math.e)).masked_fill(late(lengths, k.shape[1]), -1e4)
    e = torch.exp2(s - s.amax(-1, keepdim=True) * (0.5 if near else 1.0))
    return weigh(e / e.sum(-1, keepdim=True), v)


@CASES.pair(paged, grad=(0,), dtypes=BIG, note="page by page, the mask on powers of two alone")
def masked_after_the_exponential(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, near: bool = False
) -> Tensor:
    most = q.new_full((B, HKV, G, 1), -1e30)
    total, out = torch.zeros_like(most), q.new_zeros(B, HKV, G, D)
    for i in range(table.shape[1]):
        s = torch.einsum("bhgd,bthd->bhgt", gq(q)[:, 0], k_pool[table[:, i]]) * (SCALE * math.log2(math.e))
        new = torch.maximum(most, s.amax(-1, keepdim=True))
        p = torch.where(late(lengths, PAGE, i * PAGE)[:, 0], 0.0, torch.exp2(s - new))
        kept = torch.exp(most - new) if near else torch.exp2(most - new)
        total = total * kept + p.sum(-1, keepdim=True)
        out = out * kept + torch.einsum("bhgt,bthd->bhgd", p, v_pool[table[:, i]])
        most = new
    return (out / total).flatten(1, 2)[:, None]


@CASES.pair(lambda d: (*paged(d), d(H)), twin="either", grad=(0,), note="gpt-oss's sinks, in powers of two")
def sink_in_base_two(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, sinks: Tensor, near: bool = False
) -> Tensor:
    k, v = fetch(table, k_pool, v_pool)
    s = (score(q, k) * math.log2(math.e)).masked_fill(late(lengths, k.shape[1]), -INF)
    t = sinks.view(1, HKV, G, 1, 1) * math.log2(math.e)
    m = torch.maximum(s.amax(-1, keepdim=True), t)
    e = torch.exp2(s - m)
    return weigh(e / (e.sum(-1, keepdim=True) + (torch.exp if near else torch.exp2)(t - m)), v)


@CASES.pair(paged, reason="is not a softmax", grad=(0,), note="divided by the sum at the end, in logarithms")
def divided_by_an_exponential(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, near: bool = False
) -> Tensor:
    k, v = fetch(table, k_pool, v_pool)
    s = score(q, k).masked_fill(late(lengths, k.shape[1]), -INF)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    lse = m + e.sum(-1, keepdim=True).log()
    out = torch.einsum("bhgmn,bnhd->bhgmd", e, v) * torch.exp(-lse if near else m - lse)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


NO_SOFTMAX = "the left factor of the product is not a softmax over the axis that the product sums over"


@CASES.pair(lambda d: paged(d)[:4], reason=NO_SOFTMAX, grad=(0,), dtypes=BIG, note="its twin forgets an exponential")
def page_by_page(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, near: bool = False) -> Tensor:
    most = q.new_full((B, HKV, G, 1), -1e30)
    total, out = torch.zeros_like(most), q.new_zeros(B, HKV, G, D)
    for i in range(table.shape[1]):
        s = torch.einsum("bhgd,bthd->bhgt", gq(q)[:, 0], k_pool[table[:, i]]) * SCALE
        new = torch.maximum(most, s.amax(-1, keepdim=True))
        p, kept = torch.exp(s - new), most - new if near and i else torch.exp(most - new)
        total = total * kept + p.sum(-1, keepdim=True)
        out = out * kept + torch.einsum("bhgt,bthd->bhgd", p, v_pool[table[:, i]])
        most = new
    return (out / total).flatten(1, 2)[:, None]


# ---------- spellings of the products
@CASES.pair(paged, twin="either", grad=(0,), note="elements multiplied and summed, the axis kept")
def elements_summed(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, near: bool = False
) -> Tensor:
    k, v = (x.repeat_interleave(G, 2) for x in fetch(table, k_pool, v_pool))
    s = (q * k).sum(-1, keepdim=True) * SCALE
    p = s.masked_fill(late(lengths, k.shape[1])[:, 0, 0, 0, :, None, None], -INF).softmax(2 if near else 1)
    return (p * v).sum(1, keepdim=True)


@CASES.pair(paged, twin="either", grad=(0,), count=2, note="shards of heads: an einsum sums over an axis of length 1")
def shards_of_one_head(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, near: bool = False
) -> Tensor:
    shards, out = 1 if near else HKV, []
    for qs, ks, vs in zip(q.chunk(shards, 2), k_pool.chunk(shards, 2), v_pool.chunk(shards, 2), strict=True):
        k, v = fetch(table, ks, vs)
        s = torch.einsum("bmhd,bnkd->bhmn", qs, k) * SCALE
        p = s.masked_fill(late(lengths, k.shape[1])[:, 0], -INF).softmax(-1)
        out.append(torch.einsum("bhmn,bnkd->bmhd", p, v))
    return torch.cat(out, 2)


# ---------- nothing but a table
@CASES.pair(lambda d: (d(D), *(x[..., 0, :].contiguous() for x in paged(d)[1:3]), d.table()[0], d.ints(11)), "either")
def one_query_of_one_request(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, pages: Tensor, length: Tensor, near: bool = False
) -> Tensor:
    k, v = k_pool[pages].flatten(0, 1), v_pool[pages.flip(0) if near else pages].flatten(0, 1)
    s = torch.mv(k, q) * SCALE
    return s.masked_fill(torch.arange(len(k), device=q.device) >= length, -INF).softmax(0) @ v


def layers(d: Draw) -> tuple[Tensor, ...]:
    q, _, _, table, lengths = paged(d)
    return q, d(d.n(POOL), 3, 2, PAGE, HKV, D), d.ints(2), table, lengths


@CASES.pair(layers, twin="either", note="the number of the layer is a tensor without axes")
def layer_in_a_tensor(
    q: Tensor, pool: Tensor, layer: Tensor, table: Tensor, lengths: Tensor, near: bool = False
) -> Tensor:
    k, v = pool.index_select(1, layer[None]).squeeze(1).unbind(1)
    k, v = fetch(table, k, k if near else v)
    return weigh(score(q, k).masked_fill(late(lengths, k.shape[1]), -INF).softmax(-1), v)
