"""Heads that read the same K and V share a tile, however the program keeps them apart: as an axis of groups, or all of
them beside one key head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import Interpreter, agree
from recognising import region_of
from torch import Tensor

from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.device import find
from fusecomp.planning.plan import plan
from fusecomp.planning.tile import TilePlan

INF = float("inf")
Q, LENGTHS = torch.randn(2, 1, 10, 16), torch.tensor([300, 11])
KEYS, VALUES = torch.randn(2, 300, 2, 16), torch.randn(2, 300, 2, 16)


def unseen(k: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(k.shape[1]) >= lengths[:, None]


def groups(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    s = torch.einsum("bmhgd,bnhd->bhgmn", q.unflatten(2, (k.shape[2], -1)), k)
    p = s.masked_fill(unseen(k, lengths)[:, None, None, None], -INF).softmax(-1)
    return torch.einsum("bhgmn,bnhd->bmhgd", p, v).flatten(2, 3)


def one_key_head(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    s = torch.einsum("bmhd,bnd->bhmn", q, k[:, :, 0])
    p = s.masked_fill(unseen(k, lengths)[:, None, None], -INF).softmax(-1)
    return torch.einsum("bhmn,bnd->bmhd", p, v[:, :, 0])


def key_heads(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """As many key heads as query heads"""
    return groups(q[:, :, :2], k, v, lengths)


def heads_of_values(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """One key head, two value heads, of which each query head reads one or the other in turn"""
    s = torch.einsum("bmhd,bnd->bhmn", q[:, :, :2], k[:, :, 0])
    return torch.einsum("bhmn,bnhd->bmhd", s.masked_fill(unseen(k, lengths)[:, None, None], -INF).softmax(-1), v)


def planned(region: AttentionRegion, **sizes: int) -> TilePlan:
    return plan(region, {**dict.fromkeys(region.sizes, 1), "B": 64, "N": 4096, **sizes}, find("h200"))


PACKED = [(groups, {"H": 2, "G": 5}, 5), (one_key_head, {"H": 10}, 10)]
APART = [(key_heads, {"H": 2, "G": 1}), (heads_of_values, {"H": 2})]


@pytest.mark.parametrize(("fn", "sizes", "pack"), PACKED)
def test_heads_of_the_same_keys_share_a_tile(
    interpreter: Interpreter, fn: Callable[..., Any], sizes: dict[str, int], pack: int
) -> None:
    region = region_of(fn, Q, KEYS, VALUES, LENGTHS)
    made = planned(region, **sizes)
    assert (made.skeleton, made.pack) == ("decode", pack)
    agree(interpreter, region, [Q, KEYS, VALUES, LENGTHS], {"B": 2, "M": 1, "N": 300, **sizes}, made)


@pytest.mark.parametrize(("fn", "sizes"), APART)
def test_heads_of_other_keys_or_values_do_not(fn: Callable[..., Any], sizes: dict[str, int]) -> None:
    assert planned(region_of(fn, Q, KEYS, VALUES, LENGTHS), **sizes).pack == 1


def test_a_number_of_heads_that_may_change_is_not_shared_out() -> None:
    """Another call may have heads that no tile would reach."""
    assert region_of(one_key_head, Q, KEYS, VALUES, LENGTHS, dynamic=True).alike == 1
