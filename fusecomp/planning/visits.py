"""Whether the tiles of keys that are visited come from a table of the mask's data, or from the bounds of its terms.

    table_s = two launches + bytes of the masks / HBM_RATE
    taken where  table_s <= SHARE * seconds

    "ranges"   a range of each tile of queries (codegen/table_ranges.py): where the masks are known of queries and of
               keys apart, which holes are seldom in
    "table"    a list of tiles (codegen/table.py)

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
from fusecomp.planning.holes import filled

SHARE = 0.125
"""Of the attention's predicted time."""
FILLED = 0.75
"""Of the tiles from the first to the last that a query sees, as far as is known: a range holds the others too."""
SHOWN = 0.25
"""Of the tiles that the bounds leave, those that data is taken to show, beside one in each row: as many as of nine
documents in 4096 places."""
HOST_LAUNCH = 1e-5
"""s: what a launch takes the host (probes_h200.json). Tables of gradients are made in each layer anew, and short
kernels wait for it."""


def visits(region: AttentionRegion, sizes: Mapping[str, int], device: Device, seconds: float) -> str:
    """ "ranges", "table" or "bounds" for a plan of one query tile a program."""
    if not data.unknown(region):
        return "bounds"
    kind = "ranges" if data.apart(region) and filled(region, sizes) >= FILLED else "table"
    return kind if table_seconds(region, sizes, device) <= SHARE * seconds else "bounds"


def shown(region: AttentionRegion, visits: str) -> float:
    """Of the tiles that the bounds leave, those that are taken to be visited."""
    return SHOWN if visits != "bounds" and data.reads(region) else 1.0


def gradients_visit(seconds: float) -> bool:
    """Whether gradients visit by tables of their own, of four launches; they take twice the `seconds` of the forward
    pass, or longer."""
    return SHARE * 2 * seconds >= 4 * HOST_LAUNCH


def table_seconds(region: AttentionRegion, sizes: Mapping[str, int], device: Device) -> float:
    """The time in which a table is made."""
    read = sum(elements(x, sizes) * WIDTH.get(x.dtype, 1) for x in data.reads(region))
    return 2 * device.launch + read / device.hbm_rate
