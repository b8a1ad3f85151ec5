"""Random operands for a region: normal numbers, plausible integers, real strides, no zeros."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusecomp.ir.expr import Expr, Load, kind, parts
from fusecomp.ir.reference import bind, evaluate_expr
from fusecomp.ir.region import AttentionRegion
from fusecomp.running.subgraph import concrete

Example = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""(shape, strides, dtype) of one operand."""


def example_of(fake: Tensor) -> Example:
    """Shape, strides and dtype of a fake tensor, symbolic lengths at the size they were seen with."""
    return tuple(concrete(s) for s in fake.shape), tuple(concrete(s) for s in fake.stride()), fake.dtype


def draw(
    region: AttentionRegion, examples: Sequence[Example], sizes: Mapping[str, int], device: torch.device, seed: int = 0
) -> list[Tensor]:
    """One random tensor per operand. Integers that index a tensor stay inside it; others reach from 0 to N."""
    generator = torch.Generator(device=device).manual_seed(seed)
    reach = max([*sizes.values(), 2]) + 1
    tensors = [_draw(e, reach, generator, device) for e in examples]
    while reach > 1 and not inside(region, tensors, sizes):
        reach = (reach + 1) // 2
        tensors = [t if t.is_floating_point() else _draw(e, reach, generator, device) for t, e in zip(tensors, examples, strict=True)]
    return tensors


def _draw(example: Example, reach: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """A tensor of the example's strides; expanded axes share memory as they do in the model."""
    shape, strides, dtype = example
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    return torch.as_strided(_fill(span, dtype, reach, generator, device), shape, strides)


def _fill(span: int, dtype: torch.dtype, reach: int, generator: torch.Generator, device: torch.device) -> Tensor:
    options: Any = {"generator": generator, "device": device}
    if dtype == torch.bool:
        return torch.rand(span, **options) < 0.8
    if dtype.is_floating_point:
        return torch.randn(span, **options).to(dtype)
    return torch.randint(0, reach, (span,), **options).to(dtype)


def inside(region: AttentionRegion, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> bool:
    """Whether every index that is read out of a tensor lies inside the tensor that it indexes."""
    env = bind(region, tensors, sizes, torch.float64)
    by_name = {o.name: t for o, t in zip(region.operands, tensors, strict=True)}
    for name, place, coordinate in coordinates(region):
        if any(isinstance(x, Load) for x in parts(coordinate)) and kind(coordinate) == "int":
            at = evaluate_expr(coordinate, env)
            if int(at.min()) < 0 or int(at.max()) >= by_name[name].shape[place]:
                return False
    return True


def coordinates(region: AttentionRegion) -> Iterator[tuple[str, int, Expr]]:
    """(tensor, axis, coordinate) of every read."""
    for access in [region.v, *(a for p in region.products for a in (p.q, p.k))]:
        yield from ((access.operand, i, c) for i, c in enumerate(access.index))
    for e in region.expressions():
        for load in parts(e):
            if isinstance(load, Load):
                yield from ((load.tensor, i, c) for i, c in enumerate(load.index))
