"""Br x Bc, warps and stages of one region on one device: the fastest tile that fits, and why each other was not taken.

Lengths are rounded up to powers of two before choosing, so that one kernel serves many of them; the cost that a plan
carries is that of the lengths asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from fusecomp.errors import PlanError
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.candidate import Launch, share_of_registers
from fusecomp.planning.chunks import power
from fusecomp.planning.device import Device, current
from fusecomp.planning.facts import lengths
from fusecomp.planning.queueing import bound
from fusecomp.planning.resources import usable
from fusecomp.planning.tile import Cost, Rejected, Tile, TilePlan
from fusecomp.planning.visits import shown, visits
from fusecomp.planning.workload import Workload
from fusecomp.planning.worth import candidates, packs

DECODE_ROWS, DECODE_KEYS = 16, 256
"""At most so many queries, and at least so many keys: the keys are split over programs."""
ALONE_QUERIES, ALONE_KEYS = 4096, 1 << 16
SHARE_KEYS = 512
"""Keys of a share where shares may not depend on other requests: 128 of them for a context of 64 k."""
SPILL_LIMIT = 64
"""Registers over the limit that a tile may need and still be tried; each costs time (`cost.spill_s`)."""
TIE, DECODE_TIE = 0.01, 0.02
"""Times so near each other are one; in decoding, where many tiles are as fast as the memory, predictions tell less."""


@dataclass(frozen=True)
class Row:
    """One tile considered, with what it is predicted to cost."""

    tile: Tile
    skeleton: str
    cost: Cost
    reason: str
    """Why it is not the plan; empty for the plan's own."""


def plan(
    region: AttentionRegion,
    sizes: Mapping[str, int],
    device: Device | None = None,
    budget: int | None = None,
    describable: bool = True,
) -> TilePlan:
    """The plan at lengths near `sizes` (a value for each of region.sizes), within `budget` B of shared memory.

    `describable`: whether K and V, as they lie, fit in tensor descriptors; without, they are read through pointers."""
    device = device or current()
    given = coarse(sizes), device, _allowed(device, budget), describable
    ranked = _ranked(region, *given)
    tile, kind = ranked[0].tile, ranked[0].skeleton
    launch = Launch(region, sizes, device, kind == "decode")
    cost = cost_of(launch.quantities(tile))
    how = "bounds" if kind == "decode" else visits(region, sizes, device, cost.seconds)
    if (part := shown(region, how)) < 1.0:
        ranked = _ranked(region, *given, part, how == "ranges")
        tile = ranked[0].tile
        cost = cost_of(Launch(region, sizes, device, False, part, how == "ranges").quantities(tile))
    made = TilePlan(
        skeleton=kind,
        block_m=tile.block_m,
        block_n=tile.block_n,
        d_chunks=launch.known.d_chunks,
        dv_chunks=launch.known.dv_chunks,
        warps=tile.warps,
        stages=tile.stages,
        cost=cost,
        rejected=_rejected(ranked),
        device=device.name,
        visits=how,
    )
    return scheduled(made, tile, region, sizes, device)


def scheduled(
    made: TilePlan, tile: Tile, region: AttentionRegion, sizes: Mapping[str, int], device: Device
) -> TilePlan:
    """The plan with another tile of the same skeleton, at lengths near `sizes`."""
    made = replace(made, **{f.name: getattr(tile, f.name) for f in fields(Tile) if f.name != "resident"})
    if not made.decodes:
        return replace(made, registers=told_of_runs(made, tile, region, sizes, device))
    if not tile.resident:
        return replace(made, skeleton="prefill", resident=0, registers=0, overlap=False)
    held = share_of_registers(device, tile.resident * tile.warps)
    launch = Launch(region, dict(coarse(sizes)), device, decode=True)
    splits, looks = at_a_time(launch, tile)
    made = replace(made, skeleton="decode", resident=tile.resident, registers=held, overlap=device.capability >= 90)
    return replace(made, splits=splits, looks=looks)


def split(made: TilePlan, region: AttentionRegion, sizes: Mapping[str, int]) -> TilePlan:
    """The best plan that splits the keys, where a launch may have fewer requests than planned for: shares are counted
    at every launch."""
    taken = next(row for row in rows(region, dict(coarse(sizes))) if row.tile.resident)
    return replace(scheduled(made, taken.tile, region, sizes, current()), cost=taken.cost)


def told_of_runs(made: TilePlan, tile: Tile, region: AttentionRegion, sizes: Mapping[str, int], device: Device) -> int:
    """Registers of a thread where a kernel is told which run of keys each query sees: what its usual loops need. The
    loop that reads the mask would take more, and leave room for one program less."""
    part = shown(region, made.visits)
    if made.visits != "ranges" or part == 1.0 or device.arch != "sm_90":
        return 0
    found = Launch(region, sizes, device, False, part, True).quantities(tile)
    return share_of_registers(device, int(found["resident"]) * tile.warps)


SPLITS, LOOKS = (4, 64), (32, 1024)
"""Of `TilePlan.splits` and `looks`, at least and at most: a warp has 32 lanes, a program so many registers."""


def at_a_time(launch: Launch, tile: Tile) -> tuple[int, int]:
    """Shares that are combined, and requests that are looked through, in one step where there are as many as here."""
    splits = int(launch.quantities(tile)["splits"])
    return clipped(power(splits), *SPLITS), clipped(power(launch.requests), *LOOKS)


def clipped(n: int, least: int, most: int) -> int:
    return min(max(n, least), most)


def rows(
    region: AttentionRegion,
    sizes: Mapping[str, int],
    device: Device | None = None,
    budget: int | None = None,
    describable: bool = True,
) -> tuple[Row, ...]:
    """Every tile considered at exactly `sizes`: the best first, then by time, then those that do not fit."""
    device = device or current()
    return _ranked(region, tuple(sorted(sizes.items())), device, _allowed(device, budget), describable)


def tiles(workload: Workload, device: Device | None = None, budget: int | None = None) -> tuple[Row, ...]:
    """`rows` of attention given by numbers."""
    return rows(workload.region, workload.sizes, device, budget)


def table(ranked: tuple[Row, ...]) -> list[dict[str, Any]]:
    """Rows as plain numbers and words, for printing and for JSON."""
    return [{**asdict(row.tile), "skeleton": row.skeleton, **asdict(row.cost), "reason": row.reason} for row in ranked]


def alone(region: AttentionRegion, sizes: Mapping[str, int]) -> dict[str, int]:
    """Lengths to plan at where neither the other requests nor how long they are may decide: one request, many keys."""
    first = [v.name.upper() for v in region.batch[:1]]
    few = sizes["M"] <= DECODE_ROWS
    return {**sizes, **dict.fromkeys(first, 1), "M": DECODE_ROWS if few else ALONE_QUERIES, "N": ALONE_KEYS}


def fixed_share(tiles: TilePlan) -> TilePlan:
    """The plan with shares of so many keys, whatever else is in the launch."""
    return replace(tiles, share=max(1, SHARE_KEYS // tiles.block_n)) if tiles.skeleton == "decode" else tiles


def coarse(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Each size rounded up to a power of two: neighbours share a plan."""
    return tuple((name, power(size) if size > 0 else size) for name, size in sorted(sizes.items()))


def skeleton(region: AttentionRegion, sizes: Mapping[str, int]) -> str:
    """ "decode" where a few queries face many keys, else "prefill"."""
    at = lengths(region, sizes)
    return "decode" if at.m <= DECODE_ROWS and at.n >= DECODE_KEYS else "prefill"


@lru_cache(maxsize=512)
def _ranked(
    region: AttentionRegion, sizes: tuple[tuple[str, int], ...], device: Device, budget: int, describable: bool,
    shown: float = 1.0, runs: bool = False,
) -> tuple[Row, ...]:  # fmt: skip
    """All candidates, the chosen one first."""
    kind = skeleton(region, dict(sizes))
    costed = _costed(region, sizes, device, budget, kind, describable, shown, runs)
    if kind == "decode" and min(cost.smem_bytes for _, cost in costed) > budget:
        kind = "prefill"
        costed = _costed(region, sizes, device, budget, kind, describable, shown, runs)
    refused = {tile: _too_large(cost, budget, device) for tile, cost in costed}
    fits = [tc for tc in costed if not refused[tc[0]]] or [_last_resort(costed, budget)]
    tie = DECODE_TIE if kind == "decode" else TIE
    fits = _by_merit(fits, tie)
    best = fits[0][1]
    losers = [Row(t, kind, c, refused[t]) for t, c in costed if refused[t] and t != fits[0][0]]
    return (*(Row(t, kind, c, _slower(c, best, tie)) for t, c in fits), *losers)


def _costed(
    region: AttentionRegion, sizes: tuple[tuple[str, int], ...], device: Device, budget: int, kind: str,
    describable: bool, shown: float, runs: bool,
) -> list[tuple[Tile, Cost]]:  # fmt: skip
    """The candidates of the most heads that share a tile and leave one that fits."""
    launch, costed = Launch(region, dict(sizes), device, kind == "decode", shown, runs), list[tuple[Tile, Cost]]()
    for pack in packs(launch):
        costed = [(tile, cost_of(launch.quantities(tile))) for tile in candidates(launch, describable, pack)]
        if not all(_too_large(cost, budget, device) for _, cost in costed):
            break
    return costed


def _by_merit(fits: list[tuple[Tile, Cost]], tie: float) -> list[tuple[Tile, Cost]]:
    """By time, after the one preferred of those that tie with the fastest."""
    fits = sorted(fits, key=lambda tc: tc[1].seconds)
    near = [tc for tc in fits if tc[1].seconds <= (1 + tie) * fits[0][1].seconds]
    best = min(near, key=lambda tc: _preference(*tc))
    return [best, *(tc for tc in fits if tc is not best)]


def _preference(tile: Tile, cost: Cost) -> tuple[float, ...]:
    """The largest tile, the squarest, of fewest programs, pipelined, of least memory."""
    size, side = tile.block_m * tile.block_n, min(tile.block_m, tile.block_n)
    return -size, -side, tile.resident, tile.stages < 2, cost.smem_bytes, tile.warps


def _allowed(device: Device, budget: int | None) -> int:
    if budget is not None and budget < 1:
        raise PlanError(f"the shared-memory budget must be positive, not {budget} B")
    return device.smem_bytes if budget is None else min(budget, device.smem_bytes)


def _too_large(cost: Cost, budget: int, device: Device) -> str:
    """Why a tile cannot run well, in numbers; empty where it can."""
    if cost.smem_bytes > min(budget, usable(device)):
        return f"needs {cost.smem_bytes} B of shared memory, {budget} usable"
    if cost.spilled > SPILL_LIMIT:
        return f"needs {cost.registers + cost.spilled} registers a thread, {device.registers_per_thread} there are"
    return ""


def _last_resort(costed: list[tuple[Tile, Cost]], budget: int) -> tuple[Tile, Cost]:
    """The smallest tile, whatever it spills, provided that its shared memory is there."""
    tile, cost = min(costed, key=lambda tc: (tc[1].smem_bytes, tc[1].registers + tc[1].spilled))
    if cost.smem_bytes > budget:
        smallest = f"the smallest tile, {tile.block_m}x{tile.block_n} in {tile.stages} stage, needs {cost.smem_bytes} B"
        raise PlanError(f"nothing fits in {budget} B of shared memory: {smallest}; a smaller head size needs less")
    return tile, cost


def _slower(cost: Cost, best: Cost, tie: float) -> str:
    if cost is best:
        return ""
    if cost.seconds <= (1 + tie) * best.seconds:
        return f"as fast within {tie:.0%} ({seconds(cost.seconds)}), with {cost.smem_bytes} B of shared memory"
    times = f"{seconds(cost.seconds)} against {seconds(best.seconds)}"
    return f"predicted {cost.seconds / best.seconds - 1:.1%} slower ({times}), limited by {cost.bound}"


def seconds(t: float) -> str:
    """1.5e-4 -> "150 us"."""
    return f"{t * 1e6:.4g} us" if t < 1e-3 else f"{t * 1e3:.4g} ms"


def cost_of(q: Mapping[str, float]) -> Cost:
    """The cost in the quantities of one tile."""
    spilled = round(q.get("spilled", 0.0))
    return Cost(
        flops=float(q["flops"]),
        hbm_bytes=float(q["hbm"]),
        unfused_hbm_bytes=float(q["hbm_unfused"]),
        smem_bytes=int(q["smem"]),
        registers=round(q["registers"]) - spilled,
        programs=int(q["programs"]),
        waves=float(q["waves"]),
        seconds=float(q["seconds"]),
        bound=bound(q),
        spilled=spilled,
    )


def _rejected(ranked: tuple[Row, ...]) -> tuple[Rejected, ...]:
    tiles_of = ((row.tile, row.reason) for row in ranked[1:])
    return tuple(
        Rejected(t.block_m, t.block_n, t.warps, t.stages, reason, t.loads, t.resident) for t, reason in tiles_of
    )
