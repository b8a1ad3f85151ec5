"""The online softmax of one query, tile by tile, as a table that a person can check with a pencil.

m'  = max(m, max_j s_j)                    the running maximum over the keys seen so far
c   = exp(m - m')                          what the old sums shrink by (0 for the first tile)
p_j = exp(s_j - m')
l'  = c l + sum_j p_j
acc'= c acc + sum_j p_j V_j
O   = acc / l                              after the last tile: softmax(s) V exactly, whatever the tile
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """What one tile of keys adds: the columns of the table."""

    keys: range
    scores: tuple[float, ...]
    row_max: float
    """m after the tile."""
    rescale: float
    """c, the factor on what was summed before."""
    p: tuple[float, ...]
    row_sum: float
    """l after the tile."""
    acc: tuple[float, ...]
    """Unnormalised output after the tile, Dv values."""


@dataclass(frozen=True)
class Trace:
    """Every step of an online softmax, and its result."""

    tiles: tuple[Tile, ...]
    output: tuple[float, ...]

    def __str__(self) -> str:
        rows = [("keys", "scores", "m", "c", "p", "l", "acc"), *map(_cells, self.tiles)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"O = acc / l = {_vector(self.output, 9)}"])


def online_softmax_trace(q: Tensor, keys: Tensor, values: Tensor, tile: int) -> Trace:
    """softmax(q K^T) V for q [D], K [N, D], V [N, Dv], `tile` keys at a time, in float64."""
    if tile < 1:
        raise ValueError(f"a tile holds at least one key, not {tile}")
    tiles = tuple(_tiles(q.double(), keys.double(), values.double(), tile))
    last = tiles[-1]
    return Trace(tiles, tuple(x / last.row_sum for x in last.acc))


def _tiles(q: Tensor, keys: Tensor, values: Tensor, tile: int) -> Iterator[Tile]:
    row_max, row_sum, acc = -math.inf, 0.0, values.new_zeros(values.shape[1])
    for start in range(0, len(keys), tile):
        part = slice(start, min(start + tile, len(keys)))
        scores = keys[part] @ q  # [tile]
        new_max = max(row_max, scores.max().item())
        rescale = math.exp(row_max - new_max)
        p = torch.exp(scores - new_max)
        row_max, row_sum, acc = new_max, rescale * row_sum + p.sum().item(), rescale * acc + p @ values[part]
        yield Tile(range(part.start, part.stop), _floats(scores), row_max, rescale, _floats(p), row_sum, _floats(acc))


def _floats(x: Tensor) -> tuple[float, ...]:
    return tuple(x.tolist())


def _cells(t: Tile) -> tuple[str, ...]:
    numbers = (f"{t.row_max:.6g}", f"{t.rescale:.6g}", _vector(t.p), f"{t.row_sum:.6g}", _vector(t.acc))
    return (f"{t.keys.start}..{t.keys.stop - 1}", _vector(t.scores), *numbers)


def _vector(x: tuple[float, ...], digits: int = 6) -> str:
    return "[" + ", ".join(f"{value:.{digits}g}" for value in x) + "]"
