"""Attention of which one call does more than a product of two tensors: several products, a product and a sum, rows of
several heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import FULL, INF, Table, places, qkv, scores, square
from torch import Tensor, einsum

CASES = Table()
LEARNING = (0, 1, 2, 3)


def matrices(d: Any) -> list[Tensor]:
    """q, k and v of one head, without axes of length 1."""
    return [x[0, 0] for x in qkv(d)]


# ----------------------------------------------------------------------------------------------------------------
# Products of three tensors


@CASES.fuse(lambda d: [*qkv(d), d(3)], grad=LEARNING)
def scores_scaled_in_their_product(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    s = einsum("bhid,bhjd,h->bhij", q, k, scale)
    return einsum("bhij,bhjd->bhid", s.softmax(-1), v)


@CASES.fuse(lambda d: [*qkv(d), d(24, 24) * 0.2], grad=LEARNING)
def projected_in_one_call(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return einsum("hdo,bhjd,bhij->bio", w.view(3, 8, 24), v, scores(q, k).softmax(-1))


@CASES.fuse(lambda d: [*matrices(d), d(8, 12)], grad=LEARNING)
def multiplied_in_a_chain(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.linalg.multi_dot([(q @ k.T).softmax(-1), v, w])


@CASES.fuse(lambda d: [*qkv(d), d(3, 3)], grad=LEARNING)
def heads_mixed_behind_the_values(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return einsum("bhij,hg,bhjd->bgid", scores(q, k).softmax(-1), w, v)


@CASES.decline(lambda d: [*qkv(d), d(3, 3)], "mixes scores of different heads", grad=LEARNING)
def heads_mixed_in_the_product(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return einsum("bhid,bhjd,hg->bgij", q, k, w).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# A product and a sum


@CASES.fuse(lambda d: [*(x[0] for x in qkv(d)), d(3, d.n(13), 8)], grad=LEARNING)
def residual_in_baddbmm(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return torch.baddbmm(x, torch.bmm(q, k.mT).softmax(-1), v, beta=0.5)


@CASES.fuse(lambda d: [*matrices(d), d(8)], grad=LEARNING)
def bias_in_addmm(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, (q @ k.T).softmax(-1), v, alpha=0.5)


@CASES.fuse(lambda d: [*matrices(d), d(8)], grad=LEARNING)
def bias_in_linear(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    e = F.linear(q, k).exp()
    return F.linear(e / e.sum(-1, keepdim=True), v.T, b)


@CASES.decline(lambda d: [x[0] for x in square(d, d=21)], "read elsewhere too, by `add`")
def weights_added_to_their_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.bmm(q, k.mT).softmax(-1)
    return torch.baddbmm(p, p, v)


@CASES.fuse(lambda d: [d(2, 3, 24, 8) for _ in range(3)])
def values_added_up_by_python(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    return sum(w @ x for w, x in zip(p.split(8, -1), v.split(8, 2), strict=True))


@CASES.decline(lambda d: [d(2, 3, 24, 8) for _ in range(3)])
def values_added_up_from_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    return sum((w @ x for w, x in zip(p.split(8, -1), v.split(8, 2), strict=True)), 1)


# ----------------------------------------------------------------------------------------------------------------
# Rows of several heads


def shared_keys(d: Any) -> list[Tensor]:
    return [d(2, d.n(13), 3, 8), d(2, d.n(21), 8), d(2, d.n(21), 8), d(3, d.n(13), d.n(21))]


@CASES.fuse(shared_keys, grad=LEARNING)
def mapped_with_shared_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    def one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * 8**-0.5 + bias, -1) @ v

    heads = torch.vmap(one, in_dims=(1, None, None, 0), out_dims=1)
    return torch.vmap(heads, in_dims=(0, 0, 0, None))(q, k, v, bias)


@CASES.fuse(square, dtypes=FULL)
def scores_changed_by_a_mapped_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def change(s: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i >= j, 20 * torch.tanh(s / 20) + (j - i) * torch.exp2(-(h + 1)), -INF)

    of_keys = torch.vmap(change, in_dims=(0, None, None, 0))
    of_heads = torch.vmap(torch.vmap(of_keys, in_dims=(0, None, 0, None)), in_dims=(0, 0, None, None))
    i, j = places(q, k)
    of_all = torch.vmap(of_heads, in_dims=(0, None, None, None))
    return of_all(scores(q, k), torch.arange(3, device=q.device), i[:, 0], j[0]).softmax(-1) @ v


@CASES.decline(lambda d: [*qkv(d)[:2], d(2, d.n(21), 8)], "no product of queries and keys")
def rows_of_heads_with_keys_of_their_own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).flatten(1, 2).softmax(-1) @ v
