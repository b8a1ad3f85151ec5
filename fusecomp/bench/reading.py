"""Kernels that only read: the floor of anything that must read as many bytes. Needs Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

SHAPES = ((1024, 1056), (2048, 528), (4096, 528), (2048, 2112), (4096, 264))
"""Elements that a program reads at once, and programs: which is fastest depends on the size."""


@triton.jit
def _read(x_ptr: tl.tensor, out_ptr: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> None:
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def readers(x: Tensor) -> Iterator[Callable[[], object]]:
    """Ways to read all of `x`."""
    for block, programs in SHAPES:
        out = torch.empty(programs, device=x.device)
        yield partial(_read[(programs,)], x, out, x.numel(), BLOCK=block, num_warps=8)
