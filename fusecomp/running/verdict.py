"""What a comparison of a kernel with what it replaces finds.

    max |kernel - exact|  <=  max(4 * max |eager - exact|, floor of the dtype)      relative to max |exact|

Where a kernel's products are in TF32, the floor is at least TF32's: at sizes that cuBLAS has no TF32 kernel for, eager
rounds less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusecomp.ir.region import AttentionRegion

EAGER_MULTIPLE = 4.0
"""A fused kernel may err this many times as much as eager does."""
SINGLE = 32 * 2.0**-23
FLOOR = {torch.float64: SINGLE, torch.float32: SINGLE, torch.bfloat16: 2 * 2.0**-7, torch.float16: 4 * 2.0**-10}
"""Relative error that is always allowed: what rounding the output alone may cost. In float64 there are only gradients,
of what kernels read in float32."""
TF32 = 4 * 2.0**-10
"""The same where Q, K, P and V are cut to TF32, whose numbers lie as far apart as those of float16."""
MISREAD = {torch.float32: 0.02, torch.bfloat16: 0.5, torch.float16: 0.5}
"""Relative error of eager, its products in TF32 maybe, that is no rounding any more: the program was misread."""


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    passed: bool
    error: float
    """Largest relative error of the kernel."""
    budget: float
    against: str
    """What the kernel was held against."""
    detail: str = ""
    """Where it disagreed."""

    def __str__(self) -> str:
        word = "agrees with" if self.passed else "DISAGREES with"
        tail = f": {self.detail}" if self.detail else ""
        return f"{word} {self.against}: error {self.error:.1e} of {self.budget:.1e} allowed{tail}"


@dataclass(frozen=True)
class Judged:
    """Tensors to compare: the kernel's O, eager's (if it was run), the exact one."""

    got: Tensor
    eager: Tensor | None
    exact: Tensor
    against: str
    meant: bool = False
    """Whether `exact` is what was read of the program: eager must then be near it too."""


def floor_of(dtype: str, region: AttentionRegion, device: torch.device) -> float:
    """Relative error that is always allowed a kernel of a region, for a result of that dtype."""
    multiplied = {region.pv_dtype, *(p.dtype for p in region.products)}
    cut = device.type == "cuda" and region.precision == "tf32" and "float32" in multiplied
    return max(FLOOR[getattr(torch, dtype)], TF32 if cut else 0.0)


def judge(judged: Judged, dtype: str, floor: float | None = None) -> Verdict:
    """Compare: special values in place, finite ones within the budget. `floor`: instead of that of the dtype."""
    floor = FLOOR[getattr(torch, dtype)] if floor is None else floor
    got, exact = judged.got.double(), judged.exact.double()
    eager = judged.eager.double() if judged.eager is not None else None
    wrong = specials(got) != specials(exact)
    if eager is not None:
        wrong &= specials(got) != specials(eager)
        lost = (specials(eager) != specials(exact)) & (specials(got) == specials(exact))
        drift = relative(eager, exact) if not lost.any() else 0.0
    else:
        drift = floor / EAGER_MULTIPLE * 2
    budget = max(EAGER_MULTIPLE * drift, floor)
    if judged.meant and drift > (most := MISREAD[getattr(torch, dtype)]):
        return Verdict(False, drift, most, judged.against, "eager itself is as far from what was read")
    if wrong.any():
        detail = f"{int(wrong.sum())} of {wrong.numel()} elements are NaN or infinite on one side only"
        return Verdict(False, float("inf"), budget, judged.against, detail)
    error = relative(got, exact)
    detail = "" if error <= budget else f"worst at {worst(got, exact)}"
    return Verdict(error <= budget, error, budget, judged.against, detail)


def specials(x: Tensor) -> Tensor:
    """0 where finite, else a code for NaN, +inf and -inf."""
    return x.isnan() * 1 + (x == float("inf")) * 2 + (x == float("-inf")) * 3


def relative(x: Tensor, exact: Tensor) -> float:
    """max |x - exact| / max |exact| over the places where both are finite."""
    finite = x.isfinite() & exact.isfinite()
    if not finite.any():
        return 0.0
    size = exact[exact.isfinite()].abs().max().item()
    return float((x - exact)[finite].abs().max().item() / (size or 1.0))


def worst(x: Tensor, exact: Tensor) -> tuple[int, ...]:
    """Index of the largest finite difference."""
    off = (x - exact).abs().nan_to_num(0.0, 0.0, 0.0)
    return tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
