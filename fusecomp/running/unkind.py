"""What was read of a program, beside the program, on values that random ones are not like, both in float64.

    Q, K, V     far from 0, some rows a hundred times as long as others
    divisors    negative too
    lengths     0 too: queries that see no key

Where the program gives a number, its meaning gives the same. No kernel runs: in float64 neither side rounds, so what
such values do to roundings is no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fusecomp.ir import data
from fusecomp.ir.algebra import depends_on_score, swallows
from fusecomp.ir.expr import Cast, parts
from fusecomp.ir.reference import evaluate
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.build import Match
from fusecomp.running.expected import computed, pick, sample
from fusecomp.running.inputs import divisors, elements, leaving
from fusecomp.running.original import original
from fusecomp.running.verdict import Verdict, relative, worst

ALLOWED = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
"""Relative error: what is lost in a sum of that dtype was left out of the meaning."""
AGAINST = "the program on values far apart, in float64"
LENGTHS = (0.03, 0.3, 1.0, 3.0)
"""Of the rows of Q and K, one after the other."""
FAR = 2.0
"""How far from 0 the middle of each tensor is, before that."""


def judge_meaning(
    match: Match, tensors: list[Tensor], out: Tensor, lengths: Sequence[int], sizes: Mapping[str, int]
) -> Verdict | None:
    """A failed verdict where what was read is another function than the program; else None. Writes into `tensors`."""
    region = match.region
    make_unkind(region, tensors)
    if rounds(region) or leaving(region, tensors, sizes) or not original(match).inside(tensors):
        return None
    try:
        exact = computed(match, tensors, out, torch.float64)
    except RuntimeError:  # it knows no float64
        exact = None
    if exact is None:
        return None
    places = sample(region, sizes, out.device)
    exact, batch = pick(exact, region, places), {n: found for n, found in places.items() if n != "q_idx"}
    got = evaluate(region, tensors, lengths, torch.float64, places["q_idx"], batch=batch)
    told, allowed = exact.isfinite(), ALLOWED[region.out_dtype]
    lost = told & ~got.isfinite()
    if lost.any():
        detail = f"{int(lost.sum())} of {lost.numel()} elements are NaN or infinite in what was read alone"
        return Verdict(False, math.inf, allowed, AGAINST, detail)
    got = got.where(told, exact)
    error = relative(got, exact)
    return None if error <= allowed else Verdict(False, error, allowed, AGAINST, f"worst at {worst(got, exact)}")


HALVES = ("float16", "bfloat16")


def rounds(region: AttentionRegion) -> bool:
    """Whether a rounding on the way is more than noise, and float64 has none: of operands, of what no score is part of,
    of a score that is lost in its fill."""
    of = [(region.operand(a.operand).dtype, p.dtype) for p in region.products for a in (p.q, p.k)]
    of += [(region.operand(region.v.operand).dtype, region.pv_dtype)]
    casts = [x for e in region.expressions() for x in parts(e) if isinstance(x, Cast) and x.dtype in HALVES]
    blurred = any(to in HALVES and held not in HALVES for held, to in of)
    blind = region.filled_score is not None and any(to in HALVES for _, to in of)
    return blurred or blind or any(swallows(x) or not depends_on_score(x) for x in casts)


def make_unkind(region: AttentionRegion, tensors: Sequence[Tensor]) -> None:
    """Change operands in their memory."""
    products = {a.operand for p in region.products for a in (p.q, p.k)}
    signed, added = set(divisors(region)) - products, {x.tensor for x in data.added(region)}
    for operand, x in zip(region.operands, tensors, strict=True):
        own = elements(x)
        if x.is_floating_point() and x.element_size() == 1:
            continue
        if operand.name in products | {region.v.operand} and x.is_floating_point() and x.dim() > 1:
            place = torch.arange(len(own), device=x.device) // x.shape[-1]
            own += FAR
            own *= torch.tensor(LENGTHS, device=x.device, dtype=x.dtype)[place % len(LENGTHS)]
        elif operand.name in signed and x.is_floating_point():
            own[1::2] *= -1
        elif operand.name in added or x.dtype == torch.bool:
            last_row(x).fill_(-torch.inf if x.is_floating_point() else False)
        elif not x.is_floating_point():
            own[::3] = 0


def last_row(x: Tensor) -> Tensor:
    """What the last query reads of a mask, if it has queries."""
    own = x[tuple(slice(None) if step else slice(1) for step in x.stride())]
    return own[..., -1:, :] if x.dim() > 1 and own.shape[-2] > 1 else elements(x)[:0]
