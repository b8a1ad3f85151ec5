"""Random attention programs: one choice per stage, every choice a way in which people write that stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import strategies as st
from random_operands import CASTS, LAYOUTS, RESULTS, Stage
from torch import Tensor

INF = float("inf")

# ----------------------------------------------------------------------------------------------------------------
# The stages. q [B, H, M, D], k and v [B, H, N, D], s [B, H, M, N]

SCALES: Stage = {
    "none": lambda q, k: (q, k, 1.0),
    "after": lambda q, k: (q, k, q.shape[-1] ** -0.5),
    "on q": lambda q, k: (q * 0.5, k, 1.0),
    "on k": lambda q, k: (q, k / 3, 1.0),
    "on both": lambda q, k: (q * 0.7, k * 0.7, 1.0),
    "a tensor": lambda q, k: (q, k, torch.rsqrt(torch.tensor(float(q.shape[-1]), dtype=q.dtype))),
}
PRODUCTS: Stage = {
    "matmul": lambda q, k: torch.matmul(q, k.transpose(-2, -1)),
    "mT": lambda q, k: q @ k.mT,
    "einsum": lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k),
    "ellipsis": lambda q, k: torch.einsum("...id,...jd->...ij", q, k),
    "keys first": lambda q, k: (k @ q.mT).transpose(2, 3),
    "sum": lambda q, k: (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1),
    "bmm": lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(*q.shape[:3], k.shape[2]),
    "baddbmm": lambda q, k: torch.baddbmm(
        torch.full((1,), math.nan, dtype=q.dtype), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=0.5
    ).unflatten(0, q.shape[:2]),
    "permuted": lambda q, k: torch.einsum("bhid,bjhd->bijh", q, k.transpose(1, 2)).permute(0, 3, 1, 2),
}
SCORES: Stage = {
    "plain": lambda s, i, j, x: s,
    "soft cap": lambda s, i, j, x: 3 * torch.tanh(s / 3),
    "bias": lambda s, i, j, x: s + x,
    "distance": lambda s, i, j, x: s - (0.1 * (i - j).abs()).to(s.dtype),
    "bias of a bias": lambda s, i, j, x: x.mul(0.5) + s * 0.5 + x[:, :1],
    "clamped": lambda s, i, j, x: s.clamp(-1.0, 1.0),
    "in place": lambda s, i, j, x: s.mul_(0.5).add_(x),
    "by place": lambda s, i, j, x: torch.where((i + j) % 2 == 0, s, s * 0.5),
}
MASKINGS: Stage = {
    "masked_fill": lambda s, keep, fill: s.masked_fill(~keep, fill),
    "where": lambda s, keep, fill: torch.where(keep, s, fill),
    "added": lambda s, keep, fill: s + torch.zeros(keep.shape, dtype=s.dtype).masked_fill(~keep, fill),
    "tensor": lambda s, keep, fill: torch.where(keep, s, torch.full_like(s, fill)),
    "logical": lambda s, keep, fill: s.masked_fill(keep.logical_not(), fill),
    "in place": lambda s, keep, fill: s.masked_fill_(keep == 0, fill),
}
SOFTMAXES: Stage = {
    "softmax": lambda s: s.softmax(-1),
    "positive axis": lambda s: F.softmax(s, dim=3),
    "transposed": lambda s: s.mT.softmax(-2).mT,
    "log_softmax": lambda s: s.log_softmax(-1).exp(),
    "logsumexp": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "shifted": lambda s: shifted(s) / shifted(s).sum(-1, keepdim=True),
    "unsqueezed": lambda s: shifted(s).div(shifted(s).sum(3).unsqueeze(-1)),
    "reciprocal": lambda s: shifted(s) * shifted(s).sum(-1, keepdim=True).reciprocal(),
    "base 2": lambda s: (e := torch.exp2((s - s.amax(-1, keepdim=True)) * math.log2(math.e))) / e.sum(-1, True),
    "sink": lambda s: torch.cat([s, s.new_zeros(*s.shape[:-1], 1)], -1).softmax(-1)[..., :-1],
    "two sinks": lambda s: F.pad(s, (1, 1)).softmax(-1)[..., 1:-1],
    "one more": lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True)),
    "flat": lambda s: s.flatten(0, 2).softmax(-1).view(s.shape),
}
VALUES: Stage = {
    "matmul": lambda p, v: p @ v,
    "einsum": lambda p, v: torch.einsum("bhij,bhjd->bihd", p, v),
    "values first": lambda p, v: (v.mT @ p.mT).mT,
    "sum": lambda p, v: (p.unsqueeze(-1) * v.unsqueeze(2)).sum(-2),
    "bmm": lambda p, v: torch.bmm(p.flatten(0, 1), v.flatten(0, 1)).unflatten(0, p.shape[:2]).transpose(1, 2),
}
HEADS: Stage = {
    "equal": lambda x, n: x,
    "repeat_interleave": lambda x, n: x[:, ::n].repeat_interleave(n, 1),
    "expand": lambda x, n: x[:, ::n, None].expand(-1, -1, n, -1, -1).flatten(1, 2),
    "tiled": lambda x, n: x[:, : x.shape[1] // n].repeat(1, n, 1, 1),
    "stacked": lambda x, n: torch.stack([x[:, ::n]] * n, 2).flatten(1, 2),
    "by index": lambda x, n: x[:, torch.arange(x.shape[1]) // n],
}
SUMS: Stage = {
    "logsumexp": lambda s: s.logsumexp(-1),
    "kept": lambda s: s.logsumexp(3, keepdim=True),
    "turned": lambda s: s.logsumexp(-1).transpose(1, 2),
    "above the maximum": lambda s: s.amax(-1) + shifted(s).sum(-1).log(),
    "of log_softmax": lambda s: (s - s.log_softmax(-1))[..., 0],
    "in float32": lambda s: s.float().logsumexp(-1).square(),
}
"""The log-sum-exp of the scores, which the program uses too."""
OTHER_SUMS: Stage = {
    "over queries": lambda s: s.logsumexp(-2),
    "over heads": lambda s: s.logsumexp(1),
    "over batches": lambda s: s.logsumexp(0),
    "over all": lambda s: s.flatten(2).logsumexp(-1),
    "transposed": lambda s: s.mT.logsumexp(-1),
    "doubled": lambda s: (2 * s).logsumexp(-1),
    "but for one": lambda s: s[..., 1:].logsumexp(-1),
    "of other heads": lambda s: s.flip(1).logsumexp(-1),
    "of other queries": lambda s: s.roll(1, 2).logsumexp(-1),
    "and one more": lambda s: F.pad(s, (0, 1)).logsumexp(-1),
    "above another maximum": lambda s: s.amax((-2, -1))[..., None] + shifted(s).sum(-1).log(),
    "to base 2": lambda s: s.exp2().sum(-1).log2(),
    "maximum": lambda s: s.amax(-1),
    "sum": lambda s: s.exp().sum(-1),
    "mean": lambda s: s.mean(-1) + s.exp().mean(-1).log(),
}
"""What is not."""
FILLS = (-INF, -1e30, -1e9, -1e4)


def shifted(s: Tensor) -> Tensor:
    return (s - s.amax(-1, keepdim=True)).exp()


# ----------------------------------------------------------------------------------------------------------------
# What makes each stage another function

TWINS: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "cumsum": ("scores", lambda s: s.cumsum(-1)),
    "flip": ("weights", lambda p: p.flip(-1)),
    "roll": ("scores", lambda s: s.roll(1, -1)),
    "sort": ("scores", lambda s: s.sort(-1).values),
    "over queries": ("softmax", lambda s: s.softmax(-2)),
    "over heads": ("softmax", lambda s: s.softmax(1)),
    "over all": ("softmax", lambda s: s.flatten(-2).softmax(-1).view(s.shape)),
    "sum of queries": ("softmax", lambda s: shifted(s) / shifted(s).sum(-2, keepdim=True)),
    "greatest of queries": ("softmax", lambda s: (e := (s - s.amax(-2, keepdim=True)).exp()) / e.sum(-1, keepdim=True)),
    "half of the keys": ("softmax", lambda s: s.exp() / s[..., : (s.shape[-1] + 1) // 2].exp().sum(-1, keepdim=True)),
    "sigmoid": ("softmax", lambda s: s.sigmoid()),
    "squared": ("weights", lambda p: p * p),
    "renormalised": ("weights", lambda p: p / p.square().sum(-1, keepdim=True)),
    "of scores": ("scores", lambda s: s * s.amax(-1, keepdim=True)),
    "mean": ("scores", lambda s: s - s.mean(-2, keepdim=True)),
    "shifted keys": ("scores", lambda s: s + F.pad(s[..., :-1], (1, 0))),
    "other heads": ("scores", lambda s: s + s.flip(1)),
    "thresholded": ("weights", lambda p: p * (p > 0.2)),
}


@dataclass(frozen=True)
class Program:
    """The choice of each stage."""

    scale: str = "after"
    product: str = "matmul"
    score: str = "plain"
    masking: str = "masked_fill"
    softmax: str = "softmax"
    value: str = "matmul"
    heads: str = "equal"
    mask: Any = None
    """(i, j, x) -> bool, or None."""
    fill: float = -INF
    deferred: bool = False
    twin: str = ""
    beside: str = ""
    """What of the scores is returned beside O."""
    cast: str = "none"
    layouts: tuple[str, ...] = ("as given",) * 4
    result: str = "as it is"

    def typed(self, name: str, x: Tensor) -> Tensor:
        """x as the program casts it; all in float64 where the inputs are."""
        return x if x.dtype == torch.float64 else x.to(CASTS[self.cast].get(name, x.dtype))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        q, k, v, x = (LAYOUTS[how](t) for how, t in zip(self.layouts, (q, k, v, x), strict=True))
        q, k, v = self.typed("q", self.typed("r q", q)), self.typed("k", k), self.typed("v", v)
        k, v = (HEADS[self.heads](t, 2) for t in (k, v))
        q, k, c = SCALES[self.scale](q, k)
        s = self.typed("s", self.typed("r", PRODUCTS[self.product](q, k) * c))
        x = x.to(s.dtype)
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        s = SCORES[self.score](s, i, j, x)
        stage, change = TWINS.get(self.twin, ("", None))
        s = change(s) if change and stage == "scores" else s
        if self.mask is not None:
            s = MASKINGS[self.masking](s, self.mask(i, j, x).expand(s.shape[-2:]), self.fill)
        out = RESULTS[self.result](self.typed("o", self.attended(s, v, stage, change)))
        if not self.beside:
            return out
        beside = {**SUMS, **OTHER_SUMS}[self.beside](s)
        return torch.cat([out.flatten(), beside.flatten().to(out.dtype)])

    def attended(self, s: Tensor, v: Tensor, stage: str, change: Callable[[Tensor], Tensor] | None) -> Tensor:
        if self.deferred:
            e = shifted(s)
            return VALUES["matmul"](self.typed("p", e), v) / e.sum(-1, keepdim=True)
        p = change(s) if change and stage == "softmax" else SOFTMAXES[self.softmax](s)
        p = change(p) if change and stage == "weights" else p
        return VALUES[self.value](self.typed("p", p), v)


# ----------------------------------------------------------------------------------------------------------------
# Random choices

LEAVES: tuple[Callable[[int], Callable[..., Tensor]], ...] = (
    lambda n: lambda i, j, x: j <= i + n,
    lambda n: lambda i, j, x: i - j < n + 3,
    lambda n: lambda i, j, x: (i - j).abs() <= n + 2,
    lambda n: lambda i, j, x: i // (n + 2) == j // (n + 2),
    lambda n: lambda i, j, x: (i - j) % (n + 2) != 1,
    lambda n: lambda i, j, x: (j < n + 1).expand(len(i), -1),
    lambda n: lambda i, j, x: torch.ones(len(i), len(j)).tril(n).bool(),
    lambda n: lambda i, j, x: torch.ones(len(i), len(j), dtype=torch.bool).triu(-n),
    lambda n: lambda i, j, x: (x[0, 0, 0] > -0.5)[None, :].expand(len(i), -1),
    lambda n: lambda i, j, x: x[0, 0] > 0,
    lambda n: lambda i, j, x: (i.to(torch.uint8) - j.to(torch.uint8)) < 9 - n,
)


def masks() -> st.SearchStrategy[Any]:
    """Trees of predicates; each query sees the key 0 at least, or not."""
    leaf = st.builds(lambda make, n: make(n), st.sampled_from(LEAVES), st.integers(0, 3))

    def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        both = st.tuples(inner, inner)
        return st.one_of(
            both.map(lambda ab: lambda i, j, x: ab[0](i, j, x) & ab[1](i, j, x)),
            both.map(lambda ab: lambda i, j, x: ab[0](i, j, x) | ab[1](i, j, x)),
            both.map(lambda ab: lambda i, j, x: ab[0](i, j, x) ^ ab[1](i, j, x)),
            inner.map(lambda a: lambda i, j, x: ~a(i, j, x)),
            inner.map(lambda a: lambda i, j, x: a(i, j, x) | (j == 0)),
        )

    return st.recursive(leaf, grown, max_leaves=4)


def programs(twins: bool = False) -> st.SearchStrategy[Program]:
    return st.builds(
        Program,
        scale=st.sampled_from(list(SCALES)),
        product=st.sampled_from(list(PRODUCTS)),
        score=st.sampled_from(list(SCORES)),
        masking=st.sampled_from(list(MASKINGS)),
        softmax=st.sampled_from(list(SOFTMAXES)),
        value=st.sampled_from(list(VALUES)),
        heads=st.sampled_from(list(HEADS)),
        mask=st.none() | masks(),
        fill=st.sampled_from(FILLS),
        deferred=st.just(False) if twins else st.booleans(),
        twin=st.sampled_from(list(TWINS)) if twins else st.just(""),
    )


def combined() -> st.SearchStrategy[Program]:
    """Programs whose operands are cast and lie in memory anyhow, and whose result goes on."""
    laid = st.tuples(*[st.sampled_from(list(LAYOUTS))] * 4)
    more = st.tuples(st.sampled_from(list(CASTS)), laid, st.sampled_from(list(RESULTS)))
    return st.builds(
        lambda program, chosen: replace(program, cast=chosen[0], layouts=chosen[1], result=chosen[2]), programs(), more
    )
