"""Near misses of quantised pages and of writes into a paged cache.

Fusing and declining are both fine; another value, or another cache afterwards, is not. Words and sizes as in `paged`.
"""

from __future__ import annotations

import torch
from corpus.paged import HKV, PAGE, D, Draw, H, paged, with_new_tokens
from corpus.paged_masked import float8_by_head, int8_by_token
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


# ----------------------------------------------------------------------------------------------------------------
# Scales


def masked_by_length(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    return attend(q, k.flatten(1, 2), v.flatten(1, 2), places(table) < lengths[:, None])


@CASES.either(lambda d: (*float8_by_head(d), d(D)))
def scale_of_each_column(
    q: Tensor, k8: Tensor, v8: Tensor, ks: Tensor, vs: Tensor, table: Tensor, lengths: Tensor, columns: Tensor
) -> Tensor:
    k, v = k8[table].to(q.dtype) * columns, v8[table].to(q.dtype) * columns * 0.5
    return masked_by_length(q, k, v, table, lengths)


@CASES.either(int8_by_token)
def scale_of_the_token_before(
    q: Tensor, k8: Tensor, v8: Tensor, ks: Tensor, vs: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = k8[table].to(q.dtype) * ks[table].roll(1, 2), v8[table].to(q.dtype) * vs[table - 1]
    return masked_by_length(q, k, v, table, lengths)


@CASES.either(int8_by_token)
def zero_points(q: Tensor, k8: Tensor, v8: Tensor, ks: Tensor, vs: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = ((x[table].to(q.dtype) - 3) * s[table] for x, s in ((k8, ks), (v8, vs)))
    return masked_by_length(q, k, v, table, lengths)


@CASES.either(int8_by_token)
def doubled_in_eight_bits(
    q: Tensor, k8: Tensor, v8: Tensor, ks: Tensor, vs: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """int8 wraps around"""
    k, v = (k8[table] * 2).to(q.dtype) * ks[table], (v8[table] << 1).to(q.dtype) * vs[table]
    return masked_by_length(q, k, v, table, lengths)


@CASES.either(int8_by_token)
def divided_by_the_scale(
    q: Tensor, k8: Tensor, v8: Tensor, ks: Tensor, vs: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = k8[table].to(q.dtype) / (10 * ks[table]), ks[table] / (v8[table].to(q.dtype) + 200)
    return masked_by_length(q, k, v, table, lengths)


@CASES.either(paged)
def rounded_on_the_way(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Quantised and dequantised in the graph"""
    k, v = ((x[table] * 16).round().clamp(-128, 127).to(torch.int8).to(q.dtype) / 16 for x in (k_pool, v_pool))
    return masked_by_length(q, k, v, table, lengths)


@CASES.either(paged)
def scale_of_the_query(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """By head, on keys that are read through the table"""
    by_head = torch.arange(1, HKV + 1, device=q.device).to(q.dtype)[:, None]
    return masked_by_length(q, k_pool[table] * by_head, v_pool[table] / by_head, table, lengths)


@CASES.either(paged)
def keys_squared(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    return masked_by_length(q, k_pool[table] * k_pool[table], v_pool[table] * k_pool[table], table, lengths)


# ----------------------------------------------------------------------------------------------------------------
# Writes


def written(pool: Tensor, slot: Tensor, new: Tensor) -> None:
    pool.view(-1, HKV, D)[slot] = new


@CASES.either(with_new_tokens)
def written_afterwards(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    out = masked_by_length(q, k_pool[table], v_pool[table], table, lengths)
    written(k_pool, at, k_new)
    written(v_pool, at, v_new)
    return out


@CASES.either(with_new_tokens)
def written_between_fetch_and_use(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = k_pool[table], v_pool[table]
    written(k_pool, at, k_new)
    written(v_pool, at, v_new)
    return masked_by_length(q, k, v, table, lengths)


@CASES.either(with_new_tokens)
def values_written_under_the_scores(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """The keys of before, the values of after"""
    k = k_pool[table].flatten(1, 2)
    s = torch.einsum("bmhgd,bnhd->bhgmn", q.unflatten(2, (HKV, G)), k) * D**-0.5
    written(k_pool, at, k_new)
    written(v_pool, at, v_new)
    p = s.masked_fill((places(table) >= lengths[:, None])[:, None, None, None], -INF).softmax(-1)
    return torch.einsum("bhgmn,bnhd->bmhgd", p, v_pool[table].flatten(1, 2)).flatten(2, 3)


@CASES.decline(with_new_tokens, reason="`copy_` writes a tensor that is read before and after")
def table_written_before_the_values(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    table = table.clone()
    k = k_pool[table].flatten(1, 2)
    table[:, 0] = at // PAGE
    return attend(q, k, v_pool[table].flatten(1, 2), places(table) < lengths[:, None])


@CASES.either(with_new_tokens)
def old_pool_read_beside_a_new_one(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> tuple[Tensor, ...]:
    new = k_pool.index_put((at // PAGE, at % PAGE), k_new)
    return masked_by_length(q, k_pool[table], new[table], table, lengths), new


@CASES.either(with_new_tokens)
def scale_written_after_its_use(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_pool: Tensor, v_pool: Tensor, at: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    scale = v_pool[:, :, :1, :1].clone()
    k, v = k_pool[table] * scale[table], v_pool[table] * scale[table]
    scale.zero_()
    return masked_by_length(q, k, v, table, lengths)
