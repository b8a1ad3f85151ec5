"""Attentions as a person writes them in plain PyTorch, each with what its peers need to be told.

A new case is one function: q [B, H, M, D], k and v [B, Hkv, N, D], and further inputs whose first two axes are B or 1
and H or 1. The row above it says the same to FlexAttention, SDPA and FlashAttention-3; what a peer is not told, it does
not run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusecomp.bench.variant import Mods, Shape, grouped, is_past, past, places, scores, seen, variant, weights

WINDOW, CAP = 256, 30.0
"""Keys that a query sees in a window; the bound of a soft cap."""

@variant("full", flex=lambda *_: (None, None), sdpa=lambda *_: {}, fa3={})
def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ grouped(v, q)


@variant("causal", flex=past, sdpa=lambda *_: {"is_causal": True}, fa3={"causal": True})
def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return seen(scores(q, k), j <= i).softmax(-1) @ grouped(v, q)


def _capped(*_: Any) -> Mods:
    return lambda s, b, h, q, kv: CAP * torch.tanh(s / CAP), is_past


@variant("soft cap", flex=_capped, fa3={"causal": True, "softcap": CAP})
def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    s = CAP * torch.tanh(scores(q, k) / CAP)
    return weights(seen(s, j <= i), q) @ grouped(v, q)


def _slopes(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """ALiBi's, [1, H, 1, 1]."""
    head = torch.arange(1, shape.h + 1, device=device, dtype=torch.float32)
    return (torch.exp2(-8 * head / shape.h)[None, :, None, None],)


def _sloped(_: Shape, slopes: Tensor) -> Mods:
    flat = slopes.flatten()
    return lambda s, b, h, q, kv: s + flat[h] * (kv - q), is_past


@variant("ALiBi", extra=_slopes, flex=_sloped)
def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    i, j = places(q, k)
    return weights(seen(scores(q, k) + slopes * (j - i), j <= i), q) @ grouped(v, q)


def _table(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """A bias for each head and pair, [1, H, M, N]."""
    return (torch.randn(1, shape.h, shape.queries, shape.n, device=device, dtype=torch.bfloat16),)


def _biased(_: Shape, bias: Tensor) -> Mods:
    return lambda s, b, h, q, kv: s + bias[0, h, q, kv], None


def _given(shape: Shape, table: Tensor) -> dict[str, Any]:
    return {"attn_mask": table.expand(shape.b, -1, -1, -1)}


@variant("bias", extra=_table, flex=_biased, sdpa=_given)
@variant("learned bias", extra=_table, flex=_biased, sdpa=_given, learned=True)
def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return weights(scores(q, k) + bias, q) @ grouped(v, q)


def _in_window(*_: Any) -> Mods:
    return None, lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW)


@variant(f"window {WINDOW}", flex=_in_window, fa3={"causal": True, "window_size": (WINDOW - 1, 0)})
def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return weights(seen(scores(q, k), (j <= i) & (i - j < WINDOW)), q) @ grouped(v, q)


def _kept(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """A causal mask in memory that leaves out a tenth of the pairs, [1, 1, M, N]; a query sees its own key."""
    kept = torch.rand(1, 1, shape.queries, shape.n, device=device) < 0.9
    return (kept.tril_() | torch.eye(shape.queries, shape.n, device=device, dtype=torch.bool),)


def _is_kept(_: Shape, mask: Tensor) -> Mods:
    return None, lambda b, h, q, kv: mask[0, 0, q, kv]


@variant("boolean mask", extra=_kept, flex=_is_kept, sdpa=_given)
def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return weights(seen(scores(q, k), mask), q) @ grouped(v, q)


def _labels(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """The document of each place, [1, 1, N]: eight documents in all on average."""
    begins = torch.rand(1, 1, shape.n, device=device) < 8 / shape.n
    return (begins.cumsum(-1),)


def _same_document(_: Shape, labels: Tensor) -> Mods:
    flat = labels.flatten()
    return None, lambda b, h, q, kv: (q >= kv) & (flat[q] == flat[kv])


@variant("documents", extra=_labels, flex=_same_document)
def documents(q: Tensor, k: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    i, j = places(q, k)
    same = labels[..., :, None] == labels[..., None, :]
    return weights(seen(scores(q, k), (j <= i) & same), q) @ grouped(v, q)


def _in_prefix(shape: Shape) -> Mods:
    return None, lambda b, h, q, kv: (q >= kv) | (kv < shape.n // 4)


@variant("prefix", flex=_in_prefix)
def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first quarter sees itself whole."""
    i, j = places(q, k)
    return weights(seen(scores(q, k), (j <= i) | (j < k.shape[-2] // 4)), q) @ grouped(v, q)


def _sinks(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """A logit for each head, [1, H, 1, 1]."""
    return (torch.randn(1, shape.h, 1, 1, device=device, dtype=torch.bfloat16),)


def _drained(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return (out * torch.sigmoid(lse[..., None] - sinks)).to(out.dtype)


@variant("sinks", extra=_sinks, flex=past, after=_drained)
def sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    i, j = places(q, k)
    s = seen(scores(q, k), j <= i)
    sunk = torch.cat([s, sinks.expand(*s.shape[:-1], 1)], -1)
    return weights(sunk, q)[..., :-1] @ grouped(v, q)
