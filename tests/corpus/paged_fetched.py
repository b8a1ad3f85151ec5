"""Decode over a paged cache: ways to fetch the pages, and layouts of the pool.

Words and sizes as in `paged`. G = H / Hkv query heads share a key head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from corpus.paged import HKV, PAGE, B, D, Draw, H, one_empty, paged
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """q [B, M, H, D], k and v [B, N, Hkv, D]: all M queries see the keys before the length."""
    s = torch.einsum("bmhgd,bnhd->bhgmn", q.unflatten(2, (HKV, G)), k) * q.shape[-1] ** -0.5
    dead = torch.arange(k.shape[1], device=q.device) >= lengths.view(-1, 1, 1, 1, 1)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.masked_fill(dead, -INF).softmax(-1), v).flatten(2, 3)


# ----------------------------------------------------------------------------------------------------------------
# Slots of a flat cache, in other arithmetic


def by_slot(q: Tensor, k_pool: Tensor, v_pool: Tensor, slot: Tensor, lengths: Tensor) -> Tensor:
    """slot [B, N]"""
    k, v = (x.flatten(0, 1)[slot] for x in (k_pool, v_pool))
    return attend(q, k, v, lengths)


@CASES.fuse(paged)
def shifted_and_masked_bits(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n = torch.arange(table.shape[1] * PAGE, device=q.device)
    return by_slot(q, k_pool, v_pool, (table[:, n >> 3].long() << 3) + (n & 7), lengths)


@CASES.fuse(paged)
def bits_joined_by_or(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n = torch.arange(table.shape[1] * PAGE, device=q.device)
    return by_slot(q, k_pool, v_pool, (table.long()[:, n >> 3] << 3) | (n & (PAGE - 1)), lengths)


@CASES.fuse(paged)
def divided_and_remaindered(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n = torch.arange(table.size(1) * PAGE, device=q.device)
    page = torch.div(n, PAGE, rounding_mode="trunc")
    offset = torch.fmod(n, PAGE)
    return by_slot(q, k_pool, v_pool, table.gather(1, page.expand(len(table), -1)) * PAGE + offset, lengths)


@CASES.fuse(paged)
def offset_by_subtraction(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n = torch.arange(table.shape[1] * PAGE, device=q.device)
    page = n // PAGE
    slot = torch.take_along_dim(table.long(), page[None], 1) * PAGE + (n - page * PAGE)
    return by_slot(q, k_pool, v_pool, slot, lengths)


@CASES.fuse(paged)
def table_repeated_by_page(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """LMDeploy and teaching notebooks"""
    offset = torch.arange(PAGE, device=q.device).repeat(table.shape[1])
    return by_slot(q, k_pool, v_pool, table.repeat_interleave(PAGE, dim=1) * PAGE + offset, lengths)


@CASES.fuse(paged)
def slots_outer_sum(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    slot = (table.unsqueeze(-1) * PAGE + torch.arange(PAGE, device=q.device, dtype=table.dtype)).reshape(len(table), -1)
    return by_slot(q, k_pool, v_pool, slot, lengths)


@CASES.fuse(paged)
def slots_clamped(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """-1 marks a page that is not there"""
    table = torch.where(torch.arange(table.shape[1], device=q.device) * PAGE < lengths[:, None], table, -1)
    slot = table.clamp(min=0)[:, :, None] * PAGE + torch.arange(PAGE, device=q.device)
    return by_slot(q, k_pool, v_pool, slot.flatten(1), lengths)


def request_slots(d: Draw) -> tuple[Tensor, ...]:
    """SGLang: req_to_token [requests, N], req_pool_indices [B]."""
    q, k_pool, v_pool, _, lengths = paged(d)
    slots = torch.stack([torch.randperm(len(k_pool) * PAGE, generator=d.generator)[: d.n(6) * PAGE] for _ in range(7)])
    return q, k_pool.flatten(0, 1), v_pool.flatten(0, 1), slots.to(d.device, torch.int32), d.ints([5, 0, 3]), lengths


@CASES.fuse(request_slots, note="SGLang: the row of the request, then its token slots")
def slots_of_requests(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor, requests: Tensor, lengths: Tensor
) -> Tensor:
    tokens = req_to_token[requests.long()]
    k, v = k_cache[tokens.long()], v_cache[tokens.long()]
    return attend(q, k, v, lengths)


@CASES.fuse(request_slots)
def slots_selected_then_embedded(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor, requests: Tensor, lengths: Tensor
) -> Tensor:
    tokens = req_to_token.index_select(0, requests)
    k, v = (F.embedding(tokens, x.flatten(1)).unflatten(-1, (HKV, D)) for x in (k_cache, v_cache))
    return attend(q, k, v, lengths)


# ----------------------------------------------------------------------------------------------------------------
# Operations that fetch


@CASES.fuse(paged)
def pages_gathered(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    at = table.long().flatten()[:, None, None, None].expand(-1, *k_pool.shape[1:])
    k, v = (x.gather(0, at).view(len(table), -1, HKV, D) for x in (k_pool, v_pool))
    return attend(q, k, v, lengths)


@CASES.fuse(paged)
def pages_taken_along(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    at = table.long().view(len(table), -1, 1, 1, 1)
    k, v = (torch.take_along_dim(x[None], at, 1).flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, lengths)


@CASES.fuse(paged)
def pages_embedded(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (F.embedding(table, x.reshape(len(x), -1)).view(len(table), -1, HKV, D) for x in (k_pool, v_pool))
    return attend(q, k, v, lengths)


@CASES.fuse(paged)
def pages_by_request(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One request at a time under vmap"""

    def one(q: Tensor, pages: Tensor, length: Tensor) -> Tensor:
        k, v = (x[pages].flatten(0, 1).repeat_interleave(G, 1) for x in (k_pool, v_pool))
        s = torch.einsum("mhd,nhd->hmn", q, k) / math.sqrt(D)
        s = s.masked_fill(torch.arange(len(k), device=q.device) >= length, -INF)
        return torch.einsum("hmn,nhd->mhd", s.softmax(-1), v)

    return torch.vmap(one)(q, table, lengths)


@CASES.fuse(paged)
def one_block_at_a_time(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Teaching notebooks: fetch each column of the table, and put the blocks together"""
    k, v = (torch.cat([x[table[:, i]] for i in range(table.shape[1])], 1) for x in (k_pool, v_pool))
    return attend(q, k, v, lengths)


@CASES.fuse(paged)
def blocks_stacked(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (torch.stack([x[i] for i in table.unbind(1)], 1).flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, lengths)


@CASES.fuse(paged)
def requests_stacked(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (torch.stack([x[table[b]].flatten(0, 1) for b in range(len(table))]) for x in (k_pool, v_pool))
    return attend(q, k, v, lengths)


@CASES.fuse(paged, count=3)
def loop_over_requests(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """A fixed number of requests, the length a tensor"""
    out = []
    for b in range(len(table)):
        k, v = (x[table[b]].reshape(-1, HKV, D).repeat_interleave(G, 1).transpose(0, 1) for x in (k_pool, v_pool))
        live = torch.arange(k.shape[1], device=q.device) < lengths[b]
        out.append(F.scaled_dot_product_attention(q[b].transpose(0, 1), k, v, attn_mask=live[None, None]))
    return torch.stack(out).transpose(1, 2)


@CASES.fuse(paged)
def head_in_the_index(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Every query head names its key head in the same advanced index"""
    head = torch.arange(H, device=q.device) // G
    k, v = (x[table[:, None, :], :, head[None, :, None]].flatten(2, 3) for x in (k_pool, v_pool))
    s = q.transpose(1, 2) @ k.mT * D**-0.5
    live = torch.arange(k.shape[2], device=q.device) < lengths[:, None, None, None]
    return (torch.where(live, s, -INF).softmax(-1) @ v).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------
# Layouts of the pool


def split_d(d: Draw, x: int = 8) -> tuple[Tensor, ...]:
    """vLLM v0: keys [P, Hkv, D / x, page, x], values [P, Hkv, D, page]."""
    q, k_pool, v_pool, table, lengths = paged(d)
    k_pool = k_pool.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
    return q, k_pool, v_pool.permute(0, 2, 3, 1).contiguous(), table, lengths


@CASES.fuse(split_d, note="vLLM v0, xFormers")
def split_head_size(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k = k_cache[table].permute(0, 1, 4, 2, 3, 5).reshape(len(table), -1, HKV, D)
    v = v_cache[table].permute(0, 1, 4, 2, 3).reshape(len(table), -1, HKV, D)
    return attend(q, k, v, lengths)


@CASES.fuse(split_d, note="each position fetched by block and offset, as vLLM's first reference test does")
def split_head_size_by_position(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n = torch.arange(table.shape[1] * PAGE, device=q.device)
    block, offset = table[:, n // PAGE].long(), n % PAGE
    k = k_cache[block, :, :, offset, :].reshape(len(table), -1, HKV, D)
    v = v_cache[block, :, :, offset]
    return attend(q, k, v, lengths)


def layers(d: Draw) -> tuple[Tensor, ...]:
    """One tensor [L, 2, P, page, Hkv, D] for all layers."""
    q, *_, table, lengths = paged(d)
    return q, d(3, 2, d.n(26), PAGE, HKV, D), table, lengths


@CASES.fuse(layers)
def layer_of_a_stack(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = cache[1, 0][table], cache[1, 1][table]
    return attend(q, k.flatten(1, 2), v.flatten(1, 2), lengths)


@CASES.fuse(layers)
def layer_keys_and_values_at_once(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = cache[2][:, table].flatten(2, 3)
    return attend(q, k, v, lengths)


@CASES.fuse(lambda d: (d(B, 1, H, D), d(d.n(26), PAGE, 2 * HKV, D), d.table(), d.lengths()), note="TPU: K and V heads")
def heads_of_keys_and_values_interleaved(q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    kv = pool[table].flatten(1, 2)
    return attend(q, kv[..., 0::2, :], kv[..., 1::2, :], lengths)


@CASES.fuse(lambda d: (d(B, 1, H, D), d(d.n(26), HKV, PAGE, 2 * D), d.table(), d.lengths()))
def keys_beside_values(q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    kv = pool.index_select(0, table.view(-1)).view(len(table), -1, HKV, PAGE, 2 * D).transpose(2, 3).flatten(1, 2)
    k, v = kv.chunk(2, -1)
    return attend(q, k, v, lengths)


@CASES.fuse(paged, note="JetStream: [Hkv, P, page, D]")
def heads_outermost(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k_pages, v_pages = k_pool.permute(2, 0, 1, 3), v_pool.permute(2, 0, 1, 3)
    k, v = (x[:, table].permute(1, 0, 2, 3, 4).reshape(len(table), HKV, -1, D) for x in (k_pages, v_pages))
    s = torch.einsum("bhgd,bhnd->bhgn", q.view(-1, HKV, G, D), k) * D**-0.5
    s = s + torch.where(torch.arange(k.shape[2], device=q.device) < lengths[:, None], 0.0, -INF)[:, None, None]
    return torch.einsum("bhgn,bhnd->bhgd", s.softmax(-1).to(v.dtype), v).reshape(q.shape)


@CASES.fuse(lambda d: (d(B, 1, H, D), d(d.n(26), PAGE, 96), d.table(), d.lengths()), note="a slice of a wider pool")
def strided_rows(q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].reshape(len(table), -1, 1, D).expand(-1, -1, HKV, -1) for x in (pool[..., 32:64], pool[..., 64:]))
    return attend(q, k, v, lengths)


@CASES.fuse(one_empty)
def sequence_without_keys(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """NaN, as eager gives"""
    return attend(q, k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2), lengths)
