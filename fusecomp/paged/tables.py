"""Sequences of tokens in blocks: the host's side of a paged key-value cache, without tensors.

A sequence's table names its blocks in order: token n lies in block table[n // size], at n % size. Every method either
does what it says or raises and changes nothing. With a `window`, blocks that no token to come sees are given back as
tokens are appended; the table names GONE in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fusecomp.errors import OptionError, SequenceError
from fusecomp.paged.blocks import BlockAllocator, chained

GONE = -1


@dataclass(slots=True)
class Held:
    """One sequence. Its keys and values lie in the pages up to `written`; those up to `sent` went into a step."""

    length: int = 0
    sent: int = 0
    written: int = 0
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] | None = field(default_factory=list)  # None once the cache was not told which they are
    digests: list[bytes] = field(default_factory=list)  # of the full blocks that are written
    gone: int = 0  # blocks at its beginning that were given back: no token to come sees them
    saved: Any = None  # its pages, while it is swapped out


@dataclass(frozen=True)
class Usage:
    """What the tables hold at one moment."""

    num_blocks: int
    block_size: int
    blocks: int  # in use
    named: int  # entries of all tables
    cached: int  # free, but their tokens can be shared again
    tokens: int  # that lie in the blocks in use, each counted once

    @property
    def saved(self) -> int:
        """Blocks that sharing saves: entries that name a block which another names too."""
        return self.named - self.blocks

    @property
    def waste(self) -> float:
        """Share of the slots in use that hold no token."""
        return 1 - self.tokens / (self.blocks * self.block_size) if self.blocks else 0.0


class BlockTables:
    """Sequences, their blocks and their tokens. `max_len` is the longest that one may become; a token sees the `window`
    tokens up to itself, or all."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        max_len: int | None = None,
        share_prefixes: bool = True,
        window: int | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise OptionError(f"a cache of {num_blocks} blocks of {block_size} tokens: give at least 1 of each")
        if window is not None and window < 1:
            raise OptionError(f"a window of {window} tokens: give at least 1, or None where a token sees all before it")
        self.block_size, self.window = block_size, window
        self.max_len = num_blocks * block_size if max_len is None else max_len
        self.share_prefixes = share_prefixes
        self.allocator = BlockAllocator(num_blocks)
        self._sequences: dict[int, Held] = {}
        self._next = 0

    # ------------------------------------------------------------------------------------------------------------
    # What there is

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq: int) -> bool:
        return seq in self._sequences

    def length(self, seq: int) -> int:
        """Tokens of the sequence."""
        return self._known(seq).length

    def pending(self, seq: int) -> int:
        """Tokens whose keys and values are not written yet, as far as is known: a step works on these."""
        held = self._known(seq)
        return held.length - held.written

    def table(self, seq: int) -> tuple[int, ...]:
        """Its blocks, those reserved ahead included."""
        return tuple(self._resident(seq, "table").blocks)

    def usage(self) -> Usage:
        """What the tables hold now."""
        filled: dict[int, int] = {}
        named = 0
        for held in self._sequences.values():
            named += len(held.blocks[held.gone :])
            for i, block in enumerate(held.blocks[held.gone :], held.gone):
                inside = min(max(held.length - i * self.block_size, 0), self.block_size)
                filled[block] = max(filled.get(block, 0), inside)
        total, cached = self.allocator.num_blocks, self.allocator.cached
        return Usage(total, self.block_size, len(filled), named, cached, sum(filled.values()))

    # ------------------------------------------------------------------------------------------------------------
    # What is done to one sequence

    def add(self, tokens: Sequence[int] = ()) -> int:
        """A new sequence that begins with the full blocks of `tokens` that are held already; its number.

        Append the rest, `tokens[cache.length(seq):]`, in one piece or several: there is at least one token.
        """
        held = Held()
        for i in range((len(tokens) - 1) // self.block_size if self.share_prefixes else 0):
            own = tokens[i * self.block_size : (i + 1) * self.block_size]
            digest = chained(held.digests[-1] if held.digests else b"", own)
            block = self.allocator.find(digest)
            if block is None:
                break
            self.allocator.share(block)
            held.blocks.append(block)
            held.digests.append(digest)
        held.length = held.sent = held.written = len(held.blocks) * self.block_size
        held.tokens = list(tokens[: held.length])
        return self._enter(held)

    def reserve(self, seq: int, count: int) -> None:
        """Room for `count` more tokens, all of it or none. A last block that others hold too is copied first."""
        held = self._resident(seq, "reserve")
        if count < 0 or held.length + count > self.max_len:
            said = f"{held.length} tokens, {count} more, of at most {self.max_len}"
            raise SequenceError(f"reserve: sequence {seq} cannot have {said}: end it, or build the cache longer")
        last, inside = divmod(held.length, self.block_size)
        splits = count > 0 and inside > 0 and self.allocator.refs[held.blocks[last]] > 1
        more = max(0, self._blocks_of(held.length + count) - len(held.blocks))
        if not more + splits:
            return
        taken = self.allocator.take(more + splits, f"reserve: sequence {seq} ({held.length} tokens, {count} more)")
        if splits:
            self._copy(held.blocks[last], taken[0])
            self.allocator.release(held.blocks[last])
            held.blocks[last] = taken[0]
        held.blocks += taken[splits:]

    def append(self, seq: int, tokens: Sequence[int] | int) -> None:
        """The tokens that the next step computes: their ids, or how many (then they are never shared by content).

        What went into a step before counts as written. A step that failed is built again before anything is appended.
        """
        count = tokens if isinstance(tokens, int) else len(tokens)
        self.reserve(seq, count)
        held = self._sequences[seq]
        self._settle(held)
        self._slide(held)
        if count and held.length % self.block_size:
            self.allocator.withdraw(held.blocks[held.length // self.block_size])
        held.length += count
        if isinstance(tokens, int):
            held.tokens = None
        elif held.tokens is not None:
            held.tokens += tokens

    def commit(self, seq: int) -> None:
        """All of its tokens are written: by a step of this cache, or by other means."""
        held = self._resident(seq, "commit")
        held.sent = held.length
        self._settle(held)

    def fork(self, seq: int) -> int:
        """A second sequence with the same tokens in the same blocks; whichever is appended to first copies the last."""
        held = self._resident(seq, "fork")
        if held.sent < held.length:
            unsent = f"{held.length - held.sent} tokens of sequence {seq}"
            raise SequenceError(f"fork: {unsent} are not computed yet: run a step on them first")
        self._settle(held)
        shared = held.blocks[: self._blocks_of(held.length)]
        for block in shared[held.gone :]:
            self.allocator.share(block)
        tokens = None if held.tokens is None else list(held.tokens)
        return self._enter(replace(held, blocks=shared, tokens=tokens, digests=list(held.digests)))

    def truncate(self, seq: int, length: int) -> None:
        """Forget the tokens from `length` on, such as rejected drafts, and the blocks that held only them."""
        held = self._resident(seq, "truncate")
        if not 0 <= length <= held.length:
            raise SequenceError(f"truncate: sequence {seq} has {held.length} tokens, which cannot be cut to {length}")
        if held.gone > max(0, length + 1 - (self.window or 0)) // self.block_size:
            first = held.gone * self.block_size
            said = f"holds its tokens from {first} on, and one after {length} tokens would see earlier ones"
            raise SequenceError(f"truncate: sequence {seq} {said}: add it again")
        keep = self._blocks_of(length)
        self._release(held.blocks[keep:])
        del held.blocks[keep:], held.digests[length // self.block_size :]
        if held.tokens is not None:
            del held.tokens[length:]
        held.length, held.sent, held.written = length, min(held.sent, length), min(held.written, length)

    def free(self, seq: int) -> None:
        """Forget the sequence. Full blocks of its written tokens can be shared until they are needed for others."""
        held = self._known(seq)
        self._release(held.blocks[held.gone :])
        del self._sequences[seq]

    def swap_out(self, seq: int) -> None:
        """Move its pages to the host's memory, and free its blocks."""
        held = self._resident(seq, "swap_out")
        held.saved = self._save(held.blocks[held.gone : self._blocks_of(held.length)])
        self._release(held.blocks[held.gone :])
        held.blocks = []

    def swap_in(self, seq: int) -> None:
        """Bring it back, into free blocks and those that still hold its tokens."""
        held = self._known(seq)
        if held.saved is None:
            raise SequenceError(f"swap_in: sequence {seq} is not swapped out")
        found: list[int | None] = [self.allocator.find(d) for d in held.digests[held.gone :]]
        found += [None] * (self._blocks_of(held.length) - held.gone - len(found))
        revived = sum(block is not None and not self.allocator.refs[block] for block in found)
        missing = [i for i, block in enumerate(found) if block is None]
        self.allocator.require(revived + len(missing), f"swap_in: sequence {seq} ({held.length} tokens)")
        for block in found:
            if block is not None:
                self.allocator.share(block)
        taken = self.allocator.take(len(missing))
        self._load(held.saved, missing, taken)
        fresh = iter(taken)
        held.blocks = [GONE] * held.gone + [next(fresh) if block is None else block for block in found]
        held.saved = None

    # ------------------------------------------------------------------------------------------------------------
    # What a cache with pages adds

    def _copy(self, source: int, target: int) -> None:
        """Copy the page of a block."""

    def _save(self, blocks: Sequence[int]) -> Any:  # noqa: ARG002
        """The pages of some blocks, kept by the host; not None."""
        return ()

    def _load(self, saved: Any, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Put the saved pages of these places into blocks."""

    # ------------------------------------------------------------------------------------------------------------

    def _blocks_of(self, length: int) -> int:
        return -(-length // self.block_size)

    def _enter(self, held: Held) -> int:
        seq, self._next = self._next, self._next + 1
        self._sequences[seq] = held
        return seq

    def _known(self, seq: int) -> Held:
        if seq not in self._sequences:
            state = "was freed" if isinstance(seq, int) and 0 <= seq < self._next else "was never added"
            raise SequenceError(f"sequence {seq} {state}: `add` and `fork` return the numbers of those that there are")
        return self._sequences[seq]

    def _resident(self, seq: int, what: str) -> Held:
        held = self._known(seq)
        if held.saved is not None:
            raise SequenceError(f"{what}: sequence {seq} is swapped out: swap it in first")
        return held

    def _release(self, blocks: Sequence[int]) -> None:
        """The last first, so that the beginning of a sequence is shared longest."""
        for block in reversed(blocks):
            self.allocator.release(block)

    def _slide(self, held: Held) -> None:
        """Give the blocks back that the next token, and so every later one, sees nothing of."""
        if self.window is None:
            return
        unseen = max(held.gone, (held.written + 1 - self.window) // self.block_size)
        self._release(held.blocks[held.gone : unseen])
        held.blocks[held.gone : unseen] = [GONE] * (unseen - held.gone)
        held.gone = unseen

    def _settle(self, held: Held) -> None:
        """What went into a step is written: its full blocks can be shared."""
        held.written = held.sent
        if held.tokens is None or not self.share_prefixes:
            return
        size = self.block_size
        for i in range(len(held.digests), held.written // size):
            digest = chained(held.digests[-1] if held.digests else b"", held.tokens[i * size : (i + 1) * size])
            held.digests.append(digest)
            self.allocator.publish(held.blocks[i], digest)
