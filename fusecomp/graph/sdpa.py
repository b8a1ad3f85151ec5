"""What F.scaled_dot_product_attention means.

    SDPA(Q, K, V, mask, p) = dropout(softmax(scale * Q K^T + mask), p) V,   a query whose scores are all -inf gives 0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusecomp.graph.facts import said

CALL = "scaled_dot_product_attention"


@dataclass(frozen=True)
class How:
    """What a call says beside its tensors."""

    p: float
    causal: bool
    scale: float | None

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> How:
        p, causal, scale = (said(args, kwargs, *x) for x in ((4, "dropout_p", 0.0), (5, "is_causal"), (6, "scale")))
        return How(p, bool(causal), scale)


def mask_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return said(args, kwargs, 3, "attn_mask")


def definition(how: How, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The meaning of one call. q [.., H, M, D], k and v [.., Hkv, N, D], mask bool (True counts) or additive."""
    if k.dim() > 2 and k.shape[-3] != q.shape[-3]:
        groups = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scale = 1 / math.sqrt(q.shape[-1]) if how.scale is None else how.scale
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if how.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(mask.logical_not(), float("-inf")) if hides else scores + mask
    weights = torch.softmax(scores, -1)
    weights = weights if mask is None else weights.nan_to_num(0.0)
    if how.p:
        weights = torch.dropout(weights, how.p, True)
    return torch.matmul(weights.to(v.dtype), v)
