"""Random operations on block tables against a plain model: lists of tokens, and a memory of what was written."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from fusecomp.errors import FusecompError, OutOfBlocks, SequenceError
from fusecomp.paged import BlockTables
from fusecomp.paged.tables import GONE


class Remembered(BlockTables):
    """Block tables whose pages hold, for each token, all tokens up to it."""

    def __init__(self, num_blocks: int, block_size: int, max_len: int, window: int | None = None) -> None:
        super().__init__(num_blocks, block_size, max_len, window=window)
        self.pages: list[list[Any]] = [[None] * block_size for _ in range(num_blocks)]

    def run(self, seq: int, tokens: Sequence[int]) -> None:
        """What a step does: write the pending tokens. Only blocks of one holder are written."""
        held = self._sequences[seq]
        for n in range(held.written, held.length):
            block = held.blocks[n // self.block_size]
            assert self.allocator.refs[block] == 1
            self.pages[block][n % self.block_size] = tuple(tokens[: n + 1])
        held.sent = held.length

    def _copy(self, source: int, target: int) -> None:
        assert source != target
        self.pages[target] = list(self.pages[source])

    def _save(self, blocks: Sequence[int]) -> Any:
        return [list(self.pages[b]) for b in blocks]

    def _load(self, saved: Any, places: Sequence[int], blocks: Sequence[int]) -> None:
        for place, block in zip(places, blocks, strict=True):
            self.pages[block] = list(saved[place])


def state(tables: BlockTables) -> tuple[Any, ...]:
    """Everything that a failed operation must leave as it was."""
    a = tables.allocator
    held = [(s, h.length, h.sent, h.written, h.gone, tuple(h.blocks), len(h.digests), id(h.saved),
             h.tokens and len(h.tokens)) for s, h in tables._sequences.items()]  # fmt: skip
    return tuple(a.refs), tuple(a._empty), tuple(a._idle), tuple(a._holders.items()), tuple(held), tables._next


def check(tables: Remembered, model: dict[int, list[int]], swapped: set[int]) -> None:
    """Every invariant of the tables, and the memory against the model."""
    a, size = tables.allocator, tables.block_size
    assert set(tables._sequences) == set(model)
    resident = {s: h for s, h in tables._sequences.items() if s not in swapped}
    assert {s for s, h in tables._sequences.items() if h.saved is not None} == swapped
    named = Counter(block for h in resident.values() for block in h.blocks[h.gone :])
    assert a.refs == [named[b] for b in range(a.num_blocks)]
    free = [*a._empty, *a._idle]
    assert sorted([*free, *named]) == list(range(a.num_blocks))
    assert {b: d for d, b in a._holders.items()} == a._digests
    assert not set(a._empty) & set(a._digests)
    assert set(a._idle) <= set(a._digests)
    for seq, h in tables._sequences.items():
        tokens = model[seq]
        assert h.length == len(tokens)
        assert h.written <= h.sent <= h.length
        assert h.tokens is None or h.tokens == tokens
        assert len(h.digests) * size <= h.written
        if seq in swapped:
            assert h.blocks == []
            continue
        assert len(h.blocks) >= -(-h.length // size)
        assert len({*h.blocks[h.gone :]}) == len(h.blocks) - h.gone
        assert set(h.blocks[: h.gone]) <= {GONE}
        seen = 0 if tables.window is None else max(0, h.written + 1 - tables.window)  # first of the next token's keys
        assert h.gone * size <= seen
        for n in {*range(h.written - 1, seen - 1, -size), *range(seen, min(h.written, seen + size))}:
            assert tables.pages[h.blocks[n // size]][n % size] == tuple(tokens[: n + 1])
    used = tables.usage()
    assert (used.blocks, used.named, used.cached) == (len(named), sum(named.values()), len(a._idle))
    assert 0 <= used.waste <= 1


class Play:
    """A person, or several, at the tables: each method is one operation on both sides."""

    def __init__(self, seed: int, window: int | None, num_blocks: int = 24, size: int = 4, max_len: int = 40) -> None:
        self.random = random.Random(seed)
        self.tables = Remembered(num_blocks, size, max_len, window)
        self.model: dict[int, list[int]] = {}
        self.swapped: set[int] = set()
        self.failed: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.fresh = itertools.count(1000)

    def any(self) -> int:
        """A sequence; seldom one that was freed, or never was."""
        if not self.model or self.random.random() < 0.02:
            return self.random.randrange(-1, self.tables._next + 2)
        return self.random.choice(list(self.model))

    def add(self) -> None:
        prompt = [
            self.random.choice((1, 2)) if self.random.random() < 0.1 else 1 for _ in range(self.random.randrange(24))
        ]
        seq = self.tables.add(prompt)
        self.model[seq] = prompt[: self.tables.length(seq)]
        assert not prompt or len(prompt) > self.tables.length(seq)
        self.append(seq, prompt[self.tables.length(seq) :])

    def append(self, seq: int, tokens: list[int] | None = None) -> None:
        if tokens is None:
            tokens = [self.random.choice((1, 1, 1, 2)) for _ in range(self.random.randrange(1, 7))]
        count_only = self.random.random() < 0.02
        tokens = [next(self.fresh) for _ in tokens] if count_only else tokens
        self.tables.append(seq, len(tokens) if count_only else tokens)
        self.model[seq] += tokens
        if self.random.random() < 0.9:
            self.run(seq)

    def run(self, seq: int) -> None:
        if seq in self.model and seq not in self.swapped:
            self.tables.run(seq, self.model[seq])

    def commit(self, seq: int) -> None:
        self.run(seq)
        self.tables.commit(seq)

    def reserve(self, seq: int) -> None:
        self.tables.reserve(seq, self.random.randrange(-1, 12))

    def fork(self, seq: int) -> None:
        child = self.tables.fork(seq)
        self.model[child] = list(self.model[seq])

    def truncate(self, seq: int) -> None:
        length = self.random.randrange(len(self.model.get(seq, ())) + 2)
        self.tables.truncate(seq, length)
        del self.model[seq][length:]

    def free(self, seq: int) -> None:
        self.tables.free(seq)
        del self.model[seq]
        self.swapped.discard(seq)

    def swap_out(self, seq: int) -> None:
        self.tables.swap_out(seq)
        self.swapped.add(seq)

    def swap_in(self, seq: int) -> None:
        self.tables.swap_in(seq)
        self.swapped.discard(seq)

    def operate(self) -> None:
        """One operation; one that fails must have changed nothing."""
        name, *_ = self.random.choices(
            ("append", "add", "fork", "free", "truncate", "reserve", "run", "commit", "swap_out", "swap_in"),
            (12, 4, 3, 4, 3, 2, 2, 1, 1, 2),
        )
        if len(self.model) > 9:
            name = "free"
        arguments = () if name == "add" else (self.any(),)
        if name == "swap_in" and self.swapped and self.random.random() < 0.8:
            arguments = (self.random.choice(sorted(self.swapped)),)
        before, error = state(self.tables), None
        try:
            getattr(self, name)(*arguments)
        except FusecompError as raised:
            error = raised
        if error is None:
            self.done[name] += 1
            return
        assert name == "add" or state(self.tables) == before, f"{name} failed and changed something: {error}"
        self.failed[type(error).__name__] += 1

    def end(self) -> None:
        for seq in list(self.model):
            self.free(seq)
        assert self.tables.allocator.free == self.tables.allocator.num_blocks


def play(operations: int, seed: int, window: int | None = None) -> None:
    game = Play(seed, window)
    for _ in range(operations):
        game.operate()
        check(game.tables, game.model, game.swapped)
    assert set(game.failed) == {OutOfBlocks.__name__, SequenceError.__name__}
    assert min(game.done.values()) > operations // 200
    assert len(game.done) == 10
    game.end()
    check(game.tables, game.model, game.swapped)


def test_a_hundred_thousand_operations() -> None:
    play(100_000, 0)


@pytest.mark.parametrize("window", [1, 6, 13])
def test_operations_under_a_window(window: int) -> None:
    play(10_000, 1, window)
