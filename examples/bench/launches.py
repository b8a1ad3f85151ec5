"""One launch of one tile of one workload: its kernel as it is generated, random operands, and what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from workloads import Case

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.emit import emit
from fusecomp.codegen.source import KernelSource
from fusecomp.ir.reference import evaluate
from fusecomp.planning import backward
from fusecomp.planning.device import current
from fusecomp.planning.facts import value
from fusecomp.planning.plan import plan, rows, scheduled
from fusecomp.planning.tile import Tile, TilePlan
from fusecomp.planning.worth import TABLED
from fusecomp.running import cache
from fusecomp.running.backward import gradients
from fusecomp.running.loader import load
from fusecomp.running.verdict import FLOOR, relative
from fusecomp.running.visits import launcher

Run = Callable[[], Any]
COLUMNS = ("block_m", "block_n", "warps", "stages", "pack", "loads", "resident")
DECODE = [(n, w, s, r) for r in (0, 1, 2, 4) for n in (16, 32, 64, 128) for w in (2, 4) for s in (2, 3)]
"""BLOCK_N, warps, stages and programs of a multiprocessor, which share its registers; of 0 the keys are not split."""
GRADIENTS = ("queries", "keys")


def plans(case: Case) -> list[TilePlan]:
    """Every tile of a case, those first that the planner likes best."""
    if case.kind in GRADIENTS:
        moves = "keys" if case.kind == "queries" else "queries"
        return list(backward.candidates(case.region, moves, current()))
    first = replace(plan(case.region, case.sizes), cost=None, rejected=())
    tiles = [row.tile for row in rows(case.region, case.sizes) if "needs" not in row.reason]
    if case.kind == "decode":
        shapes, device = dict.fromkeys((t.block_m, t.pack) for t in tiles), current()
        made = [(m, p, *rest) for m, p in shapes for rest in DECODE if rest[-1] or fills(case, p)]
        made = [x for x in made if not case.page or x[3] in TABLED[0]]
        tiles = [Tile(m, n, w, s, p, "pointer", r) for m, p, n, w, s, r in made]
        return [scheduled(first, tile, case.region, case.sizes, device) for tile in tiles]
    shared = replace(first, visits="bounds", resident=4)
    return [replace(shared, **{name: getattr(t, name) for name in COLUMNS[:-1]}) for t in tiles]


def fills(case: Case, pack: int) -> bool:
    """Whether a program for each packed group of heads is one for each multiprocessor."""
    return case.batch * case.heads // pack >= current().sms


def tile_of(made: TilePlan) -> tuple[Any, ...]:
    return tuple(getattr(made, name) for name in COLUMNS)


def source_of(case: Case, made: TilePlan) -> KernelSource:
    """The generated file whose launch runs it. Of a backward file one kernel is used, the other's tile is any."""
    if case.kind not in GRADIENTS:
        return emit(case.region, made)
    both = backward.backward_plan(case.region)
    return emit_backward(case.region, replace(both, **{case.kind: made}))


@dataclass
class Inputs:
    """The tensors of one launch, and what it writes."""

    tensors: list[Tensor]
    out: Tensor
    lengths: list[int]
    grad_out: Tensor | None = None
    lse: Tensor | None = None
    grads: tuple[Tensor | None, ...] = ()


def inputs(case: Case) -> Inputs:
    """Random numbers, never zeros: power, and so the clock, depends on them."""
    region, device = case.region, "cuda" if torch.cuda.is_available() else "cpu"
    tensors = []
    for o in region.operands:
        shape = [value(e, case.sizes) or 1 for e in o.shape]
        if o.name == "table":
            pages = torch.randperm(case.sizes["P"], device=device, dtype=torch.int32).view(case.batch, -1)
            tensors.append(torch.nn.functional.pad(pages, (0, shape[1] - pages.shape[1])))
        elif o.name == "labels":
            tensors.append((torch.rand(shape, device=device) < 1 / 512).cumsum(-1, dtype=torch.int32))
        elif o.name == "lengths":
            tensors.append(torch.full(shape, case.n, dtype=torch.int32, device=device))
        else:
            tensors.append(torch.randn(shape, device=device).to(getattr(torch, o.dtype)))
    q = tensors[0]
    out = torch.empty(*q.shape[:-1], case.dv or case.d, device=device, dtype=q.dtype)
    made = Inputs(tensors, out, [case.sizes[s] for s in region.sizes])
    if case.kind in GRADIENTS:
        made.grad_out, made.lse = torch.randn_like(out), torch.empty(q.shape[:-1], device=device)
        saving = emit(region, replace(plan(region, case.sizes), cost=None, rejected=(), visits="bounds"), True)
        load(saving, cache.directory("kernels")).launch(out, tensors, made.lengths, made.lse)
        asked = (0,) if case.kind == "queries" else (1, 2)
        made.grads = tuple(torch.empty_like(t) if i in asked else None for i, t in enumerate(tensors))
    return made


def run_of(source: KernelSource, x: Inputs) -> Run:
    """One launch."""
    module = load(source, cache.directory("kernels"))
    if x.grads:
        return partial(module.launch, x.grads, x.out, x.grad_out, x.lse, x.tensors, x.lengths)
    return partial(launcher(module, source), x.out, x.tensors, x.lengths)


@dataclass
class Judge:
    """The region's meaning at some places, and what a launch has there."""

    case: Case
    x: Inputs

    def __post_init__(self) -> None:
        region, x, case = self.case.region, self.x, self.case
        if x.grads:
            wanted = [i for i, g in enumerate(x.grads) if g is not None]
            self.exact = [e.double() for e in gradients(region, x.grad_out, x.tensors, x.lengths, wanted)]
            return
        device = x.out.device
        ends = {"b": case.batch - 1, "h": case.heads - 1}
        self.places = {name: torch.tensor([0, last], device=device).unique() for name, last in ends.items()}
        m = case.m or case.n
        self.rows = torch.tensor([0, m // 3, m // 2, m - 1], device=device).unique()
        self.exact = [evaluate(region, x.tensors, x.lengths, torch.float64, self.rows, batch=self.places)]

    def error(self) -> float:
        """The largest relative error; infinite where something is not finite."""
        if self.x.grads:
            got = [g for g in self.x.grads if g is not None]
        else:
            got = [self.x.out[self.places["b"]][:, self.places["h"]][:, :, self.rows]]
        if not all(g.isfinite().all() for g in got):
            return float("inf")
        return max(relative(g.double(), e) for g, e in zip(got, self.exact, strict=True))

    @property
    def allowed(self) -> float:
        dtype = torch.float16 if self.case.dtype == "tf32" else self.x.out.dtype  # which round alike
        return (2 if self.x.grads else 1) * FLOOR[dtype]

    def forget(self) -> None:
        """Nothing is left of the launch before."""
        for t in [g for g in self.x.grads if g is not None] or [self.x.out]:
            t.fill_(float("nan"))
