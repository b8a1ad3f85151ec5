"""One model in one mode: eager beside the backend, its cores counted, its results and gradients compared.

infer     eval, no_grad, the cache that the configuration asks for
train     training, the configuration's dropouts, backward
train0    training, dropouts 0, backward: outputs and gradients are compared with eager's
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters as dynamo_counters
from zoo.cores import cores
from zoo.models import TRAINED_WITHOUT, build

from fusecomp import backend
from fusecomp.pipeline import Compilation
from fusecomp.report import Entry

MODES = ("infer", "train0", "train")
OUTPUT_BUDGET = 1e-4
"""Of the largest element of an output: float32, a few layers deep, sums in another order."""
GRADIENT_BUDGET = 2e-3
SWAY_MULTIPLE = 8.0
EPSILON = 2.0**-23
SMALL_GRADIENT = 1e-2
"""Gradients below this share of the model's largest (a key's bias has none) are measured against that share."""

Compile = Callable[[Any, Any], Callable[..., Any]]
Step = Callable[[Any], list[Tensor]]


@dataclass(frozen=True)
class Backend:
    """What is surveyed."""

    compile: Compile
    fused: Callable[[], int]
    """Attentions fused in this process so far."""


def _fusecomp(gm: Any, inputs: Any) -> Callable[..., Any]:
    return backend.fusecomp(gm, inputs, options={"inner": "eager"})


FUSECOMP = Backend(_fusecomp, lambda: backend.counters()["fused"])


@dataclass
class Result:
    """What became of one model in one mode."""

    model: str
    mode: str
    cores: int = 0
    """Attention cores in the graphs."""
    fused: int = 0
    graphs: int = 0
    breaks: int = 0
    """Graph breaks."""
    own_breaks: int = 0
    """Those that Dynamo with an eager backend does not have."""
    error: float | None = None
    """Largest difference of an output from eager's, relative to its largest element; None where dropout is random."""
    gradient_error: float | None = None
    allowed: tuple[float, float] = (OUTPUT_BUDGET, GRADIENT_BUDGET)
    """What the two may be: more where the model magnifies roundings (`sway`)."""
    left: list[dict[str, str]] = field(default_factory=list)
    """What the report says of candidates that were not fused."""
    problem: str = ""
    """What went wrong."""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether it ran, within budget, without a graph break of the backend's own."""
        return not self.problem and self.near and self.own_breaks <= 0

    @property
    def near(self) -> bool:
        return (self.error or 0) <= self.allowed[0] and (self.gradient_error or 0) <= self.allowed[1]


def survey(name: str, mode: str, by: Backend = FUSECOMP) -> Result:
    """Measure one model in one mode. Raises what the model raises."""
    found = Result(name, mode)
    model, inputs = build(name, dropout=mode == "train")
    step = inference(model, inputs) if mode == "infer" else training(name, model, inputs)
    expected, wanted = step(model), gradients(model)
    breaks = compiled(model, step, lambda gm, _: gm.forward)[1] if mode == "infer" else None
    counted: list[int] = []

    def counting(gm: Any, inputs: Any) -> Callable[..., Any]:
        counted.append(sum(1 for _ in cores(gm)))
        return by.compile(gm, inputs)

    before = by.fused()
    with told() as entries:
        got, found.breaks = compiled(model, step, counting)
    found.cores, found.graphs, found.fused = sum(counted), len(counted), by.fused() - before
    found.own_breaks = 0 if breaks is None else found.breaks - breaks
    found.left = list(reasons(entries))
    if mode != "train":
        found.error = apart(got, expected)
    if mode == "train0":
        found.gradient_error = gradients_apart(gradients(model), wanted)
    if not found.near:
        own = sway(name, mode, expected, wanted)
        found.allowed = tuple(max(a, SWAY_MULTIPLE * e) for a, e in zip(found.allowed, own, strict=True))  # type: ignore[assignment]
    return found


def sway(name: str, mode: str, outputs: list[Tensor], wanted: dict[str, Tensor]) -> tuple[float, float]:
    """How far eager's outputs and gradients move when each weight moves by an ulp: a norm over a batch of two, say,
    magnifies every rounding."""
    model, inputs = build(name, dropout=False)
    step = inference(model, inputs) if mode == "infer" else training(name, model, inputs)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + EPSILON * torch.randn_like(p))
    return apart(outputs, step(model)), gradients_apart(wanted, gradients(model))


@contextmanager
def told() -> Iterator[list[Entry]]:
    """The entries of what is compiled meanwhile, filled in at the end."""
    heard: list[Compilation] = []
    entries: list[Entry] = []
    backend._listeners.append(heard)
    try:
        yield entries
    finally:
        backend._listeners.remove(heard)
        entries += [e for done in heard for e in done.entries]


def reasons(entries: list[Entry]) -> Iterator[dict[str, str]]:
    """What is said of those that were not fused, each sentence once."""
    seen: set[tuple[str, str]] = set()
    for e in entries:
        if e.status != "fused" and (e.where, e.reason) not in seen:
            seen.add((e.where, e.reason))
            where = e.where.rpartition("/")[2]
            yield {"status": e.status, "where": where, "line": e.source, "reason": e.reason, "advice": e.advice}


def inference(model: nn.Module, inputs: dict[str, Any]) -> Step:
    model.eval()

    def step(run: Any) -> list[Tensor]:
        torch.manual_seed(1)
        with torch.no_grad():
            return list(tensors(run(**inputs)))

    return step


def training(name: str, model: nn.Module, inputs: dict[str, Any]) -> Step:
    """A step whose loss weights every output at random: the mean square of a norm's output would be a constant."""
    model.train()
    inputs = {k: v for k, v in inputs.items() if k not in TRAINED_WITHOUT.get(name, ())}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False

    def step(run: Any) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        outputs = list(tensors(run(**inputs)))
        sum((x.float() * draw(x)).mean() for x in outputs if x.requires_grad).backward()  # type: ignore[union-attr]
        return [x.detach().clone() for x in outputs]

    return step


def draw(like: Tensor) -> Tensor:
    """Normal numbers, the same for each call."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(2))


def compiled(model: nn.Module, step: Step, by: Compile) -> tuple[list[Tensor], int]:
    """The outputs of a step under a backend, and the graph breaks it took."""
    torch._dynamo.reset()
    dynamo_counters.clear()
    outputs = step(torch.compile(model, backend=by))
    return outputs, sum(dynamo_counters["graph_break"].values())


def tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a model's output."""
    if isinstance(output, Tensor):
        yield from [output] if output.is_floating_point() else []
    elif isinstance(output, dict | list | tuple):
        for x in output.values() if isinstance(output, dict) else output:
            yield from tensors(x)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference relative to the largest element of each tensor; infinite where they do not match."""
    if [x.shape for x in got] != [x.shape for x in expected]:
        return math.inf
    return max((distance(x, y, largest(y)) for x, y in zip(got, expected, strict=True)), default=0.0)


def gradients_apart(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    if set(got) != set(expected):
        return math.inf
    floor = SMALL_GRADIENT * max(map(largest, expected.values()), default=0.0)
    return max((distance(got[k], y, max(largest(y), floor)) for k, y in expected.items()), default=0.0)


def distance(x: Tensor, y: Tensor, scale: float) -> float:
    """max |x - y| / scale, where NaN equals NaN and stands beside nothing else."""
    if not torch.equal(x.isnan(), y.isnan()):
        return math.inf
    off = largest(x - y)
    return off / scale if off else 0.0


def largest(x: Tensor) -> float:
    return float(x.nan_to_num(0.0).abs().max()) if x.numel() else 0.0
