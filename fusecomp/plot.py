"""The picture of a ranking: what each Br x Bc would take, and where the tiles lie under the device's roof.

Left: predicted time of the best schedule in each cell; cells that do not fit are hatched and say why. Right: FLOP/s
over FLOP per byte of device memory, under the ceilings of memory, tensor cores and special functions. Colours are
viridis, which the colour-blind and a grey printer can read, and every colour is also written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusecomp.errors import OptionError
from fusecomp.planning.device import Device
from fusecomp.planning.facts import facts
from fusecomp.planning.ranking import Line, Ranking
from fusecomp.planning.units import held, seconds
from fusecomp.planning.workload import Workload
from fusecomp.tables import LOADS

Cells = Mapping[tuple[int, int], Line]
INK, FAINT, ACCENT = "#222222", "#8a8a8a", "#d55e00"
"""Text; what recedes; the taken tile (vermilion of Okabe and Ito's palette)."""
SLOWEST = 3.0
"""Times the best time at which the colours end."""


def draw(workload: Workload, device: Device, ranking: Ranking, path: str | Path) -> None:
    """Both pictures into one .png, .svg or .pdf file. OptionError without matplotlib, or where it cannot write."""
    figure = canvas(path, 13, 5.8, rect=(0.005, 0.0, 0.985, 0.94), wspace=0.04)
    compose(figure, workload, device, ranking)
    save(figure, path)


def compose(figure: Any, workload: Workload, device: Device, ranking: Ranking) -> None:
    """Both pictures on an empty matplotlib figure."""
    left, right = figure.subplots(1, 2, width_ratios=(1.05, 1))
    figure.text(0.012, 0.96, _title(workload, device, ranking), fontsize=12, color=INK, weight="bold")
    _map(left, ranking)
    _roofline(right, workload, device, ranking)


def canvas(path: str | Path, width: float, height: float, **layout: Any) -> Any:
    """An empty figure in inches. OptionError without matplotlib, or for a file of another kind than it writes."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise OptionError("a plot needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(**layout))
    kinds = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in kinds:
        raise OptionError(f"a plot is a file that ends in .{', .'.join(sorted(kinds))}; got {str(path)!r}")
    return figure


def save(figure: Any, path: str | Path) -> None:
    """Without the name of the program, so that a release of it changes no byte. OptionError where it cannot write."""
    unnamed = {"Software": None} if Path(path).suffix.lower() == ".png" else None
    try:
        figure.savefig(path, dpi=150, metadata=unnamed)
    except OSError as error:
        raise OptionError(f"cannot write the plot {path}: {error.strerror or error}") from error


def _title(w: Workload, device: Device, ranking: Ranking) -> str:
    heads = f"{w.heads} heads" + (f" on {w.kv_heads} KV heads" if w.kv_heads not in (None, w.heads) else "")
    mask = ", causal" * w.causal + (f", window {w.window:,}" if w.window else "") + ", soft cap" * bool(w.softcap)
    lengths = f"N {w.n:,}" if w.m in (None, w.n) else f"M {w.m:,}, N {w.n:,}"
    sizes = f"B {w.batch}, {heads}, {lengths}, D {w.d}{f', Dv {w.dv}' if w.dv not in (None, w.d) else ''}"
    return f"{ranking.kernel.capitalize()} attention on {device.name}: {sizes}, {w.dtype}{mask}"


def best_cells(lines: Sequence[Line]) -> Cells:
    """The fastest line of each Br x Bc; where none fits, the one that is nearest to fitting."""
    found: dict[tuple[int, int], Line] = {}
    for line in lines:
        cell = line.tile.block_m, line.tile.block_n
        if cell not in found or _merit(line) < _merit(found[cell]):
            found[cell] = line
    return found


def _merit(line: Line) -> tuple[float, ...]:
    cost = line.cost
    return (not line.taken, not line.fits, cost.seconds if cost and line.fits else cost.smem_bytes if cost else 0)


def _map(axes: Any, ranking: Ranking) -> None:
    cells = best_cells(ranking.lines)
    rows, columns = (sorted({cell[i] for cell in cells}) for i in (0, 1))
    axes.set(xlim=(0, len(columns)), ylim=(0, len(rows)), xlabel="Bc: keys of a tile", ylabel="Br: rows of queries")
    axes.set_xticks([i + 0.5 for i in range(len(columns))], columns)
    axes.set_yticks([i + 0.5 for i in range(len(rows))], rows)
    axes.tick_params(length=0)
    axes.set_box_aspect(max(0.3, 0.85 * len(rows) / len(columns)))
    axes.spines[:].set_visible(False)
    axes.set_title("Predicted time of the best schedule in each cell, and its SRAM", loc="left", fontsize=10, color=INK)
    best = ranking.taken.cost.seconds if ranking.taken.cost else 0.0
    for (block_m, block_n), line in sorted(cells.items(), key=lambda item: item[1].taken):
        _cell(axes, columns.index(block_n), rows.index(block_m), line, best)
    _colour_bar(axes, best)


def _cell(axes: Any, x: int, y: int, line: Line, best: float) -> None:
    from matplotlib.patches import Rectangle

    box: dict[str, Any] = {"width": 0.96, "height": 0.96, "linewidth": 3.0 if line.taken else 0.0}
    cost = line.cost
    if cost is None or not line.fits:
        axes.add_patch(Rectangle((x + 0.02, y + 0.02), **box, facecolor="#f2f2f2", edgecolor="#c4c4c4", hatch="///"))
        words = line.why.replace(": ", "\n").replace(" of ", "\nof ")
        label = {"facecolor": "#f2f2f2", "edgecolor": "none", "pad": 1.5}
        axes.text(x + 0.5, y + 0.5, words, ha="center", va="center", fontsize=8, color=INK, bbox=label)
        return
    shade = _shade(cost.seconds / best)
    edge = ACCENT if line.taken else "none"
    axes.add_patch(Rectangle((x + 0.02, y + 0.02), **box, facecolor=shade, edgecolor=edge))
    ink = "white" if _dark(shade) else INK
    head = f"{'taken: ' if line.taken else ''}{seconds(cost.seconds)}"
    axes.text(x + 0.5, y + 0.66, head, ha="center", va="center", fontsize=9.5, color=ink, weight="bold")
    t = line.tile
    schedule = f"{t.warps} warps, {t.stages} {'stage' if t.stages == 1 else 'stages'}"
    fetched = f", {LOADS[t.loads]}" if t.loads != "pointer" else ""
    axes.text(x + 0.5, y + 0.44, schedule, ha="center", va="center", fontsize=8, color=ink)
    axes.text(x + 0.5, y + 0.25, f"{held(cost.smem_bytes)}{fetched}", ha="center", va="center", fontsize=8, color=ink)


def _scale() -> Any:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    return ScalarMappable(LogNorm(1.0, SLOWEST), colormaps["viridis_r"])


def _shade(times: float) -> tuple[float, ...]:
    return tuple(_scale().to_rgba(min(max(times, 1.0), SLOWEST)))


def _dark(rgba: tuple[float, ...]) -> bool:
    """Whether white reads better than black on it (Rec. 709 luma)."""
    return 0.2126 * rgba[0] + 0.7152 * rgba[1] + 0.0722 * rgba[2] < 0.5


def _colour_bar(axes: Any, best: float) -> None:
    bar = axes.figure.colorbar(_scale(), ax=axes, shrink=0.85, pad=0.02, extend="max")
    ticks = [1, 1.25, 1.5, 2, SLOWEST]
    bar.set_ticks(ticks, labels=[seconds(t * best) if t == 1 else f"{t:g}x" for t in ticks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8, length=0)
    bar.outline.set_visible(False)


def _roofline(axes: Any, w: Workload, device: Device, ranking: Ranking) -> None:
    points = [(line, line.cost) for line in ranking.lines if line.fits and line.cost is not None]
    best = points[0][1]
    bare = best.flops / best.unfused_hbm_bytes
    peak, ceilings = _ceilings(w, device)
    places = [bare, peak / device.hbm_rate, *(c.flops / c.hbm_bytes for _, c in points)]
    rates = [bare * device.hbm_rate, *(c.flops / c.seconds for _, c in points)]
    axes.set(xscale="log", yscale="log", xlim=(min(places) / 12, max(places) * 60))
    axes.set(ylim=(min(peak, *rates) / 3e12, peak * 2.2 / 1e12))
    axes.set(xlabel="FLOP per byte of device memory", ylabel="TFLOP/s (in the tiles visited)")
    axes.set_title("Where the tiles lie under the device's roof", loc="left", fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(which="major", color="#eeeeee", zorder=0)
    _plain_ticks(axes)
    _roofs(axes, device, ceilings)
    for _, cost in points[1:]:
        at = cost.flops / cost.hbm_bytes, cost.flops / cost.seconds / 1e12
        axes.scatter(*at, s=26, color=_shade(cost.seconds / best.seconds), edgecolor="white", linewidth=0.4, zorder=3)
    _unfused(axes, bare, min(peak, bare * device.hbm_rate) / 1e12)
    _taken(axes, points[0][0], best)


def _tera(rate: float) -> str:
    return f"{rate / 1e12:,.0f}" if rate >= 1e14 else f"{rate / 1e12:.3g}"


def _plain_ticks(axes: Any) -> None:
    """1, 10, 100; and 2 and 5 between where the rates span less than two decades."""
    from math import log10

    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if log10(high / low) < 2 else (1.0,)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
        axis.set_minor_formatter(NullFormatter())


def _ceilings(w: Workload, device: Device) -> tuple[float, list[tuple[str, float]]]:
    """(the rate of the products, every level ceiling in FLOP/s with its name)."""
    known = facts(w.region)
    peak = device.matmul_rate(known.dtype, known.precision)
    special = device.sfu_rate / (1 + known.sfu) * 2 * (known.wide + known.wide_v)
    unit = "tensor cores" if known.dtype != "float32" or known.precision == "tf32" else "float32 units"
    each = f"{1 + known.sfu} a score" if known.sfu else "exp"
    return peak, [
        (f"{unit}, {w.dtype}: {_tera(peak)} TFLOP/s", peak),
        (f"special functions ({each}): {_tera(special)} TFLOP/s", special),
    ]


def _roofs(axes: Any, device: Device, ceilings: Sequence[tuple[str, float]]) -> None:
    (low, high), peak = axes.get_xlim(), ceilings[0][1]
    ridge = peak / device.hbm_rate
    axes.plot([low, ridge], [low * device.hbm_rate / 1e12, peak / 1e12], color=INK, linewidth=1.6, zorder=2)
    middle = ridge / 6
    axes.annotate(
        f"memory: {device.hbm_rate / 1e12:.3g} TB/s", (middle, middle * device.hbm_rate / 1e12), xytext=(-4, 5),
        textcoords="offset points", rotation=_slope(axes), rotation_mode="anchor", fontsize=8.5, color=INK,
    )  # fmt: skip
    shown = [(name, rate) for name, rate in ceilings if rate <= 2 * peak]
    upper = max(shown, key=lambda ceiling: ceiling[1])  # of two, however near, one is named above and one below
    for name, rate in shown:
        dashes = "-" if name == ceilings[0][0] else (0, (5, 3))
        start = min(ridge, rate / device.hbm_rate)
        axes.plot([start, high], [rate / 1e12] * 2, color=INK, linewidth=1.4, linestyle=dashes, zorder=2)
        place = {"xytext": (-2, 4 if (name, rate) == upper else -11), "textcoords": "offset points", "ha": "right"}
        axes.annotate(name, (high, rate / 1e12), **place, fontsize=8.5, color=INK)


def _slope(axes: Any) -> float:
    """Degrees of y = x on log axes, as drawn."""
    from math import atan2, degrees, log10

    box = axes.get_position()
    wide, tall = box.width * axes.figure.get_figwidth(), box.height * axes.figure.get_figheight()
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    return degrees(atan2(tall / log10(y1 / y0), wide / log10(x1 / x0)))


def _taken(axes: Any, line: Line, cost: Any) -> None:
    at = cost.flops / cost.hbm_bytes, cost.flops / cost.seconds / 1e12
    axes.scatter(*at, s=150, marker="*", color=ACCENT, edgecolor="white", linewidth=0.8, zorder=5)
    name = f"taken: {line.tile.block_m} x {line.tile.block_n}\n{at[1]:,.3g} TFLOP/s, bound\nby {cost.bound}"
    _named(axes, name, at, (9, 0), ha="left", va="center", color=ACCENT, weight="bold")


def _unfused(axes: Any, intensity: float, rate: float) -> None:
    """What traffic alone would allow eager, which stores its scores."""
    axes.scatter(intensity, rate, s=46, marker="D", color="white", edgecolor=INK, linewidth=1.2, zorder=5)
    name = f"unfused traffic:\nat most {rate:,.3g}"
    _named(axes, name, (intensity, rate), (-8, 2), ha="right", va="bottom", color=INK)


def _named(axes: Any, name: str, at: tuple[float, float], offset: tuple[int, int], **style: Any) -> None:
    back = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    axes.annotate(name, at, xytext=offset, textcoords="offset points", fontsize=8.5, bbox=back, zorder=4, **style)
