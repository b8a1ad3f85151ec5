"""What a person is told about one compilation: a block for every attention found, fused or not, and why.

Nothing is decided here. `str(report)` is text of fixed width, `rich` prints it in colour, `to_dict()` is JSON.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fusecomp.ir.region import AttentionRegion, describe
from fusecomp.planning.device import named
from fusecomp.planning.ranking import Ranking, rank_plan
from fusecomp.planning.tile import Cost, TilePlan
from fusecomp.planning.units import seconds, size
from fusecomp.tables import considered

WIDTH = 110
"""Columns of `str(report)`."""
ROWS = 4
"""Tiles that a report lists of each plan; `fusecomp show --until plan` lists more."""

NOTHING = "No softmax or scaled_dot_product_attention in what was compiled."
NO_GRAPH = "Dynamo compiled no graph; TORCH_LOGS=graph_breaks shows where it stopped."
STYLES = {"fused": "bold green", "declined": "bold yellow", "fallback": "bold red"}
LOWERINGS = {
    "triton": "generated Triton kernel",
    "library": "PyTorch's own fused kernel (no mask, nothing done to the scores)",
    "cpu": "PyTorch operators on the CPU, without an M x N tensor",
    "eager": "as written, in the rest of the graph",
}


@dataclass(frozen=True)
class Entry:
    """One attention, or something that looked like one."""

    index: int
    """Its place in its graph, and in a Report its place there."""
    status: str
    """"fused": a fused kernel runs it. "declined": not an attention that fusecomp can take over.
    "fallback": recognised, but no kernel could be trusted, so eager runs it."""
    where: str = ""
    """The user's source line: "model.py:18"."""
    source: str = ""
    """The text of that line."""
    region: AttentionRegion | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The lengths it was planned for: {"B": 2, "M": 4096 ...}. The kernel takes any."""
    learned: tuple[str, ...] = ()
    """The operands of the region that were trained."""
    reason: str = ""
    """Why it was declined, or why eager runs it."""
    advice: str = ""
    """What the user can do about it."""
    plan: TilePlan | None = None
    kernel: str = ""
    """Name of the kernel; identical layers share one."""
    kernel_text: str = ""
    """The generated file."""
    kernel_source: Any = None
    """The KernelSource behind `kernel_text`."""
    lowering: str = "eager"
    """What runs it: "triton", "library", "cpu" or "eager"."""
    verdict: str = ""
    """How the kernel was checked, and with what result."""

    def rows(self) -> Iterator[tuple[str, str]]:
        """(label, text) of what is known, in the order of the stages."""
        yield "source", self.source.strip()
        yield "reason", self.reason
        yield "advice", self.advice
        if self.region is not None:
            shapes, *mathematics = describe(replace(self.region, origin=""))
            yield "shapes", shapes.removeprefix("attention").strip()
            yield "sizes", ", ".join(f"{name} = {length}" for name, length in self.sizes.items())
            yield "region", "\n".join(line.strip() for line in mathematics)
            yield "reads", ", ".join(f"{o.name} is {o.label}" for o in self.region.loads if o.label)
        if self.plan is not None:
            yield "plan", plan_text(self.plan)
        if self.plan is not None and self.plan.cost is not None:
            yield "predicted", cost_text(self.plan.cost)
        yield "kernel", self.kernel
        yield "runs as", LOWERINGS.get(self.lowering, self.lowering)
        yield "verdict", self.verdict

    def tiles(self) -> Ranking | None:
        """The tiles that the plan was chosen from, at this call's lengths; None where nothing was planned."""
        device = named(self.plan.device) if self.plan is not None else None
        if self.region is None or self.plan is None or device is None or not self.sizes:
            return None
        return rank_plan(self.region, self.sizes, device, self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the live objects, in JSON's types."""
        plain = {k: getattr(self, k) for k in self.__dataclass_fields__ if k not in ("region", "plan", "kernel_source")}
        region = self.region and {"key": self.region.key, "text": list(describe(self.region))}
        return _plain({**plain, "region": region, "plan": self.plan})  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Report:
    """Every attention of a function or model, in the order of its graphs."""

    entries: tuple[Entry, ...] = ()
    title: str = ""
    """Name of what was compiled."""
    device: str = ""
    """Name of the device planned for."""
    graphs: int = 1
    """Graphs that Dynamo made of it."""
    notes: tuple[str, ...] = ()
    """What holds for the whole: graph breaks, warnings."""

    def __post_init__(self) -> None:
        """Number the entries: each graph counts its own from 0."""
        numbered = tuple(replace(e, index=i) for i, e in enumerate(self.entries))
        object.__setattr__(self, "entries", numbered)

    def of(self, status: str) -> tuple[Entry, ...]:
        """The entries of one status."""
        return tuple(e for e in self.entries if e.status == status)

    @property
    def fused(self) -> tuple[Entry, ...]:
        return self.of("fused")

    @property
    def declined(self) -> tuple[Entry, ...]:
        return self.of("declined")

    @property
    def fallbacks(self) -> tuple[Entry, ...]:
        return self.of("fallback")

    def groups(self) -> tuple[tuple[Entry, ...], ...]:
        """Entries that differ in their index alone (the layers of a model), together."""
        same: dict[tuple[object, ...], list[Entry]] = {}
        for entry in self.entries:
            same.setdefault((entry.status, entry.where, *entry.rows()), []).append(entry)
        return tuple(map(tuple, same.values()))

    def kernels(self) -> dict[str, str]:
        """Generated files by kernel name, each once."""
        return {e.kernel: e.kernel_text for e in self.entries if e.kernel_text}

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON's types."""
        counts = {status: len(self.of(status)) for status in STYLES}
        return {
            "title": self.title, "device": self.device, "graphs": self.graphs, "notes": list(self.notes),
            "counts": {"candidates": len(self.entries), **counts},
            "entries": [e.to_dict() for e in self.entries],
        }  # fmt: skip

    def summary(self) -> str:
        """One line: how many attentions, and what became of them."""
        kinds = [f"{len(self.of(s))} {_plural(s, len(self.of(s)))}" for s in STYLES if self.of(s)]
        found = f"{len(self.entries)} {_plural('attention', len(self.entries))}"
        graphs = f"{self.graphs} {_plural('graph', self.graphs)}"
        return f"{found} in {graphs}{': ' if kinds else ''}{', '.join(kinds)}"

    @property
    def nothing(self) -> str:
        """What to say where it has no entries."""
        return NOTHING if self.graphs else NO_GRAPH

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None, legacy_windows=False)
        console.print(self)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = " ".join(filter(None, ["fusecomp", self.title, f"for {self.device}" if self.device else ""]))
        yield Text.assemble((title, "bold"), "  ", self.summary())
        for note in self.notes:
            yield Padding(Text(note, "yellow"), (0, 0, 0, 2))
        if not self.entries:
            yield Padding(Text(self.nothing), (0, 0, 0, 2))
        for group in self.groups():
            yield Text()
            yield _heading(group)
            yield Padding(_table(group[0].rows()), (0, 0, 0, 4))
            if (tiles := group[0].tiles()) is not None and options.max_width >= 80:
                yield Padding(considered(tiles, ROWS), (1, 0, 0, 4))


def _heading(group: tuple[Entry, ...]) -> Text:
    """ "#0-31  fused  model.py:18  (32 alike)"."""
    alike = f"  ({len(group)} alike)" if len(group) > 1 else ""
    where = short_path(group[0].where) or "source line unknown"
    status = group[0].status
    number = f"#{_runs([e.index for e in group])}"
    return Text.assemble((number, "bold"), "  ", (status, STYLES.get(status, "")), "  ", where, alike)


def short_path(where: str) -> str:
    """The path from the current folder, or from site-packages: what a person would call the file."""
    for root in (f"{Path.cwd()}/", "site-packages/"):
        _, found, rest = where.rpartition(root)
        if found:
            return rest
    return where


def _runs(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    starts = [i for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    runs = [numbers[i:j] for i, j in zip(starts, [*starts[1:], len(numbers)], strict=True)]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    """Labels on the left, text folded on the right. Rich markup in the user's text stays text."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        if text:
            table.add_row(label, Text(text))
    return table


def plan_text(plan: TilePlan) -> str:
    """ "prefill, tile 128 x 64 (Br x Bc), 8 warps, 3 stages; 11 other tiles considered"."""
    parts = [plan.skeleton, f"tile {plan.block_m} x {plan.block_n} (Br x Bc)"]
    warps = f"{plan.warps} {_plural('warp', plan.warps)}"
    groups = f"{plan.consumers} groups of {warps} that multiply and one that copies"
    parts += [groups if plan.consumers else warps, f"{plan.stages} {_plural('stage', plan.stages)}"]
    parts += [f"{plan.pack} query heads in a tile"] * (plan.pack > 1)
    parts += ["tiles of keys by a table of the mask's data"] * (plan.visits != "bounds")
    others = f"; {len(plan.rejected)} other {_plural('tile', len(plan.rejected))} considered" if plan.rejected else ""
    return ", ".join(parts) + others


def cost_text(cost: Cost) -> str:
    """Time and its bound, HBM traffic against unfused, what one program holds."""
    saved = cost.unfused_hbm_bytes / cost.hbm_bytes if cost.hbm_bytes else math.inf
    grid = f"{cost.programs} {_plural('program', cost.programs)} in {cost.waves:.3g} waves"
    return (
        f"{seconds(cost.seconds)}, bound by {cost.bound}; {cost.flops / 1e9:.4g} GFLOP\n"
        f"HBM {size(cost.hbm_bytes)}, unfused {size(cost.unfused_hbm_bytes)} ({saved:.3g} x)\n"
        f"shared memory {cost.smem_bytes} B, {cost.a_thread}, {grid}"
    )


def _plural(word: str, count: int) -> str:
    return f"{word}s" if count != 1 and not word.endswith("ed") else word


def _plain(value: Any) -> Any:
    """`value` in JSON's types; numbers that JSON lacks become None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
