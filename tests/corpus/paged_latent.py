"""Decode as inference engines write it: latent caches, few bits, trees of drafts, ragged queries, parts merged.

Words and sizes as in `paged`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus.paged import BF16, F16, F32, HKV, PAGE, POOL, B, D, Draw, H, flat_batch, paged, ragged
from corpus.paged_masked import drafts, fetched
from corpus.paged_written import latent
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
SCALE = D**-0.5
MASKED = -1e30


def places(table: Tensor) -> Tensor:
    return torch.arange(table.shape[1] * PAGE, device=table.device)


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """q [B, M, H, D], k and v [B, N, Hkv, D], keep [B, M, N] or broadcast to it."""
    s = torch.einsum("bmhgd,bnhd->bhgmn", q.unflatten(2, (-1, q.shape[2] // k.shape[2])), k) * q.shape[-1] ** -0.5
    s = s.masked_fill(~keep[:, None, None], -INF)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


# ----------------------------------------------------------------------------------------------------------------
# Latent attention


@CASES.fuse(latent, note="not absorbed: keys and values of every head are made from the latent rows")
def latent_projected(
    q_nope: Tensor, q_rope: Tensor, pool: Tensor, w_uk: Tensor, w_uv: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    kv, pe = pool[table].flatten(1, 2).split([48, 16], -1)
    k = torch.cat([torch.einsum("bnr,hdr->bhnd", kv, w_uk), pe[:, None].expand(-1, H, -1, -1)], -1)
    v = torch.einsum("bnr,hdr->bhnd", kv, w_uv)
    q = torch.cat([q_nope, q_rope], -1)[:, :, None]
    keep = (places(table) < lengths[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep).squeeze(2)


@CASES.fuse(lambda d: (d(B, 3, H, 48), d(B, 3, H, 16), *latent(d)[2::3], d.table(), d.lengths()), note="MTP: drafts")
def latent_drafts(q_nope: Tensor, q_rope: Tensor, pool: Tensor, w: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    kv = pool[table].flatten(1, 2)
    s = torch.einsum("bmhr,bnr->bhmn", q_nope, kv[..., :48]) + torch.einsum("bmhr,bnr->bhmn", q_rope, kv[..., 48:])
    last = lengths[:, None] - 3 + torch.arange(3, device=pool.device)
    s = (s * 0.125).masked_fill((places(table) > last[..., None])[:, None], -INF)
    return torch.einsum("bhmn,bnr->bmhr", s.softmax(-1, dtype=torch.float32).to(kv.dtype), kv[..., :48])


def latent8(d: Draw) -> tuple[Tensor, ...]:
    q_nope, q_rope, pool, *_, table, lengths = latent(d)
    q = torch.cat([q_nope, q_nope[..., :16], q_rope], -1)
    return q, pool.clamp(-3, 3).to(torch.float8_e4m3fn), d(d.n(POOL), PAGE, 1).abs() + 0.5, table, lengths


@CASES.fuse(latent8, dtypes=(BF16, F32, F16), note="a latent cache in float8, a scale of each token")
def latent_in_float8(q: Tensor, pool: Tensor, scale: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    kv = (pool[table].to(q.dtype) * scale[table]).flatten(1, 2)
    s = torch.einsum("bhr,bnr->bhn", q, kv) * 0.125
    s = s.masked_fill((places(table) >= lengths[:, None])[:, None], -INF)
    return torch.einsum("bhn,bnr->bhr", s.softmax(-1), kv[..., :48])


@CASES.fuse(lambda d: (d(B, H, D), d(d.n(POOL), PAGE, D), d.table(), d.lengths()), note="one latent row is K and V")
def keys_are_values(q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    kv = pool[table].flatten(1, 2)
    s = (q @ kv.mT * SCALE).masked_fill((places(table) >= lengths[:, None])[:, None], -INF)
    return s.softmax(-1) @ kv


# ----------------------------------------------------------------------------------------------------------------
# Few bits


def float8_as_bytes(d: Draw) -> tuple[Tensor, ...]:
    q, k_pool, v_pool, table, lengths = paged(d)
    k8, v8 = (x.clamp(-3, 3).to(torch.float8_e4m3fn).view(torch.uint8) for x in (k_pool, v_pool))
    return q, k8, v8, d(HKV).abs() + 0.5, d(HKV).abs() + 0.5, table, lengths


@CASES.fuse(float8_as_bytes, dtypes=(BF16, F32, F16), note="vLLM: the pool is uint8, looked at as float8")
def bytes_as_float8(
    q: Tensor, k8: Tensor, v8: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = (
        x.view(torch.float8_e4m3fn)[table].flatten(1, 2).to(q.dtype) * s[:, None]
        for x, s in ((k8, k_scale), (v8, v_scale))
    )
    return attend(q, k, v, (places(table) < lengths[:, None])[:, None])


def by_channel(d: Draw) -> tuple[Tensor, ...]:
    """uint8 pools; a scale and a zero point of each channel of a head."""
    q, k_pool, v_pool, table, lengths = paged(d)
    low, high = k_pool.float().amin((0, 1)), k_pool.float().amax((0, 1))
    scale, zero = (high - low) / 255, (-low / (high - low) * 255).round()
    k8, v8 = (((x.float() / scale) + zero).round().clamp(0, 255).to(torch.uint8) for x in (k_pool, v_pool))
    return q, k8, v8, scale.to(d.dtype), zero.to(d.dtype), table, lengths


@CASES.fuse(by_channel, note="KIVI: keys by channel")
def scale_and_zero_of_each_channel(
    q: Tensor, k8: Tensor, v8: Tensor, scale: Tensor, zero: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = ((x[table].to(q.dtype) - zero) * scale for x in (k8, v8))
    return attend(q, k.flatten(1, 2), v.flatten(1, 2), (places(table) < lengths[:, None])[:, None])


@CASES.fuse(by_channel)
def scale_of_each_channel_after_the_view(
    q: Tensor, k8: Tensor, v8: Tensor, scale: Tensor, zero: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = (x[table].flatten(1, 2).transpose(1, 2).repeat_interleave(G, 1).to(q.dtype) for x in (k8, v8))
    k, v = k * scale.repeat_interleave(G, 0)[:, None], v * scale.repeat_interleave(G, 0)[:, None]
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill((places(table) >= lengths[:, None])[:, None, None], -INF)
    return (s.softmax(-1) @ v).transpose(1, 2)


def by_token(d: Draw) -> tuple[Tensor, ...]:
    """uint8 pools; a scale and a zero point of each token and head, together."""
    q, k_pool, v_pool, table, lengths = paged(d)
    made = []
    for x in (k_pool.float(), v_pool.float()):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        scale = (high - low) / 255
        made += [((x - low) / scale).round().to(torch.uint8), torch.cat([scale, -low / scale], -1).to(d.dtype)]
    return q, made[0], made[2], made[1], made[3], table, lengths


@CASES.fuse(by_token, note="LMDeploy: asymmetric, scale and zero point of each token side by side")
def scale_and_zero_of_each_token(
    q: Tensor, k8: Tensor, v8: Tensor, k_meta: Tensor, v_meta: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = ((x[table].to(q.dtype) - m[table][..., 1:]) * m[table][..., :1] for x, m in ((k8, k_meta), (v8, v_meta)))
    return attend(q, k.flatten(1, 2), v.flatten(1, 2), (places(table) < lengths[:, None])[:, None])


@CASES.fuse(by_token, note="HQQ, FlexGen: x scale + offset")
def scale_then_offset(
    q: Tensor, k8: Tensor, v8: Tensor, k_meta: Tensor, v_meta: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = (
        x[table].to(q.dtype) * m[table][..., :1] - m[table][..., 1:] * 0.01 for x, m in ((k8, k_meta), (v8, v_meta))
    )
    return attend(q, k.flatten(1, 2), v.flatten(1, 2), (places(table) < lengths[:, None])[:, None])


@CASES.either(by_channel, note="two numbers of four bits in a byte")
def nibbles(q: Tensor, k8: Tensor, v8: Tensor, scale: Tensor, zero: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    def unpacked(x: Tensor) -> Tensor:
        both = torch.stack([x & 15, x >> 4], -1).flatten(-2).to(q.dtype)
        return (both[..., :D] - 7.5).flatten(1, 2) * 0.2

    return attend(q, unpacked(k8[table]), unpacked(v8[table]), (places(table) < lengths[:, None])[:, None])


# ----------------------------------------------------------------------------------------------------------------
# Drafts and ragged queries


def tree(d: Draw) -> tuple[Tensor, ...]:
    """Four drafts of each sequence; bit j of row i says that draft i comes after draft j."""
    return *drafts(d), d.ints([0b0001, 0b0011, 0b0101, 0b1011], torch.int64)


@CASES.fuse(tree, note="SpecInfer, TensorRT-LLM: the tree packed in bits")
def tree_in_bits(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, bits: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    m = q.shape[1]
    draft = places(table) - (lengths[:, None] - m)
    seen = (bits[None, :, None] >> draft.clamp(0, m - 1)[:, None]) & 1
    keep = (draft < 0)[:, None] | ((seen == 1) & (draft < m)[:, None])
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~keep[:, None], -INF)
    return (s.softmax(-1) @ v).transpose(1, 2)


@CASES.fuse(lambda d: (*drafts(d), d(B, 4, 48) > -0.5), note="SGLang: the whole mask is given, lengths beside it")
def mask_given(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, given: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    n = k.shape[1]
    keep = F.pad(given, (0, n - given.shape[2]), value=False) & (places(table) < lengths[:, None])[:, None]
    return attend(q, k, v, keep)


@CASES.fuse(ragged, note="owners by repeat_interleave of a fixed total; a window and a soft cap")
def owners_repeated(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, cu_seqlens: Tensor
) -> Tensor:
    new = cu_seqlens.diff()
    owner = torch.repeat_interleave(torch.arange(len(new), device=q.device), new, output_size=len(q))
    position = (lengths - new)[owner] + torch.arange(len(q), device=q.device) - cu_seqlens[owner]
    k, v = (x[table[owner]].flatten(1, 2) for x in (k_pool, v_pool))
    s = torch.einsum("thgd,tnhd->thgn", q.view(-1, HKV, G, D), k) * SCALE
    s = 20 * torch.tanh(s / 20)
    n = torch.arange(k.shape[1], device=q.device)
    keep = (n <= position[:, None]) & (n > position[:, None] - 12)
    p = s.masked_fill(~keep[:, None, None], -INF).softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.einsum("thgn,tnhd->thgd", p, v).reshape(q.shape)


@CASES.fuse(flat_batch, note="all sequences in one row, whose is whose by their numbers")
def one_row_by_owner(q: Tensor, k_pool: Tensor, v_pool: Tensor, read_index: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.flatten(0, 1)[read_index].permute(1, 0, 2) for x in (k_pool, v_pool))
    owner = mask[0, 0].argmax(0)
    keep = owner[None] == torch.arange(q.shape[2], device=q.device)[:, None]
    return F.scaled_dot_product_attention(q[0], k.repeat_interleave(G, 0), v.repeat_interleave(G, 0), keep[None])[None]


# ----------------------------------------------------------------------------------------------------------------
# Parts that are merged


def part(q: Tensor, k: Tensor, v: Tensor, dead: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """O and log-sum-exp [B, H, M, 1] over k and v [B, N, Hkv, D]."""
    k, v = (x.transpose(1, 2).repeat_interleave(G, 1) for x in (k, v))
    s = (q.transpose(1, 2) @ k.mT * SCALE).float().masked_fill(dead[:, None, None], fill)
    lse = s.logsumexp(-1, keepdim=True)
    return torch.exp(s - lse).to(v.dtype) @ v, lse


def merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    top = torch.maximum(a[1], b[1])
    wa, wb = (a[1] - top).exp(), (b[1] - top).exp()
    return ((a[0] * wa + b[0] * wb) / (wa + wb)).transpose(1, 2).to(a[0].dtype)


@CASES.fuse(lambda d: (*paged(d), d(19, HKV, D), d(19, HKV, D)), count=2, note="cascade: a prefix that all share")
def shared_prefix(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, k_first: Tensor, v_first: Tensor
) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    own = part(q, k, v, places(table) >= lengths[:, None], -INF)
    k, v = (x[None].expand(len(q), -1, -1, -1) for x in (k_first, v_first))
    return merged(part(q, k, v, torch.zeros(1, 19, dtype=torch.bool, device=q.device), -INF), own)


def new_token(d: Draw) -> tuple[Tensor, ...]:
    return *paged(d), d(B, 1, HKV, D), d(B, 1, HKV, D)


@CASES.fuse(new_token, count=2, note="the new token apart from its past; left to eager in training")
def past_and_present(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, k_new: Tensor, v_new: Tensor
) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    past = part(q, k, v, places(table) >= lengths[:, None] - 1, MASKED)
    return merged(past, part(q, k_new, v_new, torch.zeros(1, 1, dtype=torch.bool, device=q.device), MASKED))


@CASES.fuse(paged, count=2, note="the second half may be empty; left to eager in training")
def halves_of_the_table(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n, half = places(table)[: table.shape[1] * PAGE // 2], table.shape[1] // 2
    (k1, k2), (v1, v2) = (x[table].flatten(1, 2).split(half * PAGE, 1) for x in (k_pool, v_pool))
    first = part(q, k1, v1, n >= lengths[:, None], MASKED)
    return merged(first, part(q, k2, v2, n + half * PAGE >= lengths[:, None], MASKED))


@CASES.fuse(lambda d: (*paged(d), d(B, 5, HKV, D), d(B, 5, HKV, D)), note="the prefix in pages, the rest beside it")
def pages_beside_new_tokens(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, k_new: Tensor, v_new: Tensor
) -> Tensor:
    k, v = (torch.cat([x[table].flatten(1, 2), new], 1) for x, new in ((k_pool, k_new), (v_pool, v_new)))
    n = torch.arange(k.shape[1], device=q.device)
    keep = (n < lengths[:, None]) | (n >= k.shape[1] - 5)
    return attend(q, k, v, keep[:, None])
