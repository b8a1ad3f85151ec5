"""Masks in the ways in which people make them: triangles, sums, outer products, blocks, segments, written rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import BIG, FULL, INF, MIN, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()


def segments(d: Any) -> list[Tensor]:
    return [*square(d), (torch.arange(d.n(21), device=d.device) * 5 // d.n(21)).expand(2, -1).contiguous()]


def valid(d: Any) -> list[Tensor]:
    return [*square(d), d.ints(17, 9)]


@CASES.pair(square)
def band_of_two_triangles(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    n = q.shape[-2]
    band = torch.tril(torch.ones(n, n), 2) * torch.triu(torch.ones(n, n), -5)
    return scores(q, k).masked_fill(band == 0, -INF).softmax(-2 if near else -1) @ v


@CASES.pair(square)
def less_a_further_triangle(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    ones = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    keep = ones.tril() ^ ones.tril(-6)
    s = scores(q, k)
    s = s.cumsum(-1) if near else s
    return torch.where(keep, s, torch.full((), -INF, dtype=q.dtype)).softmax(-1) @ v


@CASES.pair(segments)
def blocks_of_segments(q: Tensor, k: Tensor, v: Tensor, segment: Tensor, near: bool = False) -> Tensor:
    same = (segment.unsqueeze(-1) == segment.unsqueeze(-2)).unsqueeze(1)
    s = torch.where(same, scores(q, k), -1e9)
    return (torch.sigmoid(s) if near else torch.softmax(s, -1)) @ v


@CASES.pair(segments)
def outer_product_of_one_hot_segments(q: Tensor, k: Tensor, v: Tensor, segment: Tensor, near: bool = False) -> Tensor:
    hot = F.one_hot(segment, 5).to(q.dtype)
    same = torch.bmm(hot, hot.transpose(1, 2))[:, None]
    s = scores(q, k).masked_fill(same < 0.5, -INF)
    return s.softmax(1 if near else -1) @ v


@CASES.pair(segments)
def earlier_segments_too(q: Tensor, k: Tensor, v: Tensor, segment: Tensor, near: bool = False) -> Tensor:
    seen = segment[:, :, None].ge(segment[:, None, :])[:, None]
    s = scores(q, k).masked_fill(seen.logical_not(), torch.finfo(q.dtype).min)
    p = s.softmax(-1)
    return (p.flip(-1) if near else p) @ v


@CASES.pair(segments)
def documents_and_causal_by_product(q: Tensor, k: Tensor, v: Tensor, segment: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    same = (segment[:, None, :, None] - segment[:, None, None, :]).eq(0)
    m = same.to(q.dtype) * (i >= j).to(q.dtype)
    p = (scores(q, k) + (1.0 - m) * -10000.0).softmax(-1)
    return (p - p.mean(-1, keepdim=True) ** 2 if near else p) @ v


@CASES.pair(valid, dtypes=BIG)
def outer_product_of_two_paddings(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, near: bool = False) -> Tensor:
    live = torch.arange(k.shape[-2])[None] < lengths[:, None]
    both = torch.einsum("bi,bj->bij", live.to(q.dtype), live.to(q.dtype)).unsqueeze(1)
    s = scores(q, k) - 1e9 * (1 - both)
    s = s.sort(-1).values if near else s
    return s.softmax(-1) @ v


@CASES.pair(square)
def mask_from_a_running_sum(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Positions as running sums of ones, as position ids are made."""
    place = torch.ones(q.shape[-2], dtype=torch.long).cumsum(0) - 1
    keep = place[:, None] >= place[None]
    s = scores(q, k).masked_fill(~keep, -INF)
    p = s.softmax(-1)
    return (p / p.amax(-2, keepdim=True) if near else p) @ v


@CASES.pair(lambda d: [*square(d), d(2, d.n(21)) > -1.0])
def left_padding_by_running_sum(q: Tensor, k: Tensor, v: Tensor, live: Tensor, near: bool = False) -> Tensor:
    place = live.long().cumsum(-1)
    keep = (place[:, None, :, None] >= place[:, None, None, :]) & live[:, None, None, :]
    s = scores(q, k).masked_fill(~keep, MIN if q.dtype == torch.float32 else torch.finfo(q.dtype).min)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: square(d, 24))
def blocks_on_the_diagonal(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    one = torch.ones(6, 6, dtype=torch.bool)
    keep = torch.block_diag(one, one, one, one)
    s = scores(q, k).masked_fill(~keep, -INF)
    return (s.softmax(-1) ** 2 if near else s.softmax(-1)) @ v


@CASES.pair(lambda d: square(d, 24))
def blocks_by_kron(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Causal by blocks of four: every key of the query's own block is seen."""
    keep = torch.kron(torch.ones(6, 6).tril(), torch.ones(4, 4)).bool()
    s = scores(q, k).masked_fill(~keep, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: square(d, 24))
def blocks_by_repeated_triangle(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    keep = torch.ones(6, 6, dtype=torch.bool).tril().repeat_interleave(4, 0).repeat_interleave(4, 1)
    s = scores(q, k).masked_fill(keep.logical_not(), -INF)
    s = s - s.mean(-1, keepdim=True) * s if near else s
    return s.softmax(-1) @ v


@CASES.pair(square)
def strided_by_remainder(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Sparse Transformer: the last few keys, and every fourth before."""
    i, j = places(q, k)
    keep = (i >= j) & ((i - j < 4) | ((i - j) % 4 == 0))
    s = torch.where(keep, scores(q, k), -INF)
    return s.softmax(-1 if not near else 0) @ v


@CASES.pair(square)
def fixed_columns(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    own = torch.div(i, 5, rounding_mode="floor") == torch.div(j, 5, rounding_mode="floor")
    keep = torch.logical_and(j <= i, torch.logical_or(own, torch.remainder(j, 5) == 4))
    s = scores(q, k).masked_fill(~keep, -INF)
    return (torch.exp(s) if near else s.softmax(-1)) @ v


@CASES.pair(lambda d: [*square(d), d(d.n(21)) > 1])
def longformer(q: Tensor, k: Tensor, v: Tensor, every: Tensor, near: bool = False) -> Tensor:
    """A window for all, and tokens that see and are seen by all."""
    i, j = places(q, k)
    keep = ((i - j).abs() <= 3) | every[None, :] | every[:, None]
    s = scores(q, k).masked_fill(~keep, -INF)
    p = s.softmax(-1)
    return (p * (p > 0.05) if near else p) @ v


@CASES.pair(lambda d: [*square(d, 24), torch.randint(0, 6, (6, 2), generator=d.generator).to(d.device)])
def big_bird(q: Tensor, k: Tensor, v: Tensor, drawn: Tensor, near: bool = False) -> Tensor:
    """First block, neighbours, and two random blocks for each block of queries."""
    blocks = torch.zeros(6, 6, dtype=torch.bool, device=q.device)
    blocks = blocks.scatter(1, drawn, True)
    b = torch.arange(6, device=q.device)
    blocks = blocks | ((b[:, None] - b).abs() <= 1) | (b[None] == 0)
    keep = blocks.repeat_interleave(4, 0).repeat_interleave(4, 1)
    s = scores(q, k).masked_fill(~keep, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d), d.ints(4, 11)])
def prefix_of_each_request(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    keep = torch.maximum((i >= j).int(), (j < prefix[:, None, None]).int()).bool()[:, None]
    s = scores(q, k) + torch.zeros(keep.shape, dtype=q.dtype).masked_fill_(~keep, -INF)
    return (torch.relu(s) if near else s.softmax(-1)) @ v


@CASES.pair(segments)
def bidirectional_within_causal_between(q: Tensor, k: Tensor, v: Tensor, s_id: Tensor, near: bool = False) -> Tensor:
    """Images in a text: tokens of one image see one another, otherwise the past."""
    i, j = places(q, k)
    image = (s_id[:, :, None] == s_id[:, None, :]) & (s_id[:, :, None] % 2 == 1)
    keep = image | (i >= j)
    s = scores(q, k).masked_fill(~keep[:, None], -INF)
    return (s.softmax(-1) + s.softmax(-2) if near else s.softmax(-1)) @ v


@CASES.pair(square)
def sinks_and_window(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """StreamingLLM: the first two keys and the last five."""
    i, j = places(q, k)
    far, first, later = i - j >= 5, j < 2, j > i
    s = scores(q, k).masked_fill(later | (far & ~first), -INF)
    return s.softmax(-1).softmax(-1) @ v if near else s.softmax(-1) @ v


@CASES.pair(square)
def nested_choices(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k)
    s = torch.where(j > i, -INF, torch.where(i - j > 7, torch.where(j < 3, s * 0.5, -INF), s))
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def xor_of_parities_and_itself(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    keep = ((i % 2).bool() ^ (j % 2).bool()) | (i == j)
    s = scores(q, k) + torch.log(keep.to(q.dtype))
    return (s.cummax(-1).values if near else s).softmax(-1) @ v


@CASES.pair(square, dtypes=FULL)
def rows_written_one_by_one(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    n = q.shape[-2]
    keep = torch.zeros(n, n)
    for i in range(n):
        keep[i, max(0, i - 4) : i + 1] = 1
    s = scores(q, k).masked_fill(keep == 0, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def triangle_of_indices(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    n = q.shape[-2]
    r, c = torch.triu_indices(n, n, 1)
    bias = torch.zeros(n, n, dtype=q.dtype)
    bias[r, c] = -INF
    s = scores(q, k) + bias
    return (s.softmax(-1).cumsum(-1) if near else s.softmax(-1)) @ v


@CASES.pair(square)
def places_by_meshgrid(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    i, j = torch.meshgrid(torch.arange(q.shape[-2]), torch.arange(k.shape[-2]), indexing="ij")
    s = scores(q, k).masked_fill((i < j).logical_or(i - j > 8), -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*qkv(d), d.keep()])
def inverted_once_more(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    """As encoders extend masks: (1 - m) * min, then min wherever a second mask is not 0."""
    least = torch.finfo(q.dtype).min
    m = (1.0 - keep.to(q.dtype)) * least
    s = scores(q, k).masked_fill(m.bool(), least)
    return (s.softmax(-1) if not near else (s.softmax(-1) > 0.1).to(q.dtype)) @ v


@CASES.pair(lambda d: [*qkv(d), d.keep()])
def clamped_from_below(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    """OPT: max(score + mask, min)"""
    least = torch.finfo(q.dtype).min
    s = scores(q, k) + torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, least)
    s = torch.max(s, torch.full((), least, dtype=q.dtype))
    return (s - s.roll(1, -1) if near else s).softmax(-1) @ v


@CASES.pair(square)
def future_by_the_sign(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k).masked_fill(torch.sign(j - i) > 0, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def flipped_triangle(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """The other half: keys at or behind the query."""
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().flip(0, 1)
    s = scores(q, k).masked_fill(~keep, -INF)
    return (s.softmax(-1) @ v) if not near else s.flip(-1).softmax(-2) @ v


@CASES.pair(lambda d: square(d, 24))
def block_sparse_layout(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """A layout of blocks, stretched to elements by expand and reshape."""
    layout = torch.eye(4, dtype=torch.bool) | (torch.arange(4) == 0)
    keep = layout[:, None, :, None].expand(4, 6, 4, 6).reshape(24, 24)
    s = scores(q, k).masked_fill(~keep, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def every_head_its_window(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    reach = 2 ** torch.arange(1, q.shape[1] + 1)
    keep = (i - j).abs()[None] <= reach[:, None, None]
    s = scores(q, k).masked_fill(~keep, -INF)
    return s.softmax(1 if near else -1) @ v


@CASES.pair(lambda d: [*square(d), d.ints(3, 0)], dtypes=BIG)
def padding_on_both_sides(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, near: bool = False) -> Tensor:
    j = torch.arange(k.shape[-2])
    live = (j >= begin[:, None]).float() * (j < begin[:, None] + 15).float()
    bias = (live[:, None, None, :] - 1) * 1e9
    s = scores(q, k) + bias.to(q.dtype)
    return (s.softmax(-1) if not near else s.softmax(-1).clamp(min=0.01)) @ v
