"""How long a launch takes, in two protocols and a replay, which differ by 10 to 15 % and are never compared.

    burst       the card rests 0.1 s, then about 15 ms of launches
    sustained   launches back to back, 0.2 s in all
    graph       replays of a CUDA graph: the host takes no part

All peers take their turn, then again in the reverse order, so that none always follows a slow one; those that are far
behind take one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

GROUP = 2e-4
"""s of launches between two readings of the clock, at least."""
COLD = 512 * 2**20
"""B that one replay of what is read once goes through, at least."""
FAR = 2.0
"""Times the best median: what takes longer is not timed again."""
ROUND, SHORT = 8, 2e-3
"""Launches of a graph, at least, where one takes less than so many s."""


@dataclass(frozen=True)
class Protocol:
    """Seconds of rest, of launches before, and of launches that are timed, in one turn of two."""

    name: str
    idle: float
    warm: float
    seconds: float

    def hastened(self) -> Protocol:
        """A quarter of it."""
        return replace(self, idle=self.idle / 4, warm=self.warm / 4, seconds=self.seconds / 4)


PROTOCOLS = {p.name: p for p in (
    Protocol("burst", 0.1, 0.003, 0.015), Protocol("sustained", 0.0, 0.03, 0.1), Protocol("graph", 0.0, 0.03, 0.03),
)}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """Where a run takes place, and whether it is to be quick."""

    device: torch.device
    quick: bool = False

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def protocol(self, name: str) -> Protocol:
        return PROTOCOLS[name].hastened() if self.quick else PROTOCOLS[name]


@dataclass(frozen=True)
class Timing:
    """The middle of `count` readings, and where a tenth and nine tenths of them lie. ms of one launch."""

    protocol: str
    median: float
    low: float
    high: float
    count: int

    @property
    def spread(self) -> float:
        """Half the width of the middle eight tenths, as a share of the median."""
        return (self.high - self.low) / 2 / self.median


def summary(protocol: str, samples: Sequence[float]) -> Timing:
    """Of one reading, no spread."""
    tenths = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else [*samples] * 9
    return Timing(protocol, statistics.median(samples), tenths[0], tenths[-1], len(samples))


@dataclass(frozen=True)
class Launch:
    """What is called once, and how many launches that is."""

    go: Callable[[], Any]
    count: int = 1


def launch(runs: Sequence[Callable[[], Any]], protocol: str) -> Launch:
    """The first run, or all in turn in one CUDA graph where the protocol replays."""
    if protocol != "graph":
        return Launch(runs[0])
    for go in runs:
        go()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    runs[0]()
    torch.cuda.synchronize()
    short = time.perf_counter() - begun < SHORT
    rounds = [*runs] * (-(-ROUND // len(runs)) if short else 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for go in rounds:
            go()
    return Launch(graph.replay, len(rounds))


def times(launches: Mapping[str, Launch], protocol: Protocol, device: torch.device) -> dict[str, Timing]:
    """Every launch in one order, then those that are not far behind in the reverse."""
    samples = {name: turn(go, protocol, device) for name, go in launches.items()}
    middle = {name: statistics.median(found) for name, found in samples.items()}
    near = [name for name in launches if middle[name] <= FAR * min(middle.values())]
    for name in reversed(near):
        samples[name] += turn(launches[name], protocol, device)
    return {name: summary(protocol.name, found) for name, found in samples.items()}


def turn(launch: Launch, protocol: Protocol, device: torch.device) -> list[float]:
    """Readings of one turn, in ms of one launch."""
    time.sleep(protocol.idle)
    clock = _events if device.type == "cuda" else _host
    begun, warmed = time.perf_counter(), 0
    while not warmed or time.perf_counter() - begun < protocol.warm:
        clock(launch.go, 1, 1)
        warmed += 1
    each = (time.perf_counter() - begun) / warmed
    together = max(1, round(GROUP / each))
    readings = max(3, round(protocol.seconds / each / together))
    return [ms / together / launch.count for ms in clock(launch.go, together, readings)]


def cold(size: int) -> int:
    """Copies of `size` B that one replay goes through, so that none of it is found in L2."""
    return max(2, min(16, -(-COLD // size)))


def median(launch: Launch, protocol: Protocol, device: torch.device) -> float:
    """ms of one launch, of one turn."""
    return statistics.median(turn(launch, protocol, device))


def _events(go: Callable[[], Any], together: int, readings: int) -> list[float]:
    """ms of `together` calls, by events on the device: the host runs ahead."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(readings + 1)]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(together):
            go()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(marks)]


def _host(go: Callable[[], Any], together: int, readings: int) -> list[float]:
    """ms of `together` calls, by the host's clock."""
    found = []
    for _ in range(readings):
        begun = time.perf_counter()
        for _ in range(together):
            go()
        found.append((time.perf_counter() - begun) * 1e3)
    return found


def peak(go: Callable[[], Any], device: torch.device) -> int | None:
    """B allocated above what was held; None on a CPU, which keeps no count."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    go()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held
