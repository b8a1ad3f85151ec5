"""Near misses of a paged cache: programs one step away from the usual, each of which means exactly what it says.

Fusing and declining are both fine; another value, or another cache afterwards, is not. Words and sizes as in `paged`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus.paged import HKV, PAGE, POOL, B, Draw, H, paged
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """q [B, M, H, D], k and v [B, N, Hkv, D], keep [B, N]."""
    s = torch.einsum("bmhgd,bnhd->bhgmn", q.unflatten(2, (HKV, G)), k) * q.shape[-1] ** -0.5
    s = s.masked_fill(~keep[:, None, None, None], -INF)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


def places(table: Tensor) -> Tensor:
    return torch.arange(table.shape[1] * PAGE, device=table.device)


def by_slot(q: Tensor, k_pool: Tensor, v_pool: Tensor, slot: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x.flatten(0, 1)[slot] for x in (k_pool, v_pool))
    return attend(q, k, v, torch.arange(k.shape[1], device=q.device) < lengths[:, None])


# ----------------------------------------------------------------------------------------------------------------
# Addresses


@CASES.either(paged)
def half_of_each_page(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The table's page is half as long as the pool's"""
    n = torch.arange(table.shape[1] * PAGE // 2, device=q.device)
    slot = table.long()[:, n // (PAGE // 2)] * PAGE + n % (PAGE // 2)
    return by_slot(q, k_pool, v_pool, slot, lengths.clamp(max=len(n)))


@CASES.either(paged)
def pages_that_overlap(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n = places(table)
    return by_slot(q, k_pool, v_pool, table.long()[:, n // PAGE] * (PAGE // 2) + n % PAGE, lengths)


@CASES.either(paged)
def bits_that_collide(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """(page << 2) | (n & 7) is no sum"""
    n = places(table)
    return by_slot(q, k_pool, v_pool, (table.long()[:, n >> 3] << 2) | (n & 7), lengths)


@CASES.either(paged)
def bits_not_at_the_end(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n = places(table)
    return by_slot(q, k_pool, v_pool, (table.long()[:, n >> 3] << 3) + (n & 6), lengths)


@CASES.either(paged)
def bits_of_the_number_below(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """-1 >> 3 is -1, and -1 & 7 is 7: the last page comes first"""
    n = places(table) - 1
    return by_slot(q, k_pool, v_pool, table.long()[:, n >> 3] * PAGE + (n & 7), lengths)


@CASES.either(paged)
def truncated_below_zero(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n = places(table) - 3
    page, offset = torch.div(n, PAGE, rounding_mode="trunc"), torch.fmod(n, PAGE)
    return by_slot(q, k_pool, v_pool, table.long()[:, page] * PAGE + offset.abs(), lengths)


@CASES.either(paged)
def table_repeated_whole(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """repeat where repeat_interleave is usual"""
    offset = torch.arange(PAGE, device=q.device).repeat(table.shape[1])
    return by_slot(q, k_pool, v_pool, table.repeat(1, PAGE).long() * PAGE + offset, lengths)


@CASES.either(paged)
def offsets_repeated_each(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    offset = torch.arange(PAGE, device=q.device).repeat_interleave(table.shape[1])
    return by_slot(q, k_pool, v_pool, table.long().repeat_interleave(PAGE, 1) * PAGE + offset, lengths)


@CASES.either(paged)
def table_backwards(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table.flip(1)].flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, places(table) < lengths[:, None])


@CASES.either(paged)
def keys_backwards(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2).flip(1) for x in (k_pool, v_pool))
    return attend(q, k, v, places(table) < lengths[:, None])


@CASES.either(paged)
def page_and_offset_swapped(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].transpose(1, 2).flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, places(table) < lengths[:, None])


@CASES.either(paged)
def blocks_out_of_order(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (torch.cat([x[table[:, i]] for i in (0, 2, 1, 5, 4, 3)], 1) for x in (k_pool, v_pool))
    return attend(q, k, v, torch.arange(k.shape[1], device=q.device) < lengths[:, None])


@CASES.either(paged)
def every_other_block_from_the_end(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (torch.stack([x[table[:, i]] for i in (5, 3, 1)], 1).flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, torch.arange(k.shape[1], device=q.device) < lengths[:, None].clamp(max=20))


@CASES.either(lambda d: (*paged(d), d.ints(torch.randint(0, POOL, (B, d.n(6)), generator=d.generator))))
def values_in_pages_of_their_own(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, v_table: Tensor
) -> Tensor:
    k, v = k_pool[table].flatten(1, 2), v_pool[v_table].flatten(1, 2)
    return attend(q, k, v, places(table) < lengths[:, None])


@CASES.either(paged)
def values_one_page_further(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Two pools in one memory, a page apart"""
    k, v = k_pool[:-1][(table - 1).clamp(min=0)].flatten(1, 2), k_pool[1:][(table - 1).clamp(min=0)].flatten(1, 2)
    return attend(q, k, v, places(table) < lengths[:, None])


@CASES.either(paged)
def one_table_for_all(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table[:1].expand(len(q), -1)].flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, places(table) < lengths[:, None])


@CASES.either(paged)
def last_page_by_a_negative_number(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """A live page whose number is counted from the end"""
    k, v = (x[table - POOL].flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, places(table) < lengths[:, None])


@CASES.either(paged)
def heads_repeated_whole(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2).repeat(1, 1, G, 1).transpose(1, 2) for x in (k_pool, v_pool))
    keep = (places(table) < lengths[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=keep).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------
# Masks


@CASES.either(paged)
def length_of_the_neighbour(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    return attend(q, k, v, places(table) < lengths.roll(1)[:, None])


@CASES.either(paged)
def length_of_the_first(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    return attend(q, k, v, (places(table) < lengths[1]).expand(len(table), -1))


@CASES.either(paged)
def one_key_too_many(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    return attend(q, k, v, places(table) <= lengths[:, None])


@CASES.either(paged)
def one_key_too_few(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    return attend(q, k, v, places(table) + 1 < lengths[:, None])


@CASES.either(paged)
def whole_pages(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The last page to its end"""
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    return attend(q, k, v, places(table) // PAGE < (lengths[:, None] + PAGE - 1) // PAGE)


@CASES.either(paged)
def past_the_length_or_even(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """An alternative without an end"""
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    n = places(table)
    return attend(q, k, v, (n < lengths[:, None]) | (n % 2 == 0))


@CASES.either(paged)
def later_of_two_lengths(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    n, other = places(table), lengths.flip(0)[:, None]
    return attend(q, k, v, torch.where(n % 3 == 0, n < lengths[:, None], n < other))


@CASES.either(paged)
def values_zeroed_elsewhere(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = k_pool[table].flatten(1, 2), v_pool[table].flatten(1, 2)
    n = places(table)
    v = torch.where((n < lengths[:, None] - 2)[..., None, None], v, 0.0)
    return attend(q, k, v, n < lengths[:, None])


@CASES.decline(paged, reason="another axis than the product of weights and values sums over")
def softmax_within_each_page(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = k_pool[table], v_pool[table]
    s = torch.einsum("bhd,bpohd->bhpo", q[:, 0], k.repeat_interleave(G, 3))
    p = s.softmax(2).mean(-1)
    return torch.einsum("bhp,bphd->bhd", p, v.repeat_interleave(G, 3).mean(2))
