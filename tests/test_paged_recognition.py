"""What is found in decoding programs, and the nearly identical programs in which it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recognising import candidates, mathematics, region_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusecomp
from fusecomp.ir.expr import Const

H, D, PAGE = 4, 16, 8


def args(m: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [3, H, M, D], pools [9, PAGE, H, D], table [3, 2]."""
    torch.manual_seed(0)
    return torch.randn(3, H, m, D), *torch.randn(2, 9, PAGE, H, D), torch.randint(0, 9, (3, 2))


def fetched(pool: Tensor, table: Tensor) -> Tensor:
    return pool[table].flatten(1, 2).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------
# scaled_dot_product_attention without a mask


def paged(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor) -> Tensor:
    return sdpa(q, fetched(k_pool, table), fetched(v_pool, table))


def keys_alone(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor) -> Tensor:
    return sdpa(q, fetched(k_pool, table), v_pool[:3, :2].repeat(1, PAGE, 1, 1).transpose(1, 2))


def computed(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor) -> Tensor:
    return sdpa(q, fetched(k_pool, table) * 2, fetched(v_pool, table))


def test_few_queries_read_through_the_table() -> None:
    assert {o.name for o in region_of(paged, *args()).loads} == {"load0"}


@pytest.mark.parametrize(("fn", "m"), [(paged, 17), (keys_alone, 1), (computed, 1)])
def test_other_calls_are_pytorchs_own(fn: Any, m: int) -> None:
    assert not candidates(fn, *args(m))


# ----------------------------------------------------------------------------------------------------------------
# Weights that are filled where the scores were


def filled(by: str) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, keep: Tensor) -> Tensor:
        n = torch.arange(k.shape[2])
        dead = (n >= lengths[:, None])[:, None, None]
        hidden = {"the same": dead, "more": dead | ~keep, "another": ~keep & (n > 3)}[by]
        return (q @ k.mT).masked_fill(dead, float("-inf")).softmax(-1).masked_fill(hidden, 0.0) @ v

    return attend


@pytest.mark.parametrize(("by", "empty_row", "weighted"), [("the same", "zero", 0), ("more", "zero", 1)])
def test_rows_without_keys_are_zero_where_all_is_filled(by: str, empty_row: str, weighted: int) -> None:
    q, k, v = torch.randn(3, H, 1, D), *torch.randn(2, 3, H, 16, D)
    region = region_of(filled(by), q, k, v, torch.tensor([3, 16, 0]), torch.rand(16) > 0.5)
    assert region.empty_row == empty_row
    assert (region.weight != Const(1.0)) == weighted


def test_rows_without_keys_are_nan_and_zero_where_something_else_is_filled() -> None:
    q, k, v = torch.randn(3, H, 1, D), *torch.randn(2, 3, H, 16, D)
    (found,) = candidates(filled("another"), q, k, v, torch.tensor([3, 16, 0]), torch.rand(16) > 0.5)
    assert "some are NaN, some 0" in getattr(found, "reason", "")


# ----------------------------------------------------------------------------------------------------------------
# Scores less their log-sum-exp, under a finite fill


def reduced(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    dead = (torch.arange(k.shape[2]) >= lengths[:, None])[:, None, None]
    s = (q @ k.mT).masked_fill(dead, -1e30)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


def normalised(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    dead = (torch.arange(k.shape[2]) >= lengths[:, None])[:, None, None]
    return (q @ k.mT).masked_fill(dead, -1e30).softmax(-1) @ v


def unmasked(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    s = q @ k.mT + lengths.view(-1, 1, 1, 1)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@pytest.mark.parametrize(("fn", "said"), [(reduced, True), (normalised, False), (unmasked, False)])
def test_a_logarithm_that_a_fill_swallows(fn: Any, said: bool) -> None:
    tensors = torch.randn(3, H, 1, D), *torch.randn(2, 3, H, 16, D), torch.tensor([3, 16, 0])
    region = region_of(fn, *tensors)
    assert region.subtracted is said
    assert not said or region.key != region_of(normalised, *tensors).key


def test_training_is_left_to_eager() -> None:
    q, *rest = torch.randn(3, H, 1, D, requires_grad=True), *torch.randn(2, 3, H, 16, D), torch.tensor([3, 16, 0])
    fusecomp.reset()
    fast = torch.compile(reduced, backend="fusecomp", options={"inner": "eager"})
    (own,), (got,) = (torch.autograd.grad(f(q, *rest).sum(), q) for f in (reduced, fast))
    torch.testing.assert_close(got, own)
    assert fusecomp.counters()["declined"] == 1


@pytest.mark.parametrize(
    ("queries", "seen"), [(1, "kv_idx < load0[1] - load0[0]"), (3, "kv_idx < load0[q_idx + 1] - load0[q_idx]")]
)
def test_where_one_query_ends_does_not_vary_with_it(queries: int, seen: str) -> None:
    """So that no key after it is read; of three queries each has an end of its own."""

    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        held = (starts[1:] - starts[:-1])[:, None]
        live = torch.arange(k.shape[1], device=q.device) < held
        return (q @ k.mT).masked_fill(~live, -torch.inf).softmax(-1) @ v

    q, k = torch.randn(2, queries, 16), torch.randn(2, 40, 16)
    region = region_of(attend, q, k, k, torch.arange(queries + 1) * 11)
    assert mathematics(region)["keep"] == [seen]
