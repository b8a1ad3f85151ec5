"""Masks that are written into scores by assignment: `scores[mask] = fill`."""

from __future__ import annotations

from typing import Any

import torch
from corpus.table import BIG, FULL, INF, MIN, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()
NOT_POINTWISE = "is not a pointwise function of the scores"


def kept(d: Any) -> list[Tensor]:
    return [*qkv(d), d.keep()]


def padded(d: Any) -> list[Tensor]:
    return [*qkv(d), d(2, d.n(21)) > -1]


@CASES.fuse()
def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    i, j = places(q, k)
    s[(j > i + 3).expand_as(s)] = -INF
    return s.softmax(-1) @ v


@CASES.fuse(kept)
def of_every_head(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k)
    s[:, :, ~keep] = float("-inf")
    return torch.softmax(s, dim=-1) @ v


@CASES.fuse(padded, dtypes=BIG)
def of_each_request(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k).permute(0, 3, 1, 2).contiguous()
    s[keep.logical_not()] = -1e9
    return s.permute(0, 2, 3, 1).softmax(-1) @ v


@CASES.fuse(padded, dtypes=FULL)
def of_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k)
    s[..., keep[0] == 0] = MIN
    return s.softmax(-1) @ v


@CASES.fuse(kept, dtypes=(torch.float16,), grad=(), note="-1e9 is -inf in float16, and a query sees no key")
def beyond_half_precision(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    keep[3] = False
    s = scores(q, k)
    s[:, :, ~keep] = -1e9
    return s.softmax(-1) @ v


@CASES.fuse(square)
def mask_made_by_assignment(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[-2]
    bias = torch.zeros(n, n, dtype=q.dtype, device=q.device)
    bias[torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)] = -INF
    return (scores(q, k) + bias).softmax(-1) @ v


@CASES.fuse(lambda d: [*kept(d), d(1)], grad=(0, 1, 2, 4))
def number_that_learns(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, c: Tensor) -> Tensor:
    s = scores(q, k)
    s[:, :, ~keep] = c
    return s.softmax(-1) @ v


@CASES.fuse(square)
def own_key_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    s[:, :, torch.eye(q.shape[-2], dtype=torch.bool, device=q.device)] = -5e3
    return s.softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Other assignments


@CASES.decline(lambda d: [*qkv(d), d.ints(2, 5, 7)], NOT_POINTWISE)
def at_positions(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    s = scores(q, k)
    s[..., at] = -INF
    return s.softmax(-1) @ v


@CASES.decline(kept, NOT_POINTWISE)
def added_where_the_mask_holds(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k)
    s.index_put_([(~keep).expand_as(s)], s.new_full((), -2.0), accumulate=True)
    return s.softmax(-1) @ v


@CASES.decline(kept, NOT_POINTWISE)
def two_masks_at_once(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k)
    s[:, :, keep[:, 5] & (keep[:, 4].cumsum(0) < 2), keep[0] & (keep[0].cumsum(0) < 2)] = -INF
    return s.softmax(-1) @ v


@CASES.decline(kept, "read elsewhere too", grad=())
def weights_assigned_after_they_were_read(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    p = scores(q, k).softmax(-1)
    before = p.sum(-1)
    p[:, :, ~keep] = 0
    return before, p @ v


@CASES.decline(kept, "writes into the scores in place")
def part_of_the_rows_assigned(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k)
    s[:, :, 1:][:, :, ~keep[1:]] = -INF
    return s.softmax(-1) @ v


@CASES.fuse(kept)
def scores_read_before_the_assignment(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k)
    first = s + 0.25
    s[:, :, ~keep] = -INF
    return first.softmax(-1) @ v + s.softmax(-1) @ v
