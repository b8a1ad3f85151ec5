"""Differences and running sums along an axis: positions that count up are one document, data stay data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from corpus.table import INF, Draw, places, scores, square
from recognising import region_of
from torch import Tensor

from fusecomp.ir.expr import text
from fusecomp.ir.reference import evaluate

Ids = Callable[[Tensor], Tensor]
SIZES = {"B": 2, "H": 3, "M": 21, "N": 21}


def numbered(at: Tensor, first: Tensor | None = None) -> Tensor:
    """Which packed sequence each position is in: transformers 5.24, find_packed_sequence_indices."""
    before = at[..., :1] - 1 if first is None else first
    return (torch.diff(at, prepend=before, dim=-1) != 1).cumsum(-1)


def one_of(ids: Ids) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Causal attention within what `ids` of the positions [1, N] number, and its arguments."""

    def fn(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        i, j = places(q, k)
        own = ids(at)
        keep = (j <= i) & (own[:, None, :, None] == own[:, None, None, :])
        return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v

    draw = Draw(torch.float32, "cpu", 1)
    return fn, [*square(draw), torch.tensor([[*range(8), *range(6), *range(7)]])]


COUNTED: dict[str, tuple[Ids, str]] = {
    "transformers": (lambda at: numbered(torch.arange(21)[None].expand(2, -1)), "q_idx >= kv_idx"),
    "from an offset": (lambda at: numbered(torch.arange(21)[None] + 5), "q_idx >= kv_idx"),
    "appended": (lambda at: (torch.arange(20).diff(append=torch.tensor([20]), prepend=torch.tensor([-1])) != 1)
                 .cumsum(0)[None], "q_idx >= kv_idx"),
    "backwards": (lambda at: (torch.arange(21, 0, -1).diff(prepend=torch.tensor([22])) + 1).cumsum(0)[None],
                  "q_idx >= kv_idx"),
    "each its own": (lambda at: torch.ones_like(at).cumsum(-1), "q_idx >= kv_idx q_idx + 1 == kv_idx + 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_positions_that_count_up_are_no_data(name: str) -> None:
    ids, keep = COUNTED[name]
    fn, args = one_of(ids)
    region = region_of(fn, *args)
    assert (" ".join(map(text, region.keep)), region.loads) == (keep, ())
    wide = [x.double() for x in args[:3]]
    torch.testing.assert_close(evaluate(region, wide, SIZES), fn(*wide, args[3]))


@pytest.mark.parametrize(("first", "edge"), [(-1, 4), (3, 4)])
def test_a_difference_is_that_within_pieces_and_between_them(first: int, edge: int) -> None:
    """A seam that differs is told apart by its place."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = places(q, k)
        steps = torch.arange(20).diff(prepend=torch.tensor([first]), append=torch.tensor([edge]))[None]
        keep = (j <= i) & (steps[:, None, :, None] == steps[:, None, None, :])
        return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v

    draw = Draw(torch.float32, "cpu", 1)
    q, k, v = square(draw)
    region = region_of(fn, q, k, v)
    wide = [x.double() for x in (q, k, v)]
    torch.testing.assert_close(evaluate(region, wide, SIZES), fn(*wide))


KEPT: dict[str, Ids] = {
    "positions that are given": numbered,
    "a running sum of positions": lambda at: torch.arange(21)[None].cumsum(-1),
    "of one of them": lambda at: torch.arange(21)[None].cumsum(-1)[:, 5:6].expand(-1, 21) + at,
    "another first one": lambda at: numbered(torch.arange(21)[None], torch.tensor([[7]])),
    "second differences": lambda at: torch.arange(23)[None].square().diff(n=2).cumsum(-1),
    "of floats": lambda at: torch.full((1, 21), 0.1).cumsum(-1),
    "wrapped": lambda at: torch.ones(1, 21, dtype=torch.int8).cumsum(-1, dtype=torch.int8),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_running_sums_are_read(name: str) -> None:
    fn, args = one_of(KEPT[name])
    region = region_of(fn, *args)
    assert region.loads


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8])
def test_small_integers_wrap_around(kind: torch.dtype) -> None:
    """0 - 1 is 255 in bytes."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        steps = (torch.arange(20, -1, -1) * 20).to(kind).diff(append=torch.zeros(1, dtype=kind))
        return scores(q, k).masked_fill(steps > 3, -INF).softmax(-1) @ v

    q, k, v = square(Draw(torch.float32, "cpu", 1))
    wide = [x.double() for x in (q, k, v)]
    region = region_of(fn, q, k, v)
    torch.testing.assert_close(evaluate(region, wide, SIZES), fn(*wide), equal_nan=True)
