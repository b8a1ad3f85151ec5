"""The paged cache on tensors: steps, and pages that move with forks, drafts and swaps."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paging import BLOCK, DV, HKV, D, H, cache_of, dense, filled, holds, more, run
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fusecomp.errors import OptionError, OutOfBlocks, SequenceError
from fusecomp.paged import PagedKVCache
from fusecomp.paged.attention import write


def test_step_tensors_stay_where_they_are() -> None:
    cache = cache_of()
    seqs = filled(cache)
    more(cache, seqs, (1, 1, 1))
    before = cache.step(list(seqs), columns=1, rows=5)
    places = [x.data_ptr() for x in (before.block_table, before.seq_lens, before.slot_mapping, before.positions)]
    for _ in range(9):  # tables grow
        more(cache, seqs, (1, 1, 1))
        step = cache.step(list(seqs), columns=1, rows=5)
        assert step is before
    assert [x.data_ptr() for x in (step.block_table, step.seq_lens, step.slot_mapping, step.positions)] == places
    assert step.seq_lens.tolist() == [27, 14, 19, 0, 0]
    assert step.cu_seqlens_q.tolist() == [0, 1, 2, 3, 3, 3]
    assert step.positions.tolist() == [[26], [13], [18], [0], [0]]
    assert step.slot_mapping[3:].tolist() == [[-1], [-1]]
    assert set(step.block_table[3:].flatten().tolist()) == {cache.null}
    for row, seq in enumerate(seqs):
        table = [*cache.table(seq)]
        assert step.block_table[row].tolist() == table + [cache.null] * (10 - len(table))


def test_writing_is_in_place_and_unused_places_write_nothing() -> None:
    cache = cache_of()
    seqs = filled(cache)
    places = [pages.data_ptr() for pages in cache.keys]
    more(cache, seqs, (1, 2, 0))
    step = cache.step(list(seqs), columns=3, rows=5)
    whole = cache.keys[0].clone()
    write = torch.compile(cache.write, backend="fusecomp", options={"inner": "aot_eager"})
    write(0, torch.full((5, 3, HKV, D), 5.0), torch.full((5, 3, HKV, DV), 5.0), step)
    assert [pages.data_ptr() for pages in cache.keys] == places
    changed = (cache.keys[0] != whole).flatten(2).any(-1)[: cache.dump].sum()
    assert changed == 3
    assert not cache.keys[0][cache.null].any()


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_keeps_one_copy_of_the_pages() -> None:
    cache = cache_of()
    more(cache, seqs := filled(cache), (1, 1, 1))
    step = cache.step(list(seqs), columns=1, rows=5)

    def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(0, k, v, step)
        return cache.attend(0, q, step)

    def copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = cache.keys[0].clone()
        write(keys, k, step.slot_mapping)
        return keys

    def allocates_pages(fn: Callable[..., Tensor]) -> bool:
        q, k, v = (torch.randn(5, 1, h, d) for h, d in ((H, D), (HKV, D), (HKV, DV)))
        with torch.no_grad():
            out, (code,) = run_and_get_code(torch.compile(fn, backend="fusecomp", options={"strict": True}), q, k, v)
            torch.testing.assert_close(out[:3], fn(q, k, v)[:3])
        made = [line for line in code.splitlines() if "= empty_strided" in line]
        return any(f"(({n}, " in line for n in (cache.dump + 1, (cache.dump + 1) * BLOCK) for line in made)

    assert allocates_pages(copied)
    assert not allocates_pages(in_place)


def test_a_step_of_a_sequence_that_has_nothing_pending() -> None:
    cache = cache_of()
    seqs = filled(cache, (5,))
    more(cache, seqs, (0,))
    run(cache, seqs, columns=1)
    holds(cache, seqs)


# ----------------------------------------------------------------------------------------------------------------
# Pages under forks, drafts and swaps


def test_forks_copy_one_block_when_they_part() -> None:
    cache = cache_of()
    seqs = filled(cache, (10,))
    (first,) = seqs
    for _ in range(3):
        seqs[cache.fork(first)] = list(seqs[first])
    assert (cache.usage().blocks, cache.usage().saved) == (3, 9)
    for i, (seq, tokens) in enumerate(seqs.items()):
        cache.append(seq, [i])
        tokens.append(i)
        assert cache.usage().blocks == 3 + min(i + 1, 3)  # the last writer keeps the original
    got = run(cache, seqs, columns=1)
    for seq, tokens in seqs.items():
        torch.testing.assert_close(got[seq].double(), dense(tokens, 1), rtol=1e-4, atol=1e-5)
    holds(cache, seqs)
    assert {cache.table(seq)[:2] for seq in seqs} == {cache.table(first)[:2]}


def test_rejected_drafts_leave_no_trace() -> None:
    cache = cache_of()
    seqs = filled(cache, (7, 12))
    first, second = seqs
    for drafts, accepted in (((1, 2, 3, 4, 5), 2), ((6, 7), 2), ((8, 9, 10), 0)):
        for seq in seqs:
            cache.append(seq, drafts)
        run(cache, {seq: seqs[seq] + list(drafts) for seq in seqs}, columns=5)
        for seq in seqs:
            seqs[seq] += drafts[:accepted]
            cache.truncate(seq, len(seqs[seq]))
    assert (cache.length(first), len(cache.table(first))) == (11, 3)
    assert (cache.length(second), len(cache.table(second))) == (16, 4)
    more(cache, seqs, (2, 2))
    got = run(cache, seqs, columns=2)
    for seq, tokens in seqs.items():
        torch.testing.assert_close(got[seq].double(), dense(tokens, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 9])
def test_what_has_left_the_window_is_given_back(window: int) -> None:
    """A new sequence fits where the old tokens were, and NaN there changes nothing."""
    cache = cache_of(num_blocks=3 * (-(-window // BLOCK) + 3), window=window)
    seqs = filled(cache, (7, 3, 9), window=window)
    for counts in ((1, 2, 1), (2, 2, 2), (1, 1, 1)) * 4:
        more(cache, seqs, counts)
        free = [b for b in range(cache.allocator.num_blocks) if not cache.allocator.refs[b]]
        for pages in (*cache.keys, *cache.values):
            pages[free] = float("nan")
        got = run(cache, seqs, columns=2, window=window)
        for (seq, tokens), count in zip(seqs.items(), counts, strict=True):
            exact = dense(tokens, count, window=window)
            torch.testing.assert_close(got[seq].double(), exact, rtol=1e-4, atol=1e-5)
    first = next(iter(seqs))
    assert cache.usage().named <= 3 * (-(-window // BLOCK) + 2)
    twin = cache.fork(first)
    cache.swap_out(twin)
    cache.swap_in(twin)
    assert cache.table(twin)[-1] >= 0 > cache.table(twin)[0]
    with pytest.raises(SequenceError, match=r"holds its tokens from \d+ on, and one after 2 tokens would see earlier"):
        cache.truncate(twin, 2)
    for seq in (*seqs, twin):
        cache.free(seq)
    assert cache.allocator.free == cache.allocator.num_blocks


def test_random_life_keeps_every_page() -> None:
    """What the tables say is checked elsewhere; here the pages really move with them."""
    chance, cache = random.Random(0), cache_of(num_blocks=16, max_seqs=12)
    seqs: dict[int, list[int]] = {}
    swapped: set[int] = set()
    for _ in range(400):
        live = [s for s in seqs if s not in swapped]
        what = chance.choice(("add", "append", "append", "fork", "truncate", "swap", "free"))
        try:
            if what == "add" or not live:
                tokens = [chance.choice((1, 1, 1, 2)) for _ in range(chance.randrange(1, 14))]
                seq = cache.add(tokens)
                seqs[seq] = tokens[: cache.length(seq)]
                cache.append(seq, tokens[cache.length(seq) :])
                seqs[seq] = tokens
            elif what == "append":
                for seq in live:
                    cache.append(seq, [3])
                    seqs[seq].append(3)
            elif what == "fork":
                parent = chance.choice(live)
                seqs[cache.fork(parent)] = list(seqs[parent])
            elif what == "truncate":
                seq = chance.choice(live)
                seqs[seq] = seqs[seq][: chance.randrange(len(seqs[seq]) + 1)]
                cache.truncate(seq, len(seqs[seq]))
            elif swapped and chance.random() < 0.6:
                cache.swap_in(seq := chance.choice(sorted(swapped)))
                swapped.discard(seq)
            elif what == "swap":
                cache.swap_out(seq := chance.choice(live))
                swapped.add(seq)
            else:
                cache.free(seq := chance.choice(live))
                del seqs[seq]
        except (OutOfBlocks, SequenceError):
            for seq in [s for s in seqs if s not in swapped][::2]:
                cache.free(seq)
                del seqs[seq]
        resident = {s: t for s, t in seqs.items() if s not in swapped}
        if resident:
            run(cache, resident)
        holds(cache, resident)


# ----------------------------------------------------------------------------------------------------------------
# What is told to those who ask for what cannot be


def swapped(cache: PagedKVCache, seq: int) -> int:
    cache.swap_out(seq)
    return seq


def freed(cache: PagedKVCache, seq: int) -> int:
    cache.free(seq)
    return seq


MISUSES: list[tuple[type[Exception], str, Callable[[PagedKVCache, int], object]]] = [
    (OutOfBlocks, r"reserve: sequence 0 \(9 tokens, 31 more\) needs 7 blocks, 2 free of 5: free or swap out a sequence",
     lambda c, s: c.reserve(s, 31)),
    (SequenceError, "sequence 7 was never added: `add` and `fork` return the numbers", lambda c, _: c.append(7, [1])),
    (SequenceError, "sequence 0 was freed", lambda c, s: c.free(freed(c, s))),
    (SequenceError, "sequence 0 was freed", lambda c, s: c.fork(freed(c, s))),
    (SequenceError, "sequence 0 is swapped out: swap it in first", lambda c, s: c.append(swapped(c, s), 1)),
    (SequenceError, "fork: sequence 0 is swapped out", lambda c, s: c.fork(swapped(c, s))),
    (SequenceError, "step: sequence 0 is swapped out", lambda c, s: c.step([swapped(c, s)])),
    (SequenceError, "swap_out: sequence 0 is swapped out", lambda c, s: c.swap_out(swapped(c, s))),
    (SequenceError, "swap_in: sequence 0 is not swapped out", lambda c, s: c.swap_in(s)),
    (SequenceError, "truncate: sequence 0 has 9 tokens, which cannot be cut to 10", lambda c, s: c.truncate(s, 10)),
    (SequenceError, "truncate: sequence 0 has 9 tokens, which cannot be cut to -1", lambda c, s: c.truncate(s, -1)),
    (SequenceError, "reserve: sequence 0 cannot have 9 tokens, 32 more, of at most 40", lambda c, s: c.reserve(s, 32)),
    (SequenceError, "reserve: sequence 0 cannot have 9 tokens, -1 more", lambda c, s: c.append(s, -1)),
    (SequenceError, "a sequence is named twice", lambda c, s: c.step([s, s])),
    (SequenceError, "1 sequences in 7 rows, of at most 5: split the step", lambda c, s: c.step([s], rows=7)),
    (SequenceError, "9 new tokens in 45 places, of at most 40", lambda c, s: c.step([s], columns=45)),
    (OptionError, "attend: a window of all tokens in a cache that keeps the last 8: build it with the widest window",
     lambda c, s: filled(cache_of(window=8), (5,))),
    (OptionError, "a window of 0 tokens: give at least 1, or None", lambda c, s: cache_of(window=0)),
    (OptionError, "a cache of 0 blocks of 4 tokens: give at least 1 of each", lambda c, s: cache_of(num_blocks=0)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "said", "call"), MISUSES, ids=[said[:40] for _, said, _ in MISUSES])
def test_misuse_is_told(error: type[Exception], said: str, call: Callable[[PagedKVCache, int], object]) -> None:
    cache = cache_of(num_blocks=5)
    (seq,) = filled(cache, (9,))
    with pytest.raises(error, match=said):
        call(cache, seq)
    assert seq not in cache or cache.length(seq) == 9


def test_the_next_tokens_must_be_computed_before_a_fork() -> None:
    cache = cache_of()
    seq = cache.add()
    cache.append(seq, [1, 2, 3])
    with pytest.raises(SequenceError, match="fork: 3 tokens of sequence 0 are not computed yet: run a step on them"):
        cache.fork(seq)
    with pytest.raises(SequenceError, match="step: 3 new tokens in a row of 2 places: give more columns"):
        cache.step([seq], columns=2)


def test_blocks_are_released_once() -> None:
    cache = cache_of()
    (block,) = cache.allocator.take(1)
    cache.allocator.release(block)
    with pytest.raises(SequenceError, match=f"block {block} is free already: it was released twice"):
        cache.allocator.release(block)
    with pytest.raises(SequenceError, match=f"block {block} is free and holds nothing to share"):
        cache.allocator.share(block)


def test_importing_it_costs_torch_only() -> None:
    program = "import sys, torch; before = set(sys.modules)\n"
    program += "import fusecomp.paged; new = set(sys.modules) - before\n"
    program += "assert not {'triton', 'sympy', 'networkx', 'transformers', 'fusecomp.backend'} & new, new"
    done = subprocess.run([sys.executable, "-c", program], cwd=Path("/"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
