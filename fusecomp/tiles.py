"""`fusecomp tiles`: the plan of a plain workload, given by numbers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from fusecomp.errors import OptionError
from fusecomp.report import cost_text, plan_text

ROWS = 12
"""Tiles not taken that are listed; the planner gives the best first, JSON has all."""

UNITS = {"": 1, "b": 1, "k": 1024, "kb": 1024, "kib": 1024}


def tiles(
    n: Annotated[int, typer.Option(help="keys")],
    d: Annotated[int, typer.Option(help="head size of Q and K")] = 128,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or tf32")] = "bf16",
    device: Annotated[str | None, typer.Option(help="h100, l4 ... or a .toml file; default: the GPU, or h200")] = None,
    causal: Annotated[bool, typer.Option(help="a query sees the keys up to its own")] = False,
    heads: Annotated[int, typer.Option(help="query heads")] = 16,
    batch: Annotated[int, typer.Option(help="batch size")] = 1,
    kv_heads: Annotated[int | None, typer.Option(help="key and value heads; default: as many as query heads")] = None,
    dv: Annotated[int | None, typer.Option(help="head size of V; default: that of Q and K")] = None,
    m: Annotated[int | None, typer.Option(help="query rows; default: as many as keys")] = None,
    window: Annotated[int | None, typer.Option(help="a query sees this many keys up to its own")] = None,
    softcap: Annotated[float | None, typer.Option(help="c tanh(s / c)")] = None,
    bias: Annotated[bool, typer.Option(help="add a bias tensor [H, M, N]")] = False,
    budget: Annotated[str | None, typer.Option(help="shared memory that one program may use: 98304, 96KB")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Choose Br x Bc, warps and stages for attention of given sizes, and say why not another tile."""
    from fusecomp.planning.device import current, find
    from fusecomp.planning.plan import plan
    from fusecomp.planning.workload import Workload

    work = Workload(n, d, dtype, causal, heads, batch, kv_heads, dv, m, window, softcap, bias)
    found = plan(work.region, work.sizes, find(device) if device else current(), _bytes(budget))
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    console = Console()
    console.print(f"{work.region}\n", markup=False, highlight=False)
    console.print(f"on {found.device}, {', '.join(f'{k} = {v}' for k, v in work.sizes.items())}", highlight=False)
    console.print(Padding("\n".join(_chosen(found)), (0, 0, 1, 4)), markup=False, highlight=False)
    if found.rejected:
        console.print(_rejected(found))
    if len(found.rejected) > ROWS:
        console.print(f"\n  and {len(found.rejected) - ROWS} more: --json lists them all", highlight=False)


def _chosen(plan: Any) -> Iterator[str]:
    yield plan_text(plan)
    if plan.cost is not None:
        yield cost_text(plan.cost)


def _rejected(plan: Any) -> Table:
    """A row for each of the first tiles not taken."""
    table = Table("Br", "Bc", "warps", "stages", "not taken because", box=None, header_style="bold", padding=(0, 2))
    for r in plan.rejected[:ROWS]:
        table.add_row(str(r.block_m), str(r.block_n), str(r.warps), str(r.stages), r.reason)
    return table


def _bytes(text: str | None) -> int | None:
    """ "96KB" -> 98304."""
    if text is None:
        return None
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(number) :].strip().lower()
    if not number.isdecimal() or unit not in UNITS or int(number) == 0:
        raise OptionError(f"--budget takes bytes, such as 98304 or 96KB; got {text!r}")
    return int(number) * UNITS[unit]
