"""The kernels as pages with named holes. A skeleton holds no conditional: another loop structure is another skeleton."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fusecomp.errors import KernelError

MODULE = '''\
"""
«document»
"""

import torch
import triton
import triton.language as tl

«constants»


«kernels»


def launch(out, tensors, sizes):
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
    for k_start in range(«full_begin», full_end, BLOCK_N):
        «full_tile»

    «edge_loop»
        «edge_tile»

    «rescue»

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
