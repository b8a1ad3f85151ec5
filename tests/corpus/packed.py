"""Where operands lie and what stands around them: packs, strides, layouts, layers, contexts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import FULL, INF, Table, places, qkv, scores, square
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CASES = Table()


def pack(d: Any) -> list[Tensor]:
    """[2, 21, 3 * 3 * 8]"""
    return [d(2, d.n(21), 72)]


# ----------------------------------------------------------------------------------------------------------------
# Packs and strides


@CASES.fuse(pack, grad=(0,))
def unbound(x: Tensor) -> Tensor:
    q, k, v = x.view(2, -1, 3, 3, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(pack, grad=(0,))
def chunked(x: Tensor) -> Tensor:
    q, k, v = (t.view(2, -1, 3, 8).transpose(1, 2) for t in x.chunk(3, -1))
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(pack, grad=(0,))
def split_and_merged(x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in x.split([24, 24, 24], dim=2))
    return (scores(q, k).softmax(-1) @ v).transpose(1, 2).reshape(2, -1, 24)


@CASES.fuse(pack, grad=(0,))
def narrowed(x: Tensor) -> Tensor:
    q, k, v = (x.narrow(-1, 24 * i, 24).view(2, -1, 3, 8).transpose(1, 2) for i in range(3))
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(pack, grad=(0,))
def every_third_element(x: Tensor) -> Tensor:
    q, k, v = (x[..., i::3].view(2, -1, 3, 8).transpose(1, 2) for i in range(3))
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(pack, grad=(0,))
def interleaved_by_head(x: Tensor) -> Tensor:
    q, k, v = x.view(2, -1, 3, 24).transpose(1, 2).chunk(3, -1)
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(lambda d: [d(d.n(21), 2, 24) for _ in range(3)])
def sequence_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, b, _ = q.shape
    q, k, v = (x.contiguous().view(n, b * 3, 8).transpose(0, 1) for x in (q, k, v))
    out = torch.bmm(torch.bmm(q * 8**-0.5, k.transpose(1, 2)).softmax(-1), v)
    return out.transpose(0, 1).contiguous().view(n, b, 24)


@CASES.fuse(lambda d: [d(2, 24, 5, 4) for _ in range(3)])
def image_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(2 * 3, 8, 20) for x in (q, k, v))
    p = torch.einsum("bcq,bck->bqk", q * 0.5, k).softmax(-1)
    return torch.einsum("bqk,bck->bcq", p, v).reshape(2, 24, 5, 4)


@CASES.fuse(lambda d: [*qkv(d, batch=1)[:1], *qkv(d, batch=1)[1:]])
def expanded_over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.expand(5, -1, -1, -1), v.expand(5, -1, -1, -1)
    return scores(q.expand(5, -1, -1, -1), k).softmax(-1) @ v


@CASES.fuse(lambda d: [x.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :, ::2] for x in qkv(d, d=16)])
def strided_arguments(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(lambda d: qkv(d, n=29))
def keys_cut(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k[:, :, 3:-5]).softmax(-1) @ v[:, :, 3:-5]


@CASES.fuse(lambda d: qkv(d, n=42))
def every_other_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k[:, :, ::2]).softmax(-1) @ v[:, :, 1::2]


@CASES.fuse(lambda d: [*qkv(d), d(2, 3, 4, 8), d(2, 3, 4, 8)], grad=(0, 1, 2, 3, 4))
def keys_concatenated(q: Tensor, k: Tensor, v: Tensor, more_k: Tensor, more_v: Tensor) -> Tensor:
    return scores(q, torch.cat([k, more_k], 2)).softmax(-1) @ torch.cat([v, more_v], 2)


@CASES.fuse(square)
def values_are_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ k + v


@CASES.fuse(square)
def queries_are_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, q).softmax(-1) @ v + k


@CASES.decline(square, "the softmax runs over another axis")
def keys_transposed_in_the_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).transpose(-2, -1).softmax(-1).transpose(-2, -1) @ v


@CASES.fuse(lambda d: [d(2, 8, 8, 8) for _ in range(3)])
def contraction_over_another_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k).softmax(-1) @ v


@CASES.fuse(lambda d: [d(2, 8, 8, 8) for _ in range(3)])
def attention_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Several attentions, and what stands around them


@CASES.fuse(square, count=3)
def layers_that_share_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    mask = torch.zeros(21, 21, dtype=q.dtype).masked_fill(j > i, -INF)
    for _ in range(3):
        q = (scores(q, k) + mask).softmax(-1) @ v
    return q


@CASES.fuse(square, count=2)
def self_and_cross(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, q)
    x = scores(q, q).masked_fill(j > i, -INF).softmax(-1) @ q
    return scores(x, k[:, :, :17]).softmax(-1) @ v[:, :, :17]


@CASES.fuse(square, count=2)
def differential(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = scores(q[..., :4], k[..., :4]).softmax(-1) @ v
    return a - 0.3 * (scores(q[..., 4:], k[..., 4:]).softmax(-1) @ v)


@CASES.fuse(square, count=2)
def differential_of_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q[..., :4], k[..., :4]).softmax(-1) - 0.3 * scores(q[..., 4:], k[..., 4:]).softmax(-1)
    return p @ v


@CASES.fuse(lambda d: [*square(d, heads=4), d(2, 1, 1)], grad=(0, 1, 2, 3), count=2)
def differential_by_chunks_of_heads(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    p, less = scores(q, k).softmax(-1).chunk(2, dim=1)
    return (p - lam * less) @ v[:, ::2]


@CASES.decline(lambda d: [*square(d, heads=4), d(2, 1, 1)], "made of more than one softmax")
def size_of_a_difference_by_chunks_of_heads(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    p, less = scores(q, k).softmax(-1).chunk(2, dim=1)
    return (p - lam * less).abs() @ v[:, ::2]


@CASES.fuse(square)
def scores_of_two_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[..., :4] @ k[..., :4].mT + q[..., 4:] @ k[..., 4:].mT).softmax(-1) @ v


@CASES.fuse(qkv, count=2)
def weights_used_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    return p @ v + p @ (v * 2)


@CASES.fuse(qkv)
def product_of_values_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = torch.zeros(6, 13, 8, dtype=q.dtype)
    p = scores(q, k).softmax(-1).flatten(0, 1)
    return torch.baddbmm(x, p, v.flatten(0, 1), beta=0, alpha=0.5)


@CASES.fuse()
def product_of_values_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1).flatten(0, 1)
    return torch.baddbmm(q.flatten(0, 1), p, v.flatten(0, 1), beta=0.5)


@CASES.fuse(qkv)
def projection_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = (scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)
    return F.linear(out, torch.ones(5, 24, dtype=q.dtype)) * 0.1


@CASES.fuse(square)
def dropout_that_is_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(scores(q, k).softmax(-1), 0.5, training=False) @ v


@CASES.fuse(square)
def dropout_of_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(scores(q, k).softmax(-1), 0.0) @ v


@CASES.fuse(square)
def dropout_of_everything(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v + F.dropout(scores(q, k).softmax(-1), 1.0) @ v


@CASES.fuse(square)
def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(lambda q, k, v: scores(q, k).softmax(-1) @ v, q, k, v, use_reentrant=False)


@CASES.fuse(lambda d: [*square(d), torch.tensor(True)], count=2, grad=())
def in_both_branches(q: Tensor, k: Tensor, v: Tensor, which: Tensor) -> Tensor:
    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).softmax(-1) @ v

    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (scores(q, k) * 0.5).softmax(-1) @ v

    return torch.cond(which, one, other, (q, k, v))


@CASES.fuse(square, grad=())
def without_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return scores(q, k).softmax(-1) @ v


@CASES.fuse(square, dtypes=FULL, grad=())
def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return scores(q, k).softmax(-1) @ v


@CASES.fuse(square, dtypes=FULL, grad=())
def softmax_out_of_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        s = scores(q, k)
        with torch.autocast("cpu", enabled=False):
            p = s.float().softmax(-1).to(v.dtype)
    return p @ v


@CASES.fuse(square)
def mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.vmap(lambda q, k, v: scores(q, k).softmax(-1) @ v)(q, k, v)


@CASES.fuse(lambda d: [d(21, 2, 24), d(72, 24), d(24, 24)])
def multi_head_attention_forward(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    return F.multi_head_attention_forward(
        x, x, x, 24, 3, w, None, None, None, False, 0.0, out, None, training=False, need_weights=True
    )[0]


@CASES.fuse(lambda d: [*square(d), d.keep(21, 21)])
def sdpa_with_a_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


@CASES.decline(square, "PyTorch's own flash kernels")
def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@CASES.decline(lambda d: [x.double() for x in qkv(d)], "products in float64 have no kernel", dtypes=FULL)
def in_double_precision(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v
