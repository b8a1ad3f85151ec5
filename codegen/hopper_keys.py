"""Which tiles of keys a tile of queries visits in the forward kernel for Hopper, and in which order. (frame) -> lines.

From the last key that the mask's bounds leave, or a table of its data (codegen/table_ranges.py), to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.program import full_range, key_range
from fusecomp.ir.algebra import apply
from fusecomp.ir.poly import poly

Lines = list[str]


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


def _cuts_one_tile(frame: Frame) -> bool:
    """Whether no more than the last tile of keys needs its mask at the end: kv_idx <= q_idx + c, c whole tiles."""
    if frame.tabled:
        return False
    sloped = [poly(apply("sub", x.edge, frame.q_idx)) for x in frame.reach.upper if x.slope]
    square = frame.plan.block_m == frame.plan.block_n or not sloped
    return square and all(x.slope in (0, 1) for x in frame.reach.upper) and all(
        set(rest) <= {()} and (int(rest.get((), 0)) - 1) % frame.plan.block_n == 0 for rest in sloped
    )
