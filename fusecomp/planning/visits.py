"""Whether the tiles of keys that are visited come from a table of the mask's data, or from the bounds of its terms.

    table_s = 2 launches + bytes of the masks / HBM_RATE
    taken where  table_s <= SHARE * seconds

`seconds` is the attention's predicted time, every key visited: what data hides is not known before the run. A mask that
hides nothing costs its table for nothing, at most SHARE of the time; one that is causal gives half of the time back,
and most masks that are passed as data are causal, padding, windows or documents. Layers that share a mask share its
table, so that the share is smaller still. A bias of every head is as large as what the attention itself reads, which
rules itself out.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusecomp.ir import data
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.candidate import elements
from fusecomp.planning.device import Device
from fusecomp.planning.facts import WIDTH

SHARE = 0.125
"""Of the attention's predicted time."""
HOST_LAUNCH = 1e-5
"""s: what a launch takes the host (probes_h200.json). Tables of gradients are made in each layer anew, and short
kernels wait for it."""


def visits(region: AttentionRegion, sizes: Mapping[str, int], device: Device, seconds: float) -> str:
    """ "table" or "bounds" for a plan of one query tile a program."""
    if not data.unknown(region):
        return "bounds"
    return "table" if table_seconds(region, sizes, device) <= SHARE * seconds else "bounds"


def gradients_visit(seconds: float) -> bool:
    """Whether gradients visit by tables of their own, of four launches; they take twice the `seconds` of the forward
    pass, or longer."""
    return SHARE * 2 * seconds >= 4 * HOST_LAUNCH


def table_seconds(region: AttentionRegion, sizes: Mapping[str, int], device: Device) -> float:
    """The time in which a table is made."""
    read = sum(elements(x, sizes) * WIDTH.get(x.dtype, 1) for x in data.reads(region))
    return 2 * device.launch + read / device.hbm_rate
