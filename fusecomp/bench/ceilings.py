"""What the device could do at most, measured in the same run: products, copies, reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusecomp.bench.timing import Effort, Launch, cold, launch, median


@dataclass(frozen=True)
class Ceiling:
    """FLOP/s, or B/s."""

    what: str
    protocol: str
    rate: float


def products(protocol: str, effort: Effort, device: torch.device) -> Ceiling:
    """A square product in bfloat16."""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    ms = median(launch([lambda: a @ b], protocol), effort.protocol(protocol), device)
    return Ceiling(f"product {n} x {n}", protocol, 2 * n**3 / ms * 1e3)


def copies(effort: Effort, device: torch.device) -> Ceiling:
    """A large copy, read and written."""
    size = 2**31 if device.type == "cuda" else 2**20
    x = torch.zeros(size // 4, device=device)
    y = torch.empty_like(x)
    ms = median(Launch(lambda: y.copy_(x)), effort.protocol("sustained"), device)
    return Ceiling(f"copy {size >> 20} MiB", "sustained", 2 * size / ms * 1e3)


def reads(size: int, effort: Effort, device: torch.device) -> Ceiling:
    """The fastest of a few kernels that only read `size` bytes, none of them in L2; on a CPU, a sum."""
    name = f"read {size / 2**20:.3g} MiB"
    if device.type != "cuda":
        x = torch.zeros(size // 4)
        return Ceiling(name, "sustained", size / median(Launch(x.sum), effort.protocol("sustained"), device) * 1e3)
    from fusecomp.bench.reading import readers

    memory = [torch.randn(size // 2, device=device, dtype=torch.bfloat16) for _ in range(cold(size))]
    ways = zip(*map(readers, memory), strict=True)
    ms = min(median(launch(way, "graph"), effort.protocol("graph"), device) for way in ways)
    return Ceiling(name, "graph", size / ms * 1e3)

