"""The tiles of the backward kernels: those of least predicted time (`cost_backward`).

The query gradient's program has BLOCK_M queries and walks their keys; the key gradients' has BLOCK_N keys and walks
the queries that see them. Nothing predicts float32, dropout, and what S or a mask reads for each query and key, which
has a tile of its own in registers: they take sizes that are known to be good, made smaller until they fit.

    BLOCK_M x BLOCK_N  query gradient           key gradients
    D <= 64            64 x 128, 4 warps        64 x 128, 8 warps      3 stages
    D <= 128           128 x 64, 8 warps        64 x 128, 8 warps      3 stages, 2 of the second
    D <= 256           64 x 64,  8 warps        32 x 64,  8 warps      2 stages
    more, or float32   32 x 32,  4 warps        32 x 32,  4 warps      2 stages
    with dropout       at most x 64             at most 32 x 64, of 4 warps where 128 had 8
    bias or mask read  64 x 64,  8 warps        64 x 64,  8 warps      and so its own gradient
    and D <= 128       128 x 64, 8 warps        64 x 64,  4 warps      3 stages, 2 of the second
    and D <= 64        64 x 64,  4 warps        64 x 64,  4 warps      3 stages
    its own gradient   as dK and dV, with 8 warps; fetched ahead 64 x 128 where D > 64, with 4 warps where not
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from fusecomp.errors import PlanError
from fusecomp.ir import data
from fusecomp.ir.algebra import draws
from fusecomp.ir.expr import Expr, Load, parts, variables
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.backward_resources import fits, smem
from fusecomp.planning.candidate import Launch
from fusecomp.planning.cost_backward import BACKWARD, BACKWARD_FITTED, BACKWARD_REGISTERS
from fusecomp.planning.device import Device, find
from fusecomp.planning.facts import facts
from fusecomp.planning.plan import coarse
from fusecomp.planning.tile import Tile, TilePlan

KERNELS = ("query_gradient", "key_gradients")
LONG, HEADS = {"M": 4096, "N": 4096}, 32
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
    once: bool = False
    """Whether the programs of dK and dV add to dQ too, in any order, so that the scores are computed once. Portable
    ones do not: atomic adds take them longer than the scores again, but beside a bias (probes_h200.json)."""
    bias: Tile | None = None
    """Of the kernel of a bias that fetches ahead; None where it does not."""

    @property
    def pairs(self) -> TilePlan:
        """Of a tensor of every query and key: block_m queries and block_n keys a program."""
        m, n = self.keys.block_m, self.keys.block_n
        t = self.bias or Tile(m, n, 8 if m * n >= 64 * 64 else self.keys.warps, 1)
        return replace(self.keys, visits="bounds", block_m=t.block_m, block_n=t.block_n, warps=t.warps, stages=t.stages)


def backward_plan(
    region: AttentionRegion, device: Device | None = None, sizes: Mapping[str, int] | None = None
) -> BackwardPlan:
    """The tiles for one region on `device`, an H200 unless one is named, at lengths near `sizes`, long ones unless they
    are given. Raises PlanError where nothing fits."""
    on, name = device or find("h200"), device.name if device else ""
    lengths = dict(coarse(sizes or {s: LONG.get(s, HEADS) for s in region.sizes}))
    if predicted(region):
        made = {kernel: _fastest(region, lengths, on, kernel) for kernel in KERNELS}
    else:
        made = {kernel: _fitting(region, kernel, t, on) for kernel, t in _known(region).items()}
    queries, keys = (_plan(region, t, kernel, name) for kernel, t in made.items())
    return BackwardPlan(queries, keys, bias=ahead(region, keys, on))


def by_table(plan: BackwardPlan, region: AttentionRegion, learned: frozenset[str], visits: str) -> BackwardPlan:
    """The same kernels, which visit the tiles that the masks' data shows, as the forward kernel does. A gradient takes
    more than twice as long as the forward pass, and its two tables twice as long as that one's. None where a mask
    learns: its own gradient is of every pair."""
    if plan.keys.consumers or {x.tensor for x in data.reads(region)} & learned:
        return plan
    return replace(plan, queries=replace(plan.queries, visits=visits), keys=replace(plan.keys, visits=visits))


def predicted(region: AttentionRegion) -> bool:
    """Whether the equations know its kernels."""
    known = facts(region)
    return known.width == 2 and not known.draws and not reads_pairs(region) and max(known.wide, known.wide_v) <= 256


def _fastest(region: AttentionRegion, sizes: Mapping[str, int], device: Device, kernel: str) -> Tile:
    rows = costed(region, sizes, device, kernel)
    if not rows:
        return _fitting(region, kernel, _known(region)[kernel], device)
    return min(rows, key=lambda row: row[1]["seconds"])[0]


def costed(
    region: AttentionRegion, sizes: Mapping[str, int], device: Device, kernel: str
) -> list[tuple[Tile, dict[str, float]]]:
    """Every candidate, with every quantity of `cost_backward`."""
    launch = Launch(region, sizes, device, decode=False)
    return [(t, BACKWARD.evaluate(inputs(launch, kernel, t))) for t in tiles(region, kernel, device)]


def _known(region: AttentionRegion) -> dict[str, Tile]:
    """The table above."""
    known = facts(region)
    size = max(known.wide, known.wide_v)
    if size > 256 or known.width > 2:
        queries, keys = Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)
    elif size > 128:
        queries, keys = Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)
    elif size > 64:
        queries, keys = Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)
    else:
        queries, keys = Tile(64, 128, 4, 3), Tile(64, 128, 8, 3)
    if reads_pairs(region) and size <= 256 and known.width == 2:
        rows, few = (64 if size <= 128 else 32), size <= 128 and not draws(region.weight)
        warps, ahead = (4, 3 if size <= 64 else 2) if few else (8, keys.stages)
        if size <= 64 or not few:
            queries = replace(queries, block_m=rows, block_n=64, warps=warps)
        keys = replace(keys, block_n=64, warps=warps, stages=ahead)
    if draws(region.weight):  # what a tile keeps takes registers
        queries = replace(queries, block_n=min(64, queries.block_n))
        keys = replace(keys, block_m=min(32, keys.block_m))
        keys = replace(keys, block_n=64, warps=4) if keys.block_n > 64 else keys
    return {"query_gradient": queries, "key_gradients": keys}


def candidates(region: AttentionRegion, moves: str, device: Device) -> Iterator[TilePlan]:
    """Plans of every tile worth trying of dQ (`moves` "keys") or of dK and dV ("queries")."""
    kernel = "query_gradient" if moves == "keys" else "key_gradients"
    yield from (_plan(region, tile, kernel, device.name) for tile in tiles(region, kernel, device))


def tiles(region: AttentionRegion, kernel: str, device: Device) -> Iterator[Tile]:
    """Those for whose sums and operands there is room, and in which eight warps have work."""
    known = facts(region)
    for block_m, block_n, warps, stages in product(SIDES, SIDES, (4, 8), (1, 2, 3)):
        tile = Tile(block_m, block_n, warps, stages)
        of_queries = kernel == "query_gradient"
        fixed, sums = (block_m, known.wide) if of_queries else (block_n, known.wide + known.wide_v)
        registers = (fixed * sums + 3 * block_m * block_n) / (32 * warps)
        run = registers <= REGISTERS and fits(kernel, tile, known, device)
        if run and (warps == 4 or block_m * block_n >= 64 * 32):
            yield tile


def inputs(launch: Launch, kernel: str, tile: Tile) -> dict[str, float]:
    """What the equations of `cost_backward` take for one tile of "query_gradient" or "key_gradients"."""
    at, of_keys = launch.at, kernel == "key_gradients"
    fixed, moving = (tile.block_n, tile.block_m) if of_keys else (tile.block_m, tile.block_n)
    seen = launch.visits(tile.block_m, tile.block_n)
    # a tile of keys is seen by as many queries as a query sees keys, in each head of its group
    longest = -(-seen.longest * tile.block_n // tile.block_m) * (at.heads // at.kv_heads) if of_keys else seen.longest
    return {
        **launch.inputs(replace(tile, block_m=fixed, block_n=moving, pack=1)),
        **BACKWARD_REGISTERS,
        **BACKWARD_FITTED,
        "KEYS": int(of_keys),
        "FIXED": fixed,
        "MOVING": moving,
        "FIXED_HEADS": at.kv_heads if of_keys else at.heads,
        "FIXED_ROWS": at.n if of_keys else at.m,
        "TILES": seen.visited,
        "TESTED": seen.tested,
        "LONGEST": longest,
        "smem": smem(kernel, tile, launch.known, launch.device),
    }


def reads_pairs(region: AttentionRegion) -> bool:
    """Whether S or the mask reads something for each query and key."""
    return any(pairs(x, region) for e in (region.score, *region.keep) for x in parts(e))


def queries_down(region: AttentionRegion) -> bool:
    """Whether a tile of dK and dV's kernel has queries down it: as a bias lies that is read with it."""
    return facts(region).load_width > 1


def pairs(e: Expr, region: AttentionRegion) -> bool:
    """Whether `e` is read for each query and key."""
    return isinstance(e, Load) and {region.q_idx.name, region.kv_idx.name} <= variables(e)


def ahead(region: AttentionRegion, keys: TilePlan, device: Device) -> Tile | None:
    """The tile of the kernel of a bias, two of which it fetches where it walks what shares the bias; None where
    it walks nothing, or two do not fit."""
    shared = [x for x in parts(region.score) if pairs(x, region) and not {v.name for v in region.batch} <= variables(x)]
    known = facts(region)
    wide = 64 < max(known.wide, known.wide_v) <= 128 and keys.warps == 4
    for tile in [Tile(keys.block_m, 128, 8, 2)] * wide + [Tile(keys.block_m, keys.block_n, keys.warps, 2)]:
        rows = tile.stages * known.width * (tile.block_m + tile.block_n) * (known.wide + known.wide_v)
        if shared and rows <= device.smem_bytes:
            return tile
    return None


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


def _plan(region: AttentionRegion, t: Tile, skeleton: str, device: str) -> TilePlan:
    known = facts(region)
    return TilePlan(
        skeleton, t.block_m, t.block_n, known.d_chunks, known.dv_chunks, warps=t.warps, stages=t.stages, device=device
    )
