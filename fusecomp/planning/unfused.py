"""Whether separate kernels are predicted faster than one: two products and a softmax that goes over the scores twice.

    bytes_s   = (unfused bytes of `cost` + K and V of each head, written and read, where heads share them) / HBM_RATE
    product_s = 2 B H M N (D + Dv) / MMA
    unfused_s = max(bytes_s, product_s) + 4 launches
    left      where  programs < SMS  and  MARGIN * unfused_s < fused_s

A kernel that walks all keys for a tile of queries has a program for each tile: of few queries and heads it leaves most
of a device idle, however many keys there are, which a product of matrices does not. Decoding shares its keys, so that
there is nothing to gain, and keys behind a table would have to be fetched first. Small attention is fused: it takes the
time of its launches, of which separate kernels have more.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.device import Device
from fusecomp.planning.facts import facts, lengths
from fusecomp.planning.tile import TilePlan

LAUNCHES = 4
MARGIN = 1.25
"""Of ten plans that were measured, nine took within a quarter of what is predicted (fit_tiles.py, tiles_h200.json)."""
MOST = 1 / 64
"""Of the device's memory: what the scores and their probabilities may take, whatever the time."""


def unfused_seconds(region: AttentionRegion, sizes: Mapping[str, int], tiles: TilePlan, device: Device) -> float:
    """Predicted for separate kernels."""
    assert tiles.cost is not None
    known, at = facts(region), lengths(region, sizes)
    again = 2 * at.heads * at.n * (known.k_row + known.v_row) if at.kv_heads < at.heads else 0
    bytes_s = (tiles.cost.unfused_hbm_bytes + again) / device.hbm_rate
    flops = 2 * at.heads * at.m * at.n * (known.wide + known.wide_v)
    return max(bytes_s, flops / device.matmul_rate(known.dtype, known.precision)) + LAUNCHES * device.launch


def faster_apart(region: AttentionRegion, sizes: Mapping[str, int], tiles: TilePlan, device: Device) -> str:
    """Why the region is better left to separate kernels; empty where it is not."""
    known, at = facts(region), lengths(region, sizes)
    if tiles.skeleton != "prefill" or tiles.cost is None or known.looked_up or tiles.cost.programs >= device.sms:
        return ""
    fused, apart = tiles.cost.seconds, unfused_seconds(region, sizes, tiles, device)
    if at.heads * at.m * at.n * 2 * (4 + known.width) > MOST * device.memory_bytes or MARGIN * apart >= fused:
        return ""
    return (
        f"separate kernels are predicted to take {apart * 1e6:.0f} us, one kernel {fused * 1e6:.0f} us, as its "
        f"{tiles.cost.programs} programs do not fill {device.sms} multiprocessors"
    )
