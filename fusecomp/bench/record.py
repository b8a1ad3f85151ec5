"""What a run found, and its JSON: every number that is measured, and those that follow from them.

Times in ms, rates in FLOP/s or B/s, memory in B. What follows from other numbers is written for readers and is not
read again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fusecomp.bench.ceilings import Ceiling
from fusecomp.bench.timing import Timing
from fusecomp.errors import OptionError

FORMAT = "fusecomp bench 1"
OURS = "fusecomp"


@dataclass(frozen=True)
class Row:
    """One peer on one case: timed, or why not."""

    peer: str
    timings: tuple[Timing, ...] = ()
    error: float | None = None
    """Relative, against float64."""
    peak: int | None = None
    """B that one launch allocates above what is held."""
    first: float | None = None
    """Seconds to the first result: compiling what was not compiled ahead, autotuning, verifying."""
    problem: str = ""
    """Why it was not timed: wrong, or what it raised."""
    note: str = ""

    @property
    def ours(self) -> bool:
        """Of fusecomp, with any options."""
        return self.peer.startswith(OURS)

    def timing(self, protocol: str) -> Timing | None:
        return next((t for t in self.timings if t.protocol == protocol), None)


@dataclass(frozen=True)
class Measured:
    """One case: all of its peers in one run."""

    case: str
    mode: str
    shape: Mapping[str, Any]
    work: float
    """Of one launch, in FLOP or B."""
    unit: str
    """FLOP or B."""
    roofs: Mapping[str, float]
    """The measured ceiling of each protocol, in `unit` a second."""
    rows: tuple[Row, ...]
    seconds: float = 0.0
    """What the case took in all: compiling, autotuning, checking, timing."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of which the inputs, what is right, the first results of all peers, and each protocol."""

    def row(self, peer: str) -> Row | None:
        return next((row for row in self.rows if row.peer == peer), None)

    def rate(self, timing: Timing) -> float:
        """In `unit` a second."""
        return self.work / timing.median * 1e3

    def of_roof(self, timing: Timing) -> float | None:
        roof = self.roofs.get(timing.protocol)
        return self.rate(timing) / roof if roof else None

    def over_best(self, row: Row, protocol: str) -> float | None:
        """The time of the best other peer, as a multiple of this one's. fusecomp is no peer of its own."""
        own, rivals = row.timing(protocol), [r for r in self.rows if r is not row and not (r.ours and row.ours)]
        others = [t.median for r in rivals if (t := r.timing(protocol))]
        return min(others) / own.median if own and others else None

    def to_dict(self) -> dict[str, Any]:
        """With what follows from it."""
        return {**asdict(self), "rows": [self._row(row) for row in self.rows]}

    def _row(self, row: Row) -> dict[str, Any]:
        rates = {
            t.protocol: {"rate": self.rate(t), "of_roof": self.of_roof(t), "over_best": self.over_best(row, t.protocol)}
            for t in row.timings
        }
        told = {name: value for name, value in asdict(row).items() if value not in (None, "", ())}
        return told if not rates else {**told, "follows": rates}


@dataclass(frozen=True)
class Record:
    """A run."""

    machine: Mapping[str, str]
    ceilings: tuple[Ceiling, ...] = ()
    cases: tuple[Measured, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "machine": dict(self.machine),
            "ceilings": [asdict(c) for c in self.ceilings],
            "cases": [c.to_dict() for c in self.cases],
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Record:
        """KeyError or TypeError where it is not a record's."""
        cases = [
            Measured(**{**case, "rows": tuple(_row(row) for row in case["rows"])}) for case in found["cases"]
        ]  # fmt: skip
        return cls(dict(found["machine"]), tuple(Ceiling(**c) for c in found["ceilings"]), tuple(cases))

    def write(self, path: str | Path) -> None:
        """As JSON; through a second file, so that an interrupted run leaves a whole one. OptionError if it cannot."""
        target = Path(path)
        half = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            half.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
            half.replace(target)
        except OSError as error:
            raise OptionError(f"cannot write the record {path}: {error.strerror or error}") from error


def _row(found: Mapping[str, Any]) -> Row:
    kept = {name: value for name, value in found.items() if name not in ("follows", "timings")}
    return Row(**kept, timings=tuple(Timing(**t) for t in found.get("timings", ())))


def read(path: str | Path) -> Record:
    """A record that `write` wrote. OptionError for anything else."""
    try:
        found = json.loads(Path(path).read_text())
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise OptionError(f"{path} is no record of `fusecomp bench --json`: its \"format\" is not {FORMAT!r}")
        return Record.from_dict(found)
    except OSError as error:
        raise OptionError(f"cannot read the record {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{path} is no record of `fusecomp bench --json`: {error}") from error


def machine(device: str = "cuda") -> dict[str, str]:
    """The device, the versions and the date."""
    named = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    cudnn = {"cudnn": str(torch.backends.cudnn.version())} if device == "cuda" else {}
    return {
        "device": named,
        "torch": torch.__version__,
        **cudnn,
        "triton": _installed("triton"),
        "fusecomp": _installed("fusecomp"),
        "date": str(datetime.now(tz=UTC).date()),
    }


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
