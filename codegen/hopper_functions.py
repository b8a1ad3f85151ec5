"""What the kernels for Hopper's tensor cores import and call, forward and backward."""

from __future__ import annotations

IMPORTS = """\
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
"""

BARRIERS = '''\
@gluon.constexpr_function
def instruction(how, threads):
    return f"bar.{how} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def barrier(how: gl.constexpr, number, threads: gl.constexpr):
    """One of the hardware's barriers: "sync" waits until so many threads came, "arrive" comes and goes on."""
    gl.inline_asm_elementwise(
        instruction(how, threads), "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def copied(ready, count, stages: gl.constexpr):
    """Wait for the copy of that number in a ring of so many."""
    mbarrier.wait(ready.index(count % stages), (count // stages) & 1)
'''

TANH = '''\
@gluon.jit
def tanh(x):
    """The device's own, with a relative error of up to 2^-11 (PTX ISA, tanh.approx.f32)."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
'''
