"""One recognised attention, as mathematics: no FX nodes, no strides, no devices.

    score_t(b, h, q_idx, kv_idx) = sum_d  Q_t[...] K_t[...]
    S                            = score(score_0, ..., b, h, q_idx, kv_idx)      where keep holds, else the fill
    O(b, h, q_idx, dv)           = sum_kv_idx  weight * softmax_kv_idx(S, with the sink) * V[...]

A test can write a region by hand; `patterns.attention` finds it in a graph.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from fusecomp.ir.algebra import draws
from fusecomp.ir.expr import Apply, Const, Expr, Largest, Load, Score, Size, Var, parts, text


@dataclass(frozen=True)
class Operand:
    """A tensor the kernel reads. Its strides and, where they are Sizes, its lengths are known at run time."""

    name: str
    shape: tuple[Expr, ...]
    dtype: str
    """Short torch name: "bfloat16", "float32", "bool", "int64" ..."""
    label: str = field(default="", repr=False, compare=False)
    """What the program calls it, where it is an input or a parameter. Equal attentions may differ in it."""


@dataclass(frozen=True)
class Access:
    """operand[index]: which element of a tensor stands at (batch axes, q_idx or kv_idx, d)."""

    operand: str
    index: tuple[Expr, ...]

    def __str__(self) -> str:
        return _read(self, {})


@dataclass(frozen=True)
class Product:
    """score = sum over d of q * k, both rounded to `dtype` first, accumulated in float32."""

    q: Access
    k: Access
    d: Var
    dtype: str


@dataclass(frozen=True)
class AttentionRegion:
    """softmax(S) V over one graph region."""

    operands: tuple[Operand, ...]
    """Every tensor read, in the order in which the kernel takes them."""
    batch: tuple[Var, ...]
    """The axes that Q, O (and perhaps K, V) run over together, outermost first: (b, h), (b, h, g), (b,), ()."""
    q_idx: Var
    kv_idx: Var
    products: tuple[Product, ...]
    v: Access
    dv: Var
    score: Expr
    """S at live positions, in Score(t), the indices, Loads and constants. Natural exponent."""
    keep: tuple[Expr, ...] = ()
    """The conjunction that says which keys a query sees. Elsewhere S holds the fill, and the weight is 0."""
    filled_score: Expr | None = None
    """S with its finite fill, for rows that may see no key at all: those rows are softmax(filled_score) over every
    key. None where dead scores are -inf (such a row is then `empty_row`) or where every row provably sees a key."""
    fill: float = float("-inf")
    """What S holds at dead positions. See `rescue_below`."""
    subtracted: bool = False
    """Whether the weights of rows that need their fill are exp(S - L), L = log sum exp(S) as it is rounded: in a large
    fill the logarithm is lost, and each weight is 1."""
    weight: Expr = Const(1.0)
    """A factor on the probabilities, after the softmax."""
    sink: Expr | None = None
    """A logit that takes part in the normaliser but gives no value; a function of the batch axes and q_idx, or the
    row's largest score and a number."""
    lse: bool = False
    """Whether log sum exp(S), the sink included, is a result beside O. Where a query sees no key it is -inf, or that
    of `filled_score`."""
    empty_row: str = "nan"
    """"nan": a row whose scores are all -inf gives NaN, as softmax does; "zero": it gives 0; "guarded": so does a row
    with a score that is NaN or inf; "unsafe": it gives NaN, a sink or not, as its maximum is subtracted."""
    pv_dtype: str = "float32"
    """The probabilities and V are rounded to this dtype for the second product."""
    out_dtype: str = "float32"
    out_axes: tuple[str, ...] = ("b", "h", "q_idx", "dv")
    """Axis names in the order of O's dimensions."""
    out_order: tuple[int, ...] = (0, 1, 2, 3)
    """O's dimensions in the order of memory, outermost first: (0, 2, 1, 3) for [B, M, H, Dv] memory."""
    precision: str = "ieee"
    """Of float32 products: "ieee" or "tf32", torch.get_float32_matmul_precision's meaning."""
    alike: int = 1
    """Places on the last batch axis, of which every call has so many, that all read the same K and V."""
    origin: str = ""
    """The user's source line: "model.py:18"."""
    source: str = ""
    """The text of that line."""

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the run-time lengths the kernel takes, in order: the batch axes', M, N, what expressions use."""
        named = [s.name for v in (*self.batch, self.q_idx, self.kv_idx) for s in [v.size] if isinstance(s, Size)]
        used = [x.name for e in self.expressions() for x in parts(e) if isinstance(x, Size)]
        return tuple(dict.fromkeys([*named, *sorted(set(used))]))

    @property
    def rescue_below(self) -> float:
        """With a `filled_score`: a row whose largest live score is at most this, or that has none, is recomputed from
        `filled_score` over every key. In other rows a dead key's weight exp(fill - max) underflows to exactly 0."""
        return self.fill / 2

    def expressions(self) -> Iterator[Expr]:
        """Every expression of the region, accesses included."""
        for product in self.products:
            yield from product.q.index
            yield from product.k.index
        yield from self.v.index
        yield from (self.score, *self.keep, self.weight)
        yield from (e for e in (self.filled_score, self.sink) if e is not None)

    @property
    def beside(self) -> float | None:
        """c of exp(S - max S) / (c + sum exp(S - max S)), where the sink is max S + log c."""
        match self.sink:
            case Largest():
                return 1.0
            case Apply("add", (Largest(), Const(float(log)))):
                return math.exp(log)
        return None

    @property
    def grounded(self) -> bool:
        """Whether the normaliser has an entry that owes nothing to the keys: a row that sees none then gives 0."""
        return self.sink is not None and self.beside is None and self.empty_row != "unsafe"

    def operand(self, name: str) -> Operand:
        return next(o for o in self.operands if o.name == name)

    @property
    def exact(self) -> bool:
        """Whether scores come from products in float32 that are not rounded on the way."""
        return self.precision == "ieee" and all(p.dtype == "float32" for p in self.products)

    @property
    def loads(self) -> tuple[Operand, ...]:
        """The operands other than Q, K and V: biases, masks, lengths, tables, sinks."""
        held = {a.operand for p in self.products for a in (p.q, p.k)} | {self.v.operand}
        return tuple(o for o in self.operands if o.name not in held)

    @property
    def key(self) -> str:
        """A hash of what the kernel computes; where it came from does not count."""
        plain = replace(self, origin="", source="")
        optional = ("lse", "subtracted", "alike")
        said = [name for name in optional[:2] if getattr(self, name)] + [f"alike {self.alike}"] * (self.alike > 1)
        values = [getattr(plain, f.name) for f in fields(plain) if f.name not in optional]
        return hashlib.sha256(repr([*values, *said]).encode()).hexdigest()[:16]

    @property
    def head_size(self) -> int:
        """D, summed over the products."""
        return sum(extent(p.d) for p in self.products)

    def kv_shared_by(self) -> tuple[str, ...]:
        """Batch axes along which neighbouring programs read the same K and V (grouped heads): those that neither the
        keys nor the values depend on, or only through `axis // group`."""
        accesses = [*(p.k for p in self.products), self.v]
        free = [v.name for v in self.batch if not any(_mentions(a, v.name) for a in accesses)]
        return tuple(free)

    def q_per_kv(self) -> int:
        """Query heads per key head, where the keys are read at `h // group`; 1 otherwise."""
        last = self.batch[-1].name if self.batch else ""
        for e in self.products[0].k.index:
            for x in parts(e):
                match x:
                    case Apply("floordiv", (Var(name, _), Const(int(group)))) if name == last:
                        return group
        return 1

    @property
    def group(self) -> int:
        """Heads side by side on the last batch axis that read the same K and V, as far as it is known."""
        return self.alike if self.alike > 1 else self.q_per_kv()

    def __str__(self) -> str:
        return "\n".join(describe(self))


def _mentions(access: Access, name: str) -> bool:
    return any(isinstance(x, Var) and x.name == name for e in access.index for x in parts(e))


def extent(v: Var) -> int:
    """The size of an index whose size is constant, such as d."""
    if not isinstance(v.size, Const):
        raise ValueError(f"index {v.name} has run-time size {v.size}; a constant is needed here")
    return int(v.size.value)


EMPTY = {"zero": ", 0 where no key is seen", "guarded": ", 0 where softmax(S) is NaN",
         "unsafe": ", NaN where no key is seen"}  # fmt: skip


def describe(region: AttentionRegion) -> Iterator[str]:
    """The region as a person writes it, a line at a time."""
    where = f"attention at {region.origin}" if region.origin else "attention"
    head = ", ".join([f"{v.name} < {text(v.size)}" for v in (*region.batch, region.q_idx, region.kv_idx)])
    yield f"{where}   {head}, D {region.head_size}, Dv {extent(region.dv)}, {region.operands[0].dtype}"
    places = _places(region)
    yield from (f"    {name} = {text(e)}" for e, name in places.items())
    for t, p in enumerate(region.products):
        yield f"    {text(Score(t))} = sum_{p.d.name} {_read(p.q, places)} * {_read(p.k, places)}"
    yield f"    S = {text(region.score)}"
    if region.keep:
        yield f"    keep  {'  and  '.join(map(_clause, region.keep))}"
    if region.filled_score is not None:
        all_of_them = "takes exp(S - log sum exp(S)) of" if region.subtracted else "averages over"
        yield f"    elsewhere S = {region.fill!r}; a row that sees no key {all_of_them} all of them"
    if region.sink is not None:
        yield f"    sink  {text(region.sink)}"
    if region.weight != Const(1.0):
        yield f"    W = {text(region.weight)}"
    if draws(region.weight):
        yield f"    random  32 uniform bits that depend on its arguments alone (Philox-4x32-7){_shares(region.weight)}"
    weights = "softmax(S)" if region.weight == Const(1.0) else "(W * softmax(S))"
    empty = EMPTY.get(region.empty_row, "")
    yield f"    O = {weights} {_read(region.v, places)}{empty}"
    if region.lse:
        yield f"    lse = log sum exp(S){' with the sink' if region.sink is not None else ''}, beside O"


def _shares(weight: Expr) -> str:
    """The numbers that random words are compared with, as shares of all words: how much is dropped."""
    compared = [x.operands[1] for x in parts(weight) if isinstance(x, Apply) and draws(x) == [x.operands[0]]]
    numbers = dict.fromkeys(int(c.value) for c in compared if isinstance(c, Const))
    return "".join(f"; {n} = {n / 2**32:.4g} * 2^32" for n in numbers)


def _places(region: AttentionRegion) -> dict[Expr, str]:
    """Indices of Q, K and V that hold a condition, and are read more easily by a name."""
    accesses = [*(a for p in region.products for a in (p.q, p.k)), region.v]
    long = [e for a in accesses for e in a.index if any(isinstance(x, Apply) and x.op == "where" for x in parts(e))]
    return {e: f"place{i or ''}" for i, e in enumerate(dict.fromkeys(long))}


def _read(access: Access, places: Mapping[Expr, str]) -> str:
    return f"{access.operand}[{', '.join(places.get(e) or text(e) for e in access.index)}]"


def _clause(e: Expr) -> str:
    return f"({text(e)})" if isinstance(e, Apply) and e.op in ("or", "xor", "where") else text(e)


def loads_of(e: Expr) -> frozenset[str]:
    """Names of the tensors `e` reads."""
    return frozenset(x.tensor for x in parts(e) if isinstance(x, Load))
