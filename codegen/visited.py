"""Ranges of tiles that a table of the mask's data gives, for the kernels for Hopper. (frame) -> lines.

    tiles [rows, 4] int32:  begin, full_begin, full_end, end             codegen/table.py, codegen/table_ranges.py

The names are those of ranges that bounds give (codegen/program.py), and so are the loops.
"""

from __future__ import annotations

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.printer import triton_text
from fusecomp.ir import data

Lines = list[str]


def row_of(frame: Frame) -> str:
    """Which mask this program's is, of those along the axes that they differ along."""
    row = ""
    for v in data.axes(frame.region):
        size = triton_text(v.size, frame.names)
        row = f"({row} * {size} + {v.name})" if row else v.name
    return row


def key_row(frame: Frame) -> Lines:
    """[k_begin, k_end) of a tile of queries."""
    return _row(frame, triton_text(frame.q_idx.size, frame.names), "q_start", "BLOCK_M", "k")


def query_row(frame: Frame) -> Lines:
    """[q_begin, q_end) of a tile of keys."""
    return _row(frame, triton_text(frame.kv_idx.size, frame.names), "k_start", "BLOCK_N", "q")


def _row(frame: Frame, size: str, start: str, block: str, of: str) -> Lines:
    row, tile = row_of(frame), f"{start} // {block}"
    place = f"({row} * tl.cdiv({size}, {block}) + {tile})" if row else tile
    return [f"tiles = tiles_ptr + {place} * 4", f"{of}_begin = tl.load(tiles)", f"{of}_end = tl.load(tiles + 3)"]


FULL = ["full_begin = tl.load(tiles + 1)", "full_end = tl.load(tiles + 2)"]
"""[full_begin, full_end) of a row: there every query sees every key."""
