"""Decode over a paged cache: pages that stay an axis of their own, products by head, lengths in Python.

Words and sizes as in `paged`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus.paged import HKV, PAGE, B, D, Draw, H, flat_page_list, head_major, paged, used_pages
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
SCALE = D**-0.5
LENGTHS = (48, 11, 16)


def live(table: Tensor, lengths: Tensor) -> Tensor:
    """[B, pages, PAGE]"""
    n = torch.arange(table.shape[1] * PAGE, device=table.device).view(-1, PAGE)
    return n < lengths[:, None, None]


# ----------------------------------------------------------------------------------------------------------------
# Pages as an axis


@CASES.fuse(paged, note="one softmax over pages and slots, both contracted with the values at once")
def pages_kept_apart(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = k_pool[table], v_pool[table]
    s = torch.einsum("bhgd,bpshd->bhgps", q.view(len(q), HKV, G, D), k) * SCALE
    s = s.masked_fill(~live(table, lengths)[:, None, None], -INF)
    p = s.flatten(-2).softmax(-1).view_as(s)
    return torch.einsum("bhgps,bpshd->bhgd", p, v).reshape(q.shape)


@CASES.fuse(paged)
def pages_kept_apart_in_the_scores(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    s = torch.einsum("bhgd,bpshd->bhgps", q.view(len(q), HKV, G, D), k_pool[table])
    s = torch.where(live(table, lengths)[:, None, None], s * SCALE, -INF).flatten(3)
    return torch.einsum("bhgn,bnhd->bhgd", s.softmax(-1), v_pool[table].flatten(1, 2)).reshape(q.shape)


@CASES.fuse(paged, note="exponentials over both axes, by hand")
def exponentials_of_pages(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    s = torch.einsum("bhgd,bpshd->bhgps", q.view(len(q), HKV, G, D), k_pool[table]).float() * SCALE
    s = s.masked_fill(~live(table, lengths)[:, None, None], -INF)
    e = torch.exp(s - s.amax((-2, -1), keepdim=True))
    p = (e / e.sum((-2, -1), keepdim=True)).to(q.dtype)
    return torch.einsum("bhgps,bpshd->bhgd", p, v_pool[table]).reshape(q.shape)


@CASES.decline(paged, reason="another axis than the product of weights and values sums over")
def values_summed_over_pages(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """A product for each page, and their sum afterwards"""
    k, v = (x[table].permute(0, 3, 1, 2, 4) for x in (k_pool, v_pool))
    s = q.view(len(q), HKV, 1, G, D) @ k.mT * SCALE
    s = s.masked_fill(~live(table, lengths)[:, None, :, None], -INF)
    p = s.transpose(2, 3).flatten(3).softmax(-1).view(len(q), HKV, G, -1, PAGE).transpose(2, 3)
    return (p @ v).sum(2).reshape(q.shape)


# ----------------------------------------------------------------------------------------------------------------
# Products by head


@CASES.fuse(head_major, note="TensorRT-LLM, lit-gpt: batch times key heads as one axis of bmm")
def heads_in_the_batch(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table.long()].transpose(1, 2).reshape(len(q) * HKV, -1, D) for x in (k_pool, v_pool))
    s = torch.baddbmm(q.new_zeros(1, 1, 1), q.reshape(-1, G, D), k.transpose(1, 2), beta=0, alpha=SCALE)
    dead = torch.arange(k.shape[1], device=q.device) >= lengths.repeat_interleave(HKV)[:, None]
    return torch.bmm(s.masked_fill(dead[:, None], -INF).softmax(-1), v).reshape(q.shape)


@CASES.fuse(
    lambda d: (d(B, 1, H, D), d(d.n(26), HKV, D, PAGE), d(d.n(26), HKV, PAGE, D), d.table(), d.lengths()),
    note="NeuronX: keys held transposed",
)
def keys_held_transposed(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    kt = k_pool[table].permute(0, 2, 3, 1, 4).flatten(3)
    v = v_pool[table].permute(0, 2, 1, 3, 4).flatten(2, 3)
    s = q.view(len(q), HKV, G, D) @ kt * SCALE
    keep = live(table, lengths).flatten(1)[:, None, None]
    return (torch.where(keep, s, torch.finfo(s.dtype).min).softmax(-1) @ v).view(q.shape)


@CASES.fuse(paged, note="every element by its flat address")
def elements_taken(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n, h, d = (torch.arange(x, device=q.device) for x in (table.shape[1] * PAGE, HKV, D))
    slot = table.long()[:, n // PAGE] * PAGE + n % PAGE
    at = (slot[:, :, None, None] * HKV + h[:, None]) * D + d
    k, v = torch.take(k_pool, at), v_pool.view(-1)[at]
    s = torch.einsum("bhgd,bnhd->bhgn", q.view(len(q), HKV, G, D), k) * SCALE
    s = s.masked_fill(~live(table, lengths).flatten(1)[:, None, None], -INF)
    return torch.einsum("bhgn,bnhd->bhgd", s.softmax(-1), v).reshape(q.shape)


# ----------------------------------------------------------------------------------------------------------------
# Lengths in Python


@CASES.fuse(lambda d: paged(d, M=4)[:4], count=3, note="vLLM's ref_paged_attn, its lists constants of the graph")
def loop_with_triangles(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor) -> Tensor:
    out = []
    for b, n in enumerate(LENGTHS):
        pages = table[b, : (n + PAGE - 1) // PAGE].long()
        k, v = (x[pages].view(-1, HKV, D)[:n].repeat_interleave(G, 1) for x in (k_pool, v_pool))
        s = torch.einsum("qhd,khd->hqk", q[b] * SCALE, k).float()
        dead = torch.triu(torch.ones(4, n, device=q.device), diagonal=n - 4 + 1).bool()
        p = s.masked_fill_(dead, -INF).softmax(-1).to(v.dtype)
        out.append(torch.einsum("hqk,khd->qhd", p, v))
    return torch.cat(out).view(q.shape)


@CASES.fuse(lambda d: paged(d, M=4)[:4], count=3, note="the same with a window, by scaled_dot_product_attention")
def loop_with_windows(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor) -> Tensor:
    out = torch.empty_like(q)
    for b, n in enumerate(LENGTHS):
        k, v = (x[table[b]].flatten(0, 1)[:n].transpose(0, 1) for x in (k_pool, v_pool))
        i, j = torch.arange(n - 4, n, device=q.device)[:, None], torch.arange(n, device=q.device)
        keep = (j <= i) & (i - j < 9)
        o = F.scaled_dot_product_attention(q[b].transpose(0, 1)[None], k[None], v[None], keep, enable_gqa=True)
        out[b] = o[0].transpose(0, 1)
    return out


# ----------------------------------------------------------------------------------------------------------------
# Addresses


def grouped(q: Tensor, k: Tensor, v: Tensor, late: Tensor) -> Tensor:
    """q [T, H, D], k and v [T, HKV, N, D], late [T, N]"""
    s = q.view(-1, HKV, G, D) @ k.mT * SCALE
    return (s.masked_fill(late[:, None, None], -INF).softmax(-1) @ v).reshape(q.shape)


@CASES.fuse(lambda d: [d(B, H, D), *paged(d)[1:]])
def four_index_arrays(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    head, slot = torch.arange(HKV, device=q.device)[:, None, None], torch.arange(PAGE, device=q.device)
    pages = table.long()[:, None, :, None]
    k, v = (x[pages, slot, head].flatten(2, 3) for x in (k_pool, v_pool))
    return grouped(q, k, v, torch.arange(k.shape[2], device=q.device) >= lengths[:, None])


@CASES.fuse(lambda d: [d(B, H, D), d(d.n(26), HKV, PAGE, 2 * D), d.table(), d.lengths()])
def values_behind_keys_in_a_row(q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = pool[table].transpose(1, 2).reshape(B, HKV, -1, 2 * D).chunk(2, -1)
    return grouped(q, k, v, torch.arange(k.shape[2], device=q.device) >= lengths[:, None])


@CASES.fuse(lambda d: [d(7, H, D), *paged(d)[1:4], d.ints([0, 0, 0, 1, 1, 2, 2]), d.ints([45, 46, 47, 9, 10, 14, 15])])
def tokens_of_several_requests(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, owner: Tensor, position: Tensor
) -> Tensor:
    k, v = (x[table[owner.long()]].flatten(1, 2).transpose(1, 2) for x in (k_pool, v_pool))
    return grouped(q, k, v, torch.arange(k.shape[2], device=q.device) > position[:, None])


@CASES.fuse(lambda d: [*paged(d, M=4), d.ints([[0, 0, 0, 1]] * B)], note="ancestors by two lookups of parents")
def tree_of_parents(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, parents: Tensor
) -> Tensor:
    seen = torch.eye(4, dtype=torch.bool, device=q.device).expand(B, 4, 4)
    for _ in range(2):
        seen = seen | torch.gather(seen, 1, parents.long()[:, :, None].expand(-1, -1, 4))
    k, v = (x[table].flatten(1, 2).repeat_interleave(G, 2) for x in (k_pool, v_pool))
    place = torch.arange(k.shape[1], device=q.device) - (lengths - 4)[:, None]
    draft = torch.gather(seen, 2, place.clamp(0, 3)[:, None].expand(-1, 4, -1))
    keep = (place[:, None] < 0) | ((place[:, None] < 4) & draft)
    s = torch.einsum("bmhd,bnhd->bhmn", q, k) * SCALE
    return torch.einsum("bhmn,bnhd->bmhd", s.masked_fill(~keep[:, None], -INF).softmax(-1), v)


CASES.decline(used_pages, reason="segments of a list, which `index_add` adds up")(flat_page_list)
