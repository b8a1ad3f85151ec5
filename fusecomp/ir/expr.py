"""Scalar expressions: what one element of a tensor is, as a function of where it stands.

    Expr ::= Const(value)                     a number or a truth value
           | Var(name, size)                  an index, 0 <= Var < size: b, h, q_idx, kv_idx, d ...
           | Size(name)                       a length known at run time: M, N, ...
           | Score(term)                      one element of Q K^T, the products numbered from 0
           | Largest()                        the largest S of the row; in a sink alone
           | Load(tensor, index, dtype)       one element of a tensor
           | Apply(op, args)                  a primitive of `primitives.PRIMITIVES`
           | Cast(x, dtype)                   rounding to another dtype
           | Reduce(op, var, body)            max, sum or any over one index; only while recognising

Everything is frozen, hashable and free of FX nodes, so that a test can write any of it by hand. Build arithmetic
through `algebra`, which folds constants and normalises index arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fusecomp.ir.primitives import ATOM, PRIMITIVES, Primitive


@dataclass(frozen=True, eq=False)
class Expr:
    """A scalar. Equality is structural; the hash is computed once, since expressions share their parts."""

    def __post_init__(self) -> None:
        names: tuple[str, ...] = self.__match_args__  # fields(self), sooner
        key = (type(self), *(_exact(getattr(self, name)) for name in names))
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Expr) and hash(self) == hash(other) and self._key == other._key  # type: ignore[attr-defined,no-any-return]

    def __str__(self) -> str:
        return text(self)

    @property
    def args(self) -> tuple[Expr, ...]:
        """The expressions directly inside this one."""
        return ()


def _exact(value: object) -> object:
    """Tell 1, 1.0 and True apart, which Python holds equal; 0.0 and -0.0 too; NaN equals itself."""
    return (type(value).__name__, repr(value)) if isinstance(value, bool | int | float) else value


@dataclass(frozen=True, eq=False)
class Const(Expr):
    value: bool | int | float


@dataclass(frozen=True, eq=False)
class Size(Expr):
    """A length known at run time, always a natural number."""

    name: str


@dataclass(frozen=True, eq=False)
class Var(Expr):
    """An index, 0 <= Var < size."""

    name: str
    size: Expr


@dataclass(frozen=True, eq=False)
class Score(Expr):
    """One element of the product Q K^T; `term` counts products where the score sums several."""

    term: int = 0


@dataclass(frozen=True, eq=False)
class Largest(Expr):
    """max S over the keys that the query sees, as a number that no gradient flows through."""


@dataclass(frozen=True, eq=False)
class Load(Expr):
    """tensor[index]. `dtype` is a torch dtype's short name: "float32", "bool", "int64"."""

    tensor: str
    index: tuple[Expr, ...]
    dtype: str

    @property
    def args(self) -> tuple[Expr, ...]:
        return self.index


@dataclass(frozen=True, eq=False)
class Apply(Expr):
    """op(*operands), op a key of PRIMITIVES."""

    op: str
    operands: tuple[Expr, ...]

    @property
    def args(self) -> tuple[Expr, ...]:
        return self.operands

    @property
    def primitive(self) -> Primitive:
        return PRIMITIVES[self.op]


@dataclass(frozen=True, eq=False)
class Cast(Expr):
    """x rounded to `dtype` (a short torch dtype name)."""

    x: Expr
    dtype: str

    @property
    def args(self) -> tuple[Expr, ...]:
        return (self.x,)


@dataclass(frozen=True, eq=False)
class Reduce(Expr):
    """op over `var` of `body`; op is "sum", "max" or "any". `var` is bound: no other expression may use its name."""

    op: str
    var: Var
    body: Expr

    @property
    def args(self) -> tuple[Expr, ...]:
        return (self.body,)


def rebuild(e: Expr, args: tuple[Expr, ...], apply: Callable[..., Expr] | None = None) -> Expr:
    """`e` with other parts; `apply(op, *args)` rebuilds Apply nodes (default: as they are)."""
    match e:
        case Apply(op, _):
            return apply(op, *args) if apply else Apply(op, args)
        case Load(tensor, _, dtype):
            return Load(tensor, args, dtype)
        case Cast(_, dtype):
            return Cast(args[0], dtype)
        case Reduce(op, var, _):
            return Reduce(op, var, args[0])
        case _:
            return e


def transform(e: Expr, rule: Callable[[Expr], Expr | None], apply: Callable[..., Expr] | None = None) -> Expr:
    """`e` with every part for which `rule` answers replaced by the answer, outermost first."""
    memo: dict[Expr, Expr] = {}

    def walk(x: Expr) -> Expr:
        if x not in memo:
            new = rule(x)
            memo[x] = new if new is not None else rebuild(x, tuple(map(walk, x.args)), apply) if x.args else x
        return memo[x]

    return walk(e)


def parts(e: Expr) -> Iterator[Expr]:
    """Every distinct sub-expression of `e`, itself first."""
    seen: set[Expr] = set()
    stack = [e]
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            yield x
            stack.extend(x.args)


@lru_cache(maxsize=1 << 14)
def length(*es: Expr) -> int:
    """How many parts they have together, written out."""
    return sum(1 + length(*e.args) for e in es)


def variables(e: Expr) -> frozenset[str]:
    """Names of the free indices in `e`."""
    bound = {x.var.name for x in parts(e) if isinstance(x, Reduce)}
    return frozenset(x.name for x in parts(e) if isinstance(x, Var)) - bound


def kind(e: Expr) -> str:
    """"bool", "int" or "float"."""
    match e:
        case Const(value):
            return type(value).__name__
        case Var() | Size():
            return "int"
        case Load(_, _, dtype) | Cast(_, dtype):
            return dtype_kind(dtype)
        case Apply(_, args) if e.primitive.kind == "same":
            kinds = [kind(x) for x in (args[1:] if e.op == "where" else args)]
            return max(kinds, key=("bool", "int", "float").index)
        case Apply():
            return e.primitive.kind
        case Reduce("any", _, _):
            return "bool"
        case _:
            return "float"


def dtype_kind(dtype: str) -> str:
    """"bool", "int" or "float" of a short torch dtype name."""
    if dtype == "bool":
        return "bool"
    return "int" if dtype.startswith(("int", "uint")) else "float"


def text(e: Expr) -> str:
    """`e` as a person writes it, with only the parentheses that precedence needs."""
    return _text(e)[0]


def _text(e: Expr) -> tuple[str, int]:
    match e:
        case Const(value):
            return number(value), ATOM
        case Var(name, _) | Size(name):
            return name, ATOM
        case Largest():
            return "max(S)", ATOM
        case Score(term):
            return "score" if term == 0 else f"score{term}", ATOM
        case Load(tensor, index, _):
            return f"{tensor}[{', '.join(map(text, index))}]" if index else tensor, ATOM
        case Cast(x, dtype):
            return f"{dtype}({text(x)})", ATOM
        case Reduce(op, var, body):
            return f"{op}_{var.name}({text(body)})", ATOM
        case Apply():
            return fill(e.primitive.text, e.primitive.level, e.operands, _text), e.primitive.level
    raise TypeError(f"not an expression: {e!r}")


def fill(template: str, level: int, operands: tuple[Expr, ...], show: Callable[[Expr], tuple[str, int]]) -> str:
    """`template` with its operands shown, parenthesised where they bind looser (or as loose, on the right)."""
    shown = []
    for place, operand in enumerate(operands):
        body, inner = show(operand)
        loose = inner > level or (inner == level and place > 0)
        shown.append(f"({body})" if loose and level != ATOM else body)
    return template.format(*shown)


def number(value: Any) -> str:
    """A constant as Python text: at most 9 significant digits would lose exactness, so floats print in full."""
    return str(value) if isinstance(value, bool | int) else repr(float(value))
