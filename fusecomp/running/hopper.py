"""Where the kernel for Hopper's tensor cores runs an attention: it can express it, and there is enough to do.

A launch of it costs the host about 0.15 ms, for four descriptors, and its tiles are one size: short launches, and masks
that leave a query tile few tiles of keys, stay with the portable kernel (codegen/hopper.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from fusecomp.codegen import hopper
from fusecomp.codegen.descriptors import choose
from fusecomp.ir.expr import Load, parts, variables
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.build import Match
from fusecomp.planning.device import current
from fusecomp.planning.facts import lengths, visits
from fusecomp.planning.plan import plan
from fusecomp.planning.tile import TilePlan
from fusecomp.running.inputs import example_of
from fusecomp.settings import Options

LEAST_SECONDS = 1e-4
"""Predicted for the portable kernel: shorter ones would wait for the host."""
LEAST_TILES = 6
"""Tiles of keys that a tile of queries visits, on average: before the first and after the last nothing overlaps."""


@cache
def available() -> bool:
    """Whether the installed Triton has the Gluon that the kernel is written in."""
    try:
        from triton.experimental.gluon.language.nvidia import hopper as language
        from triton.experimental.gluon.nvidia import hopper as host
    except ImportError:
        return False
    names = ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")
    return all(hasattr(language, n) for n in names) and hasattr(host, "TensorDescriptor")


def takes(match: Match, sizes: Mapping[str, int], options: Options) -> bool:
    """Whether it runs the match. Only where it is verified: the portable kernel is there if it disagrees."""
    region = match.region
    if match.output.meta["val"].device.type != "cuda" or not options.verify or options.batch_invariant:
        return False
    if current().arch != "sm_90" or not available() or not hopper.expresses(region) or _reads_pairs(region):
        return False
    tiles = plan(region, sizes)
    if tiles.skeleton != "prefill" or tiles.visits != "bounds" or tiles.cost is None:
        return False
    visited, _ = visits(region, sizes, hopper.ROWS, hopper.KEYS)
    many = visited >= LEAST_TILES * -(-lengths(region, sizes).m // hopper.ROWS)
    return many and tiles.cost.seconds >= LEAST_SECONDS and _in_steps(match, tiles)


def _reads_pairs(region: AttentionRegion) -> bool:
    """Whether the score or the mask loads something for each pair: its tiles are laid out for products, not loads."""
    pair = {region.q_idx.name, region.kv_idx.name}
    loads = [x for e in (region.score, *region.keep) for x in parts(e) if isinstance(x, Load)]
    return any(pair <= set(variables(x)) for x in loads)


def _in_steps(match: Match, tiles: TilePlan) -> bool:
    """Whether Q, K and V lie as descriptors want them, so that nothing is copied."""
    strides = [example_of(n.meta["val"])[1] for n in match.inputs]
    if choose(match.region, replace(tiles, loads="pointer"), current().arch, strides).loads != "descriptor":
        return False
    *outer, last = strides[[o.name for o in match.region.operands].index(match.region.products[0].q.operand)]
    return last == 1 and not any(s % 8 for s in outer)
