"""The tensors of a case, and what is right: the same program in float64, where it is cheap enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fusecomp.bench.cases import Case
from fusecomp.bench.timing import cold

Results = tuple[Tensor, ...]
"""The output; in training also the gradients of Q, K and V, and of what else learns."""
Attend = Callable[[], Tensor]
Run = Callable[[], Results]
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 1e-4}
"""The largest relative error, in the Frobenius norm, of a result that is timed. Eager's own in half precision, whose
scores and weights are rounded, is about a third of it."""


@dataclass(frozen=True)
class Inputs:
    """q, k, v (pools of pages where paged), what else the program takes, and the gradient of its result."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: tuple[Tensor, ...] = ()
    grad: Tensor | None = None

    @property
    def all(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, *self.extra

    @property
    def learn(self) -> tuple[Tensor, ...]:
        """Those that have a gradient."""
        return tuple(t for t in self.all if t.requires_grad)

    @cached_property
    def gathered(self) -> tuple[Tensor, Tensor]:
        """Dense K and V of pages, [B, Hkv, N, D], by as many keys as the longest request has."""
        table, lengths = self.extra
        found = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (self.k, self.v))
        k, v = (x[:, :, : int(lengths.max())].contiguous() for x in found)
        return k, v


def dense(case: Case, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v for a peer that knows no pages: gathering them is not timed."""
    return (x.q, *x.gathered) if case.shape.page else (x.q, x.k, x.v)


def draw(case: Case, device: torch.device) -> Inputs:
    """Normal random numbers."""
    s = case.shape
    extra = case.variant.extra(s, device)
    if case.learns and case.variant.learned:
        extra = tuple(t.requires_grad_() for t in extra)
    keys = (s.b, s.key_heads, s.n, s.d)
    if s.page:
        keys = (sum(-(-n // s.page) for n in s.held), s.page, s.key_heads, s.d)
    shapes = [(s.b, s.h, s.queries, s.d), keys, keys]
    q, k, v = (torch.randn(x, device=device, dtype=case.dtype, requires_grad=case.learns) for x in shapes)
    return Inputs(q, k, v, extra, torch.randn_like(q) if case.learns else None)


def run(case: Case, x: Inputs, attend: Attend) -> Run:
    """One launch of what is timed, of `attend` on the inputs."""
    if not case.learns:
        return lambda: (attend(),)

    def step() -> Results:
        out = attend()
        return (out, *torch.autograd.grad(out, x.learn, x.grad))

    return step


# ----------------------------------------------------------------------------------------------------------------
# What is right


@dataclass(frozen=True)
class Exact:
    """A part of the result in float64: the rows and heads of each tensor where it stands."""

    at: tuple[tuple[slice, slice], ...]
    results: Results


def exact(case: Case, x: Inputs) -> list[Exact]:
    """The first and the last group of heads of the first and the last request; of all requests together where they
    share what learns."""
    return [_exact(case, part, at) for part, at in (_pages if case.shape.page else _heads)(case, x)]


def _exact(case: Case, x: Inputs, at: tuple[tuple[slice, slice], ...]) -> Exact:
    return Exact(at, tuple(t.detach() for t in run(case, x, lambda: case.variant.fn(*x.all))()))


def _heads(case: Case, x: Inputs) -> Iterator[tuple[Inputs, tuple[tuple[slice, slice], ...]]]:
    s = case.shape
    group = s.h // s.key_heads
    shared = any(e.requires_grad and len(e) == 1 for e in x.extra)
    for b, head in sorted({(0, 0), (s.b - 1, s.key_heads - 1)}):
        row, key, query = slice(b, b + 1), slice(head, head + 1), slice(head * group, (head + 1) * group)
        row = slice(None) if shared else row
        places = [_where_many(e, row, query) for e in x.extra]
        extra = tuple(_wide(e[at], e.requires_grad) for e, at in zip(x.extra, places, strict=True))
        q, k, v = (_wide(t[row, heads], case.learns) for t, heads in ((x.q, query), (x.k, key), (x.v, key)))
        grad = _wide(x.grad[row, query]) if x.grad is not None else None
        learned = [at for e, at in zip(x.extra, places, strict=True) if e.requires_grad]
        yield Inputs(q, k, v, extra, grad), ((row, query), (row, query), (row, key), (row, key), *learned)


def _where_many(x: Tensor, row: slice, head: slice) -> tuple[slice, slice]:
    """Those of its requests and heads, or the only one."""
    return row if x.shape[0] > 1 else slice(None), head if x.shape[1] > 1 else slice(None)


def _pages(case: Case, x: Inputs) -> Iterator[tuple[Inputs, tuple[tuple[slice, slice], ...]]]:
    table, lengths = x.extra
    for b in sorted({0, case.shape.b - 1}):
        row = slice(b, b + 1)
        pages = table[b, : -(-case.shape.held[b] // case.shape.page)].long()
        own = torch.arange(len(pages), device=table.device)[None]
        yield Inputs(_wide(x.q[row]), _wide(x.k[pages]), _wide(x.v[pages]), (own, lengths[row])), ((row, slice(None)),)


def _wide(x: Tensor, learns: bool = False) -> Tensor:
    """In float64, if it is a number at all."""
    wide = x.detach().double() if x.is_floating_point() else x
    return wide.requires_grad_() if learns else wide


def error(results: Results, truth: Sequence[Exact]) -> float:
    """The largest relative error in the Frobenius norm; NaN where any is."""
    parts = [zip(results, part.results, part.at, strict=False) for part in truth]
    return float(torch.stack([relative(ours[at], theirs) for part in parts for ours, theirs, at in part]).max())


def relative(ours: Tensor, exact: Tensor) -> Tensor:
    """|ours - exact| / |exact|."""
    return (ours.detach().double() - exact).norm() / exact.norm()


def share(case: Case, x: Inputs) -> float:
    """Of the M x N pairs, those that the mask keeps; all of them where FlexAttention is told of no mask."""
    mask = case.variant.flex(case.shape, *x.extra)[1] if case.variant.flex else None
    if mask is None:
        return 1.0
    m, n = case.shape.queries, case.shape.n
    keys = torch.arange(n, device=x.q.device)[None]
    zero = torch.zeros((), dtype=torch.long, device=x.q.device)
    rows = torch.arange(m, device=x.q.device)[:, None].split(1024)
    return sum(int(mask(zero, zero, part, keys).sum()) for part in rows) / (m * n)


def sets(case: Case, device: torch.device) -> list[Inputs]:
    """Inputs of one replay: copies of them where they are read once."""
    return [draw(case, device) for _ in range(cold(case.read_bytes) if case.reads and device.type == "cuda" else 1)]
