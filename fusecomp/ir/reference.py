"""What a region means, evaluated densely: the judge that every kernel is held against.

    score_t = Q_t K_t^T                                    operands as the region rounds them, products in `dtype`
    S       = score(score_0, ..., indices) where keep holds, -inf elsewhere
    P       = softmax over kv_idx of S, the sink in the normaliser; rows that need their fill: softmax(filled_score)
    O       = (weight * P) V

Rounding of whatever depends on a score is noise around this value, and is left out unless `rounded`; rounding of
anything else (a bfloat16 position, a half bias) is the same in every implementation, and is always applied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusecomp.ir.algebra import depends_on_score, swallows
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Score, Size, Var, dtype_kind, variables
from fusecomp.ir.region import Access, AttentionRegion, Product

Span: TypeAlias = "range | Tensor"
"""The positions that one index takes: a range of step 1, or a vector of any positions."""
CLAMPS = {"max": torch.clamp_min, "min": torch.clamp_max}  # by a number: at the bound the gradient is that of x

@dataclass(frozen=True)
class Env:
    """What the names in an expression stand for. Values have one dimension per axis, of size 1 where constant."""

    axes: tuple[str, ...]
    """The indices that run, outermost dimension first."""
    spans: Mapping[str, Span]
    sizes: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scores: tuple[Tensor, ...] = ()
    dtype: torch.dtype = torch.float64
    """Of every float on the way."""
    rounded: bool = False
    """Whether roundings of scores are carried out."""
    device: torch.device | str = "cpu"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self.spans[name]) for name in self.axes)

    def index(self, name: str) -> Tensor:
        """The positions of one index, along its own dimension."""
        place = self.axes.index(name)
        span = positions(self.spans[name], self.device)
        return span.view([-1 if i == place else 1 for i in range(len(self.axes))])

    def over(self, *axes: str) -> Env:
        return replace(self, axes=axes)

    def at(self, **spans: Span) -> Env:
        """The same names with some indices restricted."""
        return replace(self, spans={**self.spans, **spans})


def positions(span: Span, device: torch.device | str) -> Tensor:
    """A span as a vector of int64."""
    if isinstance(span, range):
        return torch.arange(span.start, span.stop, device=device)
    return span.to(device, torch.int64)


# ----------------------------------------------------------------------------------------------------------------
# Expressions


def evaluate_expr(e: Expr, env: Env) -> Tensor:
    """The value of `e` over the axes of `env`: a tensor that broadcasts to `env.shape`."""
    memo: dict[Expr, Tensor] = {}

    def walk(x: Expr) -> Tensor:
        if x not in memo:
            memo[x] = _value(x, env, walk)
        return memo[x]

    return walk(e)


def _value(e: Expr, env: Env, walk: Callable[[Expr], Tensor]) -> Tensor:
    match e:
        case Const(value):
            return torch.tensor(value, dtype=env.dtype if isinstance(value, float) else None, device=env.device)
        case Size(name):
            return torch.tensor(env.sizes[name], device=env.device)
        case Var(name, _):
            return env.index(name)
        case Score(term):
            return env.scores[term]
        case Load(tensor, index, _):
            return _working(read(env.tensors[tensor], index, env, walk), env)
        case Cast(x, dtype):
            return _cast(walk(x), dtype, env.rounded or not depends_on_score(x) or swallows(e), env)
        case Apply(op, operands):
            f = (CLAMPS.get(op) if isinstance(operands[-1], Const) else None) or e.primitive.evaluate
            return f(*_promoted(op, e.primitive.kind, [walk(x) for x in operands], env))
    raise TypeError(f"not a scalar at one position: {e}")


def _working(x: Tensor, env: Env) -> Tensor:
    """Floats in the working dtype, integers in 64 bits."""
    held = torch.bool if x.dtype == torch.bool else torch.int64
    return x.to(env.dtype if x.dtype.is_floating_point else held)


def _cast(x: Tensor, dtype: str, rounding: bool, env: Env) -> Tensor:
    if dtype_kind(dtype) != "float" or (rounding and x.dtype != getattr(torch, dtype)):
        x = x.to(getattr(torch, dtype))
    return x.to(env.dtype) if dtype_kind(dtype) == "float" else _working(x, env)


def _promoted(op: str, kind: str, args: list[Tensor], env: Env) -> list[Tensor]:
    """Arguments in one kind: floats in the working dtype as soon as one of them, or the result, is a float."""
    first = 1 if op == "where" else 0
    if kind == "float" or any(x.dtype.is_floating_point for x in args[first:]):
        args[first:] = [x.to(env.dtype) for x in args[first:]]
    return args


def read(tensor: Tensor, index: Sequence[Expr], env: Env, walk: Callable[[Expr], Tensor] | None = None) -> Tensor:
    """tensor[index] over the axes of `env`: a view where no coordinate mixes indices or skips positions.

    Coordinates outside the tensor are moved to its edge: they stand where a `where` or the mask discards the value.
    """
    n, walk = len(env.axes), walk or (lambda e: evaluate_expr(e, env))
    if tensor.numel() == 0 and all(env.shape):
        return tensor.new_zeros([1] * n)
    uses = Counter(name for e in index for name in variables(e))
    joint = [place for place, e in enumerate(index) if len(variables(e)) > 1 or any(uses[x] > 1 for x in variables(e))]
    single = {place: _line(e, env, walk) for place, e in enumerate(index) if place not in joint}
    for place, (_, span) in single.items():
        tensor = _along(tensor, place, span) if isinstance(span, range) else tensor
    tensor = tensor.permute([*joint, *single])
    tensor = tensor[_together([walk(index[j]) for j in joint], tensor.shape, n) if joint else (None,) * n]
    for place, (_, span) in enumerate(single.values(), n):  # repeats come last
        tensor = tensor if isinstance(span, range) else _along(tensor, place, span)
    owner = {name: n + i for i, (name, _) in enumerate(single.values()) if name}
    order = [owner.get(name, i) for i, name in enumerate(env.axes)]
    spare = [i for i in range(tensor.ndim) if i not in order]  # all of size 1
    return tensor.permute([*order, *spare])[(..., *(0,) * len(spare))]


def _line(e: Expr, env: Env, walk: Callable[[Expr], Tensor]) -> tuple[str, Span]:
    """(index, positions) of a coordinate that one index decides; ("", the place) where it is the same everywhere."""
    if isinstance(e, Var):
        return e.name, env.spans[e.name]
    name, at = "".join(variables(e)), walk(e).flatten().to(torch.int64)
    first, steps = int(at[0]) if len(at) else 0, at.diff()
    if len(at) and not steps.any():
        return "", range(first, first + 1)
    return name, range(first, first + len(at)) if (steps == 1).all() else at


def _along(x: Tensor, place: int, span: Span) -> Tensor:
    """x at the positions of `span` in one dimension."""
    if isinstance(span, range) and span.start >= 0 and span.stop <= x.shape[place]:
        return x.narrow(place, span.start, len(span))
    return x.index_select(place, positions(span, x.device).clamp(0, x.shape[place] - 1))


def _together(coordinates: list[Tensor], shape: Sequence[int], n: int) -> tuple[Tensor, ...]:
    """Coordinates of the leading dimensions, each with n dimensions, inside the tensor."""
    padded = [c.reshape((1,) * (n - c.ndim) + c.shape) for c in coordinates]
    return tuple(c.to(torch.int64).clamp(0, size - 1) for c, size in zip(padded, shape, strict=False))


# ----------------------------------------------------------------------------------------------------------------
# Regions


def bind(
    region: AttentionRegion,
    tensors: Sequence[Tensor],
    sizes: Mapping[str, int] | Sequence[int],
    dtype: torch.dtype = torch.float64,
    rows: slice | Tensor | None = None,
    rounded: bool = False,
) -> Env:
    """The region's names bound to tensors (in the order of its operands) and lengths, every index over its range."""
    lengths = dict(sizes) if isinstance(sizes, Mapping) else dict(zip(region.sizes, sizes, strict=True))
    named = {o.name: x for o, x in zip(region.operands, tensors, strict=True)}
    env = Env((), {}, lengths, named, (), dtype, rounded, tensors[0].device)
    running = (*region.batch, region.q_idx, region.kv_idx, *(p.d for p in region.products), region.dv)
    spans: dict[str, Span] = {v.name: range(int(evaluate_expr(v.size, env))) for v in running}
    spans[region.q_idx.name] = _rows(rows, len(spans[region.q_idx.name]))
    return replace(env, spans=spans, axes=logit_axes(region))


def logit_axes(region: AttentionRegion) -> tuple[str, ...]:
    """The dimensions of S: the batch axes, q_idx, kv_idx."""
    return (*(v.name for v in region.batch), region.q_idx.name, region.kv_idx.name)


def _rows(rows: slice | Tensor | None, m: int) -> Span:
    if not isinstance(rows, slice):
        return range(m) if rows is None else rows
    chosen = range(*rows.indices(m))
    return chosen if chosen.step == 1 else torch.tensor(list(chosen), dtype=torch.int64, device="cpu")


def evaluate(
    region: AttentionRegion,
    tensors: Sequence[Tensor],
    sizes: Mapping[str, int] | Sequence[int],
    dtype: torch.dtype = torch.float64,
    rows: slice | Tensor | None = None,
    *,
    rounded: bool = False,
    out_dtype: torch.dtype | None = None,
    batch: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """O in the order of region.out_axes, for all query rows or for `rows` only, and for some positions of `batch` axes.

    `tensors` follow region.operands, `sizes` region.sizes. The work is done in `dtype`, and so is the result unless
    `out_dtype` asks for another (the kernel's is region.out_dtype). Holds S whole: B * H * rows * N elements.
    """
    env = bind(region, tensors, sizes, dtype, rows, rounded).at(**(batch or {}))
    axes = [*(v.name for v in region.batch), region.q_idx.name, region.dv.name]
    return attend(region, env).permute([axes.index(name) for name in region.out_axes]).to(out_dtype or dtype)


def attend(region: AttentionRegion, env: Env) -> Tensor:
    """O over (batch axes, q_idx, dv), for the rows and keys that `env` spans."""
    env = replace(env, scores=tuple(product_scores(region, p, env) for p in region.products))
    weights, reads = weigh(region, env)
    v = operand(region, region.v, region.pv_dtype, env.over(*env.axes[:-2], env.axes[-1], region.dv.name))
    if reads is not None:  # a key that no row sees is not read: its value may be anything
        v = torch.where(reads.any(-2).unsqueeze(-1), v, 0.0)
    v = v.expand(*v.shape[:-2], weights.shape[-1], -1)  # values may be the same for all keys
    return (weights @ v).expand(*env.shape[:-1], v.shape[-1])


def product_scores(region: AttentionRegion, product: Product, env: Env) -> Tensor:
    """Q K^T over (batch axes, q_idx, kv_idx), of size 1 along batch axes that neither depends on."""
    *batch, row, key = env.axes
    q = operand(region, product.q, product.dtype, env.over(*batch, row, product.d.name))
    return q @ operand(region, product.k, product.dtype, env.over(*batch, key, product.d.name)).mT


def operand(region: AttentionRegion, access: Access, dtype: str, env: Env) -> Tensor:
    """A factor of a product, rounded to `dtype` where it was held in another, in the working dtype."""
    x = read(env.tensors[access.operand], access.index, env)
    return (x if region.operand(access.operand).dtype == dtype else x.to(getattr(torch, dtype))).to(env.dtype)


def weigh(region: AttentionRegion, env: Env) -> tuple[Tensor, Tensor | None]:
    """(the factors of V, which (row, key) pairs take part or None for all), over (batch axes, q_idx, kv_idx)."""
    logits, reads = masked_logits(region, env)
    p = softmax(region, logits, env)
    if region.weight != Const(1.0):
        p = p * evaluate_expr(region.weight, env)
    return (_cast(p, region.pv_dtype, True, env) if env.rounded else p), reads


def masked_logits(region: AttentionRegion, env: Env) -> tuple[Tensor, Tensor | None]:
    """S, and which of its entries take part: the kept ones, and all of a row that needs its fill."""
    logits = evaluate_expr(region.score, env).expand(env.shape)
    live = kept(region, env)
    if live is None:
        return logits, None
    logits = torch.where(live, logits, -math.inf)
    if region.filled_score is None:
        return logits, live
    needs = logits.amax(-1, keepdim=True) <= region.rescue_below
    return torch.where(needs, evaluate_expr(region.filled_score, env), logits), live | needs


def kept(region: AttentionRegion, env: Env) -> Tensor | None:
    """The conjunction of the mask's terms, or None where every query sees every key."""
    live: Any = None
    for value in (evaluate_expr(term, env) for term in region.keep):
        live = value if live is None else live & value
    return live


def softmax(region: AttentionRegion, logits: Tensor, env: Env, out: Tensor | None = None) -> Tensor:
    """softmax over the last axis without the sink's share; empty rows as the region says. `out`: memory to use."""
    if region.subtracted and region.sink is None:
        return (logits - torch.logsumexp(logits, -1, keepdim=True)).exp()
    empty = (logits == -math.inf).all(-1, keepdim=True) if region.empty_row != "nan" else None
    logits = logits if empty is None else logits.masked_fill(empty, 0.0)
    logits, out = (torch.cat([logits, sinks(region, logits, env)], -1), None) if region.sink else (logits, out)
    p = torch.softmax(logits, -1, out=out)[..., : env.shape[-1]]
    rest = math.nan if region.empty_row == "unsafe" else 0.0
    return p if empty is None else p.masked_fill(empty | p.isnan() if region.empty_row == "guarded" else empty, rest)


def sinks(region: AttentionRegion, logits: Tensor, env: Env) -> Tensor:
    """The sink of each row, as one more column of its logits."""
    if region.beside is not None:
        return logits.detach().amax(-1, keepdim=True) + math.log(region.beside)
    return evaluate_expr(region.sink, env).to(env.dtype).expand(*logits.shape[:-1], 1)  # type: ignore[arg-type]
