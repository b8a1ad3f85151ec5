"""Who holds each block of a key-value cache, which are free, and which full one holds which tokens.

    digest_i = H(digest_{i-1}, tokens of block i)       so equal digests mean equal tokens from the first on
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from fusecomp.errors import OutOfBlocks, SequenceError

ADVICE = "free or swap out a sequence, or build the cache with more blocks"


def chained(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full block, given that of the block before it."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockAllocator:
    """`refs[block]` counts the tables that name a block; one that none names is free.

    A free block that was published keeps its tokens until it is taken: empty blocks go first, then the published ones,
    the one released longest ago before the others.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._digests: dict[int, bytes] = {}
        self._holders: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that no table names."""
        return len(self._empty) + len(self._idle)

    @property
    def cached(self) -> int:
        """Free blocks whose tokens can still be shared."""
        return len(self._idle)

    def require(self, count: int, what: str = "this") -> None:
        """OutOfBlocks unless `count` blocks are free."""
        if count > self.free:
            blocks = "1 block" if count == 1 else f"{count} blocks"
            raise OutOfBlocks(f"{what} needs {blocks}, {self.free} free of {self.num_blocks}: {ADVICE}")

    def take(self, count: int, what: str = "this") -> list[int]:
        """`count` free blocks, each now held once."""
        self.require(count, what)
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in taken:
            self.refs[block] = 1
        return taken

    def share(self, block: int) -> None:
        """One table more names the block, which is in use or published."""
        if not self.refs[block]:
            if block not in self._idle:
                raise SequenceError(f"block {block} is free and holds nothing to share")
            del self._idle[block]
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """One table fewer names the block."""
        if not self.refs[block]:
            raise SequenceError(f"block {block} is free already: it was released twice")
        self.refs[block] -= 1
        if not self.refs[block]:
            if block in self._digests:
                self._idle[block] = None
            else:
                self._empty.append(block)

    def publish(self, block: int, digest: bytes) -> None:
        """The block is full, and holds what the digest says; the first block to say so is the one that is shared."""
        if digest not in self._holders and block not in self._digests:
            self._holders[digest], self._digests[block] = block, digest

    def withdraw(self, block: int) -> None:
        """The block will hold something else."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._holders[digest]

    def find(self, digest: bytes) -> int | None:
        """The block that holds what the digest says."""
        return self._holders.get(digest)

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self.withdraw(block)
        return block
