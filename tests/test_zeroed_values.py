"""Values in pages that a program zeroes past the length are read from the pages: no key from there on is visited."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from corpus.paged import HKV, INF, Draw, H, paged
from recognising import region_of
from torch import Tensor

Zero = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(zero: Zero, fill: float = -INF) -> Callable[..., Tensor]:
    """Decode attention whose values, [B, Hkv, N, D], pass through zero(v, key, lengths)."""

    def fn(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        k, v = (x[table].flatten(1, 2).transpose(1, 2) for x in (k_pool, v_pool))
        key = torch.arange(k.shape[2])
        v = zero(v, key, lengths)
        k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
        s = q.transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5
        dead = key[None] >= lengths[:, None]
        return s.masked_fill(dead[:, None, None], fill).softmax(-1) @ v

    return fn


def live(key: Tensor, lengths: Tensor) -> Tensor:
    return (key[None] < lengths[:, None])[:, None, :, None]


def reads_pages(fn: Callable[..., Tensor]) -> bool:
    region = region_of(fn, *paged(Draw(torch.float32, "cpu", 1)))
    assert "kv_idx // 8" in str(region.products[0].k)
    return "kv_idx // 8" in str(region.v)


SAME: dict[str, Zero] = {
    "where": lambda v, key, lengths: torch.where(live(key, lengths), v, 0.0),
    "where not": lambda v, key, lengths: torch.where(~live(key, lengths), torch.zeros(()), v),
    "zeros_like": lambda v, key, lengths: torch.where(live(key, lengths), v, torch.zeros_like(v)),
    "masked_fill": lambda v, key, lengths: v.masked_fill(~live(key, lengths), 0),
    "the other way round": lambda v, key, lengths: torch.where(live(key, lengths).logical_not(), 0.0, v),
    "times": lambda v, key, lengths: v * live(key, lengths),  # a factor of the weights
    "scaled": lambda v, key, lengths: torch.where(live(key, lengths), v * 0.5, 0.0),
    "then a copy": lambda v, key, lengths: torch.where(live(key, lengths), v, 0.0).contiguous().clone(),
}
OTHER: dict[str, Zero] = {
    "another length": lambda v, key, lengths: torch.where(live(key, lengths - 1), v, 0.0),
    "scaled, another length": lambda v, key, lengths: torch.where(live(key, lengths - 1), v * 0.5, 0.0),
    "another number": lambda v, key, lengths: torch.where(live(key, lengths), v, 1.0),
    "from a key on": lambda v, key, lengths: torch.where((key >= 2)[:, None] & live(key, lengths), v, 0.0),
    "some keys": lambda v, key, lengths: torch.where((key % 2 == 0)[:, None] & live(key, lengths), v, 0.0),
    "the live ones": lambda v, key, lengths: torch.where(live(key, lengths), 0.0, v),
}


@pytest.mark.parametrize("name", SAME)
def test_zeroed_past_the_length_is_read_in_place(name: str) -> None:
    assert reads_pages(attention(SAME[name]))


@pytest.mark.parametrize("name", OTHER)
def test_anything_else_is_computed_first(name: str) -> None:
    assert not reads_pages(attention(OTHER[name]))


def test_a_finite_fill_gives_rows_that_average_over_the_zeros() -> None:
    assert not reads_pages(attention(SAME["where"], fill=torch.finfo(torch.float32).min))
    assert reads_pages(attention(lambda v, *_: v, fill=torch.finfo(torch.float32).min))


def test_a_mask_that_differs_along_the_queries_is_no_length() -> None:
    def fn(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        k, v = (x[table].flatten(1, 2).transpose(1, 2).repeat_interleave(H // HKV, 1) for x in (k_pool, v_pool))
        key = torch.arange(k.shape[2])
        per_head = torch.arange(1, H + 1)[:, None] * 3
        v = torch.where((key < per_head)[None, :, :, None], v, 0.0)
        s = q.transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5
        return s.masked_fill((key >= per_head)[None, :, None], -INF).softmax(-1) @ v

    assert not reads_pages(fn)
