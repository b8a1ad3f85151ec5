"""A record as tables: one for each mode and protocol, on a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fusecomp.bench.cases import MODES, READS
from fusecomp.bench.peers import PEERS
from fusecomp.bench.record import OURS, Measured, Record, Row
from fusecomp.tables import printed

WORDS = {
    "burst": "short bursts on a card that rested",
    "sustained": "back to back",
    "graph": "replayed from a CUDA graph",
}
RATES = {"FLOP": "TFLOP/s", "B": "GB/s"}
SCALES = {"FLOP": 1e12, "B": 1e9}


@dataclass(frozen=True)
class Page:
    """One table: times of every peer, then what fusecomp reaches."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    ours: int | None
    """The column of fusecomp, which is set in bold."""

    @property
    def markdown(self) -> str:
        """As the README has it."""
        rows = [[f"**{c}**" if i == self.ours and c else c for i, c in enumerate(row)] for row in self.rows]
        lines = [self.header, ["---"] * len(self.header), *rows]
        return f"{self.title}:\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
        for i, name in enumerate(self.header):
            table.add_column(name, justify="right" if i else "left", style="bold green" if i == self.ours else "")
        for row in self.rows:
            table.add_row(*map(Text, row))
        yield Text(f"\n{self.title}\n", "bold")
        yield table


def pages(record: Record, shown: Collection[str] = ()) -> Iterator[Page]:
    """One of each mode and protocol with times, columns of those `shown` or of all; ratios are to the best of all."""
    for mode in MODES:
        cases = [case for case in record.cases if case.mode == mode]
        for protocol in protocols(cases):
            yield _page(mode, protocol, cases, shown)


def protocols(cases: Sequence[Measured]) -> list[str]:
    """Those in which anything was timed."""
    return list(dict.fromkeys(t.protocol for case in cases for row in case.rows for t in row.timings))


def markdown(record: Record, shown: Collection[str] = ()) -> str:
    return "\n\n".join([f"{about(record)}.", *(page.markdown for page in pages(record, shown))])


def about(record: Record) -> str:
    """The device and the versions, in a line."""
    m = record.machine
    versions = ", ".join(f"{name} {m[name]}" for name in ("torch", "cudnn", "triton", "fusecomp") if name in m)
    return f"{m.get('device', 'a device')}, {versions}, {m.get('date', '')}, `{m.get('command', 'fusecomp bench')}`"


def _page(mode: str, protocol: str, cases: Sequence[Measured], shown: Collection[str]) -> Page:
    told = {row.peer for case in cases for row in case.rows if _told(row, protocol)}
    peers = in_order(told & set(shown) if shown else told)
    found = [t.median for case in cases for row in case.rows if (t := row.timing(protocol))]
    unit, scale = ("ms", 1.0) if max(found) >= 0.5 and mode not in READS else ("us", 1e3)
    work = cases[0].unit
    header = ("case", *peers, RATES[work], "of the ceiling", "spread", "over the best peer")
    rows = (
        (case.case, *(_cell(case.row(peer), protocol, scale) for peer in peers), *_reached(case, protocol))
        for case in cases
    )
    title = f"{mode.capitalize()}, {WORDS[protocol]}, {unit}{_ceiling(cases, protocol)}"
    return Page(title, header, tuple(rows), 1 + peers.index(OURS) if OURS in peers else None)


def in_order(names: Collection[str]) -> list[str]:
    """As the table of peers has them; of those that it has not, first."""
    known = [peer.name for peer in PEERS]
    return sorted(names, key=lambda name: (known.index(name) if name in known else -1, name))


def _told(row: Row, protocol: str) -> bool:
    return bool(row.problem or row.timing(protocol))


def _cell(row: Row | None, protocol: str, scale: float) -> str:
    """A time; "wrong" or "failed"; nothing for a peer that cannot say the variant."""
    timing = row.timing(protocol) if row else None
    if row is None or (timing is None and not row.problem):
        return ""
    if timing is None:
        return "wrong" if row.problem.startswith("wrong") else "failed"
    return _digits(timing.median * scale) + (" (not fused)" if row.note else "")


def _digits(value: float) -> str:
    """Three of them at least."""
    places = 3 if value < 10 else 2 if value < 100 else 0 if value >= 1000 else 1
    return f"{value:,.{places}f}"


def _three(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _reached(case: Measured, protocol: str) -> tuple[str, ...]:
    """fusecomp's rate, share of the ceiling, spread, and the best other peer's time over its own."""
    row = case.row(OURS)
    timing = row.timing(protocol) if row else None
    if row is None or timing is None:
        return "", "", "", ""
    share, over = case.of_roof(timing), case.over_best(row, protocol)
    return (
        _three(case.rate(timing) / SCALES[case.unit]),
        f"{share:.0%}" if share else "",
        f"{timing.spread:.1%}",
        f"{over:.2f}x" if over else "",
    )


def _ceiling(cases: Sequence[Measured], protocol: str) -> str:
    """Of products, which is one for all cases."""
    roofs = {case.roofs.get(protocol) for case in cases}
    roof = roofs.pop() if len(roofs) == 1 else None
    return f"; ceiling {_three(roof / SCALES[cases[0].unit])} {RATES[cases[0].unit]}" if roof else ""


@dataclass(frozen=True)
class Found:
    """A record as a terminal shows it: its tables, then what was not timed and why."""

    record: Record

    def to_dict(self) -> dict[str, Any]:
        return self.record.to_dict()

    def __str__(self) -> str:
        return printed(self, width=160)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(about(self.record))
        if missing := self.record.machine.get("missing"):
            yield Text(f"missing: {missing}", "yellow")
        yield from pages(self.record)
        rows = [(case, row) for case in self.record.cases for row in case.rows if row.problem or row.note]
        yield Text("\nnot timed, or not fused" if rows else "", "bold")
        for case, row in rows:
            yield Text(f"{case.mode}, {case.case}, {row.peer}: {row.problem or row.note}", "red" if row.problem else "")
