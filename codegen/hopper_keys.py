"""Which tiles of keys a tile of queries visits in the forward kernel for Hopper, and in which order. (frame) -> lines.

From the last key that the mask's bounds leave to the first; or, by a table of the mask's data (codegen/table.py), first
the tile that the end of the keys cuts, then those that the mask cuts, by number, then the run of full ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import full_range, key_range
from fusecomp.codegen.table import table_row
from fusecomp.ir.algebra import apply
from fusecomp.ir.poly import poly

Lines = list[str]

KEY_OF = '''\
@gluon.jit
def key_of(block, tail, masked, full_begin, tiles, k_tiles):
    """The first key of a tile, in the order in which they are visited. What is no number of a tile lies in the row too:
    to look it up waits for nothing."""
    other = gl.load(tiles + 3 + block - tail)
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
    full_begin: str
    """The same of a full one."""


def walk(frame: Frame) -> Walk:
    """The tiles of one frame."""
    return _listed(frame) if frame.tabled else _backwards(frame)


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
        "last - block * BLOCK_N",
    )


def _cuts_one_tile(frame: Frame) -> bool:
    """Whether no more than the last tile of keys needs its mask at the end: kv_idx <= q_idx + c, c whole tiles."""
    sloped = [poly(apply("sub", x.edge, frame.q_idx)) for x in frame.reach.upper if x.slope]
    square = frame.plan.block_m == frame.plan.block_n or not sloped
    return square and all(x.slope in (0, 1) for x in frame.reach.upper) and all(
        set(rest) <= {()} and (int(rest.get((), 0)) - 1) % frame.plan.block_n == 0 for rest in sloped
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
        ],
        ["above = gl.maximum(masked, 1)"],
        ("above", "blocks"),
        lambda block: f"key_of({block}, tail, masked, full_begin, tiles, k_tiles)",
        "(full_begin + block - masked) * BLOCK_N",
    )
