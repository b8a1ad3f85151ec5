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


def cut_keys(frame: Frame, tile: Lines) -> Lines:
    """`tile` for each tile of keys that the mask cuts, then the head of a loop over the one that their end cuts, where
    alone what is loaded is tested against it."""
    return _cut(triton_text(frame.kv_idx.size, frame.names), "k", "BLOCK_N", "keys", tile)


def cut_queries(frame: Frame, tile: Lines) -> Lines:
    """The same of queries."""
    return _cut(triton_text(frame.q_idx.size, frame.names), "q", "BLOCK_M", "queries", tile)


def _cut(size: str, of: str, block: str, what: str, tile: Lines) -> Lines:
    return [
        f"whole = tl.minimum({of}_end, {size} // {block} * {block})",
        "# The tiles that the mask cuts, before and after the full ones",
        f"for edge in range({of}_begin, whole - (full_end - full_begin), {block}):",
        f"    {of}_start = tl.where(edge < full_begin, edge, edge + (full_end - full_begin))",
        *(f"    {line}" if line else "" for line in tile),
        "",
        f"# The tile that the end of the {what} cuts",
        f"for {of}_start in range(whole, {of}_end, {block}):",
    ]
