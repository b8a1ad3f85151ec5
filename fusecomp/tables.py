"""Tables for people: one way to print a ranking of tiles, whoever asks, and grids of labelled text.

Everything fits in 100 columns and reads the same with no terminal: what colour says is also said in words.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fusecomp.planning.ranking import Line, Ranking
from fusecomp.planning.tile import Cost
from fusecomp.planning.units import held, seconds, size

COLUMNS = 100
"""Of text that is printed to no terminal."""
LOADS = {"pointer": "pointer", "descriptor": "TMA"}
"""How K and V come: element by element, or as whole tiles by the unit that copies them."""


def printed(*parts: RenderableType, width: int = COLUMNS) -> str:
    """The parts as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def tile_table(ranking: Ranking, rows: int | None = None) -> Table:
    """The first `rows` tiles of a ranking (None: all), the taken one first and in bold green."""
    shown = ranking.lines[:rows]
    table = Table(box=None, header_style="bold", padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name, left in _columns(shown):
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "why", overflow="fold")
    for line in shown:
        table.add_row(*_cells(line, shown), style=_style(line))
    return table


def considered(ranking: Ranking, rows: int) -> RenderableType:
    """The first tiles of a ranking, and how many more there are: what a report and `show` say of a plan."""
    rest = left_out(ranking, rows)
    return Group(tile_table(ranking, rows), *([Text(rest, "dim")] if rest else []))


def left_out(ranking: Ranking, rows: int | None) -> str:
    """ "115 more, 24 of which do not fit"; empty where all are shown."""
    rest = ranking.lines[rows:] if rows is not None else ()
    misfits = sum(not line.fits for line in rest)
    return f"{len(rest)} more{f', {misfits} of which do not fit' if misfits else ''}" if rest else ""


def _style(line: Line) -> str:
    return "bold green" if line.taken else "" if line.fits else "dim"


def _columns(shown: Sequence[Line]) -> Iterator[tuple[str, bool]]:
    """(name, whether it is text)."""
    yield "", True
    yield "Br x Bc", False
    yield "warps", False
    yield "stages", False
    if _differ(shown):
        yield "K, V by", True
    yield "SRAM", False
    if _predicted(shown):
        yield from (("regs", False), ("HBM (unfused)", False), ("time", False))
    yield "why", True


def _differ(shown: Sequence[Line]) -> bool:
    return len({line.tile.loads for line in shown}) > 1


def _predicted(shown: Sequence[Line]) -> bool:
    return all(line.cost is not None for line in shown)


def _cells(line: Line, shown: Sequence[Line]) -> Iterator[str]:
    t, c = line.tile, line.cost
    yield "*" if line.taken else ""
    yield f"{t.block_m} x {t.block_n}"
    yield from (str(t.warps), str(t.stages))
    if _differ(shown):
        yield LOADS[t.loads]
    yield held(line.smem_bytes)
    if c is not None:
        yield from (str(c.registers), f"{size(c.hbm_bytes)} ({_fraction(c)})", seconds(c.seconds))
    yield line.why


def _fraction(cost: Cost) -> str:
    """Of the unfused traffic: "1/143", "97%"."""
    times = cost.unfused_hbm_bytes / max(cost.hbm_bytes, 1)
    return f"1/{times:.0f}" if times >= 1.95 else f"{1 / times:.0%}"


def grid(rows: Iterable[tuple[str, ...]]) -> Table:
    """Labels on the left, text folded on the right. Rich markup in the text stays text."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    for label, *texts in rows:
        if any(texts):
            table.add_row(label, *map(Text, texts))
    return table
