"""Rewritings held against the program that they rewrite, in float64, on the same random values; in training their
gradients too.

    max |rewritten - written|  <=  1e-9 max |written|
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from fusecomp.graph.learning import learns
from fusecomp.patterns.build import Match
from fusecomp.running.inputs import FEW, example_of, tensor
from fusecomp.running.original import rewritten
from fusecomp.running.subgraph import Section
from fusecomp.running.verdict import Verdict, relative, specials, worst

ALLOWED = 1e-9
"""Relative error of sums in another order, in float64."""
AGAINST = "the program in float64"


def judge_rewriting(match: Match, tensors: Sequence[Tensor], train: bool) -> Verdict | None:
    """A failed verdict where the graph, as rewritten around an attention, is another function than the program, or
    where `train` has other gradients; else None. `tensors`: random operands."""
    sections = rewritten(match)
    if sections is None:
        return None
    given = [nodes[0] for nodes in sections[1].given]
    values = drawn(given, dict(zip(match.inputs, tensors, strict=True)), tensors[0].device)
    if not all(s.inside(values) for s in sections):
        return None
    try:
        exact, got = (s.run(values, torch.float64) for s in sections)
    except RuntimeError:  # one of them knows no float64, or has no room
        return None
    if (verdict := judged(got, exact)) is not None or not train:
        return verdict
    learning = [i for i, n in enumerate(given) if learns(n) and values[i].is_floating_point()]
    try:
        right, found = (gradients(s, values, learning) for s in sections)
    except RuntimeError:  # one of them writes into what it was given
        return None
    pairs = zip(learning, found, right, strict=True)
    failed = (judged(x.where(y.isfinite(), y), y, f", for the gradient of {given[i]}") for i, x, y in pairs)
    return next((v for v in failed if v is not None), None)


def gradients(section: Section, values: Sequence[Tensor], learning: Sequence[int]) -> list[Tensor]:
    """Of what learns, for a random gradient of the result; under -inf a row may have none that is a number."""
    leaves = [x.detach().double() if i in learning else x for i, x in enumerate(values)]
    asked = [leaves[i].requires_grad_() for i in learning]
    with torch.enable_grad():
        out = section.run(leaves, torch.float64)
        generator = torch.Generator(out.device).manual_seed(1)
        grad = torch.randn(out.shape, generator=generator, device=out.device, dtype=out.dtype)
        found = torch.autograd.grad(out, asked, grad, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, asked, strict=True)]


def drawn(given: Sequence[Node], known: dict[Node, Tensor], device: torch.device) -> list[Tensor]:
    """A random value of each node but for those that are known."""
    generator = torch.Generator(device=device).manual_seed(0)
    others = {n: tensor(example_of(n.meta["val"]), FEW, None, generator, device) for n in given if n not in known}
    return [known[n] if n in known else others[n] for n in given]


def judged(got: Tensor, exact: Tensor, of: str = "") -> Verdict | None:
    """A failed verdict where two results differ."""
    off, error = specials(got) != specials(exact), relative(got, exact)
    if off.any():
        detail = f"{int(off.sum())} of {off.numel()} elements are NaN or infinite on one side only"
        return Verdict(False, math.inf, ALLOWED, AGAINST + of, detail)
    if error <= ALLOWED:
        return None
    detail = f"so does the graph that it was read from: worst at {worst(got, exact)}"
    return Verdict(False, error, ALLOWED, AGAINST + of, detail)
