"""Br x Bc, warps and stages of one region on one device: the fastest tile that fits, and why each other was not taken.

Lengths are rounded up to powers of two before choosing, so that one kernel serves many of them; the cost that a plan
carries is that of the lengths asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from fusecomp.errors import PlanError
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.candidate import Tile, quantities
from fusecomp.planning.chunks import power
from fusecomp.planning.cost import bound
from fusecomp.planning.device import Device, current
from fusecomp.planning.facts import Facts, facts, lengths
from fusecomp.planning.tile import Cost, Rejected, TilePlan

DECODE_ROWS, DECODE_KEYS = 16, 256
"""At most so many queries, and at least so many keys: the keys are split over programs."""
SPILL_LIMIT = 64
"""Registers over the limit that a tile may need and still be tried; each costs time (`cost.spill_s`)."""
SIDES = (16, 32, 64, 128)
FALLBACK = Tile(16, 16, 4, 1)
"""The smallest tile there is: what a plan falls back on when no other fits."""


@dataclass(frozen=True)
class Row:
    """One tile considered, with its predicted quantities, best first in `rows`."""

    tile: Tile
    skeleton: str
    cost: Cost
    reason: str
    """Why it is not the plan; empty for the plan's own."""


def plan(region: AttentionRegion, sizes: Mapping[str, int], device: Device | None = None, budget: int | None = None) -> TilePlan:
    """The plan of a region at lengths near `sizes` (a value for each of region.sizes), within `budget` B of shared memory."""
    device = device or current()
    ranked = _ranked(region, coarse(sizes), device, _allowed(device, budget))
    best = ranked[0]
    known = facts(region)
    return TilePlan(
        skeleton=best.skeleton,
        block_m=best.tile.block_m,
        block_n=best.tile.block_n,
        d_chunks=known.d_chunks,
        dv_chunks=known.dv_chunks,
        warps=best.tile.warps,
        stages=best.tile.stages,
        pack=best.tile.pack,
        cost=_cost(quantities(best.tile, best.skeleton == "decode", region, dict(sizes), device)),
        rejected=tuple(_rejected(row) for row in ranked[1:]),
        device=device.name,
    )


def rows(region: AttentionRegion, sizes: Mapping[str, int], device: Device | None = None, budget: int | None = None) -> tuple[Row, ...]:
    """Every tile considered at exactly `sizes`, the plan's first, then by time, then those that do not fit."""
    device = device or current()
    return _ranked(region, tuple(sorted(sizes.items())), device, _allowed(device, budget))


def coarse(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Each size rounded up to a power of two: neighbours share a plan."""
    return tuple((name, power(size)) for name, size in sorted(sizes.items()))


def _allowed(device: Device, budget: int | None) -> int:
    if budget is not None and budget < 1:
        raise PlanError(f"the shared-memory budget must be positive, not {budget} B")
    return device.smem_bytes if budget is None else min(budget, device.smem_bytes)


def skeleton(region: AttentionRegion, sizes: Mapping[str, int]) -> str:
    """"decode" where a few queries face many keys, else "prefill"."""
    at = lengths(region, sizes)
    return "decode" if at.m <= DECODE_ROWS and at.n >= DECODE_KEYS else "prefill"


def tiles(known: Facts, m: int, decode: bool) -> Iterator[Tile]:
    """Every tile worth asking about: BLOCK_M no taller than the rows there are, eight warps only where they have work."""
    pack = known.group if decode and known.packs else 1
    tallest = max(16, power(m * pack))
    for block_m, block_n, warps, stages in product(SIDES, SIDES, (4, 8), (1, 2, 3, 4)):
        if block_m <= tallest and (warps == 4 or block_m * block_n >= 64 * 64):
            yield Tile(block_m, block_n, warps, stages, pack)


@lru_cache(maxsize=512)
def _ranked(region: AttentionRegion, sizes: tuple[tuple[str, int], ...], device: Device, budget: int) -> tuple[Row, ...]:
    """All candidates, the chosen one first."""
    at = dict(sizes)
    kind = skeleton(region, at)
    costed = [
        (tile, _cost(quantities(tile, kind == "decode", region, at, device)))
        for tile in tiles(facts(region), lengths(region, at).m, kind == "decode")
    ]
    fits = [(t, c) for t, c in costed if not _too_large(c, budget, device)] or _last_resort(costed, budget)
    fits.sort(key=lambda tc: (tc[1].seconds, tc[1].smem_bytes, tc[0].warps, tc[0].stages))
    best = fits[0][1]
    taken = {t for t, _ in fits}
    losers = [Row(t, kind, c, _too_large(c, budget, device)) for t, c in costed if t not in taken]
    return (*(Row(t, kind, c, _slower(c, best)) for t, c in fits), *losers)


def _too_large(cost: Cost, budget: int, device: Device) -> str:
    """Why a tile cannot run well, in numbers; empty where it can."""
    if cost.smem_bytes > budget:
        return f"needs {cost.smem_bytes} B of shared memory, {budget} usable"
    if cost.registers > device.registers_per_thread + SPILL_LIMIT:
        return f"needs {cost.registers} registers a thread, {device.registers_per_thread} there are"
    return ""


def _last_resort(costed: list[tuple[Tile, Cost]], budget: int) -> list[tuple[Tile, Cost]]:
    """The smallest tile, whatever it spills, provided that its shared memory is there."""
    smallest = min(costed, key=lambda tc: (tc[1].smem_bytes, tc[1].registers))
    if smallest[1].smem_bytes <= budget:
        return [smallest]
    t, c = smallest
    raise PlanError(
        f"nothing fits in {budget} B of shared memory: the smallest tile, {t.block_m}x{t.block_n}, needs {c.smem_bytes} B"
    )


def _slower(cost: Cost, best: Cost) -> str:
    if cost is best:
        return ""
    more = cost.seconds / best.seconds - 1
    return f"predicted {more:.1%} slower ({seconds(cost.seconds)} against {seconds(best.seconds)}), limited by {cost.bound}"


def seconds(t: float) -> str:
    """1.5e-4 -> "150 us"."""
    return f"{t * 1e6:.4g} us" if t < 1e-3 else f"{t * 1e3:.4g} ms"


def _cost(q: Mapping[str, float]) -> Cost:
    return Cost(
        flops=float(q["flops"]),
        hbm_bytes=float(q["hbm"]),
        unfused_hbm_bytes=float(q["hbm_unfused"]),
        smem_bytes=int(q["smem"]),
        registers=round(q["registers"]),
        programs=int(q["programs"]),
        waves=float(q["waves"]),
        seconds=float(q["seconds"]),
        bound=bound(q),
    )


def _rejected(row: Row) -> Rejected:
    t = row.tile
    return Rejected(t.block_m, t.block_n, t.warps, t.stages, row.reason)
