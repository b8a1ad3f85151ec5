"""Operands that are held in another dtype than their product is computed in, above all in 8 bits.

    tile = round(load), by the conversions that a device has many units for
"""

from __future__ import annotations

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.printer import triton_dtype
from fusecomp.ir.expr import dtype_kind

BYTE = frozenset({"int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"})


def converted(frame: Frame, operand: str, dtype: str) -> str:
    """Rounding of an operand to the dtype that its product is computed in. Integers go by way of float32, as they do in
    hardware; Triton's interpreter turns them into no bfloat16 otherwise. So does float8 on its way to bfloat16: from
    the float16 that it becomes first, an sm_90 converts 16 numbers a cycle straight, and 64 like this."""
    held = frame.region.operand(operand).dtype
    by_float32 = dtype_kind(held) == "int" or (held in BYTE and dtype == "bfloat16")
    whole = ".to(tl.float32)" if by_float32 and dtype != "float32" else ""
    return f"{whole}.to({triton_dtype(dtype)})" if held != dtype else ""


WIDENED = [
    "# True, as the compiler finds out late: V is turned when it has 16 bits, not byte by byte before",
    "widened = tl.program_id(0) >= 0",
]


def widens(frame: Frame) -> bool:
    """Whether V is held in 8 bits. A product wants the keys of a column together, which memory has in rows: there are
    instructions for it (ldmatrix, transposed) where an element has 16 bits. Left to itself Triton turns what it loaded,
    and then converts it."""
    return frame.region.operand(frame.region.v.operand).dtype in BYTE
