"""Attention cores fused in Hugging Face models, model by model.

    python tests/zoo/run.py --modes infer,train0,train --json OUT --md OUT      every model
    python tests/zoo/run.py --models llama,bert                                 some
    python tests/zoo/run.py --models bert --json OUT --update                   their rows anew, the others kept
    python tests/zoo/run.py --backend inductor                                  what Inductor's own patterns fuse

Each model is measured in a process of its own, on the CPU, in float32. survey.py says what the modes are, cores.py what
counts as a core.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from zoo.inductor import INDUCTOR
from zoo.models import MODELS
from zoo.survey import FUSECOMP, MODES, Backend, Result, survey
from zoo.table import markdown, summary

BACKENDS = {"fusecomp": FUSECOMP, "inductor": INDUCTOR}
TIMEOUT = 300.0
"""Seconds for a model in one mode."""


def surveyed(name: str, mode: str, by: Backend = FUSECOMP) -> Result:
    """`survey` in a process of its own; what goes wrong there is the result's `problem`."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    start = time.monotonic()
    child = fork.Process(target=answer, args=(theirs, name, mode, by))
    child.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(TIMEOUT) else Result(name, mode, problem=f"no answer in {TIMEOUT:.0f} s")
    except EOFError:
        found = Result(name, mode, problem="its process died")
    child.kill()
    child.join()
    found.seconds = round(time.monotonic() - start, 1)
    return found


def warm(by: Backend = FUSECOMP) -> None:
    """Compile one model here, so that the processes forked from this one find every module loaded."""
    quiet()
    survey("llama", "infer", by)


def answer(to: Connection, name: str, mode: str, by: Backend) -> None:
    """Send the result of a survey."""
    try:
        to.send(survey(name, mode, by))
    except Exception as error:  # whatever it is, the next model is to be measured
        to.send(Result(name, mode, problem=f"{type(error).__name__}: {error}"[:500]))


def quiet() -> None:
    """One thread, and no warnings of models about their own configurations."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)


def record(rows: Sequence[Result], by: str) -> dict[str, Any]:
    """The rows with what they were measured on."""
    return {
        "device": f"CPU, {platform.machine()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python tests/zoo/run.py --backend {by} --modes {','.join(dict.fromkeys(r.mode for r in rows))}",
        "summary": summary(rows),
        "rows": [row(r) for r in rows],
    }


def row(r: Result) -> dict[str, Any]:
    """What differs from a result about which there is nothing to say."""
    usual = asdict(Result("", ""))
    kept = ("cores", "fused")
    return {k: v for k, v in asdict(r).items() if k in kept or v != usual[k]}


def text(record: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    rows = ",\n".join(f"  {json.dumps(r)}" for r in record["rows"])
    head = json.dumps({k: v for k, v in record.items() if k != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def ordered(rows: Sequence[Result]) -> list[Result]:
    """By model, then mode; the last of each counts."""
    found = {(r.model, r.mode): r for r in rows}
    return [found[m, mode] for m in MODELS for mode in MODES if (m, mode) in found]


def rows_of(names: Sequence[str], modes: Sequence[str], by: Backend) -> Iterator[Result]:
    """Measure, and say so line by line."""
    for name in names:
        for mode in modes:
            r = surveyed(name, mode, by)
            said = r.problem or f"{r.fused} of {r.cores}, error {r.error}, {r.gradient_error}"
            print(f"{name:24} {mode:7} {'' if r.right else 'WRONG '}{said} ({r.seconds} s)", flush=True)
            yield r


def main() -> None:
    """Survey the models, and write what was asked for after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--backend", default="fusecomp", choices=sorted(BACKENDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--md", type=Path)
    parser.add_argument("--update", action="store_true", help="keep the rows of --json that are not measured anew")
    given = parser.parse_args()
    warm(BACKENDS[given.backend])
    rows: list[Result] = []
    if given.update and given.json.exists():
        rows = [Result(**r) for r in json.loads(given.json.read_text())["rows"]]
    for row in rows_of(given.models.split(","), given.modes.split(","), BACKENDS[given.backend]):
        rows = ordered([*rows, row])
        if given.json:
            given.json.write_text(text(record(rows, given.backend)))
        if given.md:
            given.md.write_text(markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()
