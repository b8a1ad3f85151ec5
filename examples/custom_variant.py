"""An attention that no library ships: soft cap, sliding window, ALiBi and sinks together, on grouped heads.

    python examples/custom_variant.py

It is written as the paper would write it. fusecomp has no rule for any of the four: it lifts whatever stands between
Q K^T and the softmax into one scalar expression, and the mask into predicates that bound the keys each tile visits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import fusecomp

CUDA = torch.cuda.is_available()


class Attention(nn.Module):
    """H query heads on H / group key heads; each query sees the last `window` keys and one learned sink."""

    def __init__(self, heads: int = 8, group: int = 4, size: int = 32, window: int = 40, cap: float = 20.0) -> None:
        super().__init__()
        self.heads, self.group, self.size, self.window, self.cap = heads, group, size, window, cap
        width = heads * size
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width // group, bias=False)
        self.v = nn.Linear(width, width // group, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.sink = nn.Parameter(torch.randn(heads))
        self.register_buffer("slope", 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """S = cap * tanh(q k / sqrt(D) / cap) - slope * distance, where 0 <= distance < window. [B, H, N, N]"""
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(self.size)
        scores = self.cap * torch.tanh(scores / self.cap)
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position[None, :]
        scores = scores - self.slope[:, None, None] * distance
        seen = (distance >= 0) & (distance < self.window)
        return torch.where(seen, scores, torch.finfo(scores.dtype).min)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, H D] -> [B, N, H D]."""
        b, n, _ = x.shape
        q = self.q(x).view(b, n, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(b, n, self.heads // self.group, self.size).transpose(1, 2)
        v = self.v(x).view(b, n, self.heads // self.group, self.size).transpose(1, 2)
        k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
        sink = self.sink.view(1, -1, 1, 1).expand(b, -1, n, 1)
        weights = torch.softmax(torch.cat([self.scores(q, k), sink], dim=-1), dim=-1)
        mixed = weights[..., :-1] @ v
        return self.out(mixed.transpose(1, 2).reshape(b, n, -1))


def main() -> None:
    """Compile, compare at two lengths, show."""
    torch.manual_seed(0)
    device = "cuda" if CUDA else "cpu"
    model = Attention().to(device).eval()
    compiled = torch.compile(model, backend="fusecomp", options={} if CUDA else {"inner": "aot_eager"})
    with torch.no_grad():
        for n in (100, 173):
            x = torch.randn(2, n, 256, device=device)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)
        report = fusecomp.explain(model, x)
    print(report)
    assert len(report.fused) == 1, "the attention should have been fused"
    print("\nThe compiled model agrees with eager PyTorch at both lengths.")


if __name__ == "__main__":
    main()
