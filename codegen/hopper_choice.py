"""Where the kernel for Hopper's tensor cores is chosen: it can express a region, and is predicted to be faster.

Its tiles are one size (codegen/hopper.py): few queries, and masks that leave a query tile few keys, stay with the
portable kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusecomp.codegen.copied import pair_loads
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.hopper import expresses, registers, specialised
from fusecomp.ir import data
from fusecomp.ir.expr import variables
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.masks import hiding
from fusecomp.planning.device import Device
from fusecomp.planning.hopper import hopper_cost
from fusecomp.planning.plan import plan
from fusecomp.planning.tile import TilePlan

AT_MOST = 0.88
"""Of the time that is predicted for the portable kernel, what this one may be predicted to take: short launches of that
are over sooner than predicted (hopper_short_h200.json)."""
AT_MOST_LISTED = 1.4
"""The same where a mask of all pairs lists the tiles: the portable kernel, which reads it element by element, takes 1.6
times what is predicted (a quarter of all blocks, B 4, H 16, N 4096, D 64: 0.395 ms, not 0.244; masks_h200.json)."""
AT_MOST_TRAINED = 1.5
"""The same where it is trained and visits by ranges: the gradients of packed documents (B 4, H 16, N 4096, D 64) take
0.35 ms by kernels for Hopper, and 1.57 by portable ones (probes_h200.json)."""


def planned(
    region: AttentionRegion, sizes: Mapping[str, int], device: Device, trained: bool = False
) -> TilePlan | None:
    """Its plan, where it can express the region and is predicted faster at these lengths than the portable kernel;
    `trained`: with gradients by kernels for Hopper."""
    if device.arch != "sm_90" or not expresses(region):
        return None
    tiles = plan(region, sizes, device)
    if tiles.skeleton != "prefill" or tiles.decodes or tiles.cost is None:
        return None
    own = specialised(region, tiles)
    if (tiles.visits == "ranges" and not expresses(hiding(region))) or (tiles.visits == "table" and filled(region)):
        return None
    if len(Frame(region, own).copied) < len(pair_loads(region)):
        return None  # what it reads element by element takes longer than its products
    cost = hopper_cost(region, sizes, device, own)
    most = {"ranges": AT_MOST_TRAINED if trained else AT_MOST, "table": AT_MOST_LISTED}.get(tiles.visits, AT_MOST)
    cost = replace(cost, registers=registers(own)[1])
    return replace(own, cost=cost) if cost.seconds <= most * tiles.cost.seconds else None


def filled(region: AttentionRegion) -> bool:
    """Whether a tensor that is added may be a mask of each request, which models fill with the least float: tiles of it
    add nothing, unless a row sees no key at all, which only the portable kernel looks after (patterns/masks.py)."""
    batch = {v.name for v in region.batch}
    return any(variables(x) & batch for x in data.added(region))
