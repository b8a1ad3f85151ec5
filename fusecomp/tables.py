"""Tables for people: one way to print a ranking of tiles, whoever asks, and grids of labelled text.

Everything fits in 100 columns and reads the same with no terminal: what colour says is also said in words.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from fusecomp.planning.ranking import Line, Ranking
from fusecomp.planning.tile import Cost
from fusecomp.planning.units import held, seconds, size

COLUMNS, NARROW = 100, 96
"""Columns of text that is printed to no terminal; where there are fewer, a table says less."""
LOADS = {"pointer": "pointer", "descriptor": "TMA"}
"""How K and V come: element by element, or as whole tiles by the unit that copies them."""


def printed(*parts: RenderableType, width: int = COLUMNS) -> str:
    """The parts as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def tile_table(ranking: Ranking, rows: int | None = None) -> RenderableType:
    """The first `rows` tiles of a ranking (None: all), the taken one first and in bold green."""
    return _TileTable(ranking.lines[:rows])


@dataclass(frozen=True)
class _TileTable:
    shown: Sequence[Line]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(_columns(self.shown, options.max_width < NARROW))
        table = Table(box=None, header_style="bold", padding=(0, 1), collapse_padding=True, pad_edge=False)
        for name, left, _ in columns:
            table.add_column(name, justify="left" if left else "right", no_wrap=name != "why", overflow="fold")
        for line in self.shown:
            table.add_row(*(cell(line) for _, _, cell in columns), style=_style(line))
        yield table


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


def _columns(shown: Sequence[Line], narrow: bool) -> Iterator[tuple[str, bool, Callable[[Line], str]]]:
    """(name, whether it is text, what it says of a line)."""
    yield "", True, lambda x: "*" if x.taken else ""
    yield "Br x Bc", False, lambda x: f"{x.tile.block_m} x {x.tile.block_n}"
    yield "warps", False, lambda x: str(x.tile.warps)
    yield "stages", False, lambda x: str(x.tile.stages)
    if any(x.tile.resident for x in shown):
        yield "per SM", False, lambda x: str(x.tile.resident or "-")
    if len({x.tile.loads for x in shown}) > 1:
        yield "K, V by", True, lambda x: LOADS[x.tile.loads]
    yield "SRAM", False, lambda x: held(x.smem_bytes)
    if all(x.cost is not None for x in shown):
        yield "regs", False, _of_cost(lambda c: f"{c.registers}+{c.spilled}" if c.spilled else str(c.registers))
        moved = _of_cost(lambda c: size(c.hbm_bytes) + ("" if narrow else f" ({_fraction(c)})"))
        yield "HBM" if narrow else "HBM (unfused)", False, moved
        yield "time", False, _of_cost(lambda c: seconds(c.seconds))
    yield "why", True, lambda x: x.why


def _of_cost(say: Callable[[Cost], str]) -> Callable[[Line], str]:
    return lambda line: say(line.cost) if line.cost is not None else ""


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
