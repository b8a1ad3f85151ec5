"""Attention in plain PyTorch: found, planned, compiled to a Triton kernel, verified. Needs no GPU.

    python examples/quickstart.py

Without a GPU the kernel runs in Triton's interpreter, and nothing is timed. With one, eager PyTorch, Inductor and
fusecomp are timed side by side.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, below

import fusecomp  # noqa: E402


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with capped scores, four query heads to a key head. q [B, H, N, D]; k, v [B, H / 4, N, D]."""
    n, d = q.shape[-2:]
    k, v = k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(d)
    scores = 30.0 * torch.tanh(scores / 30.0)
    future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v


def inputs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v: on a GPU 32 heads of 128 in bfloat16, else 8 heads of 32 in float32."""
    h, d = (32, 128) if CUDA else (8, 32)
    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": torch.bfloat16} if CUDA else {}
    return torch.randn(1, h, n, d, **make), torch.randn(1, h // 4, n, d, **make), torch.randn(1, h // 4, n, d, **make)


def check(compiled: object, args: tuple[Tensor, ...]) -> None:
    """The compiled function agrees with eager."""
    tolerance = 2e-2 if CUDA else 1e-4
    torch.testing.assert_close(compiled(*args), attention(*args), rtol=tolerance, atol=tolerance)  # type: ignore[operator]


def times(args: tuple[Tensor, ...], compiled: object) -> None:
    """Milliseconds of each way to run it, on the GPU at hand."""
    from triton.testing import do_bench

    ways = {"eager": attention, "inductor": torch.compile(attention), "fusecomp": compiled}
    print(f"\n{torch.cuda.get_device_name()}, q {list(args[0].shape)} bfloat16:")
    for name, f in ways.items():
        print(f"    {name:10} {do_bench(lambda f=f: f(*args)):8.3f} ms")  # type: ignore[operator]


def main() -> None:
    """Compile, compare, show, and on a GPU time."""
    args = inputs(4096 if CUDA else 100)
    options = {} if CUDA else {"inner": "aot_eager"}  # no C++ compiler needed for the rest of the graph
    compiled = torch.compile(attention, backend="fusecomp", options=options)
    check(compiled, args)

    report = fusecomp.explain(attention, *args)
    assert report.fused, str(report)
    for kernel in report.kernels().values():
        print(kernel)
    print(report)
    print("\nThe compiled function agrees with eager PyTorch.")
    if CUDA:
        times(args, compiled)


if __name__ == "__main__":
    main()
