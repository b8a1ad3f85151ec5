"""The input and output bounds of attention, and the memory of a key-value cache, as anyone would work them out by hand.

standard attention moves   N d + N^2       elements (the inputs, and the scores that do not fit on chip)
tiled attention moves      N^2 d^2 / M     elements, with M elements of on-chip memory
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

N, D, M = sympy.symbols("N d M", positive=True)
STANDARD = N * D + N**2
FLASH = N**2 * D**2 / M


def standard_hbm_elements(n: int, d: int) -> int:
    """N d + N^2: elements that attention moves when it stores its scores."""
    return int(STANDARD.subs({N: n, D: d}))


def flash_bound(n: int, d: int, m: int) -> float:
    """N^2 d^2 / M: elements that attention moves in tiles, M elements on chip. Halving M doubles it."""
    return float(FLASH.subs({N: n, D: d, M: m}))


def block_elements(block_m: int, block_n: int, d: int) -> int:
    """Br d + Bc d + Br Bc: elements of a tile of Q, one of K, and their scores, all on chip: at most M of them."""
    return block_m * d + block_n * d + block_m * block_n


def score_elements(n: int) -> int:
    """N^2: scores of one head."""
    return n * n


def score_bytes(n: int, width: int = 4) -> int:
    """Bytes of the scores of one head, were they stored."""
    return width * score_elements(n)


@dataclass(frozen=True)
class KVCache:
    """A model's key-value cache: `layers` layers of a key and a value of `hidden` elements, `width` bytes each."""

    layers: int
    hidden: int
    width: int = 2

    @property
    def token_bytes(self) -> int:
        """2 * layers * hidden * width: bytes of one token."""
        return 2 * self.layers * self.hidden * self.width

    def reserved_bytes(self, context: int) -> int:
        """Bytes of a request that reserves its longest context at once."""
        return context * self.token_bytes

    def paged(self, tokens: int, block: int) -> PagedUse:
        """The same in blocks of `block` tokens, taken as they fill."""
        blocks = -(-tokens // block)
        return PagedUse(tokens, blocks, blocks * block, blocks * block * self.token_bytes)

    def requests(self, memory: int, tokens: int, block: int) -> int:
        """How many requests of `tokens` tokens fit in `memory` bytes."""
        return memory // self.paged(tokens, block).bytes


@dataclass(frozen=True)
class PagedUse:
    """What `tokens` tokens take in blocks."""

    tokens: int
    blocks: int
    slots: int
    bytes: int

    @property
    def utilisation(self) -> float:
        """tokens / slots; the rest lies in the last block."""
        return self.tokens / self.slots


def utilisation(tokens: int, context: int) -> float:
    """tokens / context: what a fully reserved request uses."""
    return tokens / context
