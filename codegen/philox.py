"""Which weights of a tile a dropout keeps: a call of Philox for each row and each group of four keys.

    keeps[row, key] = Philox(key = seed, counter = (key // 4, row, batch, 0))[key % 4] >= least

Tiles begin at multiples of four, so that every tile, kernel and reference draws the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.printer import triton_text
from fusecomp.ir.expr import Expr, parts

Lines = list[str]

IN_TRITON = '''\
@triton.jit
def keeps(seed, batch, row, four, least: tl.constexpr):
    """Whether random(seed, batch, row, key) >= least, for rows [M, 1] and fours of keys [1, N / 4]: [M, N]."""
    a, b, c, d = tl.philox(seed, four, tl.cast(row, tl.int32), tl.cast(batch, tl.int32), 0, n_rounds=7)
    a, b, c, d = (a >= least).to(tl.int8), (b >= least).to(tl.int8), (c >= least).to(tl.int8), (d >= least).to(tl.int8)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], 4 * a.shape[1]]) != 0
'''
"""Compared first, in bytes: the tile is rearranged for the product, through shared memory."""

IN_TORCH = '''\
def random(seed, batch, row, key):
    """Philox-4x32-7 in 64-bit integers, a call for each word."""
    low, zero = 0xFFFFFFFF, 0 * key
    c0, c1, c2, c3 = torch.broadcast_tensors(key // 4, row + zero, batch + zero, zero)
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(7):
        x, y = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (y >> 32 ^ c1 ^ k0) & low, y & low, (x >> 32 ^ c3 ^ k1) & low, x & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return torch.stack([c0, c1, c2, c3], -1).gather(-1, (key % 4).expand(c0.shape)[..., None])[..., 0]
'''


def fours(frame: Frame) -> Lines:
    """The groups of four keys in a tile."""
    return ["four = tl.arange(0, BLOCK_N // 4)[None, :]"] if frame.element.drawn else []


def kept(frame: Frame, exprs: Iterable[Expr], rows: str = "", turned: bool = False) -> Lines:
    """kept_tile, for the dropouts in `exprs`. `rows`: what they are, where they have no name; `turned`: the keys come
    first."""
    wanted = {x for e in exprs for x in parts(e)}
    names = frame.names.having({frame.q_idx: rows}) if rows else frame.names
    lines = []
    for name, x in frame.element.drawn:
        if x in wanted:
            word, least = x.operands
            seed, batch, row, _ = (triton_text(e, names) for e in word.args)
            drawn = f"keeps({seed}, {batch}, {row}, k_start // 4 + four, {triton_text(least, names)})"
            lines.append(f"{name} = tl.trans({drawn})" if turned else f"{name} = {drawn}")
    return lines
