"""Triton's interpreter, which runs a kernel on the CPU (TRITON_INTERPRET=1), with what it lacks for attention."""

from __future__ import annotations

import os
from typing import Any


def interpreting() -> bool:
    """Whether kernels run in the interpreter rather than on a GPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def teach() -> None:
    """What generated kernels use and the interpreter has not."""
    teach_products()
    teach_rounding()
    teach_truth()
    teach_overlap()
    teach_calls()


def teach_calls() -> None:
    """Let what a kernel calls find the language as the kernel's launch prepared it: the interpreter prepares it anew at
    each call, `tl.sum` and `tl.cdiv` included, which takes much of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    if getattr(original, "once", False) or not hasattr(interpreter, "_LangPatchScope"):
        return

    def patch_lang(fn: Any) -> Any:
        langs = [m for m in (tl, tl.core) if any(value is m for value in fn.__globals__.values())]
        prepared = langs and not any(tl.core.is_builtin(m.load) for m in langs)
        return interpreter._LangPatchScope() if prepared else original(fn)

    patch_lang.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_lang


def teach_overlap() -> None:
    """Kernels run one after another there: one that may start early has nothing to wait for."""
    import triton.language as tl

    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda: None


def teach_products() -> None:
    """Let `tl.dot` multiply bfloat16 numbers, which the interpreter holds as uint16 and would multiply as those; and
    let Q K^T be the transpose of K Q^T, as it is where a thread adds up one score: NumPy's order of summation differs,
    and a score of 60 that forward and backward do not agree about costs a gradient all but five digits."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    original = builder.create_dot
    if getattr(original, "multiplies", False):
        return

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = _in_float32(interpreter, a), _in_float32(interpreter, b)
        if not (a.dtype.is_floating() and a.dtype.primitive_bitwidth > 8 and b.dtype == a.dtype):
            return original(self, a, b, d, *rest)
        product = (a.data.astype(float) @ b.data.astype(float)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    create_dot.multiplies = True  # type: ignore[attr-defined]
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


def teach_truth() -> None:
    """Let what is true of one number stay a truth value where it becomes a block's: the interpreter says that it has
    the type of what was compared, and since Triton 3.9 takes no such block for a mask."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    original = builder.create_splat
    if getattr(original, "tells", False):
        return

    def create_splat(self: Any, shape: Any, x: Any) -> Any:
        import triton.language as tl

        found = original(self, shape, x)
        return interpreter.TensorHandle(found.data.astype(bool), tl.int1) if x.data.dtype == bool else found

    create_splat.tells = True  # type: ignore[attr-defined]
    builder.create_splat = create_splat


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
