"""The constants of the cost model, fitted on one half of the workloads of a record and judged on the other.

    python examples/bench/fit_tiles.py [RECORD.json] [--fit forward,decode,backward] [--rounds 60] [--table]

Without --fit the constants are judged as they are: by the time of the tile that the equations like best over the best
time (regret), by Spearman's correlation of predicted with measured times, and by how far predictions are off; in that
order of weight. --table prints the planner's picks beside fixed tiles and FlexAttention, in markdown.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from launches import COLUMNS, GRADIENTS
from workloads import CASES, Case

from fusecomp.planning import backward, device
from fusecomp.planning.candidate import Launch
from fusecomp.planning.cost import FITTED, FORWARD
from fusecomp.planning.cost_backward import BACKWARD, BACKWARD_FITTED
from fusecomp.planning.cost_decode import DECODE, DECODE_FITTED
from fusecomp.planning.equations import Model, Page
from fusecomp.planning.plan import plan
from fusecomp.planning.tile import Tile

RECORD = Path(__file__).parent / "records" / "tiles_h200.json"
MODELS: dict[str, tuple[Model, dict[str, float]]] = {
    "forward": (FORWARD, FITTED), "decode": (DECODE, DECODE_FITTED), "backward": (BACKWARD, BACKWARD_FITTED),
}  # fmt: skip
KERNELS = {"queries": "query_gradient", "keys": "key_gradients"}
H200 = device.find("h200")
LIMITS = {"STREAM": 1.09, "SPREAD": 1.0, "BACK_MMA": 1.0}
"""4.8 TB/s, which the data sheet says; Graham's bound; the peak."""
SOFT = 0.01
"""Relative difference of predictions that a fit does not rely on."""


def halves() -> dict[Case, int]:
    """0: fitted on; 1: judged on. Every other shape of each model, in the order of `workloads`; both kernels of one
    backward pass, and one shape on pages or not, go together."""
    shapes: dict[tuple[str, str], int] = {}
    found = {}
    for case in CASES:
        model = model_of(case)
        shape = model, " ".join(f"{k}={v}" for k, v in case.given.items() if k not in ("kind", "page"))
        shapes.setdefault(shape, sum(m == model for m, _ in shapes))
        found[case] = shapes[shape] % 2
    return found


def model_of(case: Case) -> str:
    return "backward" if case.kind in GRADIENTS else case.kind


HALVES = halves()


def _of_arrays(pairwise: Any) -> Any:
    return lambda *xs: functools.reduce(pairwise, xs)


ARRAYS = {
    "Max": _of_arrays(np.maximum),
    "Min": _of_arrays(np.minimum),
    "ceiling": np.ceil,
    "floor": np.floor,
    "log": np.log,
    "sqrt": np.sqrt,
}


class Set:
    """Tiles of some workloads: what the equations take for each, and the time it took."""

    def __init__(self, model: str) -> None:
        self.model, self.names, self.halves, self.spans = model, [], [], []
        pages = MODELS[model][0].pages
        self.allocation = [page for page in pages if "smem" in page.equations]
        self.times = [Page(page.equations, ARRAYS) for page in pages if page not in self.allocation]
        self.rows: list[dict[str, float]] = []
        self.us = np.zeros(0)

    def add(self, case: Case, inputs: Sequence[dict[str, float]], us: Sequence[float]) -> None:
        """Shared memory and registers are no times: they are computed once."""
        self.spans.append(slice(len(self.rows), len(self.rows) + len(us)))
        for page in self.allocation:
            inputs = [{**given, **page(given)} for given in inputs]
        self.rows += inputs
        self.us = np.append(self.us, us)
        self.names.append(case.name)
        self.halves.append(HALVES.get(case, 1))

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        return {name: np.array([row[name] for row in self.rows], float) for name in self.rows[0]}

    def predicted(self, constants: Mapping[str, float]) -> Any:
        known = {**self.values, **constants}
        for page in self.times:
            known |= page(known)
        return np.broadcast_to(known["seconds"] * 1e6, self.us.shape)

    def scores(self, constants: Mapping[str, float]) -> Any:
        """(regret, regret if near predictions are drawn by lot, correlation, spread and mean of log errors) of each."""
        predicted = self.predicted(constants)
        return np.array([_score(predicted[span], self.us[span]) for span in self.spans])


def _score(predicted: Any, us: Any) -> tuple[float, ...]:
    lost, ahead = us / us.min() - 1, np.exp(-(predicted / predicted.min() - 1) / SOFT)
    off = np.log(predicted / us)
    near = off[us < 2 * us.min()]
    return (
        lost[predicted.argmin()],
        (lost * ahead).sum() / ahead.sum(),
        spearman(predicted, us),
        near.std(),
        near.mean(),
    )


def spearman(a: Any, b: Any) -> float:
    """Rank correlation; ties share their mean rank."""
    a, b = (_ranks(x) - (len(x) - 1) / 2 for x in (a, b))
    return float((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum() or 1))


def _ranks(x: Any) -> Any:
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place]


# ----------------------------------------------------------------------------------------------------------------
# The record


def sets(record: Mapping[str, Any]) -> dict[str, Set]:
    """The record's workloads by the model that predicts them."""
    at, found = record["columns"].index("us"), {name: Set(name) for name in MODELS}
    for row in record["workloads"]:
        case = Case(**row["case"])
        ran = [t for t in row["tiles"] if t[at] is not None]
        tiles = [Tile(**dict(zip(record["columns"][:at], t, strict=False))) for t in ran]
        found[model_of(case)].add(case, inputs(case, tiles), settled(case, tiles, [t[at] for t in ran]))
    return {name: s for name, s in found.items() if s.names}


def settled(case: Case, tiles: Sequence[Tile], us: Sequence[float]) -> list[float]:
    """Times, those of one launch under several names the least of them: decoding for one program of a multiprocessor,
    or for two, may make the same grid of the same kernel, and a few in a hundred were timed beside something else."""
    if case.kind != "decode":
        return list(us)
    launch, least = Launch(case.region, case.sizes, H200, decode=True), {}
    grids = [(launch.inputs(t)["CAP"], launch.quantities(t)["programs"]) for t in tiles]
    same = [(replace(t, resident=min(1, t.resident)), *grid) for t, grid in zip(tiles, grids, strict=True)]
    for key, time in zip(same, us, strict=True):
        least[key] = min(time, least.get(key, time))
    return [least[key] for key in same]


def inputs(case: Case, tiles: Sequence[Tile]) -> list[dict[str, float]]:
    """What the equations take for each tile."""
    launch = Launch(case.region, case.sizes, H200, case.kind == "decode")
    if case.kind in GRADIENTS:
        return [backward.inputs(launch, KERNELS[case.kind], t) for t in tiles]
    return [launch.inputs(t) for t in tiles]


# ----------------------------------------------------------------------------------------------------------------
# The search


def loss(scores: Any) -> float:
    """Regret weighs most, its worst too; then ranks, then how far predictions are off."""
    regret, lot, correlation, spread, mean = scores.T
    lost = regret.mean() + lot.mean() + 0.3 * regret.max()
    return float(3 * lost + (1 - correlation).mean() + 1.5 * spread.mean() + 0.6 * np.abs(mean).mean())


def search(s: Set, constants: dict[str, float], rounds: int, seed: int = 0) -> dict[str, float]:
    """One constant at a time, up or down by a factor: steps grow where they help and shrink where they do not."""
    rng, best, step = random.Random(seed), dict(constants), dict.fromkeys(constants, 0.4)
    fitted = [i for i, half in enumerate(s.halves) if half == 0]
    least = loss(s.scores(best)[fitted])
    for _ in range(rounds):
        for name in rng.sample(sorted(best), len(best)):
            for sign in (1, -1):
                moved = best[name] * math.exp(sign * step[name] * rng.uniform(0.2, 1))
                tried = {**best, name: min(moved, LIMITS.get(name, math.inf))}
                found = loss(s.scores(tried)[fitted])
                if found < least:
                    least, best, step[name] = found, tried, min(1, 1.5 * step[name])
                    break
            else:
                step[name] = max(0.01, 0.7 * step[name])
    return best


def told(s: Set, constants: Mapping[str, float]) -> None:
    scores = s.scores(constants)
    for (regret, _, correlation, spread, mean), half, name in zip(scores, s.halves, s.names, strict=True):
        flag = "" if regret <= 0.1 and correlation >= 0.8 else "  <--"
        judged = f"{regret:6.1%} slower  rank {correlation:5.2f}  off {mean:+.2f} +- {spread:.2f}"
        print(f"  half {half}  {judged}  {name}{flag}")
    for half in (0, 1):
        regret, _, correlation, *_ = scores[[i for i, h in enumerate(s.halves) if h == half]].T
        print(f"{s.model}, half {half}: median {np.median(regret):.1%}, worst {regret.max():.1%} slower; "
              f"rank correlation median {np.median(correlation):.2f}, least {correlation.min():.2f}")  # fmt: skip


def table(record: Mapping[str, Any]) -> str:
    """Milliseconds of the planner's pick, the best tile, two fixed ones, and FlexAttention's defaults."""
    times = {Case(**row["case"]): {tuple(t[:-1]): t[-1] for t in row["tiles"] if t[7] is not None}
             for row in record["workloads"]}  # fmt: skip
    head = "| workload | the plan's tile | plan | best tile | 128 x 64 | 64 x 64 | FlexAttention |"
    lines = [head, "|---" * 7 + "|"]
    for row in record["flex"]:
        case = Case(**row["case"])
        both = [replace(case, kind=kind) for kind in GRADIENTS] if case.kind in GRADIENTS else [case]
        ways = [(planned(c), *(_fixed(times[c], m) for m in (128, 64))) for c in both]
        taken = " and ".join(f"{p[0]} x {p[1]}, {p[2]} warps, {p[3]} stages" for p, *_ in ways)
        found = [sum(times[c].get(way[i], math.nan) for c, way in zip(both, ways, strict=True)) for i in range(3)]
        best = sum(min(times[c].values()) for c in both)
        shown = [found[0], best, *found[1:], row["us"] or math.nan]
        cells = ["" if math.isnan(us) else f"{us / 1e3:.3f}" for us in shown]
        lines.append(f"| {label(case)} | {taken} | **{cells[0]}** | {' | '.join(cells[1:])} |")
    return "\n".join(lines)


def label(case: Case) -> str:
    """ "backward, causal, D128, B4 H16 N4096"."""
    said = {
        "backward": case.kind in GRADIENTS,
        "causal": case.causal,
        f"window {case.window}": case.window,
        "soft cap": case.softcap,
        "ALiBi": case.alibi,
        case.dtype: case.dtype != "bf16",
        f"D{case.d}": True,
        f"{case.kv_heads} KV heads": case.kv_heads,
        f"B{case.batch} H{case.heads} N{case.n}": True,
    }
    return ", ".join(word for word, true in said.items() if true)


def planned(case: Case) -> tuple[Any, ...]:
    """The tile that the planner takes, as a record has it."""
    if case.kind in GRADIENTS:
        made = getattr(backward.backward_plan(case.region, H200, case.sizes), case.kind)
    else:
        made = plan(case.region, case.sizes, H200)
    return tuple(getattr(made, name) for name in COLUMNS)


def _fixed(times: Mapping[tuple[Any, ...], float], block_m: int) -> tuple[Any, ...]:
    """block_m x 64 in three stages through pointers, with four warps or eight, whichever is faster here."""
    ways = [t for t in times if t[:2] == (block_m, 64) and t[3] == 3 and t[5] == "pointer"]
    return min(ways, key=lambda t: times[t], default=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", default=RECORD)
    parser.add_argument("--fit", default="")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    record = json.loads(Path(chosen.record).read_text())
    if chosen.table:
        print(table(record))
        return
    for name, s in sets(record).items():
        constants = MODELS[name][1]
        if name in chosen.fit.split(","):
            constants = search(s, constants, chosen.rounds)
            print("".join(f'    "{k}": {float(f"{v:.3g}")},\n' for k, v in constants.items()))
        told(s, constants)


if __name__ == "__main__":
    main()
