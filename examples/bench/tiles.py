"""Every feasible tile of many workloads, timed on one GPU: what the cost model is fitted on and judged by.

    python examples/bench/tiles.py OUT.json [--only decode,d=128] [--keep OLD.json] [--seconds 580] [--list]

First each distinct kernel is compiled, in as many processes as there are cores; then one process times each tile of
each workload. A result is held against the region's meaning before it is timed. A tile whose first run takes more than
three times the best so far is not timed again; those within an eighth of the best are, in reverse order. Decoding goes
over enough copies of its inputs that none is found in L2. Last comes FlexAttention with its defaults, where it has the
variant. What is timed is written as it comes, so that a run that is cut short keeps it; --keep takes over what another
run timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flex
import torch
from compiling import Kernel, Made, compile_all, kernel, kernels_of, said
from launches import COLUMNS, Judge, Run, inputs, plans, run_of, tile_of
from workloads import CASES, Case

from fusecomp.bench.record import machine

COLD = 512 * 2**20
"""B of inputs that the runs of one measurement of decoding go through, at least."""
SHORT = 300.0
"""us; shorter launches are replayed from a CUDA graph, so that the host's part does not show."""
HOPELESS, NEAR = 3.0, 1.125
"""Times the best so far: beyond the first a tile's first run is enough, within the second it is timed again."""
COMPILING = 0.65
"""Part of the time; cases that lack a kernel then are left out."""


class Clock:
    """Microseconds of one launch."""

    def __init__(self) -> None:
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.holder = self._captured([lambda: torch.zeros(1, device="cuda")])  # a pool lasts as long as a graph of it

    def once(self, run: Run) -> float:
        """Of one run, the host's part included."""
        return self._of([run])

    def median(self, runs: Sequence[Run], about: float) -> float:
        """Of at most ten runs or 15 ms after a pause; `about`: what one takes."""
        time.sleep(0.002)
        if about > SHORT:
            count = max(2, min(10, int(15e3 / about)))
            return self._of([runs[i % len(runs)] for i in range(count)])
        each = max(1, min(20, int(1e3 / about)) // len(runs))
        graph = self._captured([*runs] * each)
        graph.replay()
        return self._of([graph.replay] * 7) / (each * len(runs))

    def _captured(self, runs: Sequence[Run]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(self.pool)
            for run in runs:
                run()
            graph.capture_end()
        return graph

    def _of(self, runs: Sequence[Run]) -> float:
        """Median of runs that wait in the device's queue for each other."""
        marks = [self._marked(run) for run in runs]
        torch.cuda.synchronize()
        return sorted(a.elapsed_time(b) * 1e3 for a, b in marks)[len(marks) // 2]

    def _marked(self, run: Run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        return begin, end


# ----------------------------------------------------------------------------------------------------------------
# Timing


def timed(case: Case, made: Mapping[Kernel, Made], clock: Clock) -> dict[str, Any]:
    """A row for each tile: its columns, then us, or None and what is wrong. `error` is the largest relative one."""
    torch.manual_seed(0)
    copies = [inputs(case)]
    judge, found, runs = Judge(case, copies[0]), {}, {}
    if case.kind == "decode":
        size = sum(t.numel() * t.element_size() for t in copies[0].tensors)
        copies += [inputs(case) for _ in range(max(1, min(23, COLD // size)))]
    best, largest = float("inf"), 0.0
    for tile in plans(case):
        source, why = made[kernel(case, tile)]
        found[tile] = (None, why)
        if source is None:
            continue
        runs[tile] = [run_of(source, x) for x in copies]
        try:
            us, error = first_look(judge, runs[tile], clock, best)
        except RuntimeError as problem:  # the device refuses it
            found[tile] = (None, said(problem))
            torch.cuda.synchronize()  # raises where the device is lost
            continue
        found[tile] = (us, "") if error <= judge.allowed else (None, f"relative error {error:.2g}")
        best, largest = (min(best, us), max(largest, error)) if found[tile][0] else (best, largest)
    for tile in reversed(list(found)):
        us = found[tile][0]
        if us is not None and us <= NEAR * best:
            found[tile] = ((us + clock.median(runs[tile], us)) / 2, "")
    listed = [[*tile_of(t), *([float(f"{us:.4g}")] if us else [None, why])] for t, (us, why) in found.items()]
    return {"case": case.given, "error": float(f"{largest:.2g}"), "tiles": listed}


def first_look(judge: Judge, runs: Sequence[Run], clock: Clock, best: float) -> tuple[float, float]:
    """(us, relative error) of a tile."""
    judge.forget()
    runs[0]()
    error = judge.error()
    once = min(clock.once(runs[0]) for _ in range(2))
    hopeless = once > max(SHORT, HOPELESS * best) or error > judge.allowed
    return (once if hopeless else clock.median(runs, once)), error


def flex_row(case: Case, clock: Clock) -> dict[str, Any]:
    """FlexAttention with its defaults on the same numbers."""
    torch._dynamo.reset()
    try:
        run = flex.flex_run(case)
        run()
        once = min(clock.once(run) for _ in range(2))
        return {"case": case.given, "us": float(f"{clock.median([run], once):.4g}")}
    except Exception as problem:  # noqa: BLE001 - a peer that fails is a row of the table
        return {"case": case.given, "us": None, "problem": said(problem)}


# ----------------------------------------------------------------------------------------------------------------
# The run


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default="")
    parser.add_argument("--only", default="", help="cases whose name holds one of these words")
    parser.add_argument("--keep", default="", help="a record: what it holds is taken over")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop timing then")
    parser.add_argument("--list", action="store_true", help="name the cases, and count their tiles")
    return parser.parse_args()


def main() -> None:
    chosen, begin = options(), time.monotonic()
    cases = [c for c in CASES if not chosen.only or any(w in c.name for w in chosen.only.split(","))]
    if chosen.list or not torch.cuda.is_available():
        for case in cases:
            print(f"{case.kind}: {case.name}: {len(plans(case))} tiles")
        print(f"{len(cases)} cases, {len(kernels_of(cases))} kernels" + ("" if chosen.list else "; no GPU to time on"))
        return
    record = {**machine(), "command": f"python examples/bench/tiles.py --seconds {chosen.seconds}",
              "protocol": PROTOCOL, "columns": [*COLUMNS, "us"], "workloads": [], "flex": []}  # fmt: skip
    if chosen.keep:
        held = json.loads(Path(chosen.keep).read_text())
        record |= {"workloads": held["workloads"], "flex": held["flex"], "also": f"{held['date']} {held['command']}"}
    kept = [row["case"] for row in record["workloads"]]
    missing = [c for c in cases if c.given not in kept]
    wanted = kernels_of(missing)
    made = compile_all(wanted, begin + COMPILING * chosen.seconds)
    missing = [c for c in missing if all(kernel(c, p) in made for p in plans(c))]
    print(
        f"{time.monotonic() - begin:.0f} s  {len(made)} of {len(wanted)} kernels, {len(missing)} cases to time",
        flush=True,
    )
    clock = Clock()
    gc.collect()
    gc.freeze()
    gc.disable()
    asked = [c for c in cases if flex.knows(c) and c.batch == 4]
    work = [("workloads", c) for c in missing]
    work += [("flex", c) for c in asked if c.given not in [row["case"] for row in record["flex"]]]
    for part, case in work:
        if time.monotonic() - begin > chosen.seconds:
            break
        row = timed(case, made, clock) if part == "workloads" else flex_row(case, clock)
        record[part].append(row)
        print(f"{time.monotonic() - begin:.0f} s  {case.kind} {case.name}: {summary(row)}", flush=True)
        if chosen.out:
            Path(chosen.out).write_text(text(record))
        gc.collect()


def summary(row: dict[str, Any]) -> str:
    if "tiles" not in row:
        return f"flex {row['us']} us"
    ran = [t for t in row["tiles"] if t[len(COLUMNS)] is not None]
    best = min(ran, key=lambda t: t[len(COLUMNS)], default=None)
    return f"{len(ran)} of {len(row['tiles'])} tiles ran, best {best}, error {row['error']}"


def text(record: dict[str, Any]) -> str:
    """JSON with a tile a line."""
    head = {k: v for k, v in record.items() if k not in ("workloads", "flex")}
    parts = [json.dumps(head, indent=1).removesuffix("\n}")]
    cases = []
    for row in record["workloads"]:
        tiles = ",\n   ".join(json.dumps(t) for t in row["tiles"])
        cases.append(f'  {{"case": {json.dumps(row["case"])}, "error": {row["error"]}, "tiles": [\n   {tiles}\n  ]}}')
    parts.append(' "workloads": [\n' + ",\n".join(cases) + "\n ]")
    parts.append(' "flex": [\n' + ",\n".join("  " + json.dumps(r) for r in record["flex"]) + "\n ]\n}\n")
    return ",\n".join(parts)


PROTOCOL = (
    "us of one launch, median of at most 10 launches or 15 ms after 2 ms of idling; under 300 us of a CUDA graph of "
    "about 1 ms, replayed 7 times; tiles within an eighth of the best: mean of two such, the second in reverse order; "
    "over three times the best: two launches; decoding over 512 MB of inputs or 24 copies"
)


if __name__ == "__main__":
    main()
