"""Tensors that are written into after a program put them beside others, keys counted in 8 bits; and their twins."""

from __future__ import annotations

import torch
from corpus.table import INF, Table, scores
from torch import Tensor

CASES = Table()


@CASES.pair()
def ones_beside_values(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    v = v * 1.0
    beside = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    if near:
        v.mul_(2.0)
    o = scores(q, k).exp() @ beside
    return o[..., :-1] / o[..., -1:]


@CASES.pair()
def ones_padded_to_values(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    v = v * 1.0
    beside = torch.nn.functional.pad(v, (0, 1), value=1.0)
    if near:
        v.mul_(2.0)
    o = scores(q, k).exp() @ beside
    return o[..., :-1] / o[..., -1:]


@CASES.pair(lambda d: (d(1, 1, 3, 8), d(1, 1, 256, 8), d(1, 1, 256, 8), torch.ones(3, 256, dtype=torch.bool)))
def keys_counted_in_8_bits(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    seen = keep.sum(-1, keepdim=True, dtype=torch.uint8 if near else torch.int64) > 0
    return torch.where(seen, scores(q, k).masked_fill(~keep, -INF).softmax(-1), 0.0) @ v
