"""Every kernel of a run is compiled before anything is timed, by processes side by side.

Each process takes the next case of a peer, runs it once, and takes another. Of what it does Triton's cache on disk is
kept, with fusecomp's kernels and verdicts. What a peer tunes is not: on a device that others use it is tuned wrong, so
each tunes when its turn comes, alone, kernels that are compiled.

    python -m fusecomp.bench.ahead      "CASE PEER" on a line, two numbers; a line is answered when it is compiled
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread, Timer
from typing import IO, cast

import torch

from fusecomp.backend import reset
from fusecomp.bench.cases import CASES, Case
from fusecomp.bench.inputs import draw, run
from fusecomp.bench.peers import PEERS, Peer, asked
from fusecomp.running import cache
from fusecomp.running.verify import machine

PROCESSES, THREADS = 12, 2
"""At most so many, on three quarters of the cores; and what each compiles at once."""
PATIENCE = 240.0
"""s; what is not compiled by then is compiled when its turn comes."""
SETTINGS = {
    "TORCHINDUCTOR_COMPILE_THREADS": str(THREADS),
    "TORCHINDUCTOR_DEFAULT_AUTOTUNE_WARMUP": "1",  # ms for what is thrown away
    "TORCHINDUCTOR_DEFAULT_AUTOTUNE_REP": "1",
}
COMMAND = (sys.executable, "-m", "fusecomp.bench.ahead")
Task = tuple[Case, Peer]


def waiting(cases: Sequence[Case], peers: Sequence[Peer]) -> list[Task]:
    """What no run has compiled yet, what takes longest first. From here on Triton keeps its kernels in one place."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache.directory("triton")))
    tasks = [(case, peer) for case in cases for peer in asked(case, peers) if peer.compiles]
    left = [task for task in tasks if not done(*task).exists()]
    return sorted(left, key=lambda task: (not task[1].slow, not task[0].learns))


def done(case: Case, peer: Peer) -> Path:
    """What lies beside the kernels when all are there."""
    what = cache.digest(machine(torch.device("cuda")), case.mode, case.name, peer.name)
    return Path(os.environ["TRITON_CACHE_DIR"]) / f"fusecomp-bench-{what}"


def compiled(tasks: Sequence[Task], say: Callable[[str], None]) -> dict[str, str]:
    """Compile all; what a record says of it."""
    if not tasks:
        return {}
    begun, left, processes = time.monotonic(), deque(tasks), list[Popen[str]]()
    count = min(PROCESSES, max(1, (os.cpu_count() or 1) * 3 // 4), len(tasks))

    def stop() -> None:
        left.clear()
        for process in processes:
            process.kill()

    timer = Timer(PATIENCE, stop)
    timer.start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own, ThreadPoolExecutor(count) as pool:
        env = os.environ | SETTINGS | {"TORCHINDUCTOR_CACHE_DIR": own}
        try:
            list(pool.map(partial(_hand_out, left, processes, say), [env] * count))
        finally:
            timer.cancel()
            stop()
    there = sum(done(*task).exists() for task in tasks)
    return {"compiled ahead": f"{there} of {len(tasks)} in {time.monotonic() - begun:.0f} s by {count} processes"}


def _hand_out(tasks: deque[Task], processes: list[Popen[str]], say: Callable[[str], None], env: dict[str, str]) -> None:
    """To one process, or to another when it dies of one: that peer says why when its turn comes."""
    while tasks:
        started = Popen(COMMAND, env=env, text=True, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        processes.append(started)
        with suppress(OSError, IndexError), started as process:
            asks, answers = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
            answer = "ready"
            while answer:
                case, peer = tasks.popleft()  # IndexError: another took the last
                say(f"compiling {case.name}: {peer.name}")
                print(CASES.index(case), PEERS.index(peer), file=asks, flush=True)
                answer = answers.readline()


# ----------------------------------------------------------------------------------------------------------------
# One process


def serve(lines: Iterable[str], answer: Callable[[str], object]) -> None:
    """Answer each line."""
    for line in lines:
        case, peer = CASES[int(line.split()[0])], PEERS[int(line.split()[1])]
        with suppress(Exception):  # what it raises, it raises again when its turn comes
            attempt(case, peer, torch.device("cuda"))
            done(case, peer).touch()
        answer("\n")


def attempt(case: Case, peer: Peer, device: torch.device) -> None:
    """Compile a case, and run it once."""
    torch._dynamo.reset()
    reset()
    torch.cuda.empty_cache()
    with torch.set_grad_enabled(case.learns):
        x = draw(case, device)
        attend = peer.bind(case)(x)
        if attend is not None:
            run(case, x, attend)()


def leave_with(asker: int) -> None:
    """End when the process that asks has ended."""
    while os.getppid() == asker:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """What compilers print goes nowhere."""
    Thread(target=leave_with, args=[os.getppid()], daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    serve(sys.stdin, answers.write)


if __name__ == "__main__":
    main()
