"""Decoding: a query or a few against a cache, dense or in pages. q [B, H, M, D]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusecomp.bench.variant import Mods, Shape, grouped, places, scores, seen, variant, weights


def _full_lengths(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.full((shape.b, 1, 1, 1), shape.n, device=device, dtype=torch.int32),)


@variant("cache", extra=_full_lengths, flex=lambda *_: (None, None), sdpa=lambda *_: {}, fa3={})
def cache(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """A dense cache, as full as `lengths`; the peers are told that it is full."""
    _, j = places(q, k)
    return weights(seen(scores(q, k), j < lengths), q) @ grouped(v, q)


def _table_and_lengths(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """Pages in random order, [B, the most pages], and the keys of each request."""
    pages = [-(-n // shape.page) for n in shape.held]
    order = torch.randperm(sum(pages), device=device, dtype=torch.int32)
    table = torch.zeros(shape.b, max(pages), dtype=torch.int32, device=device)
    for row, mine in zip(table, order.split(pages), strict=True):
        row[: len(mine)] = mine
    return table, torch.tensor(shape.held, dtype=torch.int32, device=device)


def _up_to_length(shape: Shape, table: Tensor, lengths: Tensor) -> Mods:  # noqa: ARG001 - keys are gathered for them
    if shape.queries == 1 and set(shape.held) == {shape.n}:
        return None, None
    return None, lambda b, h, q, kv: kv <= lengths[b] - shape.queries + q


def _whole(shape: Shape, *_: Any) -> dict[str, Any] | None:
    """SDPA knows no lengths."""
    return {} if shape.queries == 1 and set(shape.held) == {shape.n} else None


@variant("paged", extra=_table_and_lengths, flex=_up_to_length, sdpa=_whole, fa3={})
def paged(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Pools [pages, page, Hkv, D]; the last query of a request sees all of its keys."""
    k, v = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (k_pool, v_pool))
    i, j = places(q, k)
    last = lengths[:, None, None, None] - q.shape[2] + i
    return weights(seen(scores(q, k), j <= last), q) @ grouped(v, q)
