"""Gradients of a region by recomputation: a block of query rows at a time, so that no M x N tensor is kept.

    dL/dx = sum over row blocks of  (d O_block / d x)^T dL/dO_block

Exact for every region, since each block is the region's own meaning under autograd in float32. Generated backward
kernels are to take over from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress

import torch
from torch import Tensor

from fusecomp.ir.logsumexp import evaluate_lse
from fusecomp.ir.reference import evaluate
from fusecomp.ir.region import AttentionRegion

SCORES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Scores of one block by device: 16 MiB and 512 MiB of float32."""


def gradients(
    region: AttentionRegion, grad: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], wanted: Sequence[int],
    grad_lse: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """dL/d tensors[i] for i in `wanted`, in each tensor's shape and dtype. `grad` is dL/dO in region.out_axes order,
    `grad_lse` dL/dlse over (batch axes, M), None where it is 0."""
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
    totals = [torch.zeros(tensors[i].shape, dtype=torch.float32, device=grad.device) for i in wanted]
    rows_axis = region.out_axes.index("q_idx")
    length = grad.shape[rows_axis]
    step = rows_per_block(region, sizes, grad)
    for first in range(0, length, step):
        rows = slice(first, min(first + step, length))
        with autograd_again(grad.device.type):
            results = [evaluate(region, leaves, sizes, torch.float32, rows)]
            given = [grad.narrow(rows_axis, rows.start, rows.stop - rows.start).float()]
            if grad_lse is not None:
                results.append(evaluate_lse(region, leaves, sizes, torch.float32, rows))
                given.append(grad_lse[..., rows].float())
            learns = [x.requires_grad for x in results]  # the log-sum-exp does not where V alone is wanted
            results, given = list(compress(results, learns)), list(compress(given, learns))
            found = torch.autograd.grad(results, [leaves[i] for i in wanted], given, allow_unused=True)
        for total, g in zip(totals, found, strict=True):
            if g is not None:
                total += g
    return [total.to(tensors[i].dtype) for total, i in zip(totals, wanted, strict=True)]


@contextmanager
def autograd_again(device: str) -> Iterator[None]:
    """Record gradients inside an operator's implementation, which the dispatcher calls with autograd excluded."""
    names = ("AutogradOther", "AutogradFunctionality", f"Autograd{device.upper()}", "ADInplaceOrView")
    keys = [getattr(torch._C.DispatchKey, n) for n in names]
    excluded = [k for k in keys if torch._C._dispatch_tls_is_dispatch_key_excluded(k)]
    for key in excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


def rows_per_block(region: AttentionRegion, sizes: Sequence[int], grad: Tensor) -> int:
    """Query rows whose scores, over all batch axes and keys, fill one block."""
    known = dict(zip(region.sizes, sizes, strict=True))
    keys = known.get("N", 1)
    columns = grad.shape[region.out_axes.index("dv")]
    batch = grad.numel() // max(1, columns * grad.shape[region.out_axes.index("q_idx")])
    return max(1, SCORES.get(grad.device.type, 1 << 24) // max(1, batch * keys))
