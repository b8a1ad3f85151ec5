"""Programs that use the log-sum-exp of their scores too: they return it, lose by it, or merge parts with it."""

from __future__ import annotations

from typing import Any

import torch
from corpus.table import FULL, INF, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()
ELSEWHERE = "the weights or scores are read elsewhere too"


def masked(d: Any) -> list[Tensor]:
    return [*qkv(d), d.keep()]


def with_sink(d: Any) -> list[Tensor]:
    return [*qkv(d), d(3, 1, 1)]


# ----------------------------------------------------------------------------------------------------------------
# Spellings


@CASES.fuse()
def returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.logsumexp(-1)


@CASES.fuse()
def subtracted_and_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    lse = torch.logsumexp(s, -1, keepdim=True)
    return torch.exp(s - lse) @ v, lse


@CASES.fuse()
def above_the_maximum(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    return (e @ v) / total, (total.log() + m).squeeze(-1)


@CASES.fuse()
def above_the_detached_maximum(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    m = s.max(-1, keepdim=True).values.detach()
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    return (e / total) @ v, m + total.log()


@CASES.fuse()
def through_log_softmax(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    p = s.log_softmax(-1)
    return p.exp() @ v, (s - p)[..., 2]


@CASES.fuse()
def in_float32(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k).float()
    return s.softmax(-1).to(v.dtype) @ v, s.logsumexp(-1)


@CASES.fuse(lambda d: [x.transpose(1, 2) for x in qkv(d)])
def query_major(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.einsum("bmhd,bnhd->bhmn", q, k) * 0.3
    return torch.einsum("bhmn,bnhd->bmhd", s.softmax(-1), v), s.logsumexp(-1).transpose(1, 2)


@CASES.fuse()
def heads_folded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * 0.3
    return torch.bmm(s.softmax(-1), v.flatten(0, 1)).unflatten(0, q.shape[:2]), s.logsumexp(-1)


@CASES.fuse(lambda d: qkv(d, heads=6, kv=2))
def grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k.repeat_interleave(3, 1))
    return s.softmax(-1) @ v.repeat_interleave(3, 1), s.logsumexp(-1)


@CASES.fuse(lambda d: qkv(d, m=1))
def one_query(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.logsumexp(-1, keepdim=True)


@CASES.fuse()
def twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.logsumexp(-1), s.float().logsumexp(-1, keepdim=True).square().mean()


# ----------------------------------------------------------------------------------------------------------------
# Uses


@CASES.fuse(square)
def z_loss_under_a_causal_mask(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    i, j = places(q, k)
    s = scores(q, k).masked_fill(j > i, -INF)
    z = s.logsumexp(-1).square().mean()  # before the output is due
    return s.softmax(-1) @ v, 1e-4 * z


@CASES.fuse(masked, dtypes=FULL)
def rows_without_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    keep = keep & (torch.arange(q.shape[-2], device=q.device) != 4)[:, None]
    s = scores(q, k).masked_fill(~keep, -INF)
    return s.softmax(-1).nan_to_num(0.0) @ v, s.logsumexp(-1).clamp_min(-100.0)


@CASES.fuse(masked, dtypes=FULL)
def fill_of_a_row_without_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    keep = keep & (torch.arange(q.shape[-2], device=q.device) != 4)[:, None]
    s = scores(q, k).masked_fill(~keep, -1e30)
    return s.softmax(-1) @ v, s.logsumexp(-1)


@CASES.fuse(with_sink)
def gated_by_a_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, keepdim=True) - sink)


@CASES.fuse(with_sink)
def with_the_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.cat([scores(q, k), sink.expand(2, 3, q.shape[-2], 1)], -1)
    return s.softmax(-1)[..., :-1] @ v, s.logsumexp(-1)


@CASES.fuse()
def detached(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.logsumexp(-1).detach()


@CASES.fuse()
def without_gradient(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    out = s.softmax(-1) @ v
    with torch.no_grad():
        lse = s.logsumexp(-1)
    return out, lse


def part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    lse = s.logsumexp(-1, keepdim=True)
    return torch.exp(s - lse) @ v, lse


@CASES.fuse(count=2)
def two_parts_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (a, x), (b, y) = part(q, k[:, :, :9], v[:, :, :9]), part(q, k[:, :, 9:], v[:, :, 9:])
    lse = torch.logaddexp(x, y)
    return a * torch.exp(x - lse) + b * torch.exp(y - lse)


@CASES.fuse(count=3)
def three_parts_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = [part(q, a, b) for a, b in zip(k.split(8, 2), v.split(8, 2), strict=True)]
    lse = torch.stack([x for _, x in parts])
    shares = torch.softmax(lse, 0)
    return (torch.stack([o for o, _ in parts]) * shares).sum(0)


@CASES.fuse(lambda d: [*qkv(d), d(2, 3, 6, 8), d(2, 3, 6, 8)], count=2)
def prefix_and_own_keys(q: Tensor, k: Tensor, v: Tensor, k0: Tensor, v0: Tensor) -> tuple[Tensor, Tensor]:
    i, j = places(q, k)
    s, s0 = scores(q, k).masked_fill(j > i, -INF), scores(q, k0)
    out, out0 = s.softmax(-1) @ v, s0.softmax(-1) @ v0
    w = torch.sigmoid(s.logsumexp(-1, keepdim=True) - s0.logsumexp(-1, keepdim=True))
    return w * out + (1 - w) * out0, w


# ----------------------------------------------------------------------------------------------------------------
# Near misses


@CASES.decline(qkv, ELSEWHERE)
def over_the_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.logsumexp(-2)


@CASES.decline(lambda d: qkv(d, 21, 21), ELSEWHERE)
def over_the_queries_of_a_square(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.logsumexp(-2)


@CASES.decline(square, ELSEWHERE)
def before_the_mask(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    i, j = places(q, k)
    s = scores(q, k)
    return s.masked_fill(j > i, -INF).softmax(-1) @ v, s.logsumexp(-1)


@CASES.decline(qkv, "the scores are read elsewhere too")
def before_the_scale(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q @ k.mT
    return (s * 0.3).softmax(-1) @ v, s.logsumexp(-1)


@CASES.decline(qkv, ELSEWHERE)
def to_base_2(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.exp2().sum(-1).log2()


@CASES.decline(qkv, ELSEWHERE)
def without_the_first_key(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s[..., 1:].logsumexp(-1)


@CASES.decline(qkv, ELSEWHERE)
def another_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.flip(1).logsumexp(-1)


@CASES.decline(qkv, ELSEWHERE)
def maximum_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    m = s.amax(-1, keepdim=True)
    return (s - m).softmax(-1) @ v, m


@CASES.decline(qkv, ELSEWHERE)
def above_another_shift(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v, s.amax((-2, -1))[..., None] + e.sum(-1).log()


@CASES.decline(with_sink, ELSEWHERE)
def without_the_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    whole = torch.cat([s, sink.expand(2, 3, q.shape[-2], 1)], -1)
    return whole.softmax(-1)[..., :-1] @ v, s.logsumexp(-1)


@CASES.decline(qkv, "`mul` is not a pointwise function of the scores")
def values_made_of_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s.softmax(-1) @ (v * s.logsumexp(-1).mean())


@CASES.decline(qkv, "`square` reads the log-sum-exp before `cos` has made what the output needs")
def values_made_after_it(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    z = s.logsumexp(-1).square()
    return s.softmax(-1) @ v.cos(), z
