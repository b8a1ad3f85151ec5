"""Numbers of 32 bits that a program widens before it multiplies them: kernels multiply them in int64 too."""

from __future__ import annotations

import pytest
import torch
from kernels import Interpreter, agree, tiles
from recognising import region_of
from torch import Tensor

from fusecomp.ir.expr import Cast, parts
from fusecomp.ir.region import AttentionRegion

INF, PAGE = float("inf"), 4
Q, POOL, VALUES = torch.randn(2, 3, 1, 16), torch.randn(40, 3, 16), torch.randn(40, 3, 16)
KEYS, LENGTHS = torch.randn(2, 3, 40, 16), torch.tensor([37, 12])
NUMBERS = torch.randint(2, 9, (2, 10), dtype=torch.int32)
DOCUMENTS = torch.randint(0, 5, (2, 40), dtype=torch.int32)
SIZES = {"B": 2, "H": 3, "M": 1, "N": 40}


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v


def hashed(q: Tensor, pool: Tensor, values: Tensor, numbers: Tensor, lengths: Tensor) -> Tensor:
    """Rows of the pools by a hash of page numbers."""
    n = torch.arange(numbers.shape[1] * PAGE)
    row = (numbers.long()[:, n // PAGE] * (1 << 30) + n % PAGE * 7) % 1009 % 40
    k, v = (x[row].transpose(1, 2) for x in (pool, values))
    return attend(q, k, v, (n < lengths[:, None])[:, None, None])


def ordered(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, lengths: Tensor) -> Tensor:
    """Keys of documents up to the query's own."""
    rank = documents.long() * 1_000_003_000
    own = rank.gather(1, lengths[:, None] - 1)
    return attend(q, k, v, (rank <= own)[:, None, None])


def in_place(q: Tensor, pool: Tensor, values: Tensor, numbers: Tensor, lengths: Tensor) -> Tensor:
    """Pages by their numbers: nothing is multiplied."""
    k, v = (x[numbers.long()].flatten(1, 2).transpose(1, 2) for x in (pool, values))
    return attend(q, k, v, (torch.arange(k.shape[2]) < lengths[:, None])[:, None, None])


def widened(region: AttentionRegion) -> bool:
    held = (*region.keep, *region.products[0].k.index, *region.v.index)
    return any(isinstance(x, Cast) and x.dtype == "int64" for e in held for x in parts(e))


@pytest.mark.parametrize("skeleton", ["decode", "prefill"])
def test_rows_by_large_products(interpreter: Interpreter, skeleton: str) -> None:
    region = region_of(hashed, Q, POOL, VALUES, NUMBERS, LENGTHS)
    assert widened(region)
    agree(interpreter, region, [Q, POOL, VALUES, LENGTHS, NUMBERS], SIZES, tiles(region, 16, 16, skeleton))


def test_masks_by_large_products(interpreter: Interpreter) -> None:
    region = region_of(ordered, Q, KEYS, KEYS.flip(2), DOCUMENTS, LENGTHS)
    assert widened(region)
    agree(interpreter, region, [Q, KEYS, KEYS.flip(2), DOCUMENTS, LENGTHS], SIZES, tiles(region, 16, 16, "decode"))


def test_where_nothing_is_multiplied_nothing_is_widened() -> None:
    pools = (x.unflatten(0, (-1, PAGE)) for x in (POOL, VALUES))
    assert not widened(region_of(in_place, Q, *pools, NUMBERS, LENGTHS))
