"""Masks and position biases as people build them, and what rows without a key become."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import BIG, FULL, INF, MIN, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()


def padded(d: Any) -> list[Tensor]:
    """qkv and a [2, 21] padding vector of 0 and 1; the second sequence has 9 tokens."""
    return [*qkv(d), (torch.arange(d.n(21)) < torch.tensor([[d.n(21)], [9]])).long().to(d.device)]


def dead(d: Any) -> list[Tensor]:
    """qkv and a mask in which query 3 sees nothing."""
    keep = d.keep()
    keep[3] = False
    return [*qkv(d), keep]


def windows(d: Any) -> list[Tensor]:
    """q, k, v [6 windows of 2 images, 3, 16, 8], and a mask for each of 3 windows [3, 16, 16]."""
    mask = torch.zeros(3, 16, 16, dtype=d.dtype, device=d.device)
    mask[1, :8, 8:] = mask[1, 8:, :8] = -100.0
    return [*(d(6, 3, 16, 8) for _ in range(3)), mask]


# ----------------------------------------------------------------------------------------------------------------
# Masks passed in


@CASES.fuse(lambda d: [*qkv(d), d.keep()])
def bool_mask_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k) + mask).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep().to(d.dtype)])
def mask_multiplied(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k) * mask).softmax(-1) @ v


@CASES.fuse(dead, grad=(), note="in half precision the dead row keeps its value, not its gradient")
def mask_times_infinity(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (scores(q, k) + (~keep).to(q.dtype) * -1e9).softmax(-1) @ v


@CASES.fuse(padded)
def one_minus_mask_times_1e4(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k) + (1.0 - mask[:, None, None].to(q.dtype)) * -10000.0).softmax(-1) @ v


@CASES.fuse(padded)
def one_minus_mask_times_min(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    inverted = 1.0 - mask[:, None, None, :].to(q.dtype)
    return (scores(q, k) + inverted.masked_fill(inverted.bool(), torch.finfo(q.dtype).min)).softmax(-1) @ v


@CASES.fuse(padded, dtypes=FULL)
def one_minus_mask_times_infinity(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    bias = torch.where(mask[:, None, None] == 1, 0.0, -INF)
    return (scores(q, k) + bias).softmax(-1) @ v


@CASES.fuse(padded, dtypes=BIG)
def mask_equal_to_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scores(q, k).masked_fill((mask == 0)[:, None, None], -1e9).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep().to(d.dtype)])
def float_mask_equal_to_zero(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scores(q, k).masked_fill(mask == 0.0, -INF).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep().to(d.dtype)])
def float_mask_below_half(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scores(q, k).masked_fill(mask < 0.5, -INF).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep()], dtypes=(torch.float16,))
def fill_that_overflows_half(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, scores(q, k), torch.tensor(-1e9, dtype=q.dtype)).softmax(-1) @ v


@CASES.fuse(dead, dtypes=(torch.float16,))
def smallest_half(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v


@CASES.fuse(dead, dtypes=(torch.float16, torch.bfloat16), grad=())
def smallest_half_added(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    bias = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, torch.finfo(q.dtype).min)
    return (scores(q, k) + bias).softmax(-1) @ v


@CASES.fuse(dead)
def small_finite_fill(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~keep, -2.0).softmax(-1) @ v


@CASES.fuse(dead)
def fill_of_minus_1e4(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, scores(q, k), -1e4).softmax(-1) @ v


@CASES.fuse(dead, grad=())
def rows_without_keys_are_nan(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


@CASES.fuse(dead, grad=())
def rows_without_keys_are_zero(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1).nan_to_num(nan=0.0) @ v


@CASES.fuse(dead, grad=())
def nan_weights_replaced(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    p = scores(q, k).masked_fill(~keep, -INF).softmax(-1)
    return torch.where(p.isnan(), 0.0, p) @ v


@CASES.fuse(dead, dtypes=BIG)
def weights_masked_again(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    p = scores(q, k).masked_fill(~keep, -1e9).softmax(-1)
    return p.masked_fill(~keep, 0.0) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep(), d.keep()], dtypes=BIG)
def two_fills(q: Tensor, k: Tensor, v: Tensor, one: Tensor, other: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~one, -1e9)
    return s.masked_fill(~other, -1e30).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep(), d.keep()])
def nested_where(q: Tensor, k: Tensor, v: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(one, torch.where(other, scores(q, k), -INF), -INF).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep(), d(13, 21)], grad=(0, 1, 2, 4), dtypes=BIG)
def bias_behind_the_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
    return (scores(q, k).masked_fill(~keep, -1e9) + bias).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), torch.arange(13, device=d.device) % 4, torch.arange(21, device=d.device) // 6])
def documents_of_different_lengths(q: Tensor, k: Tensor, v: Tensor, mine: Tensor, theirs: Tensor) -> Tensor:
    return scores(q, k).masked_fill(mine[:, None] != theirs[None, :], -INF).softmax(-1) @ v


@CASES.fuse(padded, dtypes=BIG)
def both_padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    live = mask.bool()
    keep = live[:, None, :13, None] & live[:, None, None, :]
    return scores(q, k).masked_fill(~keep, -1e9).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d.ints(2, 0), d.ints(21, 17)])
def padding_vector_by_index(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> Tensor:
    live = torch.arange(k.shape[2]) < last[:, None]
    rows = torch.arange(2)[:, None, None, None]
    keep = live[rows, torch.arange(k.shape[2])] & (torch.arange(k.shape[2]) >= first[:, None, None, None])
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Masks built in the graph


@CASES.fuse(square)
def tril_times_big(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[-2]
    return (scores(q, k) - 1e9 * (1 - torch.ones(n, n, dtype=q.dtype).tril())).softmax(-1) @ v


@CASES.fuse(square)
def gpt2_of_old(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.tril(torch.ones(q.shape[-2], k.shape[-2], dtype=q.dtype))
    return (scores(q, k) * keep - 1e10 * (1 - keep)).softmax(-1) @ v


@CASES.fuse(square)
def prefix_language_model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill(~((j < 7) | (j <= i)), -INF).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d.ints(5, 0)])
def prefix_lengths(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor) -> Tensor:
    i, j = places(q, k)
    keep = (j < prefix[:, None, None, None]).logical_or(j <= i)
    return scores(q, k).masked_fill(keep.logical_not(), -INF).softmax(-1) @ v


@CASES.fuse(square)
def dilated_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    keep = ((i - j) % 2 == 0) & ((i - j).abs() <= 8)
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


@CASES.fuse(square)
def strided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return torch.where((j <= i) & ((i - j < 4) | (j % 4 == 3)), scores(q, k), -INF).softmax(-1) @ v


@CASES.fuse(square)
def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return torch.where(i // 8 == j // 8, scores(q, k), -INF).softmax(-1) @ v


@CASES.fuse(square)
def blocks_by_floor_division(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    keep = torch.div(i, 8, rounding_mode="floor") >= torch.div(j, 8, rounding_mode="floor")
    return torch.where(keep, scores(q, k), -INF).softmax(-1) @ v


@CASES.fuse(square, dtypes=BIG)
def global_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    keep = ((i - j).abs() < 4) | (i < 2) | (j < 2)
    return scores(q, k).masked_fill(~keep, -1e9).softmax(-1) @ v


@CASES.fuse(square)
def triangle_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[-2]
    mask = torch.full((n, n), -INF, dtype=q.dtype)
    return (scores(q, k) + torch.triu(mask, diagonal=1)).softmax(-1) @ v


@CASES.fuse(square)
def no_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).masked_fill(torch.eye(q.shape[-2], dtype=torch.bool), -INF).softmax(-1) @ v


@CASES.fuse(lambda d: square(d, 16))
def meshgrid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    return scores(q, k).masked_fill(j > i, -INF).softmax(-1) @ v


@CASES.fuse(lambda d: square(d, 16))
def two_dimensional_neighbours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    near = ((i // 4 - j // 4).abs() <= 1) & ((i % 4 - j % 4).abs() <= 1)
    return scores(q, k).masked_fill(~near, -INF).softmax(-1) @ v


@CASES.fuse(windows)
def swin(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    s = scores(q, k).view(2, 3, 3, 16, 16) + mask.unsqueeze(1).unsqueeze(0)
    return s.view(-1, 3, 16, 16).softmax(-1) @ v


@CASES.fuse(lambda d: [d(2, 8, 12, 3 * 16), d(49, 2)], grad=(0, 1))
def swin_shifted(x: Tensor, table: Tensor) -> Tensor:
    x = x.roll((-2, -2), (1, 2)).view(2, 2, 4, 3, 4, 48).permute(0, 1, 3, 2, 4, 5).reshape(12, 16, 3, 2, 8)
    q, k, v = x.permute(2, 0, 3, 1, 4)
    at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
    apart = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + 3
    index = apart[..., 0] * 7 + apart[..., 1]
    bias = table[index.view(-1)].view(16, 16, 2).permute(2, 0, 1)
    return (scores(q, k) + bias[None]).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Position biases


@CASES.fuse(lambda d: [*qkv(d), 2.0 ** -torch.arange(1, 4, device=d.device).to(d.dtype)], grad=(0, 1, 2, 3))
def alibi_of_distance(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    i, j = places(q, k)
    return (scores(q, k) - slopes[:, None, None] * (i - j).abs()).softmax(-1) @ v


@CASES.fuse(square)
def alibi_from_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    slopes = torch.tensor([2.0 ** -(8 * h / 3) for h in range(1, 4)], dtype=q.dtype)
    return (scores(q, k) + (slopes[:, None, None] * (j - i)).masked_fill(j > i, -INF)).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(41, 3)], grad=(0, 1, 2, 3))
def relative_table_by_embedding(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    i, j = places(q, k)
    return (scores(q, k) + F.embedding(i - j + 20, table).permute(2, 0, 1)).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(9, 3)], grad=(0, 1, 2, 3))
def clipped_relative_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    i, j = places(q, k)
    return (scores(q, k) + table[(j - i).clamp(-4, 4) + 4].permute(2, 0, 1)[None]).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(2, 3, 21, 41)], grad=(0, 1, 2, 3))
def disentangled_by_gather(q: Tensor, k: Tensor, v: Tensor, content: Tensor) -> Tensor:
    i, j = places(q, k)
    at = (i - j + 20).expand(2, 3, 21, 21)
    return (scores(q, k) + torch.gather(content, -1, at)).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d, 16), d(49, 3), torch.randint(0, 49, (16, 16))], grad=(0, 1, 2, 3))
def relative_index_buffer(q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor) -> Tensor:
    bias = table[index.view(-1)].view(16, 16, -1).permute(2, 0, 1).contiguous()
    return (scores(q, k) + bias.unsqueeze(0)).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(32, 3)], grad=(0, 1, 2, 3))
def t5_buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    i, j = places(q, k)
    apart = (j - i).abs()
    far = 8 + (torch.log(apart.float() / 8 + 1e-6) / math.log(16.0) * 8).long().clamp(min=-8)
    bucket = (j > i).long() * 16 + torch.where(apart < 8, apart, far.clamp(max=15))
    return (scores(q, k) + table[bucket].permute(2, 0, 1)).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(3, 41)], grad=(0, 1, 2, 3))
def a_second_product_as_bias(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return (scores(q, k) + (q @ (k * 0.5).mT) * 0.1).softmax(-1) @ v * x[:, :1, None]


@CASES.fuse(lambda d: [*square(d), d(41, 8)], grad=(0, 1, 2, 3), dtypes=FULL)
def relative_shift_by_padding(q: Tensor, k: Tensor, v: Tensor, rel: Tensor) -> Tensor:
    return (scores(q, k) + shifted(q @ rel.mT)).softmax(-1) @ v


def shifted(x: Tensor) -> Tensor:
    """[.., n, 2n - 1] by distance -> [.., n, n] by key, as VITS does it."""
    n = x.shape[-2]
    x = F.pad(F.pad(x, (0, 1)).flatten(-2), (0, n - 1))
    return x.unflatten(-1, (n + 1, 2 * n - 1))[..., :n, n - 1 :]


@CASES.decline(lambda d: [*square(d), d(41, 8), d(21, 8)], "read elsewhere too, by `mean`", grad=(), dtypes=FULL)
def relative_shift_and_weights_read_twice(q: Tensor, k: Tensor, v: Tensor, rel: Tensor, w: Tensor) -> Tensor:
    p = (scores(q, k) + shifted(q @ rel.mT)).softmax(-1)
    return p @ v + p.mean(-1, keepdim=True) * w


def left_padded(d: Any) -> list[Tensor]:
    return [*square(d), (torch.arange(d.n(21)) >= torch.tensor([[0], [5]])).long().to(d.device)]


@CASES.fuse(left_padded, dtypes=FULL)
def chunks_after_left_padding(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Llama 4: what stands in a chunk is counted from the first token that is no padding."""
    i, j = (x + 0 for x in places(q, k))  # + 0: the tokens before, in a cache
    first = (mask.cumsum(-1) == 0).sum(-1)[:, None, None]
    keep = ((j - first) // 8 == (i - first) // 8) & (j <= i) & mask[:, None].bool()
    return (scores(q, k) + torch.where(keep[:, None], 0.0, MIN)).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(8, 8), d(13, 21)], grad=(0, 1, 2, 3, 4))
def bias_gated_by_the_query(q: Tensor, k: Tensor, v: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """WavLM: the gate holds a sum, which is none of scores."""
    gate = torch.sigmoid((q @ w).unflatten(-1, (2, 4)).sum(-1)[..., :1])
    return (scores(q, k) + gate * bias).softmax(-1) @ v


@CASES.fuse()
def cosine_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = q.square().sum(-1, keepdim=True).sqrt() * k.square().sum(-1)[..., None, :].sqrt()
    return (5 * q @ k.mT / lengths).softmax(-1) @ v


@CASES.decline(qkv, "is not a pointwise function of the scores", grad=())
def scores_over_their_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s / s.square().sum(-1, keepdim=True).sqrt()).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), *qkv(d, d=4)], grad=(0, 1, 2, 3, 4, 5), count=2)
def two_attentions_of_the_same_scores(q: Tensor, k: Tensor, v: Tensor, r: Tensor, s: Tensor, w: Tensor) -> Any:
    """LiLT: text and layout attend by the sum of their scores, each to its own values."""
    text, layout = scores(q, k), scores(r, s)
    return (text + layout).softmax(-1) @ v, (layout + text).softmax(-1) @ w


@CASES.fuse(qkv, count=2)
def two_softmaxes_of_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s[..., :7].softmax(-1) @ v[..., :7, :] + (s[..., 7:].softmax(-1) @ v[..., 7:, :])


@CASES.decline(lambda d: [*qkv(d), d(2, 3, 21, 4)], "the scores are read elsewhere too, by", grad=())
def scores_shared_with_what_is_no_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    s = q @ k.mT
    return (s * 0.3).softmax(-1) @ v, (s + 1).sort(-1).values.softmax(-1) @ w


@CASES.decline(lambda d: [*qkv(d), d(2, 3, 21, 4)], "the scores are read elsewhere too", grad=())
def scores_shared_and_returned(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Any:
    s = q @ k.mT
    return (s * 0.3).softmax(-1) @ v, (s * 0.2).softmax(-1) @ w, s
