"""Every kernel of a measurement, compiled by as many processes as there are cores; Triton keeps them on disk."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache

import torch
from launches import Inputs, inputs, plans, run_of, source_of
from workloads import Case

from fusecomp.codegen.source import KernelSource
from fusecomp.planning.tile import TilePlan

Kernel = tuple[str, str, TilePlan]
"""Kind, region and tile."""
Made = tuple[KernelSource | None, str]
"""A generated file, or what is wrong with it."""


def kernels_of(cases: Sequence[Case]) -> dict[Kernel, Case]:
    """Each distinct kernel, with the smallest case that launches it: lengths compile nothing anew."""
    found: dict[Kernel, Case] = {}
    for case in sorted(cases, key=lambda c: c.batch * c.heads * c.n):
        for made in plans(case):
            found.setdefault(kernel(case, made), case)
    return found


def kernel(case: Case, made: TilePlan) -> Kernel:
    return case.kind, case.region.key, made


@lru_cache(maxsize=4)
def _small(case: Case) -> Inputs:
    return inputs(case)


def compiled(case: Case, made: TilePlan) -> Made:
    """The file of a kernel, which Triton's cache on disk then holds compiled; or what is wrong with it."""
    try:
        source = source_of(case, made)
        run_of(source, _small(case))()
        torch.cuda.synchronize()
    except Exception as problem:  # noqa: BLE001 - of any kind: the tile is not timed, and the record says why
        if isinstance(problem, torch.AcceleratorError) or "illegal" in str(problem):
            os._exit(1)  # this process has lost the device: another one goes on
        return None, said(problem)
    return source, ""


def said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:100]}"


def compile_all(wanted: dict[Kernel, Case], until: float) -> dict[Kernel, Made]:
    """Every kernel that is compiled by then. A process that dies takes the others with it: they begin again from the
    other end, and what is left after a few such rounds is tried alone."""
    found: dict[Kernel, Made] = {}
    for _ in range(4):
        wanted = {k: c for k, c in reversed(wanted.items()) if k not in found}
        with contextlib.suppress(BrokenProcessPool):
            _compile(wanted, found, until)
            return found
    for kernel, case in wanted.items():
        if kernel not in found and time.monotonic() < until:
            try:
                _compile({kernel: case}, found, until)
            except BrokenProcessPool:
                found[kernel] = (None, "the compiler or the device dies of it")
    return found


def _compile(wanted: dict[Kernel, Case], found: dict[Kernel, Made], until: float) -> None:
    """Enter into `found` what processes of their own make of the kernels."""
    spawn, processes = multiprocessing.get_context("spawn"), max(1, min(14, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        waiting: dict[Future[Made], Kernel] = {pool.submit(compiled, case, k[2]): k for k, case in wanted.items()}
        for done in as_completed(waiting):
            found[waiting[done]] = done.result()
            if time.monotonic() > until:
                pool.shutdown(wait=False, cancel_futures=True)
                return
