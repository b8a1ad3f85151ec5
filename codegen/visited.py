"""Ranges of tiles that a table of the mask's data gives. (frame) -> lines.

    tiles [rows, 5 + 2 BLOCK_M] int32:  begin, full_begin, full_end, end, in_runs,        codegen/table_ranges.py
                                        the first and the last of each query

The names are those of ranges that bounds give (codegen/program.py), and so are the loops.
"""

from __future__ import annotations

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.values import FIRST, LAST
from fusecomp.ir import data
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Expr, Var

Lines = list[str]
HEAD = 5
"""Numbers of a row before the first and the last of each query."""


def pitch(block: str) -> str:
    """Numbers of a row, for a block of so many queries."""
    return f"{HEAD} + 2 * {block}"


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
    return [
        f"tiles = tiles_ptr + {place} * ({pitch(block)})",
        f"{of}_begin = tl.load(tiles)",
        f"{of}_end = tl.load(tiles + 3)",
    ]


FULL = ["full_begin = tl.load(tiles + 1)", "full_end = tl.load(tiles + 2)"]
"""[full_begin, full_end) of a row: there every query sees every key."""


def key_runs() -> Lines:
    """Whether each query sees one run of keys, and which."""
    return _runs("query sees one run of keys", "row", "BLOCK_M")


def query_runs() -> Lines:
    """Whether one run of queries sees each key, and which."""
    return _runs("key is seen by one run of queries", "n", "BLOCK_N")


def _runs(what: str, row: str, block: str) -> Lines:
    return [
        f"in_runs = tl.load(tiles + 4) > 0  # whether each {what}, from a first to a last",
        f"run_first = tl.load(tiles + {HEAD} + {row})",
        f"run_last = tl.load(tiles + {HEAD} + {block} + {row})",
    ]


def in_run(v: Var) -> list[Expr]:
    """What is tested of one run of keys, or of queries."""
    return [apply("ge", v, FIRST), apply("le", v, LAST)]


def _seldom(begin: str, end: str, step: str, stages: int) -> str:
    """A range of one stage less, where it then still is a pipeline: what it reads beside has room in shared memory."""
    span = f"{begin}, {end}, {step}"
    return f"tl.range({span}, num_stages={stages - 1})" if stages > 2 else f"range({span})"


def cut_keys(frame: Frame, tile: Lines) -> Lines:
    """`tile` for each tile of keys that the mask cuts, if each query sees one run of keys; then the head of a loop over
    those for which the mask is read, and the one that the end of the keys cuts."""
    return _cut(triton_text(frame.kv_idx.size, frame.names), "k", "BLOCK_N", "keys", tile, frame.plan.stages)


def cut_queries(frame: Frame, tile: Lines) -> Lines:
    """The same of queries."""
    return _cut(triton_text(frame.q_idx.size, frame.names), "q", "BLOCK_M", "queries", tile, frame.plan.stages)


def _cut(size: str, of: str, block: str, what: str, tile: Lines, stages: int) -> Lines:
    start = f"    {of}_start = tl.where(edge < full_begin, edge, edge + (full_end - full_begin))"
    return [
        "# The tiles that the mask cuts, before and after the full ones, where it shows runs",
        f"whole = tl.minimum({of}_end, {size} // {block} * {block})",
        f"together = tl.where(in_runs, whole - (full_end - full_begin), {of}_begin)",
        f"for edge in range({of}_begin, together, {block}):",
        start,
        *(f"    {line}" if line else "" for line in tile),
        "",
        f"# Where it does not, and the tile that the end of the {what} cuts",
        f"for edge in {_seldom('together', f'{of}_end - (full_end - full_begin)', block, stages)}:",
        start,
    ]
