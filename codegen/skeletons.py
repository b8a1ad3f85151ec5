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
«language»

«constants»


«kernels»


def launch(out, tensors, sizes«lse»):
    """Write the attention of `tensors` into `out`, which has the logical shape [«out_axes»] and any strides."""
    «launcher»


«selfcheck»
'''

PREFILL = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """A tile of queries walks the keys that it sees, under a running softmax."""
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
    «first_rows»
    for k_start in range(«full_begin», full_end, BLOCK_N):
        «full_tile»

    «edge_loop»
        «edge_tile»

    «rescue»

    «store»
'''

DECODE = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """A tile of queries walks one share of the keys; the sum is left as it is, beside its maximum."""
    «next_kernel»
    # Which share of which request; the grid has room for a few more than there are
    program = tl.program_id(0)
    share = «share»
    request, place = place_of(program, requests, units, share«range»)
    if request >= requests:
        return
    free = place % units
    split = place // units
    «program»

    «rows»
    «columns»
    «fixed»

    «query»
    «pointers»

    «state»

    # The shares of a request are equal, in whole tiles
    k_begin, k_end = «key_range»
    tiles = tl.maximum(tl.cdiv(k_end - k_begin, BLOCK_N), 1)
    shares = tl.cdiv(tiles, share)
    keys = tl.cdiv(tiles, shares) * BLOCK_N
    k_begin += split * keys
    k_end = tl.minimum(k_end, k_begin + keys)
    «full_range»
    «descriptors»
    «first_rows»
    for k_start in range(full_begin, full_end, BLOCK_N):
        «full_tile»

    «edge_loop»
        «edge_tile»

    # Unnormalised: `combine` knows which programs have the shares of a request
    part = tl.cast(program, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    inside = «stored_rows»
    tl.store(part_max_ptr + part, row_max[:, None], mask=inside)
    tl.store(part_sum_ptr + part, row_sum[:, None], mask=inside)
    «store_parts»
'''

COMBINE = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """One row: its shares, each weighted by its maximum."""
    unit = tl.program_id(0)
    row = tl.program_id(1)
    request = unit // units
    free = unit % units
    «program»
    if q_idx >= «length»:
        return
    dv = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)

    share = «share»
    first, shares = shares_of(request, requests, units, share«range»)
    «previous_kernel»
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for split in range(0, shares, SPLITS):
        splits = split + tl.arange(0, SPLITS)
        part = tl.cast(first + splits * units + free, tl.int64) * BLOCK_M + row
        part_max = tl.load(part_max_ptr + part, mask=splits < shares, other=float("-inf"))
        part_sum = tl.load(part_sum_ptr + part, mask=splits < shares, other=0.0)
        part_acc = tl.load(  # [SPLITS, COLUMNS]
            part_acc_ptr + part[:, None] * «width» + dv[None, :], mask=splits[:, None] < shares, other=0.0
        )

        new_max = tl.maximum(row_max, tl.max(part_max, axis=0))
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = «weight»
        rescale = «rescale»
        row_sum = row_sum * rescale + tl.sum(part_sum * weight, axis=0)
        row_max = new_max
        acc = acc * rescale + tl.sum(part_acc * weight[:, None], axis=0)

    «keep»
    «store»
'''

RESCUE = '''\
@triton.jit(do_not_specialize=«sizes»)
def «name»(
    «parameters»
):
    """The rows of a tile that saw no key in any share."""
    unit = tl.program_id(0)
    request = unit // units
    free = unit % units
    «program»

    «rows»
    «columns»

    # Rows that see no key, or only keys near the fill, take part in every key; there is seldom one
    place = unit * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    unseen = tl.load(maxima_ptr + place, mask=«stored_rows», other=0.0) <= «level»
    if tl.max(unseen.to(tl.int32)) == 0:
        return
    «fixed»

    «query»
    «pointers»

    «state»
    for k_start in range(0, «keys», BLOCK_N):
        «every_tile»

    «store»
'''

SCHEDULE = """\
@triton.jit
def «signature»:
    \"\"\"Keys [k_begin, k_end) that a request reads; for one request, or for many at once.\"\"\"
    «request»
    «fixed»
    «key_range»
    return k_begin, k_end


@triton.jit
def tiles_of(request, requests«range»):
    \"\"\"How many tiles of keys each request reads: at least one, and none past the last request.\"\"\"
    k_begin, k_end = «many»
    return tl.where(request < requests, tl.maximum(tl.cdiv(k_end - k_begin, BLOCK_N), 1), 0)


@triton.jit
def place_of(program, requests, units, share«range»):
    \"\"\"(request, place among its programs): it has `units` programs for each of its shares.\"\"\"
    request, first, total = 0, 0, 0
    for start in range(0, requests, REQUESTS):
        shares = tl.cdiv(tiles_of(start + tl.arange(0, REQUESTS), requests«range»), share)
        ends = total + tl.cumsum(shares * units, axis=0)
        before = ends <= program
        request += tl.sum(before.to(tl.int32), axis=0)
        first = tl.maximum(first, tl.max(tl.where(before, ends, 0), axis=0))
        total += tl.sum(shares * units, axis=0)
    return request, program - first


@triton.jit
def shares_of(request, requests, units, share«range»):
    \"\"\"(its first program, how many shares) of a request: `place_of` turned round.\"\"\"
    first, own = 0, 0
    for start in range(0, requests, REQUESTS):
        others = start + tl.arange(0, REQUESTS)
        shares = tl.cdiv(tiles_of(others, requests«range»), share)
        first += tl.sum(tl.where(others < request, shares, 0), axis=0) * units
        own += tl.sum(tl.where(others == request, shares, 0), axis=0)
    return first, own
"""

BALANCED = """\
@triton.jit
def share_of(requests, units, programs«range»):
    \"\"\"Tiles of a share, such that all the work makes about as many shares as `programs`.\"\"\"
    tiles = 0
    for start in range(0, requests, REQUESTS):
        tiles += tl.sum(tiles_of(start + tl.arange(0, REQUESTS), requests«range»), axis=0)
    return tl.maximum(tl.cdiv(tiles * units, programs), 1)
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
