"""What is right, from the program in float64 or from the region's meaning, and what eager gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fusecomp.graph.learning import learns
from fusecomp.ir.region import AttentionRegion, extent
from fusecomp.patterns.build import Match
from fusecomp.running.backward import gradients
from fusecomp.running.original import original
from fusecomp.running.sums import arranged

EXACT_SCORES = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Scores up to which the program is run in float64."""
EAGER_SCORES = 8
"""As many times more are run in the model's dtype."""
KEPT = 8
"""As many times that memory is what autograd keeps."""
SAMPLED_ROWS = 64
SAMPLED_BYTES = {"cpu": 1 << 29, "cuda": 1 << 33}
"""Of K and V in float64, over the heads that are looked at."""


def sample(region: AttentionRegion, sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Rows by random, and two positions of each batch axis, outermost first, while K and V in float64 take too much."""
    lengths = {v.name: sizes[v.name.upper()] for v in region.batch}
    wide = 8 * sizes["N"] * (region.head_size + extent(region.dv))
    found = {"q_idx": some(sizes["M"], SAMPLED_ROWS, device)}
    for name, length in lengths.items():
        if wide * math.prod(lengths.values()) > SAMPLED_BYTES.get(device.type, 0):
            found[name] = some(length, 2, device)
            lengths[name] = len(found[name])
    return found


def some(length: int, count: int, device: torch.device) -> Tensor:
    """At most `count` positions in order."""
    generator = torch.Generator(device).manual_seed(0)  # what is compiled draws nothing from the program's own
    return torch.randperm(length, device=device, generator=generator)[:count].sort().values


def pick(x: Tensor, region: AttentionRegion, places: Mapping[str, Tensor]) -> Tensor:
    """O at the sampled places."""
    for name, found in places.items():
        x = x.index_select(region.out_axes.index(name), found)
    return x


def rooms(match: Match, out: Tensor, keys: int) -> float:
    """How many times as many scores might be run in float64."""
    scores = out.numel() // max(out.shape[match.region.out_axes.index("dv")], 1) * keys
    return EXACT_SCORES.get(out.device.type, 0) / max(scores, 1)


def computed(match: Match, tensors: list[Tensor], out: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """O from the program in the shape of `out`; None where the device has no room for its scores."""
    try:
        found = original(match).run(tensors, dtype).reshape(out.shape)
    except torch.OutOfMemoryError:
        return None
    return found.nan_to_num(0.0) if match.region.empty_row == "zero" else found


def differentiable(match: Match, out: Tensor, keys: int) -> bool:
    """Whether there is room for what autograd keeps of the program, whose gradients are numbers in each row."""
    return rooms(match, out, keys) >= KEPT and match.region.empty_row in ("nan", "unsafe")


def expected_gradients(
    match: Match, grad: Tensor, tensors: list[Tensor], lengths: Sequence[int], wanted: Sequence[int],
    grad_lse: Tensor | None,
) -> tuple[Sequence[Tensor | None], Sequence[Tensor], str]:  # fmt: skip
    """(eager's, the exact ones, what those are): the program under autograd where there is room for what that
    keeps, else the region's meaning a block of rows at a time."""
    if differentiable(match, grad, dict(zip(match.region.sizes, lengths, strict=True)).get("N", 1)):
        found = [differentiated(match, grad, tensors, wanted, dtype, grad_lse) for dtype in (None, torch.float64)]
        if found[1] is not None:
            return found[0] or [None] * len(wanted), found[1], "autograd in float64"
    exact = gradients(match.region, grad, tensors, lengths, wanted, grad_lse)
    return [None] * len(wanted), exact, "autograd"


def differentiated(
    match: Match, grad: Tensor, tensors: list[Tensor], wanted: Sequence[int], dtype: torch.dtype | None,
    grad_lse: Tensor | None,
) -> list[Tensor] | None:  # fmt: skip
    """Gradients from the program; None where it cannot be run so. `grad_lse` is that of one log-sum-exp."""
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
    asked = [leaves[i] for i in wanted]
    try:
        with torch.enable_grad():
            results, given = [original(match).run(leaves, dtype).reshape(grad.shape)], [grad]
            for s in [s for s in match.sums if learns(s.node)][:1]:
                if grad_lse is not None:
                    results.append(original(match, s.node).run(leaves, dtype))
                    given.append(arranged(grad_lse / s.factor, match.region, s))
            given = [g.to(x.dtype) for g, x in zip(given, results, strict=True)]
            found = torch.autograd.grad(results, asked, given, allow_unused=True)
    except RuntimeError:  # out of memory, or it writes into what it was given
        return None
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, asked, strict=True)]
