"""The command line.

    fusecomp explain model.py:attention               what was found, planned, generated and verified
    fusecomp show --until kernel model.py:attention   one stage: graph, region, plan, kernel, ptx
    fusecomp verify model.py:attention                is every kernel right? exit status 1 if not
    fusecomp tiles --n 4096 --d 128 --device h100     the plan of a workload given by numbers
    fusecomp io --n 4096 --d 128                      elements moved, scores stored against tiles
    fusecomp kv --layers 32 --hidden 4096 --tokens 300   a cache that reserves against one in blocks
    fusecomp bench --quick                            attention in plain PyTorch beside its peers, on the GPU
    fusecomp env                                      versions, device, cache, what is missing
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fusecomp.bench.command import bench
from fusecomp.commands import Json, io, kv, tiles
from fusecomp.errors import FusecompError, OptionError

if TYPE_CHECKING:
    from fusecomp.report import Report
    from fusecomp.target import Target

app = typer.Typer(
    name="fusecomp",
    help="Finds attention in plain PyTorch and compiles it to flash kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (tiles, io, kv, bench):
    app.command()(command)

Name = Annotated[str, typer.Argument(metavar="FILE:FUNCTION", help="a function, or a factory of (model, args)")]
Args = Annotated[list[str] | None, typer.Option("--arg", help="shape of each input, or of all: 2x4x96x64:bf16")]
Chosen = Annotated[list[str] | None, typer.Option("--option", "-o", help="KEY=VALUE, as in torch.compile's options")]
On = Annotated[str | None, typer.Option("--on", help="cpu, cuda, or meta to run nothing; default: where the model is")]


def main() -> None:
    """Run; an error that a person can mend is one line, not a traceback."""
    try:
        app()
    except FusecompError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)


@app.command()
def explain(name: Name, arg: Args = None, option: Chosen = None, on: On = None, as_json: Json = False) -> None:
    """Say of every attention whether it is fused, how, and if not, why."""
    options = _options(option)
    report = _report(_target(name, arg, on), options)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)


@app.command()
def show(
    name: Name,
    until: Annotated[str, typer.Option(help="graph, region, plan, kernel or ptx")] = "kernel",
    device: Annotated[str | None, typer.Option(help="plan for h100, a100 ...; default: the GPU, or h200")] = None,
    arg: Args = None,
    on: On = None,
    backward: Annotated[bool, typer.Option("--backward", help="the kernels of the gradients instead")] = False,
) -> None:
    """Print what a stage makes of each attention. Needs no GPU: eager PyTorch alone is run, with --on meta nothing."""
    from fusecomp.planning.device import current, find
    from fusecomp.show import STAGES, graphs, stage

    if until not in STAGES:
        raise OptionError(f"--until takes one of {', '.join(STAGES)}; got {until!r}")
    planned_for = find(device) if device else current()
    target = _target(name, arg, on)
    if until == "graph":
        with _progress(f"tracing {name}"):
            parts: Iterable[str] = list(graphs(target))
    else:
        target = target.learning() if backward else target
        parts = stage(_report(target, {"lowering": "off"}, backward), until, planned_for, backward)
    for part in parts:
        print(part)


@app.command()
def verify(name: Name, arg: Args = None, option: Chosen = None, on: On = None, as_json: Json = False) -> None:
    """Hold every kernel against eager, on the GPU or in Triton's interpreter. Exit status 1 if one disagrees."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    options = {**_options(option), "verify": "true"}
    report = _report(_target(name, arg, on), options)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
    raise typer.Exit(1 if report.fallbacks else 0)


@app.command()
def env() -> None:
    """Versions, device, cache and variables: what a bug report needs."""
    from fusecomp.show import facts

    table = Table.grid(padding=(0, 2))
    for what, how in facts():
        table.add_row(what, how, style="red" if how == "missing" else "")
    Console().print(table)


def _target(name: str, shapes: list[str] | None, on: str | None) -> Target:
    """The target, moved to the device, once it ran in eager PyTorch."""
    with _progress(f"running {name} in eager PyTorch"):
        from fusecomp.target import load

        target = load(name, shapes or ())
        target = target.to(on) if on else target
        target.run()
    return target


def _report(target: Target, options: dict[str, str], trained: bool = False) -> Report:
    """What became of each attention of the target."""
    import torch

    from fusecomp.backend import explain as explained

    with _progress(f"compiling and verifying {target.name}"), torch.set_grad_enabled(trained):
        report = explained(target.call, *target.args, options=options, **target.kwargs)
    return replace(report, title=target.name)


def _print(report: Report) -> None:
    """In colour on a terminal, else as text of one width."""
    console = Console()
    if console.is_terminal:
        console.print(report)
    else:
        print(report)


def _options(chosen: list[str] | None) -> dict[str, str]:
    """KEY=VALUE words as options, checked before anything runs."""
    from fusecomp.settings import Options

    options = dict(map(_pair, chosen or ()))
    Options.parse(options)
    return options


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--option takes KEY=VALUE, such as inner=aot_eager; got {text!r}")
    return key, value


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """A spinner and a clock on a terminal's standard error, where goes what the model prints too."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with redirect_stdout(sys.stderr), progress:
        progress.add_task(what, total=None)
        yield
