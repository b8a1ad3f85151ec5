"""Keys and biases put together from several tensors: each is read within its own length only."""

from __future__ import annotations

from typing import Any

import torch
from corpus.table import FULL, INF, Table, places, qkv, scores, square
from torch import Tensor
from torch.nn import functional as F

CASES = Table()


def causal(s: Tensor) -> Tensor:
    i, j = torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)
    return s.masked_fill(j > i, -INF)


# ----------------------------------------------------------------------------------------------------------------
# Scores of two kinds of keys


@CASES.fuse(lambda d: [*square(d), d(2, 3, 5, 8), d(2, 3, 5, 8)], grad=(0, 1, 2, 3, 4))
def prefix_of_its_own(q: Tensor, k: Tensor, v: Tensor, before: Tensor, values: Tensor) -> Tensor:
    s = torch.cat([scores(q, before), causal(scores(q, k))], -1)
    return s.softmax(-1) @ torch.cat([values, v], -2)


@CASES.fuse(lambda d: [*square(d), d(2, 3, 5, 8), d(2, 3, 5, 8)], grad=(0, 1, 2, 3, 4))
def memory_behind(q: Tensor, k: Tensor, v: Tensor, more: Tensor, values: Tensor) -> Tensor:
    s = torch.cat([causal(scores(q, k)), scores(q, more)], -1)
    return s.softmax(-1) @ torch.cat([v, values], -2)


@CASES.fuse(lambda d: [*qkv(d), d(3)], grad=(0, 1, 2, 3))
def sink_with_a_key_of_zeros(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = scores(q, k)
    s = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1) @ torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)


@CASES.fuse()
def zero_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.pad(scores(q, k), (1, 0)).softmax(-1) @ F.pad(v, (0, 0, 1, 0))


# ----------------------------------------------------------------------------------------------------------------
# A key before the others, which the bias and the mask do not know


@CASES.fuse(lambda d: [*qkv(d), d(3, 1, 8), d(3, 1, 8), d(3, d.n(13), d.n(21))], grad=(0, 1, 2, 3, 4, 5))
def null_key(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    k, v = (torch.cat([x.expand(len(y), -1, -1, -1), y], 2) for x, y in ((key, k), (value, v)))
    return (scores(q, k) + F.pad(bias, (1, 0))).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3, 1, 8), d(3, 1, 8), d.keep()], grad=(0, 1, 2, 3, 4))
def null_key_and_a_mask(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    k, v = (torch.cat([x.expand(len(y), -1, -1, -1), y], 2) for x, y in ((key, k), (value, v)))
    return scores(q, k).masked_fill(~F.pad(keep, (1, 0), value=True), -INF).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(3, d.n(21) - 1, d.n(21) - 1)], grad=(0, 1, 2, 3))
def bias_without_the_class_token(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (scores(q, k) + F.pad(bias, (1, 0, 1, 0))).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(d.n(13), 4), d(d.n(13), d.n(21) - 4)], grad=(0, 1, 2, 3, 4))
def bias_in_two_parts(q: Tensor, k: Tensor, v: Tensor, first: Tensor, rest: Tensor) -> Tensor:
    return (scores(q, k) + torch.cat([first, rest], -1)).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(2, d.n(21) - 4) > -0.5])
def padding_behind_a_prompt(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    shown = torch.cat([shown.new_ones(len(shown), 4), shown], -1)
    return scores(q, k).masked_fill(~shown[:, None, None], -INF).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Keys and values that are part of a bias too: their gradient is a sum


@CASES.fuse()
def keys_that_are_a_bias_too(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) + k[..., 0][:, :, None]).softmax(-1) @ v


@CASES.fuse()
def longer_values_count_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) + v[..., 1].abs()[:, :, None]).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# One softmax, whose pieces are multiplied by values of their own


def with_prefix(d: Any) -> list[Tensor]:
    return [*qkv(d), d(3, 5, 8), d(3, 5, 8)]


@CASES.fuse(with_prefix, grad=(0, 1, 2, 3, 4))
def prefix_with_values_of_its_own(q: Tensor, k: Tensor, v: Tensor, before: Tensor, values: Tensor) -> Tensor:
    p = torch.cat([scores(q, before), scores(q, k)], -1).softmax(-1)
    return p[..., :5] @ values + p[..., 5:] @ v


@CASES.fuse(lambda d: [*qkv(d), d(2, 3, 5, 8), d(2, 3, 5, 8)], grad=(0, 1, 2, 3, 4))
def memory_split_off(q: Tensor, k: Tensor, v: Tensor, more: Tensor, values: Tensor) -> Tensor:
    p = torch.cat([scores(q, k), scores(q, more)], -1).softmax(-1, dtype=torch.float32).to(v.dtype)
    own, memory = p.split([k.shape[-2], 5], -1)
    out = torch.einsum("bhij,bhjd->bhid", memory, values)
    out += torch.einsum("bhij,bhjd->bhid", own, v)
    return out


@CASES.fuse(lambda d: [*with_prefix(d), d(2, 3, 4, 8), d(2, 3, 4, 8)], grad=(0, 1, 2, 3, 4, 5, 6))
def three_kinds_of_keys(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, values: Tensor, behind: Tensor, last: Tensor
) -> Tensor:
    p = torch.cat([scores(q, before), causal(scores(q, k)), scores(q, behind)], -1).softmax(-1)
    return p.narrow(-1, 5, k.shape[-2]) @ v + p[..., :5] @ values + p[..., -4:] @ last


@CASES.fuse(lambda d: [*qkv(d), d(3), d(3, 1, 8)], grad=(0, 1, 2, 3, 4))
def sink_with_a_value(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, value: Tensor) -> Tensor:
    s = scores(q, k)
    p = torch.cat([sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1), s], -1).softmax(-1)
    return p[..., :1] * value + p[..., 1:] @ v


# ----------------------------------------------------------------------------------------------------------------
# Near misses


@CASES.fuse(lambda d: [*square(d), d(3, d.n(21), d.n(21))], grad=(0, 1, 2, 3))
def bias_moved_by_a_key(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The last key's bias falls off, and the first has none."""
    return (scores(q, k) + F.pad(bias[..., :-1], (1, 0))).softmax(-1) @ v


@CASES.decline(square, "the softmax runs over another axis", dtypes=FULL)
def normalised_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    near = scores(q, k).masked_fill(j > i, -INF).softmax(-1)
    return torch.cat([near, scores(q, k).softmax(-1)], -1) @ torch.cat([v, v], -2)


@CASES.decline(with_prefix, "the weights are not a softmax of the scores times a factor", dtypes=FULL)
def pieces_that_overlap(q: Tensor, k: Tensor, v: Tensor, before: Tensor, values: Tensor) -> Tensor:
    p = torch.cat([scores(q, before), scores(q, k)], -1).softmax(-1)
    return p[..., :5] @ values + p[..., 4:-1] @ v


@CASES.decline(lambda d: [*square(d), d(2, 3, d.n(21), 8), d(2, 3, d.n(21), 8)], dtypes=FULL)
def pieces_of_two_softmaxes(q: Tensor, k: Tensor, v: Tensor, more: Tensor, values: Tensor) -> Tensor:
    s = torch.cat([scores(q, more), scores(q, k)], -1)
    n = k.shape[-2]
    return s.softmax(-1)[..., :n] @ values + (2 * s).softmax(-1)[..., n:] @ v


@CASES.decline(with_prefix, dtypes=FULL, grad=())
def values_written_between_the_pieces(q: Tensor, k: Tensor, v: Tensor, before: Tensor, values: Tensor) -> Tensor:
    p = torch.cat([scores(q, before), scores(q, k)], -1).softmax(-1)
    out = p[..., :5] @ values
    values.mul_(2.0)
    return out + p[..., 5:] @ v
