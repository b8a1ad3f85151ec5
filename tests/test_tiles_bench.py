"""The measuring of tiles, as far as it goes without a GPU: kernels are interpreted, and the clock is a counter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "examples" / "bench"
PROGRAM = """
import sys, torch
sys.path.insert(0, {bench!r})
import compiling, tiles
from workloads import Case

torch.cuda.synchronize = lambda: None
every = compiling.plans
tiles.plans = compiling.plans = lambda case: every(case)[::20]

class Clock:
    count = 0.0
    def once(self, run):
        run()
        self.count += 1
        return self.count
    def median(self, runs, about):
        return about

case = Case(**{given})
made = {{k: compiling.compiled(c, k[2]) for k, c in compiling.kernels_of([case]).items()}}
record = {{"columns": [*tiles.COLUMNS, "us"], "workloads": [tiles.timed(case, made, Clock())], "flex": []}}
print(tiles.text(record))
"""


@pytest.mark.parametrize(
    "given",
    [
        {"n": 64, "d": 32, "causal": True, "heads": 2},
        {"n": 300, "d": 32, "m": 1, "heads": 4, "kv_heads": 2, "batch": 2, "page": 16, "kind": "decode"},
        {"n": 64, "d": 32, "causal": True, "heads": 2, "kind": "keys"},
    ],
    ids=["forward", "decode", "keys"],
)
def test_every_tile_that_runs_agrees_and_is_recorded(given: dict[str, object], tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "FUSECOMP_CACHE_DIR": str(tmp_path)}
    program = PROGRAM.format(bench=str(BENCH), given=given)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout)
    (row,) = record["workloads"]
    assert row["case"] == given
    assert len(row["tiles"]) >= 2
    assert all(len(t) == len(record["columns"]) and t[-1] > 0 for t in row["tiles"]), row["tiles"]
    assert 0 < row["error"] < 0.02
