"""Decode over a paged cache: ways to say the lengths, functions of the scores, quantised pages.

Words and sizes as in `paged`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from corpus.paged import BF16, F16, F32, HKV, PAGE, D, Draw, H, paged
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
SCALE = D**-0.5


def fetched(k_pool: Tensor, v_pool: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H, N, D]"""
    k, v = (x[table].flatten(1, 2).transpose(1, 2).repeat_interleave(G, 1) for x in (k_pool, v_pool))
    return k, v


def drafts(d: Draw) -> tuple[Tensor, ...]:
    """Four new tokens of each sequence."""
    return paged(d, M=4)


# ----------------------------------------------------------------------------------------------------------------
# Lengths


@CASES.fuse(paged)
def positions_of_the_queries(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """key <= position, as with a cache position"""
    k, v = fetched(k_pool, v_pool, table)
    position = lengths - 1
    visible = torch.arange(k.shape[2], device=q.device).expand(len(table), -1) <= position.unsqueeze(1)
    s = q.transpose(1, 2) @ k.mT * SCALE
    return (s.masked_fill(visible.logical_not()[:, None, None], -INF).softmax(-1) @ v).transpose(1, 2)


@CASES.fuse(paged)
def bias_made_in_place(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    bias = torch.zeros(len(table), 1, 1, k.shape[2], dtype=q.dtype, device=q.device)
    bias.masked_fill_((torch.arange(k.shape[2], device=q.device) >= lengths[:, None])[:, None, None], -INF)
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bias).transpose(1, 2)


@CASES.fuse(paged)
def bias_from_a_product(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """(1 - mask) * min"""
    k, v = fetched(k_pool, v_pool, table)
    mask = (torch.arange(k.shape[2], device=q.device)[None] < lengths[:, None]).to(q.dtype)
    s = torch.matmul(q.transpose(1, 2), k.transpose(2, 3)) / math.sqrt(D)
    s = s + (1.0 - mask)[:, None, None, :] * torch.finfo(q.dtype).min
    return (F.softmax(s, -1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


@CASES.fuse(paged)
def lowest_number_chosen(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    live = torch.arange(k.shape[2], device=q.device)[None, None, None] < lengths[:, None, None, None]
    s = torch.where(live, q.transpose(1, 2) @ k.mT * SCALE, torch.finfo(q.dtype).min)
    return (s.softmax(-1) @ v).transpose(1, 2)


@CASES.fuse(paged)
def weights_zeroed(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The exponentials of dead keys times 0, then normalised"""
    k, v = fetched(k_pool, v_pool, table)
    live = torch.arange(k.shape[2], device=q.device) < lengths[:, None, None, None]
    s = (q.transpose(1, 2) @ k.mT * SCALE).float()
    e = (s - s.amax(-1, keepdim=True)).exp() * live
    return ((e / e.sum(-1, keepdim=True)).to(q.dtype) @ v).transpose(1, 2)


@CASES.fuse(lambda d: (*paged(d)[:4], d.ints([[d.n(6) * PAGE - 1], [10], [15]], torch.int64)), note="position ids")
def cache_position(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, position_ids: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    causal = torch.arange(k.shape[2], device=q.device)[None, None] <= position_ids[:, :, None]
    bias = torch.full(causal.shape, torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device).masked_fill(causal, 0)
    s = q.transpose(1, 2) @ k.mT * SCALE + bias[:, None]
    return (s.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


@CASES.fuse(paged)
def left_to_right_distance(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """0 <= position - key < window"""
    k, v = fetched(k_pool, v_pool, table)
    back = (lengths[:, None] - 1) - torch.arange(k.shape[2], device=q.device)
    keep = (back >= 0) & (back < 13)
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~keep[:, None, None], -1e4)
    return (s.softmax(-1) @ v).transpose(1, 2)


@CASES.fuse(paged)
def window_begins_late(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The first key of the window, never before 0"""
    k, v = fetched(k_pool, v_pool, table)
    first = (lengths - 13).clamp(min=0)
    n = torch.arange(k.shape[2], device=q.device)
    dead = (n[None] < first[:, None]) | (n[None] >= lengths[:, None])
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(dead[:, None, None], -INF)
    return (s.softmax(-1) @ v).transpose(1, 2)


@CASES.fuse(lambda d: (*paged(d), d.ints([0, 3, 9])), note="left padding: each sequence begins at its own key")
def left_padded(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, start: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    n = torch.arange(k.shape[2], device=q.device)[None]
    keep = torch.logical_and(n >= start[:, None], n < lengths[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=keep).transpose(1, 2)


@CASES.fuse(paged, note="attention sinks of StreamingLLM: the first keys and the last")
def first_keys_and_window(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    n, end = torch.arange(k.shape[2], device=q.device)[None], lengths[:, None]
    keep = (n < end) & ((n < 4) | (n >= end - 10))
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~keep[:, None, None], -INF)
    return (s.softmax(-1) @ v).transpose(1, 2)


@CASES.fuse(drafts, note="FlashInfer's reference: causal from the end")
def bottom_right(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    m, n = q.shape[1], k.shape[2]
    row = torch.arange(m, device=q.device)[None, :, None]
    column = torch.arange(n, device=q.device)[None, None]
    keep = column < (row + 1 + lengths[:, None, None] - m)
    s = torch.einsum("bmhd,bhnd->bhmn", q, k) * SCALE
    return torch.einsum("bhmn,bhnd->bmhd", s.masked_fill(~keep[:, None], -INF).softmax(-1), v)


@CASES.fuse(lambda d: (*drafts(d), d.ints([4, 2, 3])), note="chunked prefill, padded: context lengths and new lengths")
def chunks_of_prompts(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, new: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    position = (lengths - new)[:, None] + torch.arange(q.shape[1], device=q.device)
    keep = torch.arange(k.shape[2], device=q.device) <= position[..., None]
    s = q.transpose(1, 2) @ k.mT * SCALE
    return (torch.where(keep[:, None], s, -INF).softmax(-1) @ v).transpose(1, 2)


def tree(d: Draw) -> tuple[Tensor, ...]:
    """Which of the four drafts each draft comes after."""
    after = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], device=d.device).bool()
    return *drafts(d), after


@CASES.fuse(tree, note="Medusa, EAGLE: a tree of drafts, the mask is data behind the context")
def tree_of_drafts(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, after: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    m = q.shape[1]
    draft = torch.arange(k.shape[2], device=q.device) - (lengths[:, None] - m)
    seen = after[:, draft.clamp(0, m - 1)].transpose(0, 1) & (draft < m)[:, None]
    keep = torch.where((draft < 0)[:, None], True, seen)
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~keep[:, None], -INF)
    return (s.softmax(-1) @ v).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------
# Functions of the scores


@CASES.fuse(lambda d: (*paged(d), d(H)), note="gpt-oss: a column of sinks, cut off again")
def sinks_as_a_column(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, sinks: Tensor
) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    dead = torch.arange(k.shape[2], device=q.device) >= lengths[:, None, None, None]
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(dead, torch.finfo(q.dtype).min)
    both = torch.cat([s, sinks.view(1, -1, 1, 1).expand(len(table), -1, 1, 1)], -1)
    return (F.softmax(both, -1)[..., :-1] @ v).transpose(1, 2)


@CASES.fuse(lambda d: (*paged(d), d(H)))
def sinks_in_the_sum(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, sinks: Tensor
) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    dead = torch.arange(k.shape[2], device=q.device) >= lengths[:, None, None, None]
    s = (q.transpose(1, 2) @ k.mT * SCALE).float().masked_fill(dead, -INF)
    sink = sinks.float().view(1, -1, 1, 1)
    top = torch.maximum(s.amax(-1, keepdim=True), sink)
    e = torch.exp(s - top)
    return ((e / (e.sum(-1, keepdim=True) + torch.exp(sink - top))).to(q.dtype) @ v).transpose(1, 2)


@CASES.fuse(paged, note="Gemma")
def soft_cap(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    s = q.transpose(1, 2) * SCALE @ k.mT
    s = 50.0 * torch.tanh(s / 50.0)
    s = s + torch.where(torch.arange(k.shape[2], device=q.device) < lengths[:, None], 0, -2.3819763e38)[:, None, None]
    return (s.softmax(-1, dtype=torch.float32).type_as(q) @ v).transpose(1, 2)


@CASES.fuse(lambda d: (*paged(d), 2.0 ** -torch.arange(1, H + 1, device=d.device)), note="vLLM's ALiBi")
def alibi(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, slopes: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    n = torch.arange(k.shape[2], device=q.device)
    bias = slopes[None, :, None] * (n[None, None] - lengths[:, None, None] + 1)
    s = (q.transpose(1, 2) @ k.mT).float() * SCALE + bias[:, :, None]
    s = s.masked_fill((n >= lengths[:, None])[:, None, None], -INF)
    return (s.softmax(-1).to(q.dtype) @ v).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------
# Quantised pages


def int8_by_token(d: Draw) -> tuple[Tensor, ...]:
    """int8 pools with a scale of each token and head."""
    q, k_pool, v_pool, table, lengths = paged(d)
    scales = [x.float().abs().amax(-1, keepdim=True) / 127 for x in (k_pool, v_pool)]
    pools = [(x.float() / s).round().to(torch.int8) for x, s in zip((k_pool, v_pool), scales, strict=True)]
    return q, *pools, *(s.to(d.dtype) for s in scales), table, lengths


@CASES.fuse(int8_by_token, note="LMDeploy, TensorRT-LLM: int8 cache, dequantised after the fetch")
def int8_scale_of_each_token(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = (
        (x[table].to(q.dtype) * s[table]).flatten(1, 2).transpose(1, 2).repeat_interleave(G, 1)
        for x, s in ((k_pool, k_scale), (v_pool, v_scale))
    )
    live = (torch.arange(k.shape[2], device=q.device) < lengths[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=live).transpose(1, 2)


def float8_by_head(d: Draw) -> tuple[Tensor, ...]:
    q, k_pool, v_pool, table, lengths = paged(d)
    k8, v8 = (x.clamp(-3, 3).to(torch.float8_e4m3fn) for x in (k_pool, v_pool))
    return q, k8, v8, d(HKV).abs() + 0.5, d(HKV).abs() + 0.5, table, lengths


@CASES.fuse(float8_by_head, dtypes=(BF16, F32, F16))
def float8_scale_of_each_head(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k = k_pool[table].flatten(1, 2).to(q.dtype) * k_scale[:, None]
    v = v_pool[table].flatten(1, 2).to(q.dtype) * v_scale[:, None]
    s = torch.einsum("bmhgd,bnhd->bhgmn", q.unflatten(2, (HKV, G)), k) * SCALE
    s = s.masked_fill(torch.arange(k.shape[1], device=q.device) >= lengths.view(-1, 1, 1, 1, 1), -INF)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


def float8_by_page(d: Draw) -> tuple[Tensor, ...]:
    q, k8, v8, *_, table, lengths = float8_by_head(d)
    return q, k8, v8, d(len(k8)).abs() + 0.5, d(len(k8)).abs() + 0.5, table, lengths


@CASES.fuse(float8_by_page, dtypes=(BF16, F32, F16))
def float8_scale_of_each_page(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = (
        (x[table].to(torch.float32) * s[table].float().view(len(table), -1, 1, 1, 1)).to(q.dtype).flatten(1, 2)
        for x, s in ((k_pool, k_scale), (v_pool, v_scale))
    )
    s = torch.einsum("bmhgd,bnhd->bhgmn", q.unflatten(2, (HKV, G)), k) * SCALE
    s = s.masked_fill(torch.arange(k.shape[1], device=q.device) >= lengths.view(-1, 1, 1, 1, 1), -INF)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


@CASES.fuse(float8_by_head, dtypes=(F32, BF16, F16), note="one number for K and V, a Python float")
def float8_scaled_by_number(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = fetched(k_pool.to(q.dtype) * 0.5, v_pool.to(q.dtype) * 0.25, table)
    live = (torch.arange(k.shape[2], device=q.device) < lengths[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=live).transpose(1, 2)


@CASES.fuse(int8_by_token, note="scales on the scores and on the weights, pages cast alone")
def int8_scales_outside_the_products(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    ks, vs = (x[table].flatten(1, 2).squeeze(-1).transpose(1, 2).repeat_interleave(G, 1) for x in (k_scale, v_scale))
    s = q.transpose(1, 2) @ k.to(q.dtype).mT * ks[:, :, None] * SCALE
    s = s.masked_fill(torch.arange(k.shape[2], device=q.device) >= lengths[:, None, None, None], -INF)
    return ((s.softmax(-1) * vs[:, :, None]) @ v.to(q.dtype)).transpose(1, 2)
