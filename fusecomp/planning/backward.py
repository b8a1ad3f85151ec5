"""The tiles of the backward kernels: sizes that are known to be good, made smaller until they fit.

The query gradient's program has BLOCK_M queries and walks their keys; the key gradients' has BLOCK_N keys and walks
the queries that see them.

    BLOCK_M x BLOCK_N  query gradient           key gradients
    D <= 64            64 x 128, 4 warps        64 x 128, 8 warps      3 stages
    D <= 128           128 x 64, 8 warps        64 x 128, 8 warps      3 stages, 2 of the second
    D <= 256           64 x 64,  8 warps        32 x 64,  8 warps      2 stages
    more, or float32   32 x 32,  4 warps        32 x 32,  4 warps      2 stages
    with dropout       at most x 64             at most 32 x
    with a bias        64 x 64,  8 warps        64 x 64,  8 warps      and so its own gradient, 1 stage

A bias, or whatever else S reads for each query and key, has a tile of its own in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from fusecomp.errors import PlanError
from fusecomp.ir.algebra import draws
from fusecomp.ir.expr import Expr, Load, parts, variables
from fusecomp.ir.region import AttentionRegion, extent
from fusecomp.planning.backward_resources import fits, smem
from fusecomp.planning.chunks import chunks
from fusecomp.planning.device import Device, find
from fusecomp.planning.facts import facts
from fusecomp.planning.tile import Tile, TilePlan

BYTES = {"float32": 4}
"""Of one element of an operand; 2 where it is not named here."""

SIDES = (32, 64, 128)
REGISTERS = 384
"""Of one thread, for sums, scores, probabilities and their gradients: half more than there are still runs, spilling."""


@dataclass(frozen=True)
class BackwardPlan:
    """The schedules of the two kernels of one backward pass."""

    queries: TilePlan
    """Of dQ: block_m queries a program, block_n keys at a time."""
    keys: TilePlan
    """Of dK and dV: block_n keys a program, block_m queries at a time."""


def backward_plan(region: AttentionRegion, device: Device | None = None) -> BackwardPlan:
    """The tiles for one region on `device`, an H200 unless one is named. Raises PlanError where nothing fits."""
    size = max(sum(sum(chunks(extent(p.d))) for p in region.products), sum(chunks(extent(region.dv))))
    elt = max(BYTES.get(t, 2) for t in (region.pv_dtype, *(p.dtype for p in region.products)))
    if size > 256 or elt > 2:
        queries, keys = Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)
    elif size > 128:
        queries, keys = Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)
    elif size > 64:
        queries, keys = Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)
    else:
        queries, keys = Tile(64, 128, 4, 3), Tile(64, 128, 8, 3)
    if any(pairs(x, region) for x in parts(region.score)) and size <= 256 and elt == 2:
        rows = 64 if size <= 128 else 32
        queries, keys = replace(queries, block_m=rows, block_n=64, warps=8), replace(keys, block_n=64)
    if draws(region.weight):  # what a tile keeps takes registers
        queries, keys = replace(queries, block_n=min(64, queries.block_n)), replace(keys, block_m=min(32, keys.block_m))
    first = {"query_gradient": queries, "key_gradients": keys}
    fit = {kernel: _fitting(region, kernel, t, device or find("h200")) for kernel, t in first.items()}
    return BackwardPlan(*(_plan(region, t, kernel, device) for kernel, t in fit.items()))


def candidates(region: AttentionRegion, moves: str, device: Device) -> Iterator[TilePlan]:
    """Every tile worth trying of dQ (`moves` "keys") or of dK and dV ("queries"): what its sums and its operands take
    is there, and eight warps have work."""
    known = facts(region)
    kernel = "query_gradient" if moves == "keys" else "key_gradients"
    for block_m, block_n, warps, stages in product(SIDES, SIDES, (4, 8), (1, 2, 3)):
        tile = Tile(block_m, block_n, warps, stages)
        fixed, sums = (block_m, known.wide) if moves == "keys" else (block_n, known.wide + known.wide_v)
        registers = (fixed * sums + 3 * block_m * block_n) / (32 * warps)
        run = registers <= REGISTERS and fits(kernel, tile, known, device)
        if run and (warps == 4 or block_m * block_n >= 64 * 32):
            yield _plan(region, tile, kernel, device)


def pairs(e: Expr, region: AttentionRegion) -> bool:
    """Whether `e` is read for each query and key."""
    return isinstance(e, Load) and {region.q_idx.name, region.kv_idx.name} <= variables(e)


def pair_plan(keys: TilePlan) -> TilePlan:
    """Of a kernel that has a tile of queries and keys: nothing is fetched ahead."""
    return replace(keys, stages=1)


def _fitting(region: AttentionRegion, kernel: str, t: Tile, device: Device) -> Tile:
    """Fewer stages, then half the tile, until what lies in shared memory and in tensor memory fits."""
    known = facts(region)
    while not fits(kernel, t, known, device):
        if t.stages > 1:
            t = replace(t, stages=t.stages - 1)
        elif max(t.block_m, t.block_n) > 16:
            t = replace(t, block_m=max(16, t.block_m // 2), block_n=max(16, t.block_n // 2), stages=2)
        else:
            needed = f"{t.block_m}x{t.block_n} in {t.stages} stage, needs {smem(kernel, t, known, device)} B"
            raise PlanError(
                f"nothing fits in {device.smem_bytes} B of shared memory: the smallest tile of {kernel}, {needed}"
            )
    return t


def _plan(region: AttentionRegion, t: Tile, skeleton: str, device: Device | None) -> TilePlan:
    known, name = facts(region), device.name if device else ""
    return TilePlan(
        skeleton, t.block_m, t.block_n, known.d_chunks, known.dv_chunks, warps=t.warps, stages=t.stages, device=name
    )
