"""The input and output bounds of attention, and the memory of a key-value cache, as anyone would work them out by hand.

standard attention moves   N d + N^2       elements (the inputs, and the scores that do not fit on chip)
tiled attention moves      N^2 d^2 / M     elements, with M elements of on-chip memory

Both for one head, up to a constant: Dao et al., FlashAttention, 2022 (https://arxiv.org/abs/2205.14135), theorem 2. The
cache: Kwon et al., PagedAttention, 2023 (https://arxiv.org/abs/2309.06180), sections 2 to 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from fusecomp.errors import OptionError

N, D, M = sympy.symbols("N d M", positive=True)
BR, BC = sympy.symbols("Br Bc", positive=True)
STANDARD = N * D + N**2
FLASH = N**2 * D**2 / M
HALVED = FLASH.subs(M, M / 2)
SAVED = sympy.factor(STANDARD / FLASH)
ON_CHIP = BR * D + BC * D + BR * BC

SYMBOLS = {
    N: "keys and queries of a head",
    D: "elements of a row of Q, K, V",
    M: "elements of on-chip memory, of one program",
    BR: "rows of a tile of Q",
    BC: "rows of a tile of K and V",
}
FIRST = "FlashAttention, theorem 2"
PAGE: tuple[tuple[str, Any, str, str], ...] = (
    ("standard", STANDARD, "elements of HBM: the inputs, and the scores", FIRST),
    ("tiled", FLASH, "elements of HBM: K and V again for each tile of Q", FIRST),
    ("standard / tiled", SAVED, "times fewer elements", "from both"),
    ("tiled at M / 2", HALVED, f"elements of HBM: halving M takes {HALVED / FLASH} x the traffic", "from the second"),
    ("scores", N**2, "elements that tiling never stores", "FlashAttention, section 2.2"),
    (
        "on chip",
        ON_CHIP,
        "elements of a tile of Q, one of K, their scores: at most M",
        "FlashAttention, section 3.1",
    ),
)
"""(what, its equation, unit and meaning, source)."""


def standard_hbm_elements(n: int, d: int) -> int:
    """N d + N^2: elements that attention moves when it stores its scores."""
    return int(STANDARD.subs({N: n, D: d}))


def flash_bound(n: int, d: int, m: int) -> float:
    """N^2 d^2 / M: elements that attention moves in tiles, M elements on chip. Halving M doubles it."""
    return float(FLASH.subs({N: n, D: d, M: m}))


def block_elements(block_m: int, block_n: int, d: int) -> int:
    """Br d + Bc d + Br Bc: elements of a tile of Q, one of K, and their scores, all on chip: at most M of them."""
    return block_m * d + block_n * d + block_m * block_n


def largest_tile(d: int, m: int) -> tuple[int, int] | None:
    """The powers of two Br x Bc >= 16 of most scores, then squarest, then tallest, that fit in M elements; or None."""
    sides = [1 << i for i in range(4, 15)]
    fits = [(r, c) for r in sides for c in sides if block_elements(r, c, d) <= m]
    return max(fits, key=lambda t: (t[0] * t[1], min(t), t[0]), default=None)


def score_elements(n: int) -> int:
    """N^2: scores of one head."""
    return n * n


def score_bytes(n: int, width: int = 4) -> int:
    """Bytes of the scores of one head, were they stored."""
    return width * score_elements(n)


@dataclass(frozen=True)
class Traffic:
    """What one head of `n` keys and queries, `d` elements a row of `width` bytes, moves with `on_chip` elements of
    on-chip memory. OptionError for a size below one."""

    n: int
    d: int
    on_chip: int
    width: int = 4

    def __post_init__(self) -> None:
        least = {"n": self.n, "d": self.d, "the on-chip memory": self.on_chip}
        for name, number in least.items():
            if number < 1:
                raise OptionError(f"{name} must be at least one element; got {number}")

    @property
    def standard(self) -> int:
        return standard_hbm_elements(self.n, self.d)

    @property
    def tiled(self) -> float:
        return flash_bound(self.n, self.d, self.on_chip)

    @property
    def saved(self) -> float:
        """standard / tiled."""
        return self.standard / self.tiled

    @property
    def halved(self) -> Traffic | None:
        """The same with half the on-chip memory."""
        return Traffic(self.n, self.d, self.on_chip // 2, self.width) if self.on_chip > 1 else None

    @property
    def tile(self) -> tuple[int, int] | None:
        """The largest Br x Bc that fits."""
        return largest_tile(self.d, self.on_chip)

    def to_dict(self) -> dict[str, Any]:
        """Elements, unless a name says bytes."""
        halved = self.halved
        return {
            "n": self.n,
            "d": self.d,
            "element_bytes": self.width,
            "standard_elements": self.standard,
            "tiled_elements": self.tiled,
            "on_chip_elements": self.on_chip,
            "saved": self.saved,
            "tiled_elements_at_half": halved and halved.tiled,
            "tile": self.tile,
            "tile_at_half": halved and halved.tile,
            "score_elements": score_elements(self.n),
            "score_bytes": score_bytes(self.n, self.width),
        }


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


@dataclass(frozen=True)
class CacheUse:
    """Requests of `tokens` tokens, at most `context`, in a cache that reserves whole contexts or blocks of `block`
    tokens; `memory` bytes for all of them, if known. OptionError for sizes that make no cache."""

    cache: KVCache
    tokens: int
    context: int
    block: int
    memory: int | None = None

    def __post_init__(self) -> None:
        given = {"layers": self.cache.layers, "hidden": self.cache.hidden, "tokens": self.tokens, "block": self.block}
        for name, number in given.items():
            if number < 1:
                raise OptionError(f"{name} must be at least 1; got {number}")
        if self.tokens > self.context:
            raise OptionError(f"a request holds {self.tokens} tokens, more than max_context, {self.context}")

    @property
    def used(self) -> PagedUse:
        return self.cache.paged(self.tokens, self.block)

    @property
    def reserved_bytes(self) -> int:
        return self.cache.reserved_bytes(self.context)

    def to_dict(self) -> dict[str, Any]:
        """Bytes, tokens, and shares of one."""
        used, room = self.used, self.memory
        return {
            "token_bytes": self.cache.token_bytes,
            "tokens": self.tokens,
            "max_context": self.context,
            "reserved_bytes": self.reserved_bytes,
            "reserved_utilisation": utilisation(self.tokens, self.context),
            "block": self.block,
            "blocks": used.blocks,
            "slots": used.slots,
            "paged_bytes": used.bytes,
            "paged_utilisation": used.utilisation,
            "waste": 1 - used.utilisation,
            "saved": self.reserved_bytes / used.bytes,
            "memory_bytes": room,
            "reserved_requests": None if room is None else room // self.reserved_bytes,
            "paged_requests": None if room is None else self.cache.requests(room, self.tokens, self.block),
        }
