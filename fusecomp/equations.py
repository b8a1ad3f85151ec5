"""The equations of the cost model, printed as they are written: meaning, unit, source, and the values of a launch.

    fusecomp tiles --equations              the whole page
    fusecomp tiles --n 4096 --equations     the same, with what each comes to for the tile that is taken
    fusecomp io --symbolic                  the bounds of attention's traffic
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fusecomp.planning import page, textbook
from fusecomp.tables import printed


@dataclass(frozen=True)
class Equations:
    """Every equation and symbol of one kernel's cost. Prints as pages; `to_dict()` is JSON."""

    kernel: str = "forward"
    known: Mapping[str, float] | None = None
    """A number for each symbol and result; None prints the equations alone."""
    head: tuple[str, ...] = field(default=())
    """What the values are of."""

    def to_dict(self) -> dict[str, Any]:
        """Pages of equations and the symbols that they are written in."""
        return page.equations(self.kernel, self.known)

    def __str__(self) -> str:
        return printed(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        held = self.to_dict()
        yield from map(Text, self.head)
        for one in held["pages"]:
            if one["equations"]:
                yield Text(f"\n{one['title']}", "bold")
                yield from _page(one["equations"])
        for source, rows in groupby(held["symbols"], key=lambda s: s["source"]):
            yield Text(f"\nFrom {source}" if source.startswith("the ") else f"\n{source}", "bold")
            yield Padding(_symbols(rows), (0, 0, 0, 2))


def _page(equations: list[dict[str, Any]]) -> Iterator[RenderableType]:
    """Paragraphs, and the equations of each as a table of name, text, value."""
    table = _columns()
    for e in equations:
        if e["prose"]:
            yield Padding(table, (0, 0, 0, 2))
            yield Padding(Text(e["prose"], "dim"), (1, 0, 0, 0))
            table = _columns()
        said = "; ".join(filter(None, (e["meaning"], e["unit"])))
        text = Text.assemble(f"= {e['text']}", (f"\n  {said}", "dim") if said else "")
        table.add_row(e["name"], text, "" if e["value"] is None else f"= {number(e['value'])}")
    yield Padding(table, (0, 0, 0, 2))


def _columns() -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, min_width=12)
    table.add_column(overflow="fold", ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.expand = True
    return table


def _symbols(rows: Iterator[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, min_width=14)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for s in rows:
        value = "" if s["value"] is None else number(s["value"])
        table.add_row(s["name"], value, s["unit"], Text(s["meaning"]))
    return table


def number(value: float) -> str:
    """16384 -> "16,384"; 0.0017034 -> "0.001703"; 1.339e12 as it is."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"


@dataclass(frozen=True)
class Bounds:
    """The bounds of attention's traffic, as equations. Prints as a table; `to_dict()` is JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Equations, what they count, where they come from; and the symbols."""
        rows = [dict(zip(("name", "equation", "meaning", "source"), row, strict=True)) for row in self._rows()]
        return {"equations": rows, "symbols": {str(s): meaning for s, meaning in textbook.SYMBOLS.items()}}

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for name, equation, meaning, source in textbook.PAGE:
            yield name, str(equation).replace("**", "^"), meaning, source

    def __str__(self) -> str:
        return printed(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("What one head of attention moves, up to a constant\n", "bold")
        table = Table.grid(padding=(0, 2))
        for name, equation, meaning, source in self._rows():
            table.add_row(Text(name, "dim"), equation, Text.assemble(meaning, (f"\n{source}", "dim")))
        yield table
        yield Text()
        symbols = Table.grid(padding=(0, 2))
        for symbol, meaning in textbook.SYMBOLS.items():
            symbols.add_row(str(symbol), meaning)
        yield symbols
        yield Text("\nFlashAttention: Dao et al. 2022, https://arxiv.org/abs/2205.14135", "dim")
