"""Small inputs on which a file checks itself: lengths that tell the axes apart, indices that stay in range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm

from fusecomp.ir.expr import Apply, Const, Expr, Load, Size, Var, parts
from fusecomp.ir.poly import poly
from fusecomp.ir.region import AttentionRegion, Operand

QUERIES, KEYS, OTHER = 37, 53, 8


@dataclass(frozen=True)
class Sample:
    """Lengths, and for each operand the text of a random tensor."""

    sizes: Mapping[str, int]
    tensors: tuple[str, ...]


def sample(region: AttentionRegion, queries: int = QUERIES, keys: int = KEYS) -> Sample:
    """Lengths for a region's sizes, and random operands that fit them."""
    sizes = _sizes(region, queries, keys)
    return Sample(sizes, tuple(_tensor(region, o, sizes) for o in region.operands))


def _sizes(region: AttentionRegion, queries: int, keys: int) -> dict[str, int]:
    """M and N; batch axes 2, times what their index is divided by (6 heads where 3 share a key head). No more than an
    operand of constant shape has room for: a decoding step has one query."""
    found = dict.fromkeys(region.sizes, OTHER)
    for v, n in [*((v, 2 * _groups(region, v)) for v in region.batch), (region.q_idx, queries), (region.kv_idx, keys)]:
        if isinstance(v.size, Size):
            found[v.size.name] = n
    for operand, index in _accesses(region):
        for length, e in zip(region.operand(operand).shape, index, strict=True):
            if isinstance(length, Const) and not any(isinstance(x, Load) for x in parts(e)):
                _shrink(found, e, int(length.value))
    return found


def _shrink(sizes: dict[str, int], e: Expr, room: int) -> None:
    """Make the longest axis of an index shorter, until the index stays below `room`."""
    names = {x.size.name for x in parts(e) if isinstance(x, Var) and isinstance(x.size, Size)}
    while _largest(e, sizes) >= room and any(sizes[name] > 1 for name in names):
        sizes[max(names, key=sizes.__getitem__)] -= 1


def _groups(region: AttentionRegion, v: Var) -> int:
    divisors = [
        int(c.value)
        for e in region.expressions()
        for x in parts(e)
        if isinstance(x, Apply) and x.op in ("floordiv", "mod") and v in set(parts(x.operands[0]))
        for c in x.operands[1:]
        if isinstance(c, Const)
    ]
    return lcm(*divisors) if divisors else 1


def _tensor(region: AttentionRegion, o: Operand, sizes: Mapping[str, int]) -> str:
    shape = [_extent(region, o.name, dim, e, sizes) for dim, e in enumerate(o.shape)]
    size = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
    if o.dtype == "bool":
        return f"torch.rand({size}) > 0.3"
    if o.dtype.startswith(("int", "uint")):
        low, high = _values(region, o.name, sizes)
        return f"torch.randint({low}, {high}, {size}, dtype=torch.{o.dtype})"
    if o.dtype.startswith("float8"):
        return f"torch.randn({size}).to(torch.{o.dtype})"
    return f"torch.randn({size}, dtype=torch.{o.dtype})"


def _accesses(region: AttentionRegion) -> Iterator[tuple[str, tuple[Expr, ...]]]:
    for a in [*(a for p in region.products for a in (p.q, p.k)), region.v]:
        yield a.operand, a.index
    for e in region.expressions():
        yield from ((x.tensor, x.index) for x in parts(e) if isinstance(x, Load))


def _extent(region: AttentionRegion, operand: str, dim: int, length: Expr, sizes: Mapping[str, int]) -> int:
    """What an axis's own index asks for, a constant length, or what the largest index asks for."""
    indices = {index[dim] for name, index in _accesses(region) if name == operand}
    match length, *indices:
        case Const(), Var(_, Size(name)):
            return sizes[name]
        case Const(n), *_:
            return int(n)
        case Size(name), *_ if name in sizes:
            return sizes[name]
    return 1 + max((_largest(e, sizes) for e in indices), default=OTHER - 1)


def _largest(e: Expr, sizes: Mapping[str, int]) -> int:
    """An upper bound of a natural integer expression; a loaded index is below 8."""
    match e:
        case Const(value):
            return int(value)
        case Size(name):
            return sizes.get(name, OTHER)
        case Var(_, size):
            return _largest(size, sizes) - 1
        case Apply("add", (x, y)):
            return _largest(x, sizes) + _largest(y, sizes)
        case Apply("mul", (x, y)):
            return _largest(x, sizes) * _largest(y, sizes)
        case Apply("floordiv", (x, y)):
            return _largest(x, sizes) // max(1, _largest(y, sizes))
        case Apply("mod", (x, y)):
            return min(_largest(x, sizes), _largest(y, sizes) - 1)
        case Apply("sub", (x, _)) | Apply("where" | "max" | "min", (*_, x)):
            return _largest(x, sizes)
    return OTHER - 1


def _values(region: AttentionRegion, name: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """[low, high) of an integer tensor: places in another tensor where it is an index, else lengths or labels."""
    bounds = [
        _room(region, operand, dim, c, sizes)
        for operand, index in _accesses(region)
        for dim, e in enumerate(index)
        for monomial, c in poly(e).items()
        if any(isinstance(x, Load) and x.tensor == name for f in monomial for x in parts(f))
    ]
    return (0, min(bounds)) if bounds else (1, KEYS)


def _room(region: AttentionRegion, operand: str, dim: int, c: int, sizes: Mapping[str, int]) -> int:
    length = region.operand(operand).shape[dim]
    known = isinstance(length, Const) or (isinstance(length, Size) and length.name in sizes)
    return max(1, _extent(region, operand, dim, length, sizes) // max(1, c)) if known else OTHER


