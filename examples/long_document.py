"""A document of 18,000 tokens in one piece: B = 1, 8 heads of 128, causal, in plain PyTorch.

    python examples/long_document.py

The scores alone are 18,000 x 18,000 x 8 heads: 5 GB in bfloat16, and eager PyTorch holds several copies of them. On a
GPU this measures time and peak memory of eager, Inductor and fusecomp. On a CPU the document is shorter, and the
largest tensor that is allocated is compared instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusecomp

CUDA = torch.cuda.is_available()
H, N, D = (8, 18_000, 128) if CUDA else (2, 1_500, 128)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(causal(q k^T / sqrt(D))) v, as a textbook has it."""
    n, d = q.shape[-2:]
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d)
    causal = torch.tril(torch.ones(n, n, device=q.device, dtype=torch.bool))
    return torch.matmul(torch.softmax(scores.masked_fill(~causal, float("-inf")), dim=-1), v)


def largest_allocation(f: Callable[..., Tensor], args: tuple[Tensor, ...]) -> int:
    """Bytes of the largest tensor that f(*args) allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        f(*args)
    return max(event.self_cpu_memory_usage for event in profiled.events() or ())


def measure(name: str, f: Callable[..., Tensor], args: tuple[Tensor, ...]) -> None:
    """Milliseconds, and the peak of allocated memory beyond the inputs."""
    from triton.testing import do_bench

    f(*args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f(*args)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"    {name:10} {do_bench(lambda: f(*args)):9.3f} ms   {peak / 1e9:7.3f} GB")


def main() -> None:
    """Compile, compare, and measure where there is a GPU."""
    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": torch.bfloat16} if CUDA else {}
    args = tuple(torch.randn(1, H, N, D, **make) for _ in range(3))
    compiled = torch.compile(attention, backend="fusecomp", options={} if CUDA else {"inner": "aot_eager"})
    tolerance = 2e-2 if CUDA else 1e-4
    torch.testing.assert_close(compiled(*args), attention(*args), rtol=tolerance, atol=tolerance)
    print(fusecomp.explain(attention, *args))
    if CUDA:
        print(f"\n{torch.cuda.get_device_name()}, q [1, {H}, {N}, {D}] bfloat16:")
        for name, f in {"eager": attention, "inductor": torch.compile(attention), "fusecomp": compiled}.items():
            measure(name, f, args)
    else:
        scores, fused, eager = 4 * H * N * N, largest_allocation(compiled, args), largest_allocation(attention, args)
        print(f"\nThe scores take {scores:,} B. Largest tensor allocated: eager {eager:,} B, fusecomp {fused:,} B.")
        assert fused < scores // 4 <= eager


if __name__ == "__main__":
    main()
