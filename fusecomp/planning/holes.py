"""How much of the keys between the first and the last that a query sees it does not see, as far as is known.

    filled = tiles of keys with a key that some query of a sample sees / tiles from its first to its last

Kernels that visit ranges visit the holes too. What only the run knows is taken to have none: documents and padding lie
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
from torch.nn import functional

from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Load, parts, variables
from fusecomp.ir.reference import Env, evaluate_expr
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.facts import lengths

QUERIES, KEYS = 17, 64
"""Of a sample, from the first to the last; of a tile."""


def filled(region: AttentionRegion, sizes: Mapping[str, int]) -> float:
    """The share, 1 where nothing is known."""
    rows, keys, at = region.q_idx.name, region.kv_idx.name, lengths(region, sizes)
    known = [t for t in region.keep if variables(t) <= {rows, keys} and not any(isinstance(x, Load) for x in parts(t))]
    if not known:
        return 1.0
    sample = torch.linspace(0, at.m - 1, QUERIES, device="cpu").long()
    env = Env((rows, keys), {rows: sample, keys: range(at.n)}, sizes)
    seen = evaluate_expr(reduce(lambda a, b: apply("and", a, b), known), env).expand(env.shape)
    tiles = functional.pad(seen, (0, -at.n % KEYS)).view(QUERIES, -1, KEYS).any(-1)
    number = torch.arange(1, tiles.shape[1] + 1, device="cpu") * tiles
    first = torch.where(tiles, number, tiles.shape[1] + 1).amin(-1)
    spans = (number.amax(-1) + 1 - first).clamp(min=0)
    return float(tiles.sum() / spans.sum().clamp(min=1))
