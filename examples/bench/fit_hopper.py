"""The constants of the Hopper kernel's cost (`fusecomp/planning/cost_hopper.py`), fitted on records of `hopper.py`.

    python examples/bench/fit_hopper.py [RECORD.json ...] [--fit] [--rounds 200]

A case of several records counts in the first. Times are the mean of a burst and of launches back to back. With --fit
each workload is also predicted by constants that were fitted on all others.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hopper import plans
from workloads import Case

from fusecomp.planning import device
from fusecomp.planning.cost_hopper import HOPPER, HOPPER_FITTED
from fusecomp.planning.hopper import hopper_inputs, hopper_tile

FOLDER = Path(__file__).parent / "records"
RECORDS = [FOLDER / "hopper_h200.json", FOLDER / "hopper_short_h200.json"]
H200 = device.find("h200")
Row = tuple[str, dict[str, float], float]
"""Name, a number for each symbol, seconds measured."""


def measured(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The Hopper kernel's rows."""
    found: dict[str, Row] = {}
    for row in (row for record in records for row in record["rows"] if row["impl"] == "hopper"):
        case = Case(**row["case"])
        given = hopper_inputs(case.region, case.sizes, H200, hopper_tile(plans(case)["hopper"]))
        found.setdefault(case.name, (case.name, given, (row["burst_ms"] + row["sustained_ms"]) / 2e3))
    return list(found.values())


def off(row: Row, constants: Mapping[str, float]) -> float:
    """Log of predicted over measured."""
    _, given, seconds = row
    return math.log(HOPPER.evaluate({**given, **constants})["seconds"] / seconds)


def loss(rows: Sequence[Row], constants: Mapping[str, float]) -> float:
    return sum(off(row, constants) ** 2 for row in rows)


def search(rows: Sequence[Row], constants: Mapping[str, float], rounds: int) -> dict[str, float]:
    """One constant at a time, up or down by a factor: steps grow where they help and shrink where they do not."""
    rng, best, step = random.Random(0), dict(constants), dict.fromkeys(constants, 0.4)
    least = loss(rows, best)
    for _ in range(rounds):
        for name in rng.sample(sorted(best), len(best)):
            moved = best[name] * math.exp(rng.choice((1, -1)) * step[name] * rng.uniform(0.2, 1))
            tried = {**best, name: moved}
            found = loss(rows, tried)
            step[name] = min(1, 1.5 * step[name]) if found < least else max(0.01, 0.8 * step[name])
            least, best = min((least, best), (found, tried), key=lambda x: x[0])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", default=RECORDS)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--rounds", type=int, default=200)
    chosen = parser.parse_args()
    rows = measured([json.loads(Path(record).read_text()) for record in chosen.records])
    constants = dict(HOPPER_FITTED)
    unseen = {}
    if chosen.fit:
        unseen = {row[0]: off(row, search([r for r in rows if r is not row], constants, chosen.rounds)) for row in rows}
        constants = search(rows, constants, chosen.rounds)
        print("".join(f'    "{k}": {float(f"{v:.3g}")},\n' for k, v in constants.items()))
    for row in rows:
        beside = f"  unseen {math.expm1(unseen[row[0]]):+6.1%}" if unseen else ""
        print(f"{math.expm1(off(row, constants)):+6.1%}{beside}  {row[0]}")
    every = [abs(math.expm1(x)) for x in (unseen.values() or [off(row, constants) for row in rows])]
    print(f"off by {statistics.median(every):.1%} in the median, {max(every):.1%} at most")


if __name__ == "__main__":
    main()
