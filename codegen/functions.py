"""Functions that Triton has not: each is written into the generated file, where its kernels call it."""

from __future__ import annotations

from collections.abc import Iterable

from fusecomp.codegen import philox
from fusecomp.ir.expr import Apply, Expr, parts

IN_TRITON = {
    "random": philox.IN_TRITON,
    "asinh": '''\
@triton.jit
def asinh(x):
    """log(|x| + sqrt(x^2 + 1)) with the sign of x."""
    size = tl.log(tl.abs(x) + tl.sqrt(x * x + 1.0))
    return tl.where(x < 0.0, -size, size)
''',
    "atan": '''\
@triton.jit
def atan(x):
    """t P(t^2) for t = |x| <= 1, pi / 2 - atan(1 / |x|) above, with the sign of x. The error is below 2e-7."""
    above = tl.abs(x) > 1.0
    t = tl.where(above, 1.0 / tl.abs(x), tl.abs(x))
    z = t * t
    total = 0.0109624429 - 0.0018044901 * z
    total = 0.0580404515 + z * (-0.0312645061 + z * total)
    total = 0.1095344984 + z * (-0.0840787919 + z * total)
    total = 0.1999854227 + z * (-0.1426438979 + z * total)
    total = t * (0.9999999991 + z * (-0.3333329672 + z * total))
    total = tl.where(above, 1.5707963267948966 - total, total)
    return tl.where(x < 0.0, -total, total)
''',
}


def called(exprs: Iterable[Expr]) -> list[str]:
    """The functions that expressions need, as text."""
    names = {x.op for e in exprs for x in parts(e) if isinstance(x, Apply)}
    return [text.rstrip() for name, text in IN_TRITON.items() if name in names]
