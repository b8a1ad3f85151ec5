"""`fusecomp bench` compiles every kernel in processes before it times one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusecomp.bench import ahead, cases, peers
from fusecomp.bench.cases import CASES, Case
from fusecomp.bench.peers import Peer

CPU = torch.device("cpu")
FLEX = next(p for p in peers.PEERS if p.name == "FlexAttention")
ANSWERS = """
import os, sys
for line in sys.stdin:
    with open({log!r}, "a") as log:
        log.write(line)
    if line == {fatal!r}:
        os._exit(1)
    print(flush=True)
"""


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "machine", lambda _: "H200 torch 2 triton 3")
    return tmp_path


def test_what_takes_longest_is_compiled_first_and_what_compiles_nothing_never() -> None:
    tasks = ahead.waiting(CASES, peers.chosen("", "cuda"))
    assert {peer.name for _, peer in tasks} == {
        "Inductor", "FlexAttention", "FlexAttention autotuned", "FlexAttention + its mask", "fusecomp",
        "fusecomp in any order",
    }  # fmt: skip
    assert all(peer in peers.asked(case, peers.PEERS) for case, peer in tasks)
    first = tasks[: sum(c.learns and not c.variant.plain for c in CASES)]
    assert all(case.learns and peer.name == "FlexAttention autotuned" for case, peer in first)


def test_what_is_compiled_is_not_compiled_again() -> None:
    tasks = ahead.waiting(CASES, [FLEX])
    ahead.done(*tasks[0]).touch()
    assert ahead.waiting(CASES, [FLEX]) == tasks[1:]


def test_every_task_is_handed_out_though_a_process_dies(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    tasks = ahead.waiting(CASES, [FLEX])[:5]
    lines = [f"{CASES.index(case)} {peers.PEERS.index(peer)}\n" for case, peer in tasks]
    script = ANSWERS.format(log=str(place / "log"), fatal=lines[1])
    monkeypatch.setattr(ahead, "COMMAND", (sys.executable, "-c", script))
    said: list[str] = []
    told = ahead.compiled(tasks, said.append)
    assert sorted((place / "log").read_text().splitlines(True)) == sorted(lines)
    assert len(said) == 5
    assert told["compiled ahead"].startswith("0 of 5 in ")
    assert ahead.compiled([], said.append) == {}


def test_what_takes_too_long_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(ahead, "PATIENCE", 0.3)
    began = time.monotonic()
    assert ahead.compiled(ahead.waiting(CASES, [FLEX]), lambda _: None)["compiled ahead"].startswith("0 of ")
    assert time.monotonic() - began < 30


def test_a_process_ends_with_the_one_that_asks() -> None:
    asker = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import os; from fusecomp.bench import ahead; asker = os.getppid(); print(flush=True); ahead.leave_with(asker)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os._exit(0)
"""
    pid = int(subprocess.run([sys.executable, "-c", asker], capture_output=True, check=True).stdout)
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.1)


def test_an_interrupted_run_begins_no_more(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "COMMAND", (sys.executable, "-c", ANSWERS.format(log=str(place / "log"), fatal="")))
    with pytest.raises(KeyboardInterrupt):
        ahead.compiled(ahead.waiting(CASES, [FLEX]), interrupted)
    assert not (place / "log").exists()


def test_a_process_answers_what_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(case: Case, peer: Peer, device: torch.device) -> None:
        if case is CASES[0]:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(ahead, "attempt", attempt)
    answers: list[str] = []
    ahead.serve([f"0 {peers.PEERS.index(FLEX)}\n", f"1 {peers.PEERS.index(FLEX)}\n"], answers.append)
    assert answers == ["\n", "\n"]
    assert [ahead.done(case, FLEX).exists() for case in CASES[:2]] == [False, True]


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_task_runs_all_that_is_timed(mode: str) -> None:
    found: list[torch.Tensor] = []

    def bind(case: Case) -> peers.Bind:
        return lambda x: lambda: found.append(case.variant.fn(*x.all)) or found[-1]

    case = next(c for c in cases.tiny(CASES) if c.mode == mode)
    ahead.attempt(case, Peer("eager", bind), CPU)
    (out,) = found
    assert out.requires_grad == case.learns
    if case.learns:
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
