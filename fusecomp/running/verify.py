"""Verdicts: a kernel is used only after it agreed with what it replaces.

    max |kernel - exact|  <=  max(4 * max |eager - exact|, floor of the dtype)      relative to max |exact|

`exact` is the program as it was written, in float64 (`original`). Where M x N is too large for that, the region's
meaning in float64 on sampled rows stands in for it, and the program is still run in the model's dtype if it fits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fusecomp import codegen, ir, running
from fusecomp.codegen.logsumexp import saved
from fusecomp.errors import VerificationError
from fusecomp.graph.learning import learns
from fusecomp.ir.logsumexp import evaluate_lse
from fusecomp.ir.reference import evaluate
from fusecomp.ir.region import Operand
from fusecomp.patterns.build import Match
from fusecomp.running import cache, layout
from fusecomp.running.backward import gradients
from fusecomp.running.expected import (
    EAGER_SCORES,
    KEPT,
    computed,
    differentiable,
    expected_gradients,
    pick,
    rooms,
    sample,
)
from fusecomp.running.inputs import draw
from fusecomp.running.launching import compiling
from fusecomp.running.operator import Gradients, Launch, empty_ordered
from fusecomp.running.original import original, rewritten
from fusecomp.running.rewritten import judge_rewriting
from fusecomp.running.subgraph import Section, seen
from fusecomp.running.sums import arranged, scaled, whole
from fusecomp.running.unkind import judge_meaning
from fusecomp.running.verdict import FLOOR, Judged, Verdict, floor_of, judge

GRADIENT_MULTIPLE = 2.0
"""Of FLOOR: what rounding probabilities and their gradients to half precision may cost a gradient."""
SEEDS = 16
"""Tries at random operands."""
FILLED = 1e3
"""The log-sum-exp of a row above this is that of a fill."""


def verify(
    match: Match, launch: Launch, sizes: Mapping[str, int], device: torch.device, kernel: str,
    backward: Gradients | None = None,
) -> Verdict:  # fmt: skip
    """Hold a kernel, and its backward, against what they replace, on random inputs; cached by what was compared.
    Raises VerificationError where there is nothing that they can be held against."""
    examples = layout.examples(match)
    sections = sections_of(match)
    compared = (kernel, match.region.key, [s.text() for s in sections], examples, dict(sizes), sorted(match.learned))
    name = cache.digest(own_code(), machine(device), *compared)
    path = cache.directory("verdicts") / f"{name}.json"
    if (known := kept(path)) is not None:
        return known
    drawn = example(match, sizes, device)
    before = [t._version for t in drawn[0]]
    with compiling(launches(match, drawn, launch, sizes, backward) if device.type == "cuda" else [], device):
        run = compare(match, drawn, launch, sizes, backward)
        trained = match.learned and (backward is not None or differentiable(match, drawn[1], sizes["N"]))
        differentiated = judge_gradients(match, drawn, launch, backward, sizes) if trained else None
    if [t._version for t in drawn[0]] != before:
        drawn[0][:] = example(match, sizes, device)[0]  # the graph wrote into what it reads
    out_dtype = match.region.out_dtype
    verdict = judge(run(), out_dtype, floor_of(out_dtype, match.region, device))
    if verdict.passed and (room := rooms(match, drawn[1], sizes["N"])) >= 1:
        verdict = judge_rewriting(match, drawn[0], bool(match.learned) and room >= KEPT) or verdict
        verdict = judge_meaning(match, *example(match, sizes, device), sizes) or verdict
    if verdict.passed and match.region.lse:
        verdict = judge_log_sums(match, drawn, launch, sizes) or verdict
    if verdict.passed and differentiated is not None:
        verdict = differentiated() or verdict
    if verdict.passed:  # a failure is looked into again: it may have been mended since
        cache.write_json(path, asdict(verdict))
    return verdict


def kept(path: Path) -> Verdict | None:
    """The verdict in a file; None where there is none, or something else."""
    found = cache.read_json(path) or {}
    wanted = {"passed": bool, "error": float, "budget": float, "against": str, "detail": str}
    if set(found) != set(wanted) or not all(isinstance(found[k], t) for k, t in wanted.items()):
        return None
    return Verdict(**found)


@functools.cache
def own_code() -> str:
    """A hash of what runs and judges a kernel: what another version of it found may be wrong here."""
    folders = [Path(*package.__path__) for package in (ir, codegen, running)]
    return cache.digest(*(f.read_text(encoding="utf-8") for folder in folders for f in sorted(folder.glob("*.py"))))


def machine(device: torch.device) -> str:
    """What a verdict depends on besides the code: device and versions."""
    import triton

    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{chip} torch {torch.__version__} triton {triton.__version__}"


def sections_of(match: Match) -> list[Section]:
    """What is held against each other, of which nothing is written into while it is read. Raises VerificationError."""
    sections = [original(match, result) for result in (match.output, *(s.node for s in match.sums))]
    sections += rewritten(match) or ()
    for stale in (s.stale() for s in sections):
        if stale is not None:
            raise VerificationError(f"the program reads {stale} before it writes into it; a kernel would read it after")
    return sections


Drawn = tuple[list[Tensor], Tensor, list[int]]


def example(match: Match, sizes: Mapping[str, int], device: torch.device) -> Drawn:
    """(tensors, out, lengths) as a launch takes them: random operands of the graph's shapes and strides."""
    region = match.region
    tensors = drawn_inside(match, sizes, device)
    shape = [seen(s) for s in match.out_shape]
    out = empty_ordered(shape, region.out_order, tensors[0], getattr(torch, region.out_dtype))
    return tensors, out, [sizes[s] for s in region.sizes]


def drawn_inside(match: Match, sizes: Mapping[str, int], device: torch.device) -> list[Tensor]:
    """Random operands of which the graph's own nodes read nothing outside of a tensor. Raises VerificationError."""
    examples, section = layout.examples(match), original(match)
    for seed in range(SEEDS):
        tensors = draw(match.region, examples, sizes, device, seed)
        if section.inside(tensors):
            return tensors
    raise VerificationError("no random integers were found that index no tensor of the graph outside of it")


def launches(
    match: Match, drawn: Drawn, launch: Launch, sizes: Mapping[str, int], backward: Gradients | None
) -> list[Callable[[], None]]:
    """Calls that launch each kernel that verification will."""
    tensors, out, lengths = drawn
    saves = backward is not None or match.region.lse
    lse = log_sums(match, sizes, out.device) if saves else None
    calls: list[Callable[[], None]] = [partial(launch, out, tensors, lengths, *([] if lse is None else [lse]))]
    if backward is not None and lse is not None:
        pairs = zip(tensors, match.region.operands, strict=True)
        grads = [torch.empty_like(t) if o.name in held(match) else None for t, o in pairs]
        more = [lse[..., 0].contiguous() if saved(match.region) else lse] if match.region.lse else []
        calls.append(partial(backward, grads, out, out, lse, *more, tensors, lengths))
    return calls


def held(match: Match) -> frozenset[str]:
    """The operands whose gradients are looked at: Q, K, V, and what else learns, unless a stop lies between."""
    products = match.region.products
    found = match.learned | {a.operand for p in products for a in (p.q, p.k)} | {match.region.v.operand}
    return found - match.stopped


def log_sums(match: Match, sizes: Mapping[str, int], device: torch.device) -> Tensor:
    """Memory for the log-sum-exp of each row."""
    rows = [*(sizes[v.name.upper()] for v in match.region.batch), sizes["M"], *saved(match.region)]
    return torch.empty(rows, dtype=torch.float32, device=device)


def compare(
    match: Match, drawn: Drawn, launch: Launch, sizes: Mapping[str, int], backward: Gradients | None = None
) -> Callable[[], Judged]:
    """What runs the kernel, to be held against its judges: those have run, on the same random inputs."""
    (tensors, out, lengths), saves = drawn, backward is not None or match.region.lse
    judged = judges(match, tensors, out, lengths, sizes)

    def compared() -> Judged:
        launch(out, tensors, lengths, *([log_sums(match, sizes, out.device)] if saves else []))
        return judged(out)

    return compared


def judges(
    match: Match, tensors: list[Tensor], out: Tensor, lengths: list[int], sizes: Mapping[str, int]
) -> Callable[[Tensor], Judged]:
    """What compares O with what is right."""
    region, device = match.region, out.device
    room = rooms(match, out, sizes["N"])
    exact = computed(match, tensors, out, torch.float64) if room >= 1 else None
    if exact is not None:
        eager = computed(match, tensors, out)
        against = f"{original(match).what} in float64"
        return lambda out: Judged(out, eager, exact, against)
    places = sample(region, sizes, device)
    batch = {name: found for name, found in places.items() if name != "q_idx"}
    exact = evaluate(region, tensors, lengths, torch.float64, places["q_idx"], batch=batch)
    eager = computed(match, tensors, out) if room >= 1 / EAGER_SCORES else None
    sampled = "its meaning in float64 on sampled rows"
    against = f"eager, and {sampled}" if eager is not None else sampled
    picked = None if eager is None else pick(eager, region, places)
    return lambda out: Judged(pick(out, region, places), picked, exact, against, meant=True)


def judge_log_sums(match: Match, drawn: Drawn, launch: Launch, sizes: Mapping[str, int]) -> Verdict | None:
    """A failed verdict where the kernel's log-sum-exp is not that of the graph's nodes; else None."""
    region = match.region
    (tensors, out, lengths), device = drawn, drawn[1].device
    lse = log_sums(match, sizes, device)
    launch(out, tensors, lengths, lse)
    for s in match.sums:
        got = arranged(scaled(whole(lse, region), s), region, s)
        if rooms(match, out, sizes["N"]) >= 1:
            exact, eager = (original(match, s.node).run(tensors, dtype) for dtype in (torch.float64, None))
            judged = Judged(got, eager, exact, f"the log-sum-exp of {original(match, s.node).what} in float64")
        else:
            places = sample(region, sizes, device)
            batch = {name: found for name, found in places.items() if name != "q_idx"}
            exact = evaluate_lse(region, tensors, lengths, torch.float64, places["q_idx"], batch=batch)
            got = whole(lse, region)
            for axis, name in enumerate((*(v.name for v in region.batch), "q_idx")):
                got = got.index_select(axis, places[name]) if name in places else got
            judged = Judged(got, None, exact, "the log-sum-exp in float64 on sampled rows")
        for fill in (False, True):  # beside which no other row would count
            of = (judged.exact.abs() > FILLED) == fill
            dtype = str(s.node.meta["val"].dtype).removeprefix("torch.")
            verdict = judge(only(judged, of), dtype, floor_of(dtype, region, device))
            if not verdict.passed:
                return verdict
    return None


def only(judged: Judged, of: Tensor) -> Judged:
    """The comparison at some places."""
    eager = None if judged.eager is None else judged.eager.where(of, 0.0)
    return Judged(judged.got.where(of, 0.0), eager, judged.exact.where(of, 0.0), judged.against)


def judge_gradients(
    match: Match, drawn: Drawn, launch: Launch, backward: Gradients | None, sizes: Mapping[str, int]
) -> Callable[[], Verdict | None]:
    """What runs the kernels, and finds the first failed verdict on a gradient: of Q, K, V, and of all else that learns.
    None where all agree. What is right has been computed. Without a `backward`, gradients are recomputed."""
    region = match.region
    (tensors, out, lengths), device = drawn, drawn[1].device
    generator = torch.Generator(device).manual_seed(1)
    grad = torch.randn(out.shape, device=device, generator=generator).to(out.dtype)
    given = zip(region.operands, tensors, strict=True)
    wanted = [i for i, (o, t) in enumerate(given) if o.name in held(match) and t.is_floating_point()]
    rows = [*(sizes[v.name.upper()] for v in region.batch), sizes["M"]]
    summed = any(learns(s.node) for s in match.sums)
    grad_lse = torch.randn(rows, device=device, generator=generator) if summed else None
    eager, right, against = expected_gradients(match, grad, tensors, lengths, wanted, grad_lse)
    meant = partial(gradients, grad=grad, tensors=tensors, sizes=lengths, wanted=wanted, grad_lse=grad_lse)

    def by_kernels() -> tuple[list[Tensor], Tensor]:
        lse = log_sums(match, sizes, device)
        launch(out, tensors, lengths, lse)
        grads = [torch.full_like(t, float("nan")) if i in wanted else None for i, t in enumerate(tensors)]
        more = [lse.new_zeros(rows) if grad_lse is None else grad_lse] if region.lse else []
        assert backward is not None
        backward(grads, out, grad, lse, *more, tensors, lengths)
        return [g for g in grads if g is not None], whole(lse, region)

    def judged() -> Verdict | None:
        got, lse = by_kernels() if backward else (meant(region), evaluate_lse(region, tensors, lengths, torch.float32))
        exact = right
        if region.empty_row in ("nan", "unsafe") and bool((lse == -math.inf).any()):
            # Such a row's weights are NaN, and so is eager's gradient of V; in the kernel it takes no part.
            without = meant(replace(region, empty_row="zero"))
            exact = [torch.where(x.isnan(), y, x) for x, y in zip(right, without, strict=True)]
        operands = [region.operands[i] for i in wanted]
        compared = zip(operands, got, eager, exact, strict=True)
        verdicts = (judge_gradient(match, o, Judged(x, e, y, against), device) for o, x, e, y in compared)
        return next((v for v in verdicts if not v.passed), None)

    return judged


def judge_gradient(match: Match, operand: Operand, judged: Judged, device: torch.device) -> Verdict:
    """The verdict on the gradient of one operand."""
    region = match.region
    coarse = max(operand.dtype, region.out_dtype, key=lambda t: FLOOR[getattr(torch, t)])
    judged = replace(judged, against=f"{judged.against}, for the gradient of {operand.name}")
    return judge(judged, coarse, GRADIENT_MULTIPLE * floor_of(coarse, region, device))
