"""Random operands for a region: normal numbers, plausible integers, real strides, no zeros but where a mask asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusecomp.errors import VerificationError
from fusecomp.ir import data
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Score, kind, parts, variables
from fusecomp.ir.reference import bind, evaluate_expr
from fusecomp.ir.region import AttentionRegion, loads_of
from fusecomp.running.subgraph import concrete

Example = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""(shape, strides, dtype) of one operand."""
MASKED = 0.2
"""The part of a mask that is False, and of a tensor compared with a number that is that number."""
OFF_ZERO = 0.5
FEW = range(5)
"""Of integer keys: in large ones, one score stands above all others, and a rounding may make it another's."""
HIGHEST_START = 4
"""Indices are counted from 0, or from 1; rarely does a program subtract more than a few from what it reads."""


def example_of(fake: Tensor) -> Example:
    """Shape, strides and dtype of a fake tensor, symbolic lengths at the size they were seen with."""
    return tuple(concrete(s) for s in fake.shape), tuple(concrete(s) for s in fake.stride()), fake.dtype


def draw(
    region: AttentionRegion, examples: Sequence[Example], sizes: Mapping[str, int], device: torch.device, seed: int = 0
) -> list[Tensor]:
    """One random tensor per operand. Integers reach from 0 to N, or less far where they index a tensor and would leave
    it; from 1 on where 0 does too. Raises VerificationError where no such integers are found."""
    names, most = [o.name for o in region.operands], max([*sizes.values(), 2]) + 1
    compared = dict(compared_with(region))
    quantised = {a.operand for p in region.products for a in (p.k, region.v)}
    spans = {n: FEW if n in quantised else range(most) for n in names}
    while True:
        generator = torch.Generator(device=device).manual_seed(seed)
        given = zip(names, examples, strict=True)
        tensors = [tensor(e, spans[n], compared.get(n), generator, device) for n, e in given]
        tensors = meant(region, tensors, generator)
        wild = leaving(region, tensors, sizes)
        if not wild:
            return hidden(region, tensors)
        closer = {n: nearer(spans[n], most) for n in wild if not tensors[names.index(n)].is_floating_point()}
        if not any(closer.values()):
            raise VerificationError(f"no random values of {', '.join(sorted(wild))} stay inside the tensor they index")
        spans |= {n: span for n, span in closer.items() if span}


def meant(region: AttentionRegion, tensors: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """The same, as what the region uses each for: truth values, labels, what is divided by, lengths."""
    uses: tuple[tuple[Iterator[str], Callable[[Tensor], Tensor]], ...] = (
        (complemented(region), partial(truth, generator=generator)),
        (alike(region), label),
        (divisors(region), off_zero),
        (kept_above(region), positive),
    )
    made = list(tensors)
    for found, change in uses:
        names = frozenset(found)
        made = [change(x) if o.name in names else x for o, x in zip(region.operands, made, strict=True)]
    return made


def nearer(span: range, most: int) -> range:
    """The lower half of a span; of a single number, all from the next one on. Empty where that was tried too often."""
    if len(span) > 1:
        return span[: (len(span) + 1) // 2]
    return range(span.start + 1, span.start + 1 + most) if span.start < HIGHEST_START else range(0)


def tensor(
    example: Example, span: range, often: float | None, generator: torch.Generator, device: torch.device
) -> Tensor:
    """A tensor of the example's strides, expanded axes sharing memory as in the model. `often`: a value to mix in."""
    shape, strides, dtype = example
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    flat = _fill(extent, dtype, span, generator, device)
    if often is not None and dtype != torch.bool:
        flat[torch.rand(extent, generator=generator, device=device) < MASKED] = often
    return torch.as_strided(flat, shape, strides)


def _fill(extent: int, dtype: torch.dtype, span: range, generator: torch.Generator, device: torch.device) -> Tensor:
    options: Any = {"generator": generator, "device": device}
    if dtype == torch.bool:
        return torch.rand(extent, **options) >= MASKED
    if dtype.is_floating_point:
        return torch.randn(extent, **options).to(dtype)
    return torch.randint(span.start, span.stop, (extent,), **options).to(dtype)


def elements(x: Tensor) -> Tensor:
    """The memory of a tensor, each element once, however it is expanded."""
    return x.as_strided((1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)),), (1,))


def truth(x: Tensor, generator: torch.Generator) -> Tensor:
    """0 or 1 in the place of each element of x."""
    own = elements(x)
    own.copy_(torch.rand(own.shape, generator=generator, device=x.device) >= MASKED)
    return x


def label(x: Tensor) -> Tensor:
    """Floats rounded to whole numbers."""
    if x.is_floating_point() and x.numel():
        elements(x).round_()
    return x


def off_zero(x: Tensor) -> Tensor:
    """Floats moved away from 0: a norm or a temperature is not near it, and quotients by what is have large errors."""
    own = elements(x)
    if x.is_floating_point() and own.numel():
        own += torch.where(own < 0, -OFF_ZERO, OFF_ZERO)
    return x


def positive(x: Tensor) -> Tensor:
    """Floats without their sign."""
    if x.is_floating_point():
        elements(x).abs_()
    return x


def hidden(region: AttentionRegion, tensors: list[Tensor]) -> list[Tensor]:
    """The same with whole blocks of the masks alike, so that tiles that are skipped, or read no mask, are drawn too."""
    added = {x.tensor for x in data.added(region)}
    masks = added | {x.tensor for x in data.reads(region) if x.dtype == "bool"}
    for operand, x in zip(region.operands, tensors, strict=True):
        if operand.name in masks and x.dim() > 1:
            own = x[tuple(slice(None) if step else slice(1) for step in x.stride())]
            rows, keys = (n // 2 for n in own.shape[-2:])
            own[..., :rows, :keys] = 0.0 if x.is_floating_point() else 1
            own[..., rows:, keys:] = torch.finfo(x.dtype).min if x.is_floating_point() else 0
    return tensors


def compared_with(region: AttentionRegion) -> Iterator[tuple[str, float]]:
    """(operand, number) for each test of a load for being a number: random values would never be it."""
    for e in region.expressions():
        for x in parts(e):
            match x:
                case Apply("eq" | "ne", (Load(tensor), Const(value))):
                    yield tensor, value
                case Apply("eq" | "ne", (Const(value), Load(tensor))):
                    yield tensor, value


def complemented(region: AttentionRegion) -> Iterator[str]:
    """The operands x of which 1 - x is taken: they hold truth values, and the rest is times a fill."""
    for e in region.expressions():
        for x in parts(e):
            match x:
                case Apply("sub", (Const(1 | 1.0), Load(tensor) | Cast(Load(tensor)))):
                    yield tensor


def alike(region: AttentionRegion) -> Iterator[str]:
    """The operands of which two elements are tested for being alike: they hold labels; random values never are."""
    for e in region.expressions():
        for x in parts(e):
            if isinstance(x, Apply) and x.op in ("eq", "ne"):
                reads = {y for y in parts(x) if isinstance(y, Load)}
                yield from (y.tensor for y in reads if len(reads) > 1)


def divisors(region: AttentionRegion) -> Iterator[str]:
    """The operands that something is divided by."""
    for e in region.expressions():
        for x in parts(e):
            match x:
                case Apply("div" | "rsqrt", (*_, y)):
                    yield from read_by(region, y)


def kept_above(region: AttentionRegion) -> Iterator[str]:
    """The operands that something is divided by which is kept above a small number: they hold lengths."""
    for e in region.expressions():
        for x in parts(e):
            match x:
                case Apply("div", (_, Apply("max", (y, Const(float() as c))))) if c > 0:
                    yield from read_by(region, y)


def read_by(region: AttentionRegion, e: Expr) -> Iterator[str]:
    """The operands that `e` is made of, those of products included."""
    yield from loads_of(e)
    for x in parts(e):
        if isinstance(x, Score):
            product = region.products[x.term]
            yield from (product.q.operand, product.k.operand)


def leaving(region: AttentionRegion, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> set[str]:
    """The operands that some coordinate was read from which lies outside of the tensor that it indexes."""
    env = bind(region, tensors, sizes, torch.float64)
    by_name = {o.name: t for o, t in zip(region.operands, tensors, strict=True)}
    found: set[str] = set()
    for name, place, coordinate in coordinates(region):
        if loads_of(coordinate) and kind(coordinate) == "int":
            own = env.over(*sorted(variables(coordinate)))
            at, length = evaluate_expr(coordinate, own), by_name[name].shape[place]
            if at.numel() and length and (int(at.min()) < 0 or int(at.max()) >= length):
                found |= loads_of(coordinate)
    return found


def coordinates(region: AttentionRegion) -> Iterator[tuple[str, int, Expr]]:
    """(tensor, axis, coordinate) of every read."""
    for access in [region.v, *(a for p in region.products for a in (p.q, p.k))]:
        yield from ((access.operand, i, c) for i, c in enumerate(access.index))
    for e in region.expressions():
        for load in parts(e):
            if isinstance(load, Load):
                yield from ((load.tensor, i, c) for i, c in enumerate(load.index))
