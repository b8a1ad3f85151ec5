"""Programs that write in place: every read has its time, and a fused kernel reads when the output is due."""

from __future__ import annotations

from typing import Any

import torch
from corpus.table import INF, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()
OVERWRITTEN = "overwrites an operand between its use in the scores and the output"


def with_new(d: Any) -> list[Tensor]:
    """qkv, and new keys and values for 4 positions."""
    return [*qkv(d), d(2, 3, 4, 8), d(2, 3, 4, 8)]


# ----------------------------------------------------------------------------------------------------------------
# Writes before everything is read: the new values count


@CASES.fuse(with_new, grad=())
def cache_written_by_slice(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor) -> Tensor:
    k[:, :, 5:9] = new_k
    v[:, :, 5:9].copy_(new_v)
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(with_new, grad=())
def cache_written_by_index_copy(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor) -> Tensor:
    at = torch.arange(5, 9)
    k.index_copy_(2, at, new_k)
    v.index_copy_(2, at, new_v)
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(with_new, grad=())
def view_taken_before_the_write(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor) -> Tensor:
    kt, vs = k.transpose(-2, -1), v[:, :, :]
    k[:, :, 5:9] = new_k
    v[:, :, 5:9] = new_v
    return (q @ kt).softmax(-1) @ vs


@CASES.fuse(with_new, grad=())
def copy_taken_before_the_write(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor) -> Tensor:
    old_k, old_v = k.clone(), v.clone()
    k[:, :, 5:9] = new_k
    v[:, :, 5:9] = new_v
    return scores(q, old_k).softmax(-1) @ old_v


@CASES.fuse(square, grad=())
def keys_assembled_in_slots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    whole = torch.empty_like(k)
    whole[..., :4] = k[..., 4:]
    whole[..., 4:] = k[..., :4]
    return scores(q, whole).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(13, 21)], grad=())
def bias_written_before(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    bias.mul_(2.0)
    return (scores(q, k) + bias).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep()], grad=())
def mask_written_before(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    mask = torch.ones_like(keep)
    mask[:, 3] = False
    mask &= keep
    return scores(q, k).masked_fill(~mask, -INF).softmax(-1) @ v


@CASES.fuse(qkv, grad=())
def mask_filled_by_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(13, 21, dtype=q.dtype)
    mask[:, 7:].fill_(-INF)
    return (scores(q, k) + mask).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Writes between the read and the output


@CASES.decline(with_new, OVERWRITTEN, grad=())
def keys_written_after_the_scores(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    k[:, :, 5:9] = new_k
    v[:, :, 5:9] = new_v
    return p @ v


@CASES.fuse(with_new, grad=())
def values_written_after_the_scores(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    v[:, :, 5:9] = new_v
    return p @ v + new_k.sum()


@CASES.fuse(with_new, grad=())
def written_after_the_output(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor) -> Tensor:
    out = scores(q, k).softmax(-1) @ v
    k[:, :, 5:9] = new_k
    v[:, :, 5:9] = new_v
    return out


@CASES.decline(qkv, OVERWRITTEN, grad=())
def queries_written_after_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    q.zero_()
    return s.softmax(-1) @ v + q


@CASES.decline(lambda d: [*qkv(d), d(13, 21)], OVERWRITTEN, grad=())
def bias_written_after_the_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = scores(q, k) + bias
    bias.zero_()
    return s.softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep()], grad=())
def mask_inverted_after_it_was_read(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~keep, -INF)
    keep.logical_not_()
    return s.softmax(-1) @ v


@CASES.decline(square, OVERWRITTEN, grad=())
def base_of_a_view_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    both = torch.cat([k, v], -1)
    keys, values = both.split(8, -1)
    s = scores(q, keys)
    both.mul_(2.0)
    return s.softmax(-1) @ values


@CASES.fuse(square, grad=())
def base_of_a_view_written_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    both = torch.cat([k, v], -1)
    keys, values = both.split(8, -1)
    both.mul_(2.0)
    return scores(q, keys).softmax(-1) @ values


@CASES.fuse(lambda d: [*square(d), torch.tensor([9, 17])], grad=())
def lengths_written_after_they_were_read(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    dead = torch.arange(k.shape[2]) >= lengths[:, None]
    s = scores(q, k).masked_fill(dead[:, None, None], -INF)
    lengths += 1
    return s.softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# The scores themselves are written


@CASES.fuse(lambda d: [*qkv(d), d(13, 21)], grad=(0, 1, 2, 3))
def bias_added_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = q @ k.mT
    s *= 0.25
    s += bias
    return s.softmax(-1) @ v


@CASES.fuse(square)
def scores_masked_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k)
    s.masked_fill_(j > i, -INF)
    return s.softmax(-1) @ v


@CASES.fuse(square)
def part_of_the_scores_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    s[..., 0] = 0.0
    return s.softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(21, 4)])
def parts_written_in_turn(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    s = scores(q, k)
    s[:, 1, :, 2:9] *= 0.5
    s[:, :, :, -4:] += x
    s[0, 0, 3:5].zero_()
    s[1, ..., 9:].masked_fill_(x[:, :1] > 0, -1e4)
    return s.softmax(-1) @ v


@CASES.decline(square, "`fill_` writes into the scores in place", grad=())
def every_other_score_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    s[..., ::2] = 0.0
    return s.softmax(-1) @ v


@CASES.decline(square, "`fill_` writes into the scores in place", grad=())
def part_of_the_scores_written_and_read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    s = scores(q, k)
    first = s[..., 0]
    first.fill_(0.5)
    return s.softmax(-1) @ v, first


@CASES.decline(square, grad=())
def part_of_the_scores_written_under_another_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    flat = s.view(6, 21, 21)
    flat[2] = 0.5
    return s.softmax(-1) @ v


@CASES.either(square)
def part_of_the_scores_written_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k) * 1.0
    with torch.no_grad():
        s[..., 0] = 0.5
    return s.softmax(-1) @ v


@CASES.fuse(square, grad=())
def part_of_the_weights_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    p[..., 0] = 0.0
    return p @ v


@CASES.decline(square, "`mul_` writes into the scores in place", grad=())
def scores_written_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    flat = s.view(-1)
    flat.mul_(0.5)
    return s.softmax(-1) @ v


@CASES.decline(lambda d: [*qkv(d), d(2, 3, 13, 21)], grad=())
def scores_written_into_an_argument(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    torch.matmul(q, k.mT, out=out)
    return out.softmax(-1) @ v


@CASES.decline(lambda d: [*qkv(d), d(2, 3, 13, 21)], grad=())
def scores_copied_into_an_argument(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    out.copy_(q @ k.mT)
    return out.softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(2, 3, 13, 8)], grad=())
def output_copied_into_an_argument(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    out.copy_(scores(q, k).softmax(-1) @ v)
    return out * 2


@CASES.fuse(qkv, grad=())
def output_written_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = scores(q, k).softmax(-1) @ v
    out += 1.0
    out[:, 0] = 0.0
    return out


@CASES.fuse(square, grad=())
def written_twice_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(21, 21, dtype=q.dtype)
    s = scores(q, k) + mask
    mask += 1.0
    t = s + mask
    mask += 1.0
    return t.softmax(-1) @ v * mask[:, :1]
