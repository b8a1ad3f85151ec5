"""The kernels as pages with named holes. No skeleton holds a conditional: another loop structure is another one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fusecomp.errors import KernelError

MODULE = '''\
"""«title»

«document»
"""

import torch
import triton
import triton.language as tl

«constants»


«kernels»


def launch(out, tensors, sizes«lse»):
    """Write the attention of `tensors` into `out`, which has the logical shape [«out_axes»] and any strides."""
    «launcher»


«selfcheck»
'''

PREFILL = """\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    «program»

    «rows»
    «columns»
    «fixed»

    «query»
    «pointers»

    «state»

    «key_range»
    «full_range»
    «descriptors»
    for k_start in range(«full_begin», full_end, BLOCK_N):
        «full_tile»

    «edge_loop»
        «edge_tile»

    «rescue»

    «store»
"""

DECODE = """\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    program = tl.program_id(0)
    split = program % splits
    unit = program // splits
    «program»

    «rows»
    «columns»
    «fixed»

    «query»
    «pointers»

    «state»

    «key_range»

    # This program's share of the keys, in whole tiles
    share = tl.cdiv(tl.cdiv(k_end - k_begin, BLOCK_N), splits) * BLOCK_N
    k_begin += split * share
    k_end = tl.minimum(k_end, k_begin + share)
    «full_range»
    «descriptors»
    for k_start in range(full_begin, full_end, BLOCK_N):
        «full_tile»

    «edge_loop»
        «edge_tile»

    # Unnormalised, with what is needed to combine it with the other shares
    «part»
    tl.store(part_max_ptr + part, row_max[:, None], mask=inside)
    tl.store(part_sum_ptr + part, row_sum[:, None], mask=inside)
    «store_parts»
"""

COMBINE = """\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    «program»
    «columns»

    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    «accs»
    for first in range(0, splits, SPLITS):
        share = first + tl.arange(0, SPLITS)
        part = tl.cast(program, tl.int64) * splits + share
        part_max = tl.load(part_max_ptr + part, mask=share < splits, other=float("-inf"))
        part_sum = tl.load(part_sum_ptr + part, mask=share < splits, other=0.0)

        new_max = tl.maximum(row_max, tl.max(part_max, axis=0))
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(«part_exponent»)
        rescale = tl.exp2(«row_exponent»)
        row_sum = row_sum * rescale + tl.sum(part_sum * weight, axis=0)
        row_max = new_max
        «load_parts»

    «store»
"""


def fill(skeleton: str, holes: Mapping[str, str | Sequence[str]]) -> str:
    """`skeleton` with every hole filled. A hole alone on its line takes lines, which get its indentation."""
    used: set[str] = set()

    def line_hole(match: re.Match[str]) -> str:
        indent, name = match.groups()
        value = _hole(holes, name)
        used.add(name)
        lines = value.splitlines() if isinstance(value, str) else value
        return "".join(f"{indent}{line}\n" if line else "\n" for line in lines)

    def word_hole(match: re.Match[str]) -> str:
        used.add(match[1])
        return str(_hole(holes, match[1]))

    text = re.sub(r"^([ ]*)«(\w+)»\n", line_hole, skeleton, flags=re.MULTILINE)
    text = re.sub(r"«(\w+)»", word_hole, text)
    if unused := set(holes) - used:
        raise KernelError(f"the skeleton has no hole named {', '.join(sorted(unused))}")
    return text


def _hole(holes: Mapping[str, str | Sequence[str]], name: str) -> str | Sequence[str]:
    if name not in holes:
        raise KernelError(f"nothing fills the hole «{name}»")
    return holes[name]
