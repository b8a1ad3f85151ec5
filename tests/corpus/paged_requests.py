"""Requests in loops and under vmap, their lengths in any spelling, their queries packed and padded.

Words and sizes as in `paged`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus.paged import HKV, PAGE, PAGES, B, D, Draw, H, paged
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
S = D**-0.5


def gq(q: Tensor) -> Tensor:
    return q.unflatten(2, (HKV, -1))


def att(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float = S) -> Tensor:
    """q [B,M,H,D] k,v [B,N,HKV,D] keep [B,M,N]-like"""
    s = torch.einsum("bmhgd,bnhd->bhgmn", gq(q), k) * scale
    s = s.masked_fill(~keep[:, None, None], -INF)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


def live(lengths: Tensor, n: Tensor) -> Tensor:
    return (torch.arange(n, device=lengths.device)[None] < lengths[:, None])[:, None]


# ---------- loops per request, vmap
@CASES.fuse(paged, note="vmap over requests")
def vmap_requests(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    def one(qi, ti, n):
        k, v = kp[ti].flatten(0, 1), vp[ti].flatten(0, 1)
        s = torch.einsum("mhgd,nhd->hgmn", qi.unflatten(1, (HKV, -1)), k) * S
        s = torch.where(torch.arange(k.shape[0], device=q.device) < n, s, -INF)
        return torch.einsum("hgmn,nhd->mhgd", s.softmax(-1), v).flatten(1, 2)

    return torch.vmap(one)(q, table, lengths)


@CASES.fuse(paged)
def vmap_requests_sdpa(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    def one(qi, ti, n):
        k, v = (x[ti].flatten(0, 1).transpose(0, 1).repeat_interleave(G, 0) for x in (kp, vp))
        keep = (torch.arange(k.shape[1], device=q.device) < n)[None, None]
        return F.scaled_dot_product_attention(qi.transpose(0, 1), k, v, attn_mask=keep).transpose(0, 1)

    return torch.vmap(one)(q, table, lengths)


@CASES.fuse(paged)
def vmap_heads_and_requests(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    def head(qh, kh, vh, n):
        s = qh @ kh.mT * S
        return s.masked_fill(torch.arange(kh.shape[0], device=q.device) >= n, -INF).softmax(-1) @ vh

    k, v = (x[table].flatten(1, 2).transpose(1, 2) for x in (kp, vp))
    rows = gq(q).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = torch.vmap(torch.vmap(head, (0, 0, 0, None)), (0, 0, 0, 0))(rows, k, v, lengths)
    return out.unflatten(2, (G, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.fuse(paged, note="a loop over requests with the lengths as tensors")
def loop_masks(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    out = []
    for b in range(q.shape[0]):
        k, v = (x[table[b]].flatten(0, 1) for x in (kp, vp))
        out.append(att(q[b : b + 1], k[None], v[None], live(lengths[b : b + 1], k.shape[0])))
    return torch.cat(out)


@CASES.fuse(paged)
def loop_masks_into_empty(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        k, v = (x[table[b].long()].reshape(-1, HKV, D).repeat_interleave(G, dim=1) for x in (kp, vp))
        s = torch.einsum("qhd,khd->hqk", q[b].float(), k.float()) * S
        s.masked_fill_(torch.arange(k.shape[0], device=q.device) >= lengths[b], -INF)
        out[b] = torch.einsum("hqk,khd->qhd", torch.softmax(s, -1).to(v.dtype), v)
    return out


@CASES.either(paged)
def loop_masks_of_next(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        k, v = (x[table[b].long()].reshape(-1, HKV, D).repeat_interleave(G, dim=1) for x in (kp, vp))
        s = torch.einsum("qhd,khd->hqk", q[b].float(), k.float()) * S
        s.masked_fill_(torch.arange(k.shape[0], device=q.device) >= lengths[b - 1], -INF)
        out[b] = torch.einsum("hqk,khd->qhd", torch.softmax(s, -1).to(v.dtype), v)
    return out


# ---------- lengths spelled otherwise
@CASES.fuse(paged)
def length_of_sequence_position(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    pos = lengths - 1
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    n = torch.arange(k.shape[1], device=q.device)
    return att(q, k, v, (pos[:, None] - n[None] >= 0)[:, None])


@CASES.fuse(paged)
def length_arange_floor(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """full pages, and the last page by offset"""
    w = table.shape[1]
    full, rest = lengths // PAGE, lengths % PAGE
    j = torch.arange(w, device=q.device)[None, :, None]
    o = torch.arange(PAGE, device=q.device)[None, None]
    keep = (j < full[:, None, None]) | ((j == full[:, None, None]) & (o < rest[:, None, None]))
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, keep.flatten(1)[:, None])


@CASES.either(paged)
def length_arange_floor_le(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    w = table.shape[1]
    full, rest = lengths // PAGE, lengths % PAGE
    j = torch.arange(w, device=q.device)[None, :, None]
    o = torch.arange(PAGE, device=q.device)[None, None]
    keep = (j < full[:, None, None]) | ((j == full[:, None, None]) & (o <= rest[:, None, None]))
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, keep.flatten(1)[:, None])


@CASES.fuse(paged)
def length_by_cumsum_of_ones(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    n = torch.ones(len(q), k.shape[1], device=q.device, dtype=torch.long).cumsum(1)
    return att(q, k, v, (n <= lengths[:, None])[:, None])


@CASES.fuse(
    lambda d: (*paged(d)[:4], torch.nn.functional.one_hot(d.lengths().long() - 1, d.n(PAGES) * PAGE)),
    note="one-hot of the last position, summed from behind",
)
def length_by_flip_cumsum(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, last: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    mask = last.flip(1).cumsum(1).flip(1).bool()
    return att(q, k, v, mask[:, None])


@CASES.fuse(paged)
def length_mask_log(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    m = live(lengths, k.shape[1]).to(q.dtype)
    s = torch.einsum("bmhgd,bnhd->bhgmn", gq(q), k) * S + m.log()[:, None, None]
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


@CASES.fuse(paged)
def length_mask_times_big(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    m = live(lengths, k.shape[1]).to(q.dtype)
    s = torch.einsum("bmhgd,bnhd->bhgmn", gq(q), k) * S + (1 - m)[:, None, None] * -1e4
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


@CASES.fuse(paged, note="zero after softmax, renormalised")
def length_renormalised(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    p = (torch.einsum("bmhgd,bnhd->bhgmn", gq(q), k) * S).softmax(-1) * live(lengths, k.shape[1])[:, None, None]
    p = p / p.sum(-1, keepdim=True)
    return torch.einsum("bhgmn,bnhd->bmhgd", p, v).flatten(2, 3)


@CASES.either(paged)
def length_not_renormalised(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    p = (torch.einsum("bmhgd,bnhd->bhgmn", gq(q), k) * S).softmax(-1) * live(lengths, k.shape[1])[:, None, None]
    return torch.einsum("bhgmn,bnhd->bmhgd", p, v).flatten(2, 3)


def zero(d: Draw) -> tuple[Tensor, ...]:
    q, kp, vp, t, ends = paged(d)
    return q, kp, vp, t, ends * d.ints([1, 0, 1])


@CASES.fuse(zero, grad=(), note="where on the output for empty requests; in eager the gradient of V is NaN")
def empty_by_where(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    o = att(q, k, v, live(lengths, k.shape[1]))
    return torch.where((lengths > 0)[:, None, None, None], o, 0.0)


@CASES.fuse(zero)
def empty_by_max_one(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, live(lengths.clamp(min=1), k.shape[1]))


@CASES.fuse(zero, grad=())
def empty_nan(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(zero)
def empty_by_finfo(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    s = torch.einsum("bmhgd,bnhd->bhgmn", gq(q), k) * S
    s = torch.where(live(lengths, k.shape[1])[:, None, None], s, torch.finfo(s.dtype).min)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


@CASES.fuse(zero)
def empty_times_flag(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    o = att(q, k, v, live(lengths.clamp(min=1), k.shape[1]))
    return o * (lengths > 0).to(o.dtype)[:, None, None, None]


# ---------- chunked prefill / mixed
def mixed(d: Draw) -> tuple[Tensor, ...]:
    _, kp, vp, t, ends = paged(d)
    return d(7, H, D), kp, vp, t, ends, d.ints([0, 1, 5, 7])


@CASES.fuse(mixed, note="mixed prefill and decode, cu_seqlens by comparison and sum")
def mixed_by_compare(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, cu: Tensor) -> Tensor:
    tok = torch.arange(q.shape[0], device=q.device)
    seq = (tok[:, None] >= cu[None, 1:]).sum(1)
    pos = lengths[seq] - (cu[seq + 1] - tok)
    k, v = (x[table[seq]].flatten(1, 2) for x in (kp, vp))
    return att(q[:, None], k, v, (torch.arange(k.shape[1], device=q.device) <= pos[:, None])[:, None])[:, 0]


@CASES.fuse(mixed)
def mixed_searchsorted(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, cu: Tensor) -> Tensor:
    tok = torch.arange(q.shape[0], device=q.device, dtype=cu.dtype)
    seq = torch.searchsorted(cu, tok, right=True) - 1
    ctx = lengths - (cu[1:] - cu[:-1])
    pos = ctx[seq] + tok - cu[seq]
    k, v = (x[table[seq].long()].flatten(1, 2) for x in (kp, vp))
    s = torch.einsum("thgd,tnhd->hgtn", q.unflatten(1, (HKV, G)), k) * S
    s = s.masked_fill(torch.arange(k.shape[1], device=q.device)[None] > pos[:, None], -INF)
    return torch.einsum("hgtn,tnhd->thgd", s.softmax(-1), v).flatten(1, 2)


@CASES.either(mixed)
def mixed_without_context(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, cu: Tensor) -> Tensor:
    tok = torch.arange(q.shape[0], device=q.device, dtype=cu.dtype)
    seq = torch.searchsorted(cu, tok, right=True) - 1
    pos = tok - cu[seq]
    k, v = (x[table[seq].long()].flatten(1, 2) for x in (kp, vp))
    return att(q[:, None], k, v, (torch.arange(k.shape[1], device=q.device) <= pos[:, None])[:, None])[:, 0]


@CASES.fuse(mixed, note="one dense product against all keys of the batch, block-diagonal mask")
def mixed_block_diagonal(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, cu: Tensor) -> Tensor:
    tok = torch.arange(q.shape[0], device=q.device, dtype=cu.dtype)
    seq = torch.searchsorted(cu, tok, right=True) - 1
    pos = (lengths - (cu[1:] - cu[:-1]))[seq] + tok - cu[seq]
    k, v = (x[table].flatten(0, 2) for x in (kp, vp))
    w = table.shape[1] * PAGE
    key = torch.arange(k.shape[0], device=q.device)
    keep = (key // w == seq[:, None]) & (key % w <= pos[:, None])
    s = torch.einsum("thgd,nhd->hgtn", q.unflatten(1, (HKV, G)), k) * S
    return torch.einsum("hgtn,nhd->thgd", s.masked_fill(~keep, -INF).softmax(-1), v).flatten(1, 2)


def padded(d: Draw) -> tuple[Tensor, ...]:
    _, kp, vp, t, ends = paged(d)
    return d(B, 4, H, D), kp, vp, t, ends, d.ints([1, 4, 2])


@CASES.fuse(padded, note="queries padded on the right to M, query lengths")
def padded_queries(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, qlens: Tensor) -> Tensor:
    m = torch.arange(q.shape[1], device=q.device)
    pos = lengths[:, None] - qlens[:, None] + m
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    keep = torch.arange(k.shape[1], device=q.device) <= torch.minimum(pos, lengths[:, None] - 1)[..., None]
    return att(q, k, v, keep)


@CASES.fuse(padded)
def padded_queries_zeroed(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, qlens: Tensor) -> Tensor:
    m = torch.arange(q.shape[1], device=q.device)
    pos = lengths[:, None] - qlens[:, None] + m
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    n = torch.arange(k.shape[1], device=q.device)
    o = att(q, k, v, (n <= pos[..., None]) & (n < lengths[:, None, None]))
    return o.masked_fill((m >= qlens[:, None])[..., None, None], 0)


@CASES.fuse(padded, note="left padded queries")
def padded_left(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, qlens: Tensor) -> Tensor:
    m = torch.arange(q.shape[1], device=q.device)
    pos = lengths[:, None] - q.shape[1] + m
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    keep = torch.arange(k.shape[1], device=q.device) <= pos[..., None]
    keep = keep | (m[None, :, None] < (q.shape[1] - qlens)[:, None, None])
    return att(q, k, v, keep)
