"""What a variant of attention is: the program, and what its peers need to be told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
"""score_mod and mask_mod, as FlexAttention takes them."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention. With `page`, K and V lie in pages of so many keys behind a table."""

    b: int
    h: int
    n: int
    d: int
    hkv: int = 0
    """Key heads; 0: as many as query heads."""
    m: int = 0
    """Queries; 0: as many as keys."""
    page: int = 0
    lengths: tuple[int, ...] = ()
    """Keys of each request; empty: n of each."""

    @property
    def key_heads(self) -> int:
        return self.hkv or self.h

    @property
    def queries(self) -> int:
        return self.m or self.n

    @property
    def held(self) -> tuple[int, ...]:
        """Keys of each request."""
        return self.lengths or (self.n,) * self.b


Draw = Callable[[Shape, torch.device], tuple[Tensor, ...]]


def _nothing(*_: Any) -> tuple[Tensor, ...]:
    return ()


@dataclass(frozen=True)
class Variant:
    """One attention: the program, its further inputs, and how the peers say it (None: they cannot)."""

    name: str
    fn: Callable[..., Tensor]
    extra: Draw
    flex: Callable[..., Mods] | None
    after: Callable[..., Tensor] | None
    """What FlexAttention's result and log-sum-exp become."""
    sdpa: Callable[..., dict[str, Any] | None] | None
    fa3: Mapping[str, Any] | None
    learned: bool
    """Whether its further inputs have gradients in training."""

    @property
    def plain(self) -> bool:
        """Every library has kernels for it."""
        return self.sdpa is not None and self.extra is _nothing


VARIANTS: dict[str, Variant] = {}


def variant(
    name: str,
    *,
    extra: Draw = _nothing,
    flex: Callable[..., Mods] | None = None,
    after: Callable[..., Tensor] | None = None,
    sdpa: Callable[..., dict[str, Any] | None] | None = None,
    fa3: Mapping[str, Any] | None = None,
    learned: bool = False,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Enter a plain function among the variants."""

    def enter(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        VARIANTS[name] = Variant(name, fn, extra, flex, after, sdpa, fa3, learned)
        return fn

    return enter


# ----------------------------------------------------------------------------------------------------------------
# What the programs share: q [B, H, M, D], k and v [B, Hkv, N, D]


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Q K^T / sqrt(D)."""
    return q @ grouped(k, q).transpose(-1, -2) / math.sqrt(q.shape[-1])


def grouped(x: Tensor, q: Tensor) -> Tensor:
    """K or V, one head for each query head."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def weights(s: Tensor, like: Tensor) -> Tensor:
    """The softmax, in float32 at least."""
    return s.to(torch.promote_types(s.dtype, torch.float32)).softmax(-1).to(like.dtype)


def places(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q_idx as a column, kv_idx as a row."""
    m, n = q.shape[-2], k.shape[-2]
    return torch.arange(m, device=q.device)[:, None], torch.arange(n, device=q.device)[None, :]


def seen(s: Tensor, mask: Tensor) -> Tensor:
    return s.masked_fill(~mask, float("-inf"))


def is_past(b: Any, h: Any, q: Any, kv: Any) -> Any:  # noqa: ARG001 - FlexAttention's signature
    return q >= kv


def past(*_: Any) -> Mods:
    return None, is_past
