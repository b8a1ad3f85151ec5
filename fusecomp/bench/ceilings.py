"""What the device could do at most, measured in the same run: products, copies, reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusecomp.bench.timing import Bench, Launch, cold, launch, median

PRODUCT = "product"


@dataclass(frozen=True)
class Ceiling:
    """FLOP/s, or B/s."""

    what: str
    protocol: str
    rate: float


def products(protocol: str, bench: Bench) -> Ceiling:
    """A square product in bfloat16."""
    n = 8192 if bench.gpu else 256
    a, b = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    ms = median(launch([lambda: a @ b], protocol), bench.protocol(protocol), bench.device)
    return Ceiling(PRODUCT, protocol, 2 * n**3 / ms * 1e3)


def copies(bench: Bench) -> Ceiling:
    """A large copy, read and written."""
    size = 2**31 if bench.gpu else 2**20
    x = torch.zeros(size // 4, device=bench.device)
    y = torch.empty_like(x)
    ms = median(Launch(lambda: y.copy_(x)), bench.protocol("sustained"), bench.device)
    return Ceiling(f"copy {size >> 20} MiB", "sustained", 2 * size / ms * 1e3)


def reading(size: int) -> str:
    """What its ceiling is called."""
    return f"read {size / 2**20:.5g} MiB"


def reads(size: int, bench: Bench) -> Ceiling:
    """The fastest of a few kernels that only read `size` bytes, none of them in L2; on a CPU, a sum."""
    name = reading(size)
    if not bench.gpu:
        x = torch.zeros(size // 4)
        return Ceiling(name, "sustained", size / median(Launch(x.sum), bench.protocol("sustained"), bench.device) * 1e3)
    from fusecomp.bench.reading import readers

    memory = [torch.randn(size // 2, device=bench.device, dtype=torch.bfloat16) for _ in range(cold(size))]
    ways = zip(*map(readers, memory), strict=True)
    ms = min(median(launch(way, "graph"), bench.protocol("graph"), bench.device) for way in ways)
    return Ceiling(name, "graph", size / ms * 1e3)

