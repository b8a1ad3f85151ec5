"""One case after another: draw inputs, check every peer against float64, time those that are right."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch

from fusecomp.backend import counters, reset
from fusecomp.bench.cases import Case
from fusecomp.bench.ceilings import PRODUCT, Ceiling, copies, products, reading, reads
from fusecomp.bench.inputs import TOLERANCE, Exact, Inputs, Run, error, exact, run, sets, share
from fusecomp.bench.peers import Peer, asked
from fusecomp.bench.record import OURS, Measured, Record, Row
from fusecomp.bench.timing import Bench, Launch, launch, peak, times

Say = Callable[[str], None]
"""Told what is done next: once for each peer of a case, and once when timing begins."""


@dataclass(frozen=True)
class Clock:
    """Seconds of the parts of a case."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[name] = round(time.monotonic() - begun, 2)


@dataclass(frozen=True)
class Entrant:
    """A peer on one case: its row so far, and what is timed, of each set of inputs."""

    row: Row
    runs: tuple[Run, ...] = ()


def steps(cases: Sequence[Case], peers: Sequence[Peer]) -> int:
    """How often a run says what it does."""
    return sum(1 + len(asked(case, peers)) for case in cases)


def records(
    cases: Sequence[Case], peers: Sequence[Peer], bench: Bench, about: dict[str, str], say: Say
) -> Iterator[Record]:
    """The record so far, after each case."""
    record = Record(about)
    if not all(case.reads for case in cases):
        used = dict.fromkeys(p for case in cases if not case.reads for p in case.protocols(bench.device))
        record = replace(record, ceilings=tuple(products(p, bench) for p in used))
    if any(case.reads for case in cases):
        record = replace(record, ceilings=(*record.ceilings, copies(bench)))
    for case in cases:
        found, roofs = measured(case, peers, bench, record.ceilings, say)
        new = tuple(roof for roof in roofs if roof not in record.ceilings)
        record = replace(record, ceilings=(*record.ceilings, *new), cases=(*record.cases, found))
        yield record


def measured(
    case: Case, peers: Sequence[Peer], bench: Bench, known: Sequence[Ceiling], say: Say
) -> tuple[Measured, Sequence[Ceiling]]:
    """The case by every peer, and the ceilings that it is held against."""
    begun = time.monotonic()
    torch.manual_seed(0)
    torch._dynamo.reset()
    reset()
    roofs, clock = _roofs(case, bench, known), Clock(bench.device)
    try:
        work, rows = _measured(case, asked(case, peers), bench, say, clock)
    except torch.OutOfMemoryError as problem:
        work, rows = 0.0, (Row("the inputs", problem=said(problem)),)
    if bench.gpu:
        torch.cuda.empty_cache()
    shape = {name: value for name, value in asdict(case.shape).items() if value}
    rates, took = {r.protocol: r.rate for r in roofs}, round(time.monotonic() - begun, 1)
    unit = "B" if case.reads else "FLOP"
    return Measured(case.name, case.mode, shape, work, unit, rates, rows, took, clock.seconds), roofs


def _roofs(case: Case, bench: Bench, known: Sequence[Ceiling]) -> Sequence[Ceiling]:
    """Of products or of reads, in the case's protocols."""
    what = reading(case.read_bytes) if case.reads else PRODUCT
    found = [c for c in known if c.what == what and c.protocol in case.protocols(bench.device)]
    return found or [reads(case.read_bytes, bench)]


def _measured(
    case: Case, peers: Sequence[Peer], bench: Bench, say: Say, clock: Clock
) -> tuple[float, tuple[Row, ...]]:
    """FLOP or B of one launch, and a row for each peer that can say the variant."""
    with torch.set_grad_enabled(case.learns), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SDPA, one for each reason why a backend cannot
        with clock.part("inputs"):
            drawn = sets(case, bench.device)
            work = case.read_bytes if case.reads else case.flops(share(case, drawn[0]))
        return work, _rows(case, peers, drawn, bench, say, clock)


def _rows(
    case: Case, peers: Sequence[Peer], drawn: Sequence[Inputs], bench: Bench, say: Say, clock: Clock
) -> tuple[Row, ...]:
    """A row for each peer that can say the variant."""
    entrants = []
    with clock.part("what is right"):
        truth = exact(case, drawn[0])
    with clock.part("first results"):
        for peer in peers:
            say(f"{case.name}: {peer.name}")
            entrants.append(entered(case, peer, drawn, truth, bench))
    del truth
    found = {e.row.peer: e for e in entrants if e is not None}
    say(f"{case.name}: timing")
    for protocol in case.protocols(bench.device):
        with clock.part(protocol):
            found = _timed(found, protocol, bench)
    return tuple(entrant.row for entrant in found.values())


def entered(
    case: Case, peer: Peer, drawn: Sequence[Inputs], truth: Sequence[Exact], bench: Bench
) -> Entrant | None:
    """Compiled and checked; without runs if it is wrong or raised, None if it cannot say the variant."""
    known, begun = counters(), time.monotonic()
    try:
        bound = peer.bind(case)
        attends = [attend for x in drawn if (attend := bound(x)) is not None]
        if not attends:
            return None
        runs = tuple(run(case, x, attend) for x, attend in zip(drawn, attends, strict=True))
        off = error(runs[0](), truth)
        first = round(time.monotonic() - begun, 2)
        row = Row(peer.name, error=off, peak=peak(runs[0], bench.device), first=first, note=_note(peer, known))
    except Exception as problem:  # noqa: BLE001 - whatever a peer raises is its row, not the end of the run
        return Entrant(Row(peer.name, problem=said(problem)))
    if not off <= TOLERANCE[case.dtype]:
        wrong = f"wrong: relative error {off:.2g}, of at most {TOLERANCE[case.dtype]:g}"
        return Entrant(replace(row, problem=wrong))
    return Entrant(row, runs)


def _timed(
    entrants: dict[str, Entrant], protocol: str, bench: Bench
) -> dict[str, Entrant]:
    """With a timing in this protocol; what cannot be captured in a graph gets a problem instead."""
    ready: dict[str, Launch] = {}
    found = dict(entrants)
    for name, entrant in entrants.items():
        try:
            ready |= {name: launch(entrant.runs, protocol)} if entrant.runs else {}
        except Exception as problem:  # noqa: BLE001 - as above
            found[name] = Entrant(replace(entrant.row, problem=said(problem)))
    for name, timing in times(ready, bench.protocol(protocol), bench.device).items():
        row = found[name].row
        found[name] = replace(found[name], row=replace(row, timings=(*row.timings, timing)))
    return found


def said(problem: Exception) -> str:
    """Its kind and its first line."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:160]}" if lines else type(problem).__name__


def _note(peer: Peer, before: dict[str, int]) -> str:
    """What fusecomp did not fuse."""
    if not peer.name.startswith(OURS):
        return ""
    now = {name: count - before[name] for name, count in counters().items()}
    if now["fused"] == now["candidates"] > 0:
        return ""
    return f"not fused: {now['declined']} declined, {now['fallbacks']} fell back, of {now['candidates']}"
