"""What a plan for Hopper's tensor cores is predicted to cost."""

from __future__ import annotations

from collections.abc import Mapping

from fusecomp.ir.expr import Apply, parts
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.candidate import Launch
from fusecomp.planning.cost_hopper import HOPPER, HOPPER_FITTED
from fusecomp.planning.device import Device
from fusecomp.planning.plan import cost_of
from fusecomp.planning.tile import Cost, Tile, TilePlan
from fusecomp.planning.visits import shown

OWN = {"tanh": (0, 1)}
"""What the device has an instruction for: (FMA slots, special-function slots), whatever a primitive's row says."""


RUN_PAIR = 2.0
"""Slots a pair of a tile that a range of keys cuts: two places are compared. Packed documents are so predicted within
15 % (B 4, H 16, N 4096 and B 1, H 16, N 16384, D 64; probes_h200.json); programs that share a multiprocessor begin and
end beside each other."""


def hopper_cost(region: AttentionRegion, sizes: Mapping[str, int], device: Device, plan: TilePlan) -> Cost:
    """Of one launch of `plan`, a plan with `consumers` (codegen/hopper.py)."""
    given = hopper_inputs(region, sizes, device, hopper_tile(plan), shown(region, plan.visits))
    if plan.visits == "ranges":
        given = {**given, "TEST_PAIR": RUN_PAIR, "NEXT": given["NEXT"] / plan.resident}
    return cost_of(HOPPER.evaluate(given))


def hopper_tile(plan: TilePlan) -> Tile:
    """With the warps of all groups that multiply."""
    return Tile(plan.block_m, plan.block_n, plan.consumers * plan.warps, plan.stages, loads=plan.loads)


def hopper_inputs(
    region: AttentionRegion, sizes: Mapping[str, int], device: Device, tile: Tile, part: float = 1.0
) -> dict[str, float]:
    """A number for each symbol of the page; `part`: of the tiles that the bounds leave, those that are visited."""
    given = {**Launch(region, sizes, device, False, part).inputs(tile), **HOPPER_FITTED}
    fma, sfu = saved(region)
    return {**given, "FMA": given["FMA"] - fma, "SFU": given["SFU"] - sfu, "GROUPS": tile.warps // 4}


def saved(region: AttentionRegion) -> tuple[int, int]:
    """(FMA slots, special-function slots) of a pair that the device's own instructions take less."""
    rows = [(x.primitive, *OWN[x.op]) for x in set(parts(region.score)) if isinstance(x, Apply) and x.op in OWN]
    return sum(p.fma - fma for p, fma, _ in rows), sum(p.sfu - sfu for p, _, sfu in rows)
