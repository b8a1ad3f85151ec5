"""Decode over a cache: ragged batches, latent caches, static caches, writes in the same graph, and near misses.

Words and sizes as in `paged`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus.paged import HKV, PAGE, B, D, Draw, H, flat_batch, ragged, static_cache, with_new_tokens
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
SCALE = D**-0.5


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """q [B, M, H, D], k and v [B, N, Hkv, D], keep [B, M, N] or broadcast to it."""
    s = torch.einsum("bmhgd,bnhd->bhgmn", q.unflatten(2, (HKV, G)), k) * q.shape[-1] ** -0.5
    s = s.masked_fill(~keep[:, None, None], -INF)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


def before(lengths: Tensor, x: Tensor) -> Tensor:
    """[B, 1, N]: keys before the length; x has N rows along axis 1."""
    return (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[:, None]


# ----------------------------------------------------------------------------------------------------------------
# Ragged queries


@CASES.fuse(ragged, note="the sequence of each token by counting the starts at or before it")
def owners_by_comparison(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, cu_seqlens: Tensor
) -> Tensor:
    token = torch.arange(len(q), device=q.device)
    owner = (token[:, None] >= cu_seqlens[None, 1:]).sum(-1)
    position = token - cu_seqlens[owner] + lengths[owner] - (cu_seqlens[1:] - cu_seqlens[:-1])[owner]
    k, v = (x[table[owner]].flatten(1, 2) for x in (k_pool, v_pool))
    keep = torch.arange(k.shape[1], device=q.device) <= position[:, None]
    return attend(q[:, None], k, v, keep[:, None])[:, 0]


@CASES.fuse(ragged, note="searchsorted; the position of each token; scaled_dot_product_attention")
def owners_by_search(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, cu_seqlens: Tensor
) -> Tensor:
    token = torch.arange(len(q), device=q.device, dtype=torch.int32)
    owner = torch.searchsorted(cu_seqlens, token, right=True) - 1
    position = lengths[owner] - cu_seqlens[owner + 1] + token
    pages = table.index_select(0, owner)
    k, v = (x[pages].reshape(len(q), -1, HKV, D).transpose(1, 2) for x in (k_pool, v_pool))
    keep = torch.arange(k.shape[2], device=q.device)[None] <= position[:, None]
    out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=keep[:, None, None], enable_gqa=True)
    return out.squeeze(2)


def owned(d: Draw) -> tuple[Tensor, ...]:
    q, k_pool, v_pool, table, *_ = ragged(d)
    return q, k_pool, v_pool, table, d.ints([0, 1, 1, 1, 1, 2, 2]), d.ints([47, 7, 8, 9, 10, 14, 15])


@CASES.fuse(owned, note="nano-vllm, HF: the sequence and the position of each token come from the host")
def owners_given(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, owner: Tensor, position: Tensor) -> Tensor:
    k, v = (x[table[owner.long()].long()].flatten(1, 2) for x in (k_pool, v_pool))
    keep = torch.arange(k.shape[1], device=q.device)[None] <= position[:, None]
    return attend(q.unsqueeze(1), k, v, keep[:, None]).squeeze(1)


@CASES.fuse(flat_batch)
def one_row_of_slots(q: Tensor, k_pool: Tensor, v_pool: Tensor, read_index: Tensor, mask: Tensor) -> Tensor:
    """index_select on the flat pool, grouped heads, float32 scores"""
    k, v = (x.flatten(0, 1).index_select(0, read_index) for x in (k_pool, v_pool))
    s = torch.einsum("hgmd,nhd->hgmn", q[0].unflatten(0, (HKV, G)), k).float() * SCALE + mask[0].float()
    return torch.einsum("hgmn,nhd->mhgd", s.softmax(-1).to(q.dtype), v).flatten(1, 2)[None]


# ----------------------------------------------------------------------------------------------------------------
# Latent attention


def latent(d: Draw) -> tuple[Tensor, ...]:
    """q [B, H, 32 | 16], latent pages [P, page, 48 | 16], W_UK and W_UV [H, 32, 48]."""
    return d(B, H, 32), d(B, H, 16), d(d.n(26), PAGE, 64), d(H, 32, 48), d(H, 32, 48), d.table(), d.lengths()


def dead(lengths: Tensor, x: Tensor) -> Tensor:
    return (torch.arange(x.shape[1], device=x.device) >= lengths[:, None])[:, None]


@CASES.fuse(latent, note="DeepSeek absorbed, one product over the whole latent row")
def latent_rows(
    q_nope: Tensor, q_rope: Tensor, pool: Tensor, w_uk: Tensor, w_uv: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    q = torch.cat([torch.einsum("bhd,hdr->bhr", q_nope, w_uk), q_rope], -1)
    kv = pool[table].flatten(1, 2)
    s = torch.einsum("bhr,bnr->bhn", q, kv) * SCALE
    o = torch.einsum("bhn,bnr->bhr", s.masked_fill(dead(lengths, kv), -INF).softmax(-1), kv[..., :48])
    return torch.einsum("bhr,hdr->bhd", o, w_uv)


@CASES.fuse(latent, note="FlashMLA's reference: one key head for all, a slice of it for the values, SDPA by hand")
def latent_key_head(
    q_nope: Tensor, q_rope: Tensor, pool: Tensor, w_uk: Tensor, w_uv: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    q = torch.cat([(q_nope.transpose(0, 1) @ w_uk).transpose(0, 1), q_rope], -1).unsqueeze(2)
    kv = pool.unsqueeze(2)[table].reshape(len(table), -1, 1, 64).transpose(1, 2).expand(-1, H, -1, -1)
    s = (q.float() @ kv.float().transpose(-1, -2)) * SCALE
    s = s.masked_fill(dead(lengths, kv[:, 0])[:, None], -INF)
    o = torch.softmax(s, -1) @ kv[..., :48].float()
    return torch.einsum("bhr,hdr->bhd", o.squeeze(2).to(q.dtype), w_uv)


@CASES.fuse(latent, note="DeepSeek's reference: the two parts of the cache apart, two products summed")
def latent_in_two_pools(
    q_nope: Tensor, q_rope: Tensor, pool: Tensor, w_uk: Tensor, w_uv: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    kv_cache, pe_cache = pool[..., :48], pool[..., 48:]
    kv, pe = kv_cache[table].flatten(1, 2), pe_cache[table].flatten(1, 2)
    q = torch.einsum("bhd,hdr->bhr", q_nope, w_uk)
    s = (torch.einsum("bhr,bnr->bhn", q, kv) + torch.einsum("bhp,bnp->bhn", q_rope, pe)) * SCALE
    p = torch.where(dead(lengths, kv), -INF, s).softmax(-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bhr,hdr->bhd", torch.einsum("bhn,bnr->bhr", p, kv), w_uv)


# ----------------------------------------------------------------------------------------------------------------
# Static caches


def layer(d: Draw) -> tuple[Tensor, ...]:
    q, k_new, v_new, k_cache, v_cache, position, _ = static_cache(d)
    return q.transpose(1, 2), k_new, v_new, k_cache, v_cache, position


@CASES.fuse(layer, note="HF StaticCache: index_copy_, then the mask by comparison")
def index_copied(q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Tensor:
    k_cache.index_copy_(2, at, k_new)
    v_cache.index_copy_(2, at, v_new)
    k, v = (x[:, :, None].expand(-1, -1, G, -1, -1).reshape(B, H, -1, D) for x in (k_cache, v_cache))
    dead = torch.arange(k.shape[2], device=q.device)[None, :] > at[:, None]
    s = q @ k.transpose(2, 3) * SCALE + torch.zeros(dead.shape, dtype=q.dtype, device=q.device).masked_fill(
        dead, torch.finfo(q.dtype).min
    )
    return s.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


@CASES.fuse(layer, note="scatter_ along the keys")
def scattered(q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Tensor:
    where = at.view(1, 1, 1, 1).expand_as(k_new)
    k_cache.scatter_(2, where, k_new)
    v_cache.scatter_(2, where, v_new)
    keep = torch.arange(k_cache.shape[2], device=q.device) <= at
    return F.scaled_dot_product_attention(q, k_cache, v_cache, attn_mask=keep[None, None, None], enable_gqa=True)


@CASES.fuse(layer, note="torch.where over the whole cache, out of place, kept by the caller")
def blended(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor
) -> tuple[Tensor, ...]:
    n = torch.arange(k_cache.shape[2], device=q.device)
    here = (n == at)[None, None, :, None]
    k, v = torch.where(here, k_new, k_cache), torch.where(here, v_new, v_cache)
    s = torch.einsum("bhgmd,bhnd->bhgmn", q.unflatten(1, (HKV, G)), k) * SCALE
    p = s.masked_fill(n > at, -INF).softmax(-1)
    return torch.einsum("bhgmn,bhnd->bhgmd", p, v).flatten(1, 2), k, v


@CASES.fuse(layer, note="a functional index_put")
def put_out_of_place(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor
) -> tuple[Tensor, ...]:
    k, v = (x.index_copy(2, at, new) for x, new in ((k_cache, k_new), (v_cache, v_new)))
    keep = (torch.arange(k.shape[2], device=q.device) <= at)[None, None, None]
    s = torch.where(keep, q @ k.repeat_interleave(G, 1).mT * SCALE, -INF)
    return s.softmax(-1) @ v.repeat_interleave(G, 1), k, v


@CASES.fuse(lambda d: (*layer(d)[:5], d.ints([29, 10, 15])), note="a position of each sequence")
def position_of_each(q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Tensor:
    row = torch.arange(len(q), device=q.device)
    k_cache[row, :, at] = k_new[:, :, 0]
    v_cache[row, :, at] = v_new[:, :, 0]
    keep = torch.arange(k_cache.shape[2], device=q.device) <= at[:, None]
    return F.scaled_dot_product_attention(q, k_cache, v_cache, attn_mask=keep[:, None, None], enable_gqa=True)


@CASES.fuse(layer, note="gpt-fast's filled slice: a cache longer than what is used")
def slice_of_the_cache(q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Tensor:
    k_cache[:, :, at], v_cache[:, :, at] = k_new, v_new
    k, v = (x[:, :, :40].repeat_interleave(G, 1) for x in (k_cache, v_cache))
    s = (q @ k.mT * SCALE).masked_fill(torch.arange(40, device=q.device) > at, -INF)
    return s.softmax(-1) @ v


@CASES.fuse(layer, note="HF SlidingWindowCache: rolled, the newest at the end")
def rolled(q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Tensor:
    k, v = (torch.cat([x[:, :, 1:], new], 2) for x, new in ((k_cache, k_new), (v_cache, v_new)))
    k_cache.copy_(k)
    v_cache.copy_(v)
    n = torch.arange(k.shape[2], device=q.device)
    keep = n >= k.shape[2] - 1 - at
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[None, None, None], enable_gqa=True)


# ----------------------------------------------------------------------------------------------------------------
# Writes by slot


@CASES.fuse(with_new_tokens)
def index_put_of_slots(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    for pool, new in ((k_pool, k_new), (v_pool, v_new)):
        pool.index_put_((at // PAGE, at % PAGE), new)
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    return attend(q, k, v, before(lengths, k))


@CASES.fuse(with_new_tokens)
def index_copy_of_slots(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    for pool, new in ((k_pool, k_new), (v_pool, v_new)):
        pool.view(-1, HKV * D).index_copy_(0, at, new.flatten(1))
    k, v = (x.index_select(0, table.flatten()).view(len(table), -1, HKV, D) for x in (k_pool, v_pool))
    return attend(q, k, v, before(lengths, k))


@CASES.fuse(with_new_tokens, note="a padded token goes to the at -1: the last one, which nobody reads")
def slots_of_padding(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k_flat, v_flat = k_pool.flatten(0, 1), v_pool.flatten(0, 1)
    k_flat[at], v_flat[at] = k_new, v_new
    n = torch.arange(table.shape[1] * PAGE, device=q.device)
    slots = table.long()[:, n // PAGE] * PAGE + n % PAGE
    k, v = k_flat[slots], v_flat[slots]
    return attend(q, k, v, before(lengths, k))


@CASES.fuse(with_new_tokens)
def scatter_of_slots(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    where = at[:, None, None].expand(-1, HKV, D)
    k_pool.view(-1, HKV, D).scatter_(0, where, k_new)
    v_pool.view(-1, HKV, D).scatter_(0, where, v_new)
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    return attend(q, k, v, before(lengths, k))


@CASES.fuse(with_new_tokens, note="pools returned, not written: JAX ports")
def pools_returned(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> tuple[Tensor, ...]:
    k_pool, v_pool = (x.index_put((at // PAGE, at % PAGE), new) for x, new in ((k_pool, k_new), (v_pool, v_new)))
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    return attend(q, k, v, before(lengths, k)), k_pool, v_pool
