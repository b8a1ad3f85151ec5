"""A record as a picture: the rate of every peer on every case, one panel for each mode, beside the ceiling.

Colours are Okabe and Ito's, and each peer has a mark of its own, so that no colour is needed to tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusecomp.bench.cases import MODES
from fusecomp.bench.page import RATES, SCALES, WORDS, in_order, protocols
from fusecomp.bench.record import OURS, Measured, Record
from fusecomp.errors import OptionError
from fusecomp.plot import FAINT, INK, canvas, save

COLOURS = ("#999999", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#cc79a7", "#000000", "#882255", "#44aa99", "#8c510a")
MARKS = "sv^<>PXphd"
FAR = 5
"""Times the fastest rate of a panel: a ceiling further right would leave it empty."""


def draw(record: Record, path: str | Path) -> None:
    """Into one .png, .svg or .pdf file. OptionError without matplotlib, or where it cannot write."""
    modes = [mode for mode in MODES if protocols([case for case in record.cases if case.mode == mode])]
    if not modes:
        raise OptionError("nothing was timed, so there is nothing to draw")
    heights = [len([case for case in record.cases if case.mode == mode]) + 1.6 for mode in modes]
    figure = canvas(path, 11, 1.2 + 0.34 * sum(heights))
    panels = figure.subplots(len(modes), 1, squeeze=False, height_ratios=heights)[:, 0]
    looks = _looks(record)
    for axes, mode in zip(panels, modes, strict=True):
        _panel(axes, mode, [case for case in record.cases if case.mode == mode], looks)
    handles = [_handle(name, looks[name]) for name in looks]
    figure.legend(handles=handles, loc="outside upper left", ncols=5, frameon=False, fontsize=8.5)
    figure.text(0.99, 0.004, record.machine.get("device", ""), ha="right", fontsize=8, color=FAINT)
    save(figure, path)


def _looks(record: Record) -> dict[str, tuple[str, str]]:
    """Colour and mark of each peer; fusecomp is a vermilion star."""
    peers = in_order({row.peer for case in record.cases for row in case.rows if row.timings})
    others = [name for name in peers if name != OURS]
    looks = {name: (COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]) for i, name in enumerate(others)}
    return {**looks, OURS: ("#d55e00", "*")}


def _handle(name: str, look: tuple[str, str]) -> Any:
    from matplotlib.lines import Line2D

    colour, mark = look
    return Line2D([], [], color=colour, marker=mark, linestyle="none", label=name, markersize=11 if mark == "*" else 6)


def _panel(axes: Any, mode: str, cases: Sequence[Measured], looks: dict[str, tuple[str, str]]) -> None:
    """Back to back, or replayed where nothing else was timed; faster is further right."""
    protocol, unit = sorted(protocols(cases), key="sustained".__ne__)[0], cases[0].unit
    roofs = roofs_of(cases, protocol)
    for y, (case, roof) in enumerate(zip(cases, roofs, strict=True)):
        axes.axhline(y, color="#e4e4e4", linewidth=1, zorder=1)
        if roof:
            axes.plot([roof / SCALES[unit]] * 2, [y - 0.4, y + 0.4], color=INK, linewidth=1.4, zorder=2)
        for row in case.rows:
            if timing := row.timing(protocol):
                colour, mark = looks[row.peer]
                size = 120 if row.peer == OURS else 34
                at = case.rate(timing) / SCALES[unit]
                axes.scatter(at, y, color=colour, marker=mark, s=size, zorder=4 if row.peer == OURS else 3)
    axes.set_yticks(range(len(cases)), [case.case for case in cases], fontsize=8.5)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xlabel(RATES[unit] + ("; the bar is the measured ceiling" if any(roofs) else ""))
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{mode.capitalize()}, {WORDS[protocol]}", loc="left", fontsize=10, color=INK)


def roofs_of(cases: Sequence[Measured], protocol: str) -> list[float | None]:
    """The ceiling of each case, where a panel has room for all."""
    roofs = [case.roofs.get(protocol) for case in cases]
    rates = [case.rate(t) for case in cases for row in case.rows if (t := row.timing(protocol))]
    return roofs if max(filter(None, roofs), default=0.0) <= FAR * max(rates) else [None] * len(roofs)
