"""What the equations of `cost` need to know of a region: counts and widths, and how many tiles a mask leaves.

tiles  = sum over query tiles of ceil(last key reached / BLOCK_N) - floor(first key reached / BLOCK_N)
tested = the part of them in which some pair still needs its mask
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fusecomp.errors import PlanError
from fusecomp.ir.algebra import draws
from fusecomp.ir.expr import Apply, Const, Expr, Load, Score, Size, Var, parts, variables
from fusecomp.ir.ranges import Bound, Reach, reach
from fusecomp.ir.region import Access, AttentionRegion, extent
from fusecomp.planning.chunks import chunks

WIDTH = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
"""Bytes of one element; every other dtype has one."""


@dataclass(frozen=True)
class Facts:
    """Constants of a region, whatever its lengths. Bytes, and operations for one element of the scores."""

    d_chunks: tuple[tuple[int, ...], ...]
    dv_chunks: tuple[int, ...]
    d: int
    dv: int
    dtype: str
    """Of the first product's operands."""
    precision: str
    width: int
    """Of the widest operand of the products."""
    held: int
    """Of the wider of K and V, as they lie in memory."""
    q_row: int
    """Of one row of Q, of all products; k_row and v_row likewise, o_row of one row of the output."""
    k_row: int
    v_row: int
    o_row: int
    fma: int
    sfu: int
    test_fma: int
    """Of the mask, on the tiles that need it."""
    draws: int
    """Random words of one pair."""
    loads: tuple[Load, ...]
    """Tensors read at every (q_idx, kv_idx): biases, masks."""
    passes: int
    """Kernels over the M x N scores that eager runs besides the two products and the softmax."""
    group: int
    """Query heads of one key head."""
    packs: bool
    """Whether the heads of a group may share a tile: K and V are read at h // group, or without h."""
    looked_up: int
    """Reads of K and V at places that are loaded for each key: numbers of pages."""
    describable: bool
    """Whether the products take K and V as they are held: in 16 bits, in rows of whole 16 bytes."""
    reach: Reach

    @property
    def wide(self) -> int:
        """D as Triton holds it, summed over the products."""
        return sum(map(sum, self.d_chunks))

    @property
    def wide_v(self) -> int:
        return sum(self.dv_chunks)

    @property
    def load_width(self) -> int:
        """Bytes read for one element of the scores."""
        return sum(WIDTH.get(x.dtype, 1) for x in self.loads)


@lru_cache(maxsize=512)
def facts(region: AttentionRegion) -> Facts:
    """The facts of a region."""
    products = region.products
    fma, sfu = element_work([region.score, region.weight], region)
    live = [region.score, region.weight, *region.keep]
    loads = {x for e in live for x in parts(e) if isinstance(x, Load) and _on_pairs(x, region)}
    return Facts(
        d_chunks=tuple(chunks(extent(p.d)) for p in products),
        dv_chunks=chunks(extent(region.dv)),
        d=region.head_size,
        dv=extent(region.dv),
        dtype=products[0].dtype,
        precision=region.precision,
        width=max(WIDTH.get(region.operand(a.operand).dtype, 1) for p in products for a in (p.q, p.k, region.v)),
        held=max(WIDTH.get(region.operand(a.operand).dtype, 1) for p in products for a in (p.k, region.v)),
        q_row=sum(_row(region, p.q, extent(p.d)) for p in products),
        k_row=sum(_row(region, p.k, extent(p.d)) for p in products),
        v_row=_row(region, region.v, extent(region.dv)),
        o_row=extent(region.dv) * WIDTH.get(region.out_dtype, 1),
        fma=fma,
        sfu=sfu,
        test_fma=element_work(region.keep, region)[0],
        draws=len(draws(region.weight)),
        loads=tuple(sorted(loads, key=str)),
        passes=_eager_passes(region),
        group=region.group,
        packs=region.group > 1 and _only_through_group(region),
        looked_up=sum(_looked_up(a, region) for a in (*(p.k for p in products), region.v)),
        describable=_describable(region),
        reach=reach(region.keep, region.q_idx.name, region.kv_idx.name),
    )


def _row(region: AttentionRegion, access: Access, length: int) -> int:
    return length * WIDTH.get(region.operand(access.operand).dtype, 1)


def _describable(region: AttentionRegion) -> bool:
    held = [*((p.k, p.dtype, p.d) for p in region.products), (region.v, region.pv_dtype, region.dv)]
    return all(
        region.operand(a.operand).dtype == dtype and WIDTH.get(dtype) == 2 and 2 * extent(d) % 16 == 0
        for a, dtype, d in held
    )


def _looked_up(a: Access, region: AttentionRegion) -> bool:
    loads = (x for e in a.index for x in parts(e) if isinstance(x, Load))
    return any(region.kv_idx.name in variables(x) for x in loads)


def _on_pairs(e: Expr, region: AttentionRegion) -> bool:
    """Whether `e` differs from pair to pair: it holds a score, or both indices."""
    names = variables(e)
    return {region.q_idx.name, region.kv_idx.name} <= names or any(isinstance(x, Score) for x in parts(e))


def element_work(expressions: Iterable[Expr], region: AttentionRegion) -> tuple[int, int]:
    """(FMA slots, special-function slots) of one pair. What depends on one index alone is hoisted: it costs nothing."""
    ops = {x for e in expressions for x in parts(e) if isinstance(x, Apply) and _on_pairs(x, region)}
    work = [_work(x) for x in ops]
    return sum(f for f, _ in work), sum(s for _, s in work)


def _work(e: Apply) -> tuple[int, int]:
    """A row of the primitives; score * constant folds into the exponent, and x / constant is a multiplication."""
    match e:
        case Apply("mul", (Score(), Const())) | Apply("mul", (Const(), Score())):
            return 0, 0
        case Apply("div", (_, Const())):
            return 1, 0
    return e.primitive.fma, e.primitive.sfu


def _eager_passes(region: AttentionRegion) -> int:
    ops = {x for x in parts(region.score) if isinstance(x, Apply) and _on_pairs(x, region)}
    return len(ops) + bool(region.keep)


def _only_through_group(region: AttentionRegion) -> bool:
    """Whether K and V depend on the last batch axis only through axis // group."""
    head = region.batch[-1].name
    accesses = [*(p.k for p in region.products), region.v]
    return all(_through_group(e, head, region.group) for a in accesses for e in a.index)


def _through_group(e: Expr, head: str, group: int) -> bool:
    match e:
        case Apply("floordiv", (Var(name, _), Const(value))) if name == head:
            return bool(value == group)
        case Var(name, _):
            return name != head
    return all(_through_group(x, head, group) for x in e.args)


@dataclass(frozen=True)
class Lengths:
    """One launch: how much of a region there is."""

    heads: int
    """Query heads over the whole batch."""
    kv_heads: int
    """Key heads over the whole batch."""
    m: int
    n: int


def lengths(region: AttentionRegion, sizes: Mapping[str, int]) -> Lengths:
    """The lengths of one call."""
    counts = {v.name: _count(v, sizes) for v in (*region.batch, region.q_idx, region.kv_idx)}
    heads = math.prod(counts[v.name] for v in region.batch)
    shared = math.prod(counts[name] for name in region.kv_shared_by())
    group = region.q_per_kv()
    m, n = counts[region.q_idx.name], counts[region.kv_idx.name]
    return Lengths(heads, max(1, heads // (shared * group)), m, n)


def _count(v: Var, sizes: Mapping[str, int]) -> int:
    number = value(v.size, sizes)
    if number is None:
        missing = ", ".join(sorted(x.name for x in parts(v.size) if isinstance(x, Size) and x.name not in sizes))
        raise PlanError(f"the size of {v.name} is not known: give sizes a value for {missing or v.size}")
    if number < 1:
        raise PlanError(f"the size of {v.name} is {number}; a plan needs at least 1")
    return number


def value(e: Expr, sizes: Mapping[str, int]) -> int | None:
    """The integer `e`, or None where it holds an index or a loaded element."""
    match e:
        case Const(number):
            return int(number)
        case Size(name):
            return sizes.get(name)
        case Apply(op, args) if op in INTEGER:
            numbers = [value(x, sizes) for x in args]
            return None if None in numbers else int(INTEGER[op](*numbers))
    return None


INTEGER: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
}
ALONG: dict[str, Callable[..., np.ndarray]] = {"min": np.minimum, "max": np.maximum}
"""The same over many queries at once."""


@dataclass(frozen=True)
class Visits:
    """Tiles of keys of one head."""

    visited: int
    tested: int
    """Of them, those in which some pair still needs its mask."""
    longest: int
    """Those of the query tile that visits most."""


def visits(region: AttentionRegion, sizes: Mapping[str, int], rows: int, block_n: int) -> Visits:
    """What one head visits, for query tiles of `rows` rows."""
    spans = facts(region).reach
    at = lengths(region, sizes)
    first = np.arange(0, at.m, rows)
    last = np.minimum(first + rows, at.m) - 1
    low, low_clean = _edges(spans.lower, region, sizes, first, last, 0)
    high_clean, high = _edges(spans.upper, region, sizes, first, last, at.n)
    low, high = np.clip(low, 0, at.n), np.clip(high, 0, at.n)
    visited = np.maximum(-(-high // block_n) - low // block_n, 0)
    longest = max(1, int(visited.max()))
    if spans.loose or any(_edge(b.edge, region, sizes, first) is None for b in (*spans.lower, *spans.upper)):
        return Visits(int(visited.sum()), int(visited.sum()), longest)
    # no test: the whole tile lies between the edges of every row, and before the last key
    clean = np.maximum(np.minimum(high_clean, at.n) // block_n + (-np.maximum(low_clean, 0) // block_n), 0)
    return Visits(int(visited.sum()), int((visited - np.minimum(clean, visited)).sum()), longest)


def _edges(
    bounds: tuple[Bound, ...],
    region: AttentionRegion,
    sizes: Mapping[str, int],
    first: np.ndarray,
    last: np.ndarray,
    default: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(least, greatest) edge over each query tile, folded over the bounds: the largest lower, the smallest upper."""
    fold = np.maximum if default == 0 else np.minimum
    least = greatest = np.full_like(first, default)
    for bound in bounds:
        one, other = (_edge(bound.edge, region, sizes, rows) for rows in (first, last))
        if one is not None and other is not None:
            least, greatest = fold(least, np.minimum(one, other)), fold(greatest, np.maximum(one, other))
    return least, greatest


def _edge(e: Expr, region: AttentionRegion, sizes: Mapping[str, int], rows: np.ndarray) -> np.ndarray | int | None:
    """The edge at those queries; None where it depends on data or on the head: the run alone knows it."""
    match e:
        case Var(name) if name == region.q_idx.name:
            return rows
        case Apply(op, args) if op in INTEGER and region.q_idx.name in variables(e):
            found = [_edge(x, region, sizes, rows) for x in args]
            if any(x is None for x in found):
                return None
            return ALONG.get(op, INTEGER[op])(*found)
    return value(e, sizes)
