"""`fusecomp bench`, as a person types it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fusecomp.commands import say
from fusecomp.errors import OptionError

if TYPE_CHECKING:
    from fusecomp.bench.cases import Case
    from fusecomp.bench.measure import Say
    from fusecomp.bench.peers import Peer
    from fusecomp.bench.record import Record

DEVICES = ("cuda", "cpu")


def bench(
    only: Annotated[str, typer.Option(help="cases whose name holds one of these words: D128,N18000")] = "",
    cases: Annotated[str, typer.Option(help="variants: causal,soft cap,ALiBi ...")] = "",
    modes: Annotated[str, typer.Option(help="forward, variants, backward, small, decode, paged")] = "",
    peers: Annotated[str, typer.Option(help="names, or parts: eager,flex,cudnn; of --table, the columns")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="a few cases, short timings, no slow compilations")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the same cases in tiny sizes")] = "cuda",
    out: Annotated[str | None, typer.Option("--json", help="write the record here, after each case")] = None,
    plot: Annotated[str | None, typer.Option(help="draw the rates: bench.png, .svg, .pdf")] = None,
    table: Annotated[
        str | None, typer.Option(help="print the tables of this record in Markdown (and --plot it); times nothing")
    ] = None,
) -> None:
    """Time attention in plain PyTorch beside its peers, in one run, each result held against float64 first."""
    from fusecomp.bench.page import Found, markdown
    from fusecomp.bench.peers import chosen
    from fusecomp.bench.record import read

    _check_paths(out, plot)
    if table is not None:
        record = read(table)
        print(markdown(record, [peer.name for peer in chosen(peers, device)] if peers else ()))
    else:
        record = _run(*_asked(only, cases, modes, peers, quick, device), quick, device, out)
        say(Found(record), as_json=False)
    if plot is not None:
        from fusecomp.bench.picture import draw

        draw(record, plot)


def _check_paths(out: str | None, plot: str | None) -> None:
    """OptionError now, rather than when all is timed."""
    for path in filter(None, (out, plot)):
        if not Path(path).absolute().parent.is_dir() or Path(path).is_dir():
            raise OptionError(f"cannot write {path}: give a file in a folder that exists")
    if plot is not None:
        from fusecomp.plot import canvas

        canvas(plot, 1, 1)


def _asked(
    only: str, names: str, modes: str, peers: str, quick: bool, device: str
) -> tuple[list[Case], list[Peer], str]:
    """Cases, the peers that can run here, and what is missing. OptionError for words that ask for nothing."""
    from fusecomp.bench import cases as known
    from fusecomp.bench import peers as rivals

    if device not in DEVICES:
        raise OptionError(f"--device takes {' or '.join(DEVICES)}; got {device!r}")
    cases = known.chosen(only, names, modes, quick)
    asked = rivals.chosen(peers, device, quick)
    able, missing = [p for p in asked if not p.missing], "; ".join(p.missing for p in asked if p.missing)
    if not able:
        raise OptionError(f"nobody is left to time: {missing}; --peers may name others")
    _check_gpu(device)
    return (known.tiny(cases) if device == "cpu" else cases), able, missing


def _check_gpu(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"no GPU to time on: torch {torch.__version__} finds no CUDA device here. --device cpu times the same "
            "cases in tiny sizes, and --table RECORD.json prints the tables of a record"
        )


def _run(
    cases: Sequence[Case], peers: Sequence[Peer], missing: str, quick: bool, device: str, out: str | None
) -> Record:
    """The record, written after each case. A quick run times no peer that compiles for long."""
    import torch

    from fusecomp.bench.ahead import compiled, waiting
    from fusecomp.bench.measure import records, steps
    from fusecomp.bench.record import Record, machine
    from fusecomp.bench.timing import Bench

    command = f"fusecomp {shlex.join(sys.argv[1:])}" if sys.argv[1:] else "fusecomp bench"
    about = machine(device) | {"command": command, **({"missing": missing} if missing else {})}
    record, ahead = Record(about), waiting(cases, peers) if device == "cuda" and not quick else []
    with _progress(len(ahead) + steps(cases, peers)) as step:
        about |= compiled(ahead, step)
        for record in records(cases, peers, Bench(torch.device(device), quick), about, step):
            if out is not None:
                record.write(out)
    return record


@contextmanager
def _progress(steps: int) -> Iterator[Say]:
    """A bar on a terminal's standard error; nothing where there is none."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("ceilings", total=steps)
        yield lambda what: progress.update(task, description=what, advance=1)
