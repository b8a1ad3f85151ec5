"""Scalar expressions as Triton text, with only the parentheses that precedence asks for; or as PyTorch text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusecomp.errors import KernelError
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Score, Size, Var, dtype_kind, kind, parts, variables
from fusecomp.ir.poly import Monomial, poly
from fusecomp.ir.primitives import ATOM, COMPARE, PLUS, TIMES, UNARY

BIT_AND, BIT_XOR, BIT_OR, TEST = 5, 6, 7, 8
"""Where Python puts `&`, `^`, `|` and the comparisons: looser than `+`, and the comparisons loosest."""

LEVEL = {"and": BIT_AND, "xor": BIT_XOR, "or": BIT_OR, "not": UNARY, "where": ATOM, "tanh": PLUS, "isnan": TEST}
TEMPLATES = {"tanh": "2.0 * tl.sigmoid(2.0 * {0}) - 1.0", "isnan": "{0} != {0}"}
"""Triton texts without the parentheses that the table's, which know no context, need."""
HALF = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""What is computed with in float32."""
NARROW = ("int8", "uint8", "int16")
"""What is computed with in int32: the algebra says where such a number wraps around."""
FLOAT_MAX = 3.4028234663852886e38

DTYPES = {
    "bool": "tl.int1", "float8_e4m3fn": "tl.float8e4nv", "float8_e5m2": "tl.float8e5", "uint8": "tl.uint8",
    **{name: f"tl.{name}" for name in ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64")},
}  # fmt: skip


@dataclass(frozen=True)
class Names:
    """What an expression's parts are called in the kernel."""

    values: Mapping[Expr, str] = field(default_factory=dict)
    floats: Mapping[Expr, str] = field(default_factory=dict)
    """Indices that the kernel also holds as float32: in float arithmetic they save a conversion per element."""

    torch: bool = False
    """Whether the text is PyTorch rather than Triton."""
    hardware: bool = False
    """Whether functions are the device's own instructions, where it has them."""

    def having(self, values: Mapping[Expr, str]) -> Names:
        return replace(self, values={**self.values, **values})


def triton_dtype(dtype: str) -> str:
    """"bfloat16" -> "tl.bfloat16"."""
    if dtype not in DTYPES:
        raise KernelError(f"no kernel reads or computes in {dtype}; leave this attention to eager, or cast it")
    return DTYPES[dtype]


def triton_text(e: Expr, names: Names) -> str:
    """`e` as text in the names' language."""
    return show(e, names)[0]


def show(e: Expr, names: Names) -> tuple[str, int]:
    """(text, precedence level) of `e`."""
    if e in names.values:
        return names.values[e], _level_of_name(names.values[e])
    match e:
        case Const(value):
            return literal(value), UNARY if str(value).startswith("-") and value != -math.inf else ATOM
        case Var(name, _) | Size(name):
            return name, ATOM
        case Cast(x, dtype):
            return _cast(x, dtype, names), ATOM
        case Apply():
            return _apply(e, names)
        case Load(tensor, index, dtype) if names.torch:
            body = f"{tensor}[{', '.join(triton_text(x, names) for x in index)}]" if index else tensor
            return body + (".float()" if dtype_kind(dtype) == "float" and dtype != "float64" else ""), ATOM
        case Score() | Load():
            raise KernelError(f"{e} has no value at this place of the kernel")
    raise KernelError(f"{e} cannot be computed inside a kernel")


def atom(body: str) -> str:
    """A text to be multiplied, divided or called on: in parentheses if it is more than a name or a number."""
    return body if body.isidentifier() or body.isdigit() else f"({body})"


def _level_of_name(name: str) -> int:
    return ATOM if name.isidentifier() or name.endswith((")", "]")) else PLUS


def literal(value: bool | int | float) -> str:
    """A constant; finite floats are kept inside float32, since Triton would compute in float64 beyond it."""
    if isinstance(value, bool | int):
        return str(value)
    if math.isinf(value) or math.isnan(value):
        return f'float("{value}")'
    return repr(max(-FLOAT_MAX, min(FLOAT_MAX, value)))


def _apply(e: Apply, names: Names) -> tuple[str, int]:
    primitive = e.primitive
    own = primitive.hardware if names.hardware else ""
    template = (primitive.torch_text if names.torch else own or TEMPLATES.get(e.op, primitive.triton)) or primitive.text
    level = TEST if primitive.level == COMPARE else LEVEL.get(e.op, primitive.level)
    if (names.torch or own) and template.endswith(")"):
        level = ATOM
    float_wanted = any(kind(x) == "float" for x in e.operands) or (primitive.kind == "float")
    shown = [_operand(x, place, e, level, names, float_wanted) for place, x in enumerate(e.operands)]
    return template.format(*shown), level


def _operand(x: Expr, place: int, parent: Apply, level: int, names: Names, float_wanted: bool) -> str:
    body, inner = as_float(x, names) if float_wanted and kind(x) == "int" else show(x, names)
    if isinstance(x, Load) and x.dtype in NARROW and not _compared_as_it_is(parent):
        body, inner = f"{body}.to({'torch.int32' if names.torch else 'tl.int32'})", ATOM
    if names.torch and parent.op in ("max", "min") and not any(isinstance(y, Var | Load | Score) for y in parts(x)):
        return f"torch.tensor({body})"
    if not names.torch and parent.primitive.sfu and parent.op != "div" and kind(x) != "float":
        body, inner = f"({body}).to(tl.float32)" if inner else f"{body}.to(tl.float32)", ATOM
    factor = parent.op == "tanh" and not names.torch and not names.hardware
    inside = TIMES if factor else level
    loose = inner > inside or (inner == inside and (place > 0 or level == TEST or factor))
    return f"({body})" if loose and inside != ATOM else body


def _compared_as_it_is(e: Apply) -> bool:
    """Whether small integers are compared with such, or with a number that is one."""
    return e.primitive.level == COMPARE and all(
        (isinstance(x, Load) and x.dtype in NARROW) or (isinstance(x, Const) and 0 <= x.value < 128) for x in e.operands
    )


def as_float(x: Expr, names: Names) -> tuple[str, int]:
    """An integer expression inside float arithmetic: sums of indices are taken from their float32 copies."""
    known = {v.name for v in names.floats if isinstance(v, Var)}
    if not (variables(x) & known) or (x in names.values and x not in names.floats) or not _is_sum(x):
        return show(x, names)
    return show(x, names.having(names.floats))


def _is_sum(x: Expr) -> bool:
    """Whether float32 holds all steps of a sum of indices, up to a million of them: products of two it may round."""
    return all(isinstance(f, Var | Size) for m in poly(x) for f in m) and all(map(_held_in_float32, poly(x).items()))


def _held_in_float32(term: tuple[Monomial, int]) -> bool:
    monomial, c = term
    return len(monomial) < 2 and abs(c) <= (2**4 if monomial else 2**24)


def _cast(x: Expr, dtype: str, names: Names) -> str:
    """Rounding to `dtype`; what is rounded to half precision is then kept in float32."""
    whole = kind(x) == "int"
    exact = whole and dtype == "float32"
    plain = show(x, names)
    body, level = as_float(x, names) if whole and dtype_kind(dtype) == "float" else plain
    if dtype == "bool":
        return f"({body} != 0)"
    through = ".to(tl.float32)" if whole and dtype in HALF and (body, level) == plain else ""
    if isinstance(x, Size) and dtype == "int64":  # a number, or a constant of the kernel's, which has no methods
        return body if names.torch else f"tl.cast({body}, tl.int64)"
    body = body if level == ATOM else f"({body})"
    if exact and variables(x) & {v.name for v in names.floats if isinstance(v, Var)} and _is_sum(x):
        return body
    if names.torch:
        return f"{body}.to(torch.{dtype}){'.float()' if dtype in HALF else ''}"
    return f"{body}{through}.to({triton_dtype(dtype)}){'.to(tl.float32)' if dtype in HALF else ''}"
