"""Triton's interpreter, which runs a kernel on the CPU (TRITON_INTERPRET=1), with what it lacks for attention."""

from __future__ import annotations

import os
from typing import Any


def interpreting() -> bool:
    """Whether kernels run in the interpreter rather than on a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def teach() -> None:
    """What generated kernels use and the interpreter has not."""
    teach_bfloat16()
    teach_rounding()
    teach_overlap()


def teach_overlap() -> None:
    """Kernels run one after another there: one that may start early has nothing to wait for."""
    import triton.language as tl

    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda: None


def teach_bfloat16() -> None:
    """Let `tl.dot` multiply bfloat16 numbers: the interpreter holds them as uint16 and would multiply those."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    original = builder.create_dot
    if getattr(original, "knows_bfloat16", False):
        return

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _in_float32(interpreter, a), _in_float32(interpreter, b), *rest)

    create_dot.knows_bfloat16 = True  # type: ignore[attr-defined]
    builder.create_dot = create_dot


def teach_rounding() -> None:
    """Let float32 numbers become the nearest bfloat16, as on a device: the interpreter cuts their last bits off."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    original = builder.cast_impl
    if getattr(original, "rounds", False):
        return

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        import triton.language as tl

        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return original(self, src, dst_type)
        return interpreter.TensorHandle(nearest_bfloat16(src.data), tl.bfloat16)

    cast_impl.rounds = True  # type: ignore[attr-defined]
    builder.cast_impl = cast_impl


def nearest_bfloat16(x: Any) -> Any:
    """The upper half of each float32's bits, ties to even; NaN stays NaN."""
    import numpy as np

    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _in_float32(interpreter: Any, x: Any) -> Any:
    import numpy as np
    import triton.language as tl

    if x.dtype.scalar != tl.bfloat16:
        return x
    bits = x.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
