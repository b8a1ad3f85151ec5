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

BASE_2 = '''
@gluon.jit
def base_2(row_max):
    """(a, c) with exp(x - row_max) = exp2(a x - c), one multiply-add. From 2^27 on, where the largest floats lie that
    hide keys and would overflow times log2(e), float32 has no two numbers less than 16 apart, and any a will do."""
    a = gl.where(gl.abs(row_max) < 134217728.0, LOG2E, 1.0)
    return a, a * row_max


@gluon.jit
def risen(row_max, new_max):
    """exp of their difference as the weights of either have it: c is rounded."""
    a, c = base_2(row_max)
    new_a, new_c = base_2(new_max)
    return gl.exp2(gl.where(a == new_a, c - new_c, (row_max - new_max) * LOG2E))
'''

BOUNDS = {
    name: f'''
@gluon.jit
def {name}(score, kv_idx, edge):
    """S of keys {which} an edge, else -inf. The compiler would compare ahead, and carry the answers as bits."""
    return gl.inline_asm_elementwise(
        "{{ .reg .pred p; setp.{test}.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }}",
        "=f,f,r,r", [score, kv_idx, edge], dtype=gl.float32, is_pure=True, pack=1,
    )
'''
    for name, which, test in (("until", "before", "lt"), ("since", "from", "ge"))
}

KNOWN = '''
@gluon.jit
def known(row_max):
    """Wait for the maxima here, by a store that never happens, since none is below the least float. Without it the
    assembler moves the wait for P V, which is written after, before they are taken."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0fFF7FFFFF; mov.u32 $0, 0; @p st.shared.u32 [$0], $0; }",
        "=r,f", [row_max], dtype=gl.int32, is_pure=False, pack=1,
    )
'''

WIDEN = '''
@gluon.jit
def widen(x):
    """bfloat16 as float32, two in a register at a time: Triton would take each out first."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
    )
'''

OPENED = '''
@gluon.jit
def opened(pairs):
    """Which of booleans are true, two in a word."""
    even, odd = gl.inline_asm_elementwise(
        "{ .reg .b32 w; cvt.u32.u16 w, $2; and.b32 $0, w, 0xff; and.b32 $1, w, 0xff00; }",
        "=r,=r,h", [pairs], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )
    return gl.convert_layout(gl.join(even, odd).reshape([64, BLOCK_N]), SCORES) != 0
'''

APART = '''
@gluon.jit
def apart(score):
    """The scores as they are, opaque to the compiler: it would join this branch's selection with the other's, and
    carry what either tests as bits."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [score], dtype=gl.float32, is_pure=True, pack=1)
'''

PACKED = '''
@gluon.jit
def packed(weights):
    """P rounded, two in a word."""
    even, odd = weights.reshape([64, BLOCK_N // 2, 2]).split()
    return gl.inline_asm_elementwise(
        "cvt.rn.«kind»x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpacked(words):
    """P as the tensor cores take it."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(«dtype», «dtype»), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.join(even, odd).reshape([64, BLOCK_N]), P_TILE)
'''
