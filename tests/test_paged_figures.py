"""The figures of PagedAttention from the allocator itself: bytes, waste on a serving trace, blocks saved by sharing."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest
import torch

from fusecomp.paged import BlockTables, PagedKVCache
from fusecomp.planning.textbook import KVCache

MIB = 2**20
CONTEXT = 2048


def opt_13b(num_blocks: int) -> PagedKVCache:
    """40 layers, hidden 5,120 in 40 heads of 128, fp16; pages without memory."""
    return PagedKVCache(layers=40, kv_heads=40, head_dim=128, num_blocks=num_blocks, max_len=CONTEXT,
                        dtype=torch.float16, device="meta")  # fmt: skip


def test_bytes_of_opt_13b() -> None:
    cache = opt_13b(128)
    planned = KVCache(layers=40, hidden=5120)
    assert cache.token_bytes == planned.token_bytes == 819_200
    full = cache.add()
    cache.append(full, CONTEXT)
    assert cache.usage().blocks * cache.block_bytes == planned.reserved_bytes(CONTEXT) == 1600 * MIB
    cache.free(full)

    reply = cache.add()
    cache.append(reply, 90)
    used = cache.usage()
    slots, size = used.blocks * cache.block_size, used.blocks * cache.block_bytes
    assert (used.blocks, slots, size) == (6, 96, 75 * MIB)
    assert f"{90 / CONTEXT:.1%}" == "4.4%"
    assert f"{90 / slots:.2%}" == "93.75%"
    assert used.waste == 6 / 96  # all of it in the last block
    assert [len(cache.table(reply)) * 16 - 90, round(1600 * MIB / size)] == [6, 21]


# ----------------------------------------------------------------------------------------------------------------
# A serving trace


@dataclass(frozen=True)
class Request:
    arrival: int
    prompt: int
    reply: int


def trace(requests: int, seed: int) -> list[Request]:
    """Log-normal prompts of about 160 tokens and replies of about 340, as in conversations; random arrivals."""
    draw, arrival, found = random.Random(seed), 0.0, []
    for _ in range(requests):
        arrival += draw.expovariate(0.06)
        prompt, reply = (min(max(1, round(draw.lognormvariate(mu, 0.9))), CONTEXT // 2) for mu in (4.65, 5.4))
        found.append(Request(int(arrival), prompt, reply))
    return found


def serve(requests: list[Request], block_size: int) -> tuple[float, float]:
    """Share of the held slots without a token, over time: in blocks, and with the whole context reserved."""
    tables = BlockTables(10**6, block_size, CONTEXT)
    running: list[tuple[int, int]] = []  # (last step, sequence)
    waiting = sorted(requests, key=lambda r: -r.arrival)
    held = wasted = reserved = tokens = now = 0
    while waiting or running:
        while waiting and waiting[-1].arrival <= now:
            request = waiting.pop()
            seq = tables.add()
            tables.append(seq, request.prompt)
            heapq.heappush(running, (now + request.reply, seq))
        while running and running[0][0] <= now:
            tables.free(heapq.heappop(running)[1])
        for _, seq in running:
            tables.append(seq, 1)
        used = tables.usage()
        held, tokens = held + used.blocks * block_size, tokens + used.tokens
        wasted, reserved = wasted + used.blocks * block_size - used.tokens, reserved + len(running) * CONTEXT
        now += 1
    assert tables.allocator.free == tables.allocator.num_blocks
    return wasted / held, 1 - tokens / reserved


@pytest.mark.parametrize("seed", range(2))
def test_waste_on_a_serving_trace(seed: int) -> None:
    requests = trace(120, seed)
    blocks, contiguous = serve(requests, 16)
    assert blocks <= 0.04
    assert 0.6 <= contiguous <= 0.95
    wide, _ = serve(requests, 256)
    assert wide > 3 * blocks  # the last block again


# ----------------------------------------------------------------------------------------------------------------
# Sharing


def written(tables: BlockTables, tokens: list[int]) -> int:
    seq = tables.add(tokens)
    tables.append(seq, tokens[tables.length(seq) :])
    tables.commit(seq)
    return seq


def test_requests_with_one_instruction_hold_it_once() -> None:
    tables = BlockTables(1000, 16)
    instruction = list(range(200))
    seqs = [written(tables, [*instruction, 1000 + i, *range(40)]) for i in range(32)]
    used = tables.usage()
    assert used.saved == 31 * (200 // 16)
    assert used.blocks == 12 + 32 * (-(-241 // 16) - 12)
    assert [tables.length(tables.add([*instruction, 7]))] == [192]
    for seq in seqs:
        tables.free(seq)
    assert tables.usage().cached > 12  # the next conversation still finds it
    assert tables.length(tables.add(instruction)) == 192


def test_the_last_token_is_always_computed() -> None:
    tables = BlockTables(10, 16)
    written(tables, list(range(32)))
    assert tables.length(tables.add(list(range(32)))) == 16
    assert tables.length(tables.add(list(range(33)))) == 32
    assert tables.length(tables.add([*range(15), 99, *range(16, 32)])) == 0


def test_the_block_used_longest_ago_is_taken_first_and_tails_before_heads() -> None:
    tables = BlockTables(6, 4)
    first, second = written(tables, list(range(12))), written(tables, list(range(100, 112)))
    tables.free(second)
    tables.free(first)
    tables.append(tables.add(), 4 * 2)  # takes the end of `second`
    assert [tables.length(tables.add(list(range(start, start + 13)))) for start in (100, 0)] == [4, 12]


def test_beams_share_what_they_have_in_common() -> None:
    tables = BlockTables(1000, 16)
    prompt = written(tables, list(range(90)))
    beams = [prompt, *(tables.fork(prompt) for _ in range(3))]
    assert (tables.usage().blocks, tables.usage().saved) == (6, 18)  # a fork takes no block
    for beam in beams:
        tables.append(beam, [beam])
        tables.commit(beam)
    used = tables.usage()
    assert (used.blocks, used.saved) == (5 + 4, 15)  # the first write of each copies one block, the last keeps it
    draw, separate, together = random.Random(0), 0, 0
    for _ in range(200):
        parents = [draw.choice(beams) for _ in beams]
        chosen = [tables.fork(parent) for parent in parents]
        for beam in beams:
            tables.free(beam)
        beams = chosen
        for beam in beams:
            tables.append(beam, [draw.randrange(9)])
            tables.commit(beam)
        used = tables.usage()
        separate, together = separate + used.named, together + used.blocks
    assert 1 - together / separate > 0.55  # the paper finds 38 to 66 % for beams
    for beam in beams:
        tables.free(beam)
    assert tables.allocator.free == 1000
