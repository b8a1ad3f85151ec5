"""What the log-sum-exp of a region means, evaluated densely:

    lse = log sum exp(S)       the sink included; where a query sees no key, -inf or that of its filled scores
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fusecomp.ir.reference import Env, bind, masked_logits, product_scores, sinks
from fusecomp.ir.region import AttentionRegion


def evaluate_lse(
    region: AttentionRegion,
    tensors: Sequence[Tensor],
    sizes: Mapping[str, int] | Sequence[int],
    dtype: torch.dtype = torch.float64,
    rows: slice | Tensor | None = None,
    *,
    batch: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """log sum exp(S) over (batch axes, q_idx), for the arguments of `reference.evaluate`."""
    return log_sums(region, bind(region, tensors, sizes, dtype, rows).at(**(batch or {})))


def log_sums(region: AttentionRegion, env: Env) -> Tensor:
    """log sum exp(S) for the rows and keys that `env` spans."""
    env = replace(env, scores=tuple(product_scores(region, p, env) for p in region.products))
    return log_sum(region, masked_logits(region, env)[0], env)


def log_sum(region: AttentionRegion, logits: Tensor, env: Env) -> Tensor:
    """log sum exp over the last axis, the sink included."""
    lse = torch.logsumexp(logits, -1)
    if region.sink is None:
        return lse
    total = torch.logaddexp(lse, sinks(region, logits, env).squeeze(-1))
    return torch.where(lse == -math.inf, lse, total) if region.empty_row == "unsafe" else total
