"""Attention of one short sequence, where the host takes longer than the kernels: eager, Inductor, fusecomp, and
scaled_dot_product_attention called as it is where that says the same, in turn.

    python examples/bench/small.py [OUT.json] [--names causal,ALiBi] [--lengths 128,512]

Rows: microseconds of a call, and of a training step (forward, backward): the median of turns that alternate between the
peers; of inference also by a CUDA graph, where the host takes no part. Each result is held against float64 before it is
timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

import fusecomp
from fusecomp.bench.cases import Case
from fusecomp.bench.inputs import TOLERANCE, draw, error, exact, run
from fusecomp.bench.timing import launch
from fusecomp.bench.variant import VARIANTS, Shape

TURNS, CALLS = 9, 100
NAMES = "full,causal,soft cap,ALiBi,bias,window 256,documents,prefix,sinks"


def microseconds(step: Callable[[], Any]) -> float:
    """Of a call, of one turn."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(CALLS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / CALLS * 1e6


def replayed(step: Callable[[], Any]) -> float:
    """Of a call, without the host."""
    made = launch([step], "graph")
    return microseconds(made.go) / made.count


def measure(case: Case) -> dict[str, Any]:
    """One row."""
    torch._dynamo.reset()
    fusecomp.reset()
    x, fn = draw(case, torch.device("cuda")), case.variant.fn
    calls = {"eager": fn, **{b: torch.compile(fn, backend=b, dynamic=False) for b in ("inductor", "fusecomp")}}
    steps = {name: run(case, x, partial(call, *x.all)) for name, call in calls.items()}
    if case.variant.sdpa and (given := case.variant.sdpa(case.shape, *x.extra)) is not None:
        attend = partial(torch.nn.functional.scaled_dot_product_attention, x.q, x.k, x.v, **given)
        steps["sdpa"] = run(case, x, attend)
    truth = exact(case, x)
    with torch.set_grad_enabled(case.learns):
        for name, step in steps.items():
            assert error(step(), truth) <= TOLERANCE[case.dtype], name
        for step in [*steps.values()] * 3:
            step()
        times = taking_turns(steps)
        graphs = {} if case.learns else {name: round(replayed(step), 2) for name, step in steps.items()}
    return {
        "case": case.name, "train": case.learns, "us": times, "graph_us": graphs,
        "over_best_peer": round(times["fusecomp"] / min(times["eager"], times["inductor"]), 3),
        "over_inductor": round(times["fusecomp"] / times["inductor"], 3), **fusecomp.counters(),
    }  # fmt: skip


def taking_turns(steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of each."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(TURNS):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            found[name].append(microseconds(steps[name]))
    return {name: round(statistics.median(own), 1) for name, own in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--names", default=NAMES)
    parser.add_argument("--lengths", default="128,512")
    parser.add_argument("--modes", default="small,backward")
    chosen = parser.parse_args()
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python examples/bench/small.py --modes {chosen.modes} --names {chosen.names!r}",
    }  # fmt: skip
    rows = []
    for mode, name, n in product(chosen.modes.split(","), chosen.names.split(","), chosen.lengths.split(",")):
        rows.append(measure(Case(VARIANTS[name], mode, Shape(1, 8, int(n), 64))))
        print(json.dumps(rows[-1]), flush=True)
        if chosen.out:
            chosen.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
