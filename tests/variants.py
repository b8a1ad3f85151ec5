"""The table of variants: plain PyTorch beside the region it means. It drives recognition, reference, kernels, goldens.

Each function takes its tensors in the order of the region's operands: q, k, v, then load0, load1 ... Lengths tell the
axes apart and are no multiple of a tile. Words: B batch, H heads, G a third batch axis, M queries, N keys, D the head
size of q and k, Dv of v. Regions are written for float32 unless the variant says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from regions import (
    INF,
    MIN,
    B,
    Draw,
    H,
    M,
    N,
    Variant,
    age,
    attention,
    b,
    blhd,
    causal,
    filled,
    g,
    grouped,
    h,
    kv_idx,
    load,
    places,
    q_idx,
    row,
    scaled_score,
    score,
    scores,
    some_keys,
    times,
)
from torch import Tensor

from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Cast, Const
from fusecomp.ir.region import AttentionRegion

VARIANTS: list[Variant] = []


def by_name(name: str) -> Variant:
    return next(v for v in VARIANTS if v.name == name)


def variant(args: Callable[[Draw], Sequence[Tensor]], region: AttentionRegion, tolerance: float = 1e-10) -> Any:
    """Enter the decorated function into the table; `args(draw)` makes its tensors."""

    def register(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        VARIANTS.append(row(fn, args, region, tolerance))
        return fn

    return register


# ----------------------------------------------------------------------------------------------------------------
# Shapes and layouts


@variant(Draw.qkv, attention())
def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


@variant(Draw.qkv, attention(scaled_score))
def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1)), dim=3) @ v


@variant(lambda draw: draw.qkv(dv=24), attention(scaled_score, dv=24))
def value_head_size_differs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@variant(lambda draw: draw.qkv(d=192, dv=128), attention(times(score, 192**-0.5), causal, d=192, dv=128))
def latent_192_128(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill(j > i, -INF).softmax(-1) @ v


@variant(lambda draw: draw.qkv(m=1), attention(scaled_score))
def one_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@variant(lambda draw: [x[0] for x in draw.qkv(heads=5)], attention(scaled_score, batch=(b,)))
def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.25).softmax(-1), v)


@variant(lambda draw: [x[0, 0] for x in draw.qkv(dv=24)], attention(scaled_score, batch=(), dv=24))
def single_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.T / math.sqrt(q.shape[1]), dim=1) @ v


@variant(lambda draw: [draw(2, 4, 3, n, 16) for n in (13, 21, 21)], attention(scaled_score, batch=(b, h, g)))
def windows_5d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@variant(lambda draw: [x.transpose(1, 2).contiguous() for x in draw.qkv()], blhd())
def einsum_bqhd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


@variant(lambda draw: draw.qkv(heads=6, kv=2), attention(scaled_score, **grouped(3)))
def grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(2, 6, *x.shape[2:]) for x in (k, v))
    return scores(q, k).softmax(-1) @ v


@variant(lambda draw: draw.qkv(heads=6, kv=1), attention(scaled_score, head=Const(0), heads=Const(1)))
def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Masks built in the graph


@variant(lambda draw: draw.qkv(m=53), attention(scaled_score, causal))
def causal_tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


@variant(Draw.qkv, attention(scaled_score, causal))
def causal_compare(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return torch.where(j <= i, scores(q, k), -INF).softmax(-1) @ v


_last = apply("le", kv_idx, apply("add", q_idx, apply("sub", N, M)))


@variant(lambda draw: draw.qkv(m=19), attention(scaled_score, _last))
def causal_bottom_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill(j > i + (k.shape[-2] - q.shape[-2]), -INF).softmax(-1) @ v


@variant(lambda draw: draw.qkv(m=67, n=67), attention(scaled_score, causal, apply("lt", age, Const(11))))
def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill(~((i >= j) & (i - j < 11)), -INF).softmax(-1) @ v


_near = (apply("le", age, Const(9)), apply("ge", age, Const(-9)))


@variant(lambda draw: draw.qkv(m=53), attention(scaled_score, *_near, fill=MIN))
def band(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k)
    return torch.where((i - j <= 9) & (i - j >= -9), s, torch.finfo(s.dtype).min).softmax(-1) @ v


@variant(lambda draw: draw.qkv(m=53), attention(scaled_score, apply("or", causal, apply("lt", kv_idx, Const(7)))))
def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill(~((i >= j) | (j < 7)), -INF).softmax(-1) @ v


_capped = times(apply("tanh", apply("div", scaled_score, Const(5.0))), 5.0)
_recent = (causal, apply("lt", age, Const(13)))


@variant(lambda draw: draw.qkv(m=67, n=67, heads=6, kv=2), attention(_capped, *_recent, **grouped(3)))
def softcap_causal_window_gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    i, j = places(q, k)
    s = torch.tanh(scores(q, k) / 5.0) * 5.0
    return torch.where((i >= j) & (i - j < 13), s, -INF).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Masks, lengths and biases passed in


_slope = apply("add", scaled_score, apply("mul", load(0, h), apply("sub", kv_idx, q_idx)))
_alibi = attention(_slope, causal, loads=[((H,), "float32")])


@variant(lambda draw: (*draw.qkv(m=53), 2.0 ** -torch.arange(1, 4)), _alibi)
def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    i, j = places(q, k)
    return (scores(q, k) + slopes[:, None, None] * (j - i)).masked_fill(j > i, -INF).softmax(-1) @ v


_biased = apply("add", scaled_score, load(0, 0, h, q_idx, kv_idx))


@variant(lambda draw: (*draw.qkv(), draw(1, 3, 37, 53)), attention(_biased, loads=[((1, H, M, N), "float32")]))
def bias(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return (scores(q, k) + table).softmax(-1) @ v


_mask, _mask_load = load(0, q_idx, kv_idx, dtype="bool"), [((M, N), "bool")]
_zero = attention(scaled_score, _mask, loads=_mask_load, empty_row="guarded")
_mean = attention(scaled_score, _mask, loads=_mask_load, **filled(MIN, _mask))


@variant(lambda draw: (*draw.qkv(), some_keys(draw)), attention(scaled_score, _mask, loads=_mask_load))
def bool_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


@variant(lambda draw: (*draw.qkv(), some_keys(draw, 3)), attention(scaled_score, _mask, loads=_mask_load))
def dead_row_nan(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v


@variant(lambda draw: (*draw.qkv(), some_keys(draw, 3)), _zero)
def dead_row_zero(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.nan_to_num(scores(q, k).masked_fill(~keep, -INF).softmax(-1)) @ v


@variant(lambda draw: (*draw.qkv(), some_keys(draw, 3)), _mean)
def dead_row_mean(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.where(keep, s, torch.finfo(s.dtype).min).softmax(-1) @ v


_short = apply("lt", kv_idx, load(0, b, dtype="int64"))


_unpadded = attention(scaled_score, _short, loads=[((B,), "int64")])
_padded = attention(scaled_score, _short, loads=[((B,), "int64")], **filled(-1e9, _short))


@variant(lambda draw: (*draw.qkv(), torch.tensor([53, 17])), _unpadded)
def key_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    dead = torch.arange(k.shape[-2], device=q.device) >= lengths[:, None]
    return scores(q, k).masked_fill(dead[:, None, None, :], -INF).softmax(-1) @ v


@variant(lambda draw: (*draw.qkv(), torch.tensor([0, 17])), _padded)
def key_lengths_minus_1e9(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    live = torch.arange(k.shape[-2], device=q.device) < lengths[:, None, None, None]
    return torch.where(live, scores(q, k), -1e9).softmax(-1) @ v


_same = apply("eq", load(0, q_idx, dtype="int64"), load(0, kv_idx, dtype="int64"))


_document = attention(scaled_score, _same, loads=[((N,), "int64")])


@variant(lambda draw: (*draw.qkv(m=53), torch.arange(53) // 13), _document)
def documents(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    return torch.where(document[:, None] == document[None, :], scores(q, k), -INF).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Around the softmax


@variant(lambda draw: (*draw.qkv(), draw(3)), attention(scaled_score, loads=[((H,), "float32")], sink=load(0, h)))
def sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = scores(q, k)
    s = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


_clamped = apply("min", apply("max", times(score, 0.5), Const(-2.0)), Const(2.0))


@variant(Draw.qkv, attention(_clamped))
def clamp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1)) * 0.5).clamp(-2.0, 2.0).softmax(-1) @ v


_factor = attention(scaled_score, loads=[((M, N), "float32")], weight=load(0, q_idx, kv_idx))


@variant(lambda draw: (*draw.qkv(), some_keys(draw).float()), _factor)
def mask_after_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) * mask) @ v


_rounded = Cast(times(Cast(score, "bfloat16"), 0.25), "bfloat16")


@variant(lambda draw: draw.qkv(m=53), attention(_rounded, causal, dtype="bfloat16"), 1e-6)
def softmax_in_fp32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    p = torch.softmax(scores(q, k).masked_fill(j > i, -INF), dim=-1, dtype=torch.float32)
    return p.to(q.dtype) @ v
