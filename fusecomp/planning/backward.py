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

from fusecomp.ir.algebra import draws
from fusecomp.ir.expr import Expr, Load, parts, variables
from fusecomp.ir.region import AttentionRegion, extent
from fusecomp.planning.chunks import chunks
from fusecomp.planning.tile import TilePlan

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


@dataclass(frozen=True)
class _Tile:
    block_m: int
    block_n: int
    warps: int
    stages: int


def backward_plan(region: AttentionRegion, smem: int = 232_448, device: str = "") -> BackwardPlan:
    """The tiles for one region, where a program may use `smem` bytes of shared memory."""
    size = max(sum(sum(chunks(extent(p.d))) for p in region.products), sum(chunks(extent(region.dv))))
    elt = max(BYTES.get(t, 2) for t in (region.pv_dtype, *(p.dtype for p in region.products)))
    wide = size * elt
    if size > 256 or elt > 2:
        queries, keys = _Tile(32, 32, 4, 2), _Tile(32, 32, 4, 2)
    elif size > 128:
        queries, keys = _Tile(64, 64, 8, 2), _Tile(32, 64, 8, 2)
    elif size > 64:
        queries, keys = _Tile(128, 64, 8, 3), _Tile(64, 128, 8, 2)
    else:
        queries, keys = _Tile(64, 128, 4, 3), _Tile(64, 128, 8, 3)
    if any(pairs(x, region) for x in parts(region.score)) and size <= 256 and elt == 2:
        rows = 64 if size <= 128 else 32
        queries, keys = replace(queries, block_m=rows, block_n=64, warps=8), replace(keys, block_n=64)
    if draws(region.weight):  # what a tile keeps takes registers
        queries, keys = replace(queries, block_n=min(64, queries.block_n)), replace(keys, block_m=min(32, keys.block_m))
    fit = [_fitting(t, moves, wide, smem) for t, moves in ((queries, "keys"), (keys, "queries"))]
    made = [_plan(region, t, name, device) for t, name in zip(fit, ("query_gradient", "key_gradients"), strict=True)]
    return BackwardPlan(*made)


def candidates(region: AttentionRegion, moves: str, smem: int = 232_448, device: str = "") -> Iterator[TilePlan]:
    """Every tile worth trying of dQ (`moves` "keys") or of dK and dV ("queries"): what its sums and the fixed side of
    its operands take is there, and eight warps have work."""
    d = sum(sum(chunks(extent(p.d))) for p in region.products)
    dv = sum(chunks(extent(region.dv)))
    elt = max(BYTES.get(t, 2) for t in (region.pv_dtype, *(p.dtype for p in region.products)))
    for block_m, block_n, warps, stages in product(SIDES, SIDES, (4, 8), (1, 2, 3)):
        fixed, sums = (block_m, d) if moves == "keys" else (block_n, d + dv)
        registers = (fixed * sums + 3 * block_m * block_n) / (32 * warps)
        fits = registers <= REGISTERS and elt * (d + dv) * (block_m + block_n) <= smem
        if fits and (warps == 4 or block_m * block_n >= 64 * 32):
            name = "query_gradient" if moves == "keys" else "key_gradients"
            yield _plan(region, _Tile(block_m, block_n, warps, stages), name, device)


def pairs(e: Expr, region: AttentionRegion) -> bool:
    """Whether `e` is read for each query and key."""
    return isinstance(e, Load) and {region.q_idx.name, region.kv_idx.name} <= variables(e)


def pair_plan(keys: TilePlan) -> TilePlan:
    """Of a kernel that has a tile of queries and keys: nothing is fetched ahead."""
    return replace(keys, stages=1)


def _fitting(t: _Tile, moves: str, wide: int, smem: int) -> _Tile:
    """Fewer stages, then half the tile that moves, until two operands of both sides and the products fit."""
    while _shared(t, moves, wide) > smem:
        if t.stages > 1:
            t = _Tile(t.block_m, t.block_n, t.warps, t.stages - 1)
        elif max(t.block_m, t.block_n) > 16:
            t = _Tile(max(16, t.block_m // 2), max(16, t.block_n // 2), t.warps, 2)
        else:
            return t
    return t


def _shared(t: _Tile, moves: str, wide: int) -> int:
    """Bytes of shared memory: both operands of the fixed side once, of the moving side once a stage, and P, dS."""
    fixed, moving = (t.block_m, t.block_n) if moves == "keys" else (t.block_n, t.block_m)
    return 2 * wide * (fixed + t.stages * moving) + 4 * t.block_m * t.block_n


def _plan(region: AttentionRegion, t: _Tile, skeleton: str, device: str) -> TilePlan:
    d = tuple(chunks(extent(p.d)) for p in region.products)
    dv = chunks(extent(region.dv))
    return TilePlan(skeleton, t.block_m, t.block_n, d, dv, warps=t.warps, stages=t.stages, device=device)
