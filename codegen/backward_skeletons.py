"""The backward kernels as pages with named holes."""

from __future__ import annotations

from collections.abc import Sequence

BACKWARD_MODULE = '''\
"""«title»

«document»
"""

import torch
import triton
import triton.language as tl
«language»

«constants»


«kernels»


def launch(grads, out, grad_out, lse, «grad_lse»tensors, sizes):
    """Write the gradients of `tensors` into `grads`, None where one is not wanted, of the tensors' shapes.

    `out` is the attention, [«out_axes»] like `grad_out`, its gradient; `lse` is what the forward kernel saved,
    [«lse_axes»], contiguous float32«grad_lse_axes».
    """
    «launcher»


«selfcheck»
'''

_ROWS = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """delta of a tile of queries: the sum of O dO along each row."""
    «program»

    «rows»
    «columns»
    «fixed»

    «output»
    «first_row»
    «delta»
'''

ROW_PRODUCTS = f"""{_ROWS}\
    «stored»
    «sinks»
"""

ROW_VALUES = f"""{_ROWS}\
    «lse»
    live = «stored»
    padded = outer * row_values_stride_1 + q_start + row
    tl.store(row_values_ptr + padded, tl.where(live, lse, float("inf")))
    tl.store(row_values_ptr + row_values_stride_0 + padded, tl.where(live, delta[:, None], 0.0))
"""

QUERY_GRADIENT = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """dQ: a tile of queries walks the keys that it sees."""
    «program»

    «rows»
    «columns»
    «fixed»

    «query»
    «values»
    «pointers»

    «accs»

    «key_range»
    «full_range»
    for k_start in range(«full_begin», full_end, BLOCK_N):
        «full_tile»

    «edge_loop»
        «edge_tile»

    «rescue»

    «store»
'''

_HEAD = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """dK and dV: a tile of keys walks the queries that see it."""
    «program»

    «columns»
    «fixed»

    «keys»

    «accs»

'''

_QUERIES = """\
    «pointers»
    «first_row»
    «sums»

    «query_range»
    for q_start in range(«full_begin», full_end, BLOCK_M):
        «full_tile»

    «edge_loop»
        «edge_tile»

    «rescue»

    «store_sums»
"""

_PAIRS = """\
    «member»
    «fixed»

    «query»
    «values»
    «pointers»

    «key_range»
    for k_start in range(«begin», «end», BLOCK_N):
        «tile»

    «rescue»

"""

_PAIRS_HEAD = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """The gradient of what S reads for each query and key: a tile of it."""
    «program»

    «rows»
    «columns»

    «sum»

'''


def nested(lines: str) -> str:
    """One level deeper."""
    return "".join("    " + line if line.strip() else line for line in lines.splitlines(keepends=True))


KEY_GRADIENTS = _HEAD + _QUERIES + "    «store»\n"

SHARED_KEY_GRADIENTS = (
    _HEAD
    + """\
    # The query heads that share the keys
    for «member_name» in range(«members»):
        «member»
        «fixed_inside»
"""
    + nested(_QUERIES)
    + "    «store»\n"
)

PIPELINED_PAIR_GRADIENT = (
    _PAIRS_HEAD
    + """\
    «bounds»
    for member in range(split, «last», splits):
        «member»
        «fixed»

        «query»
        «values»
        «pointers»

        «key_range»
        «tile»

    «store»
"""
)
"""Each member is one step of the loop, so that the tiles of the next are fetched meanwhile."""

PAIR_GRADIENT = _PAIRS_HEAD + _PAIRS + "    «store»\n"

SHARED_PAIR_GRADIENT = (
    _PAIRS_HEAD + "    for member in range(split, «members», splits):\n" + nested(_PAIRS) + "    «store»\n"
)


def spaced(parts: Sequence[str]) -> str:
    """Functions of one module."""
    return "\n\n\n".join(part.rstrip() for part in parts)
