"""What a mask reads of each tile of keys, or of queries: the least and the greatest, once for all who visit it.

    ends [batches, tiles, 2 loads] int64        load0 over tile t:  min, max;  load1: min, max ...

A tile is read by one warp. Those who judge it (codegen/table_ranges.py) then read two numbers, not all of it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fusecomp.codegen.function import function
from fusecomp.codegen.launcher import arguments, ranks_of, wrapped
from fusecomp.codegen.printer import atom, triton_text
from fusecomp.codegen.program import decoded
from fusecomp.codegen.table import TableFrame
from fusecomp.ir import data
from fusecomp.ir.expr import Load, Var, dtype_kind, variables
from fusecomp.ir.region import AttentionRegion

Lines = list[str]
CONSTANTS = ("BLOCK_M", "BLOCK_N", "TILES")
ENDS = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """The least and the greatest of what the mask reads of one tile."""
    count = tl.cdiv(«size», «block»)
    tile = tl.program_id(0)
    outer = tl.cast(tile // count, tl.int64)
    «axes»
    each = tl.cast(tl.minimum(tile % count * «block» + tl.arange(0, «block»), «size» - 1), tl.int64)
    «each»
'''


@dataclass(frozen=True)
class Side:
    """A table of rows along one axis: those of `own`, which visit `other`."""

    region: AttentionRegion
    own: Var
    other: Var
    name: str
    """Of what launches it."""

    @property
    def visited(self) -> str:
        return "key" if self.own == self.region.q_idx else "query"

    def block(self, v: Var) -> str:
        return "BLOCK_M" if v == self.region.q_idx else "BLOCK_N"

    def loads(self) -> dict[Load, str]:
        """What the mask reads, by name."""
        return {x: f"{x.tensor}_{i}" for i, x in enumerate(sorted(data.reads(self.region), key=str))}

    def of_other(self) -> dict[Load, str]:
        """What it reads of what is visited."""
        return {x: name for x, name in self.loads().items() if self.other.name in variables(x)}


def end_kernel(frame: TableFrame, side: Side) -> tuple[str, list[str]]:
    """(text, parameters); nothing where nothing is read of what is visited."""
    names = side.of_other()
    if not names:
        return "", []
    return function(frame, ENDS, f"{side.visited}_ends", {
        "size": triton_text(side.other.size, frame.names), "block": side.block(side.other), "axes": axes(frame),
        "each": [line for i, (x, name) in enumerate(names.items()) for line in (
            f"{name} = {value(frame, side, x, 'each')}",
            f"tl.store(ends_ptr + tile * {2 * len(names)} + {2 * i}, tl.min({name}, axis=0))",
            f"tl.store(ends_ptr + tile * {2 * len(names)} + {2 * i + 1}, tl.max({name}, axis=0))",
        )],
    }, partial(parameters, frame))  # fmt: skip


def read_ends(side: Side) -> Lines:
    """load0_0_low, load0_0_high = the least and the greatest of load0[...] over each tile."""
    names = side.of_other()
    lines = [f"ends = ends_ptr + (outer * count + tl.minimum(tile, count - 1)) * {2 * len(names)}"] * bool(names)
    for i, name in enumerate(names.values()):
        lines.append(f"{name}_low, {name}_high = tl.load(ends + {2 * i}), tl.load(ends + {2 * i + 1})")
    return lines


def launch_ends(frame: TableFrame, side: Side, params: list[str], tiles: str, block: int) -> Lines:
    """The launch that makes them, one program for each of the `tiles` of every batch."""
    if not params:
        return []
    options = [f"{side.block(side.other)}={block}", "num_warps=1"]
    given = [x for x in arguments(params, ranks_of(frame)) if x not in CONSTANTS]
    return [
        f"ends = torch.empty([{tiles}, {2 * len(side.of_other())}], dtype=torch.int64, device=tensors[0].device)",
        "if len(ends):",
        f"    {side.visited}_ends[(len(ends),)](",
        *("        " + line for line in wrapped([*given, *options], 12)),
        "    )",
    ]


def value(frame: TableFrame, side: Side, x: Load, place: str) -> str:
    """A load at the places of that name, truth values as 0 and 1."""
    names = frame.names.having({side.own: place, side.other: place})
    at = [f"{atom(triton_text(e, names))} * {x.tensor}_stride_{i}" for i, e in enumerate(x.index)]
    wide = ".to(tl.int32)" if dtype_kind(x.dtype) == "bool" else ""
    return f"tl.load({' + '.join([f'{x.tensor}_ptr', *at])}){wide}"


def axes(frame: TableFrame) -> Lines:
    """outer = b * H + h, of the axes that the masks differ along."""
    return decoded(frame) if frame.batch else []


def parameters(frame: TableFrame, read: frozenset[str]) -> list[str]:
    """What a kernel takes, of what it reads."""
    ranks = ranks_of(frame)
    pointers = ["tiles_ptr", "ends_ptr", *(f"{t}_ptr" for t in ranks)]
    strides = [f"{t}_stride_{i}" for t, rank in ranks.items() for i in range(rank)]
    return [p for p in (*pointers, *strides, *frame.region.sizes, *CONSTANTS) if p in read]
