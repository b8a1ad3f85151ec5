"""Which tiles of keys a tile of queries visits in the forward kernel for Hopper, and in which order. (frame) -> lines.

From the last key that the mask's bounds leave, or a table of its data (codegen/table_ranges.py), to the first; or by a
list of its data (codegen/table.py): first what the end of the keys cuts, then what the mask cuts, then the full ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import full_range, key_range
from fusecomp.codegen.table import table_row
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Apply, Const, Expr, variables
from fusecomp.ir.poly import poly

Lines = list[str]

KEY_OF = '''
@gluon.jit
def key_of(block, tail, masked, full_begin, tiles, k_tiles):
    """The first key of a tile, in the order in which they are visited."""
    other = gl.load(tiles + 3 + block - tail, mask=(block >= tail) & (block < masked), other=0)
    listed = gl.where(block < tail, k_tiles, other)
    return gl.where(block < masked, listed, full_begin + block - masked) * BLOCK_N
'''


@dataclass(frozen=True)
class Walk:
    """Tiles of keys by number: `block` in [0, blocks)."""

    counted: Lines
    """`blocks`: at least one."""
    parts: Lines
    """`above`: so many need their mask, the first at least; and so do those from `below` on."""
    full: tuple[str, str]
    """The range of those that do not."""
    begin: Callable[[str], str]
    """k_start of a block."""


def walk(frame: Frame) -> Walk:
    """The tiles of one frame."""
    return _listed(frame) if frame.listed else _backwards(frame)


def _backwards(frame: Frame) -> Walk:
    span = "last" if frame.k_begin == "0" else f"(last - {frame.k_begin})"
    cut, window = not _cuts_one_tile(frame), frame.k_begin != "0"
    above = "gl.maximum((last - full_end) // BLOCK_N + 1, 1)  # tiles at the end that need their mask"
    below = f"gl.maximum((last - full_begin) // BLOCK_N + 1, {'above' if cut else '1'})  # the others at the beginning"
    return Walk(
        [
            *key_range(frame),
            f"last = tl.maximum({frame.k_end} - 1, {frame.k_begin}) // BLOCK_N * BLOCK_N",
            f"blocks = {span} // BLOCK_N + 1",
        ],
        [*full_range(frame), *([f"above = {above}"] if cut else []), *([f"below = {below}"] if window else [])],
        ("above" if cut else "1", "below" if window else "blocks"),
        lambda block: "last" if block == "0" else f"last - {block} * BLOCK_N",
    )


def _listed(frame: Frame) -> Walk:
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    return Walk(
        [
            f"q_tiles = tl.cdiv({m}, BLOCK_M)",
            *table_row(frame),
            "full_begin = tl.load(tiles)",
            f"tail = tl.cdiv({n}, BLOCK_N) - k_tiles",
            "masked = tail + tl.load(tiles + 2)",
            "blocks = tl.maximum(masked + tl.load(tiles + 1) - full_begin, 1)",
            "above = tl.maximum(masked, 1)  # tiles that need their mask",
        ],
        [],
        ("above", "blocks"),
        lambda block: f"key_of({block}, tail, masked, full_begin, tiles, k_tiles)",
    )


def _cuts_one_tile(frame: Frame) -> bool:
    """Whether no more than the last tile of keys needs its mask at the end: kv_idx < q_idx + c + 1, or < c, or the
    larger or smaller of such, c whole tiles."""
    if frame.tabled:
        return False
    sloped = [x for x in frame.reach.upper if x.slope]
    square = frame.plan.block_m == frame.plan.block_n or not sloped
    return square and all(x.slope == 1 and all(_whole(frame, e) for e in _sides(x.edge)) for x in sloped)


def _sides(edge: Expr) -> Iterator[Expr]:
    match edge:
        case Apply("max" | "min", (x, y)):
            yield from (*_sides(x), *_sides(y))
        case _:
            yield edge


def _whole(frame: Frame, edge: Expr) -> bool:
    """q_idx + c + 1, or c."""
    moves = frame.q_idx.name in variables(edge)
    rest = poly(apply("sub", edge, apply("add", frame.q_idx, Const(1))) if moves else edge)
    return set(rest) <= {()} and int(rest.get((), 0)) % frame.plan.block_n == 0
