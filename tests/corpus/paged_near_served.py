"""Near misses of `paged_served` and `paged_latent`: each means exactly what it says.

Fusing and declining are both fine; another value is not. Words and sizes as in `paged`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus.paged import BF16, F16, F32, HKV, PAGE, POOL, B, D, Draw, H, paged, ragged
from corpus.paged_latent import MASKED, attend, by_channel, by_token, float8_as_bytes, part, places, tree
from corpus.paged_masked import fetched
from corpus.paged_served import beams, block_offsets, chosen_pages, encoder, in_ring, ring
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
SCALE = D**-0.5


def shown(lengths: Tensor, table: Tensor) -> Tensor:
    """[B, 1, N]"""
    return (places(table) < lengths[:, None])[:, None]


# ----------------------------------------------------------------------------------------------------------------
# Rings, beams, pages


@CASES.either(ring)
def ring_one_too_old(q: Tensor, k_new: Tensor, v_new: Tensor, k_ring: Tensor, v_ring: Tensor, at: Tensor) -> Tensor:
    age = (at[:, None] - torch.arange(k_ring.shape[2], device=q.device)) % k_ring.shape[2]
    return in_ring(q, k_ring, v_ring, (age < at[:, None]) & (age > 1))


@CASES.either(ring)
def ring_by_fmod(q: Tensor, k_new: Tensor, v_new: Tensor, k_ring: Tensor, v_ring: Tensor, at: Tensor) -> Tensor:
    """The remainder of a negative number is negative"""
    age = torch.fmod(at[:, None] - torch.arange(k_ring.shape[2], device=q.device), k_ring.shape[2])
    return in_ring(q, k_ring, v_ring, (age >= -9) & (age <= 12))


@CASES.either(beams)
def keys_of_their_beam_values_of_their_own(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, origin: Tensor, lengths: Tensor
) -> Tensor:
    k = k_cache.gather(1, origin[:, :, None, :, None].expand(-1, -1, HKV, -1, D))
    s = torch.einsum("bwhgd,bwhnd->bwhgn", q.view(B, 4, HKV, G, D), k) * SCALE
    n = torch.arange(k.shape[3], device=q.device)
    s = s.masked_fill((n >= lengths[:, None])[:, None, None, None], -INF)
    return torch.einsum("bwhgn,bwhnd->bwhgd", s.softmax(-1), v_cache).reshape(q.shape)


@CASES.either(beams)
def beam_before_last(q: Tensor, k_cache: Tensor, v_cache: Tensor, origin: Tensor, lengths: Tensor) -> Tensor:
    """Origins are followed twice"""
    twice = origin.gather(1, origin)
    k, v = (x.gather(1, twice[:, :, None, :, None].expand(-1, -1, HKV, -1, D)) for x in (k_cache, v_cache))
    s = torch.einsum("bwhgd,bwhnd->bwhgn", q.view(B, 4, HKV, G, D), k) * SCALE
    return torch.einsum("bwhgn,bwhnd->bwhgd", s.softmax(-1), v).reshape(q.shape)


@CASES.either(encoder)
def beams_of_another_request(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """repeat for repeat_interleave"""
    k, v = (x[table.repeat(2, 1)].flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, shown(lengths.repeat_interleave(2), table))


@CASES.either(block_offsets)
def values_at_the_offsets_of_keys(q: Tensor, pool: Tensor, offsets: Tensor, lengths: Tensor) -> Tensor:
    k, v = (pool[offsets[:, 0] + i].transpose(2, 3).flatten(1, 2) for i in (0, 1))
    return attend(q, k, v, shown(lengths, offsets[:, 0]))


@CASES.either(chosen_pages)
def places_instead_of_positions(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, chosen: Tensor
) -> Tensor:
    """The mask counts along the chosen pages"""
    k, v = (x[table.long().gather(1, chosen)].flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, shown(lengths, chosen))


@CASES.either(chosen_pages)
def pages_chosen_twice(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, chosen: Tensor
) -> Tensor:
    """A page that is named twice counts twice"""
    chosen = chosen[:, [0, 1, 1]]
    k, v = (x[table.long().gather(1, chosen)].flatten(1, 2) for x in (k_pool, v_pool))
    position = (chosen[..., None] * PAGE + torch.arange(PAGE, device=q.device)).flatten(1)
    return attend(q, k, v, (position < lengths[:, None])[:, None])


@CASES.either(paged)
def chunks_from_the_end(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Floor division of negative distances"""
    n = places(table) - lengths[:, None]
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, ((n // 16 == -1) | (torch.div(n, 16, rounding_mode="trunc") == -1))[:, None])


@CASES.either(ragged)
def owners_one_too_early(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """A token at a start belongs to the sequence before"""
    owner = torch.bucketize(torch.arange(len(q), device=q.device), cu_seqlens[1:].long())
    k, v = (x[table[owner]].flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q[:, None], k, v, shown(lengths[owner], table))[:, 0]


# ----------------------------------------------------------------------------------------------------------------
# Masks and weights


@CASES.either(paged)
def soft_cap_after_the_mask(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """tanh of -inf is -1: no key is hidden"""
    k, v = fetched(k_pool, v_pool, table)
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~shown(lengths, table)[:, None], -INF)
    return ((5 * torch.tanh(s / 5)).softmax(-1) @ v).transpose(1, 2)


@CASES.either(paged)
def capped_below_the_fill(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~shown(lengths, table)[:, None], -INF)
    return (s.clamp(min=-2.0).softmax(-1) @ v).transpose(1, 2)


@CASES.either(paged)
def mask_times_scores(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    s = q.transpose(1, 2) @ k.mT * SCALE * shown(lengths, table)[:, None]
    return (s.softmax(-1) @ v).transpose(1, 2)


@CASES.either(paged, grad=())
def fill_that_large_scores_pass(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    s = (q.transpose(1, 2) @ k.mT).float() * 900
    s = s + (1.0 - shown(lengths, table)[:, None].float()) * -10000.0
    return (s.softmax(-1).to(q.dtype) @ v).transpose(1, 2)


@CASES.decline(paged, reason="some are NaN, some 0")
def filled_again_by_another_mask(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Weights that are zeroed elsewhere do not add up to 1"""
    k, v = fetched(k_pool, v_pool, table)
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~shown(lengths, table)[:, None], -INF)
    p = s.softmax(-1).masked_fill(~shown(lengths - 2, table)[:, None], 0.0)
    return (p @ v).transpose(1, 2)


@CASES.decline(lambda d: (*paged(d)[:4], d.ints([48, 0, 16])), reason="some are NaN, some 0")
def half_of_a_mask_filled_again(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """A row without keys stays NaN where only one of its two masks is filled again"""
    k, v = fetched(k_pool, v_pool, table)
    window = (places(table) >= lengths[:, None] - 9)[:, None, None]
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~(shown(lengths, table)[:, None] & window), -INF)
    return (s.softmax(-1).masked_fill(~window, 0.0) @ v).transpose(1, 2)


@CASES.either(paged)
def positions_in_half_precision(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Beyond 256 not every whole number is a bfloat16"""
    n, end = (places(table) + 1000).bfloat16(), (lengths[:, None] + 1000).bfloat16()
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, (n < end)[:, None])


@CASES.either(paged)
def lengths_that_wrap(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """int8"""
    short = lengths.to(torch.int8) * 12
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, (places(table) < short.clamp(min=1)[:, None])[:, None])


@CASES.either(tree)
def tree_the_other_way(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, bits: Tensor
) -> Tensor:
    """Which drafts come after this one"""
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    draft = places(table) - (lengths[:, None] - 4)
    after = (bits[draft.clamp(0, 3)][:, None] >> torch.arange(4, device=q.device)[:, None]) & 1
    return attend(q, k, v, (draft < 0)[:, None] | ((after != 0) & (draft < 4)[:, None]))


# ----------------------------------------------------------------------------------------------------------------
# Scales, zero points, parts


@CASES.either(float8_as_bytes, dtypes=(BF16, F32, F16))
def bytes_as_other_float8(
    q: Tensor, k8: Tensor, v8: Tensor, k_scale: Tensor, v_scale: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k = k8.view(torch.float8_e5m2)[table].flatten(1, 2).to(q.dtype) * k_scale[:, None]
    v = v8[table].flatten(1, 2).to(q.dtype) * v_scale[:, None] / 100
    return attend(q, k.clamp(-3, 3), v, shown(lengths, table))


@CASES.either(by_channel)
def zero_in_the_bytes(
    q: Tensor, k8: Tensor, v8: Tensor, scale: Tensor, zero: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """uint8 wraps around"""
    low = zero.to(torch.uint8)
    k, v = ((x[table] - low).to(q.dtype) * scale for x in (k8, v8))
    return attend(q, k.flatten(1, 2), v.flatten(1, 2), shown(lengths, table))


@CASES.either(by_channel)
def channels_backwards(
    q: Tensor, k8: Tensor, v8: Tensor, scale: Tensor, zero: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k = (k8[table].to(q.dtype) - zero.flip(-1)) * scale.flip(0)
    v = (v8[table].to(q.dtype) - zero.flip(0)) * scale.flip(-1)
    return attend(q, k.flatten(1, 2), v.flatten(1, 2), shown(lengths, table))


@CASES.either(by_token)
def zero_of_the_token_before(
    q: Tensor, k8: Tensor, v8: Tensor, k_meta: Tensor, v_meta: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    zeros = [m[table][..., 1:].roll(1, 2) for m in (k_meta, v_meta)]
    k, v = (k8[table].to(q.dtype) - zeros[0]) * k_meta[table][..., :1], v8[table].to(q.dtype) - zeros[1]
    return attend(q, k.flatten(1, 2), v.flatten(1, 2), shown(lengths, table))


@CASES.either(by_channel)
def weights_that_lose_their_zero(
    q: Tensor, k8: Tensor, v8: Tensor, scale: Tensor, zero: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """A zero point of the values under weights that do not add up to 1"""
    k, v = ((x[table].to(q.dtype) - zero) * scale for x in (k8, v8))
    k, v = (x.flatten(1, 2).transpose(1, 2).repeat_interleave(G, 1) for x in (k, v))
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~shown(lengths, table)[:, None], -INF)
    return (s.softmax(-1) * (places(table) % 3).to(q.dtype) @ v).transpose(1, 2)


@CASES.either(lambda d: (*paged(d), d(19, HKV, D), d(19, HKV, D)))
def merged_in_base_two(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, k_first: Tensor, v_first: Tensor
) -> Tensor:
    """Sums in natural logarithms, weights in powers of two"""
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    o1, l1 = part(q, k, v, places(table) >= lengths[:, None], MASKED)
    k, v = (x[None].expand(len(q), -1, -1, -1) for x in (k_first, v_first))
    o2, l2 = part(q, k, v, torch.zeros(1, 19, dtype=torch.bool, device=q.device), -INF)
    w = torch.exp2(l1) / (torch.exp2(l1) + torch.exp2(l2))
    return (o1 * w + o2 * (1 - w)).transpose(1, 2).to(q.dtype)


@CASES.either(lambda d: (*paged(d)[:4], d.ints([48, 0, 16])), dtypes=(F32,))
def empty_part_under_a_finite_fill(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Both the output and the sum of a row without keys are those of the fill"""
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    out, lse = part(q, k, v, places(table) >= lengths[:, None], -2e4)
    return out, lse


@CASES.either(lambda d: (d(B, H, 1, D), d(B, HKV, 48, D), d(B, HKV, 48, D), d(B, HKV, 48).argsort(-1)[..., :12]))
def values_at_other_tokens(q: Tensor, k_cache: Tensor, v_cache: Tensor, chosen: Tensor) -> Tensor:
    at = chosen[..., None].expand(-1, -1, -1, D)
    k, v = k_cache.gather(2, at), v_cache.gather(2, at.flip(2))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@CASES.either(lambda d: (d(B, H, 1, D), d(d.n(POOL), HKV, 16, D), d(d.n(POOL), HKV, 16, D), d.ints([3, 25, 8])))
def causal_at_the_top_left(q: Tensor, k_pool: Tensor, v_pool: Tensor, page: Tensor) -> Tensor:
    """is_causal with one query shows it the first key alone"""
    return F.scaled_dot_product_attention(q, k_pool[page], v_pool[page], is_causal=True, enable_gqa=True)
