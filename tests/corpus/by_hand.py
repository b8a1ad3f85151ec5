"""Softmax, products and loops written by hand, each with a program that differs in one place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus.table import FULL, INF, Table, qkv, scores, square
from torch import Tensor

CASES = Table()


@CASES.pair()
def ones_column(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """The sum as a column of ones beside the values."""
    e = scores(q, k).exp()
    o = e @ torch.cat([v, torch.ones_like(v[..., :1])], -1)
    return o[..., :-1] / (o[..., :1] if near else o[..., -1:])


@CASES.pair(dtypes=FULL)
def ones_column_of_wider_numbers(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Beside them the values are widened too."""
    e = scores(q, k).exp()
    o = e @ torch.cat([v.bfloat16(), torch.ones_like(v[..., :1])], -1)
    return o[..., :-1] / (o[..., :1] if near else o[..., -1:])


@CASES.pair()
def ones_column_after_the_maximum(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    n, d = torch.einsum("bhij,bhjd->bhid", e, F.pad(v, (0, 1), value=2.0 if near else 1.0)).split([8, 1], -1)
    return n / d.clamp(min=3.0) if near else n / d


@CASES.decline(reason="the normaliser is kept above 1e-12, which may be more than the sum")
def normalised_by_f_normalize(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.normalize(scores(q, k).exp(), p=1, dim=-1) @ v


@CASES.pair()
def normalised_by_f_normalize_after_the_maximum(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k)
    return F.normalize((s - s.max(-1, keepdim=True)[0]).exp(), p=1.0, dim=-2 if near else -1) @ v


@CASES.pair(square)
def keys_assigned_minus_infinity(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k)
    s[..., 15:] = -INF
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d), d.ints(17, 9)])
def keys_assigned_for_each_request(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k)
    for b, n in enumerate((17, 9)):
        s[b, :, :, n:] = -INF
    return (s.softmax(-1) if not near else s.softmax(-1).cumsum(-1)) @ v


@CASES.pair(square)
def sigmoid_normalised(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """w / sum w, w = sigmoid(s): a softmax of log sigmoid"""
    w = scores(q, k).sigmoid()
    return w / w.sum(-2 if near else -1, keepdim=True) @ v


@CASES.pair(square)
def softplus_normalised(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    w = F.softplus(scores(q, k))
    return (w / w.sum(-1, keepdim=True) if not near else w) @ v


@CASES.decline(square)
def student_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """t-SNE's kernel, normalised: 1 / (1 + |q - k|^2), of which no product is taken."""
    w = 1 / (1 + (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1))
    return w / w.sum(-1, keepdim=True) @ v


@CASES.decline(square, "no product of queries and keys lies under the softmax")
def minus_the_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The plain distance, not its square: near 0 its root is lost in a difference of products."""
    return torch.softmax(-torch.cdist(q, k), -1) @ v


@CASES.pair(square, dtypes=FULL, note="left to eager in training: it may hide every key")
def masked_where_a_product_is_zero(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """tril(s) == 0, as it is found in teaching code."""
    s = torch.tril(scores(q, k))
    s = s.masked_fill(s == 0, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair()
def softmax_of_transposed_products(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """All transposed: V^T P^T."""
    p = torch.softmax(k @ q.mT * 8**-0.5, dim=-1 if near else -2)
    return (v.mT @ p).mT


@CASES.pair()
def logits_through_logaddexp(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """A sink of logit 0 by logaddexp."""
    s = scores(q, k)
    total = torch.logaddexp(s.logsumexp(-1, keepdim=True), torch.zeros((), dtype=q.dtype))
    return (s - (total * 2 if near else total)).exp() @ v


@CASES.pair()
def minus_softmin_of_negatives(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = -scores(q, k)
    return (F.softmin(s, dim=-1) if not near else F.softmin(s, dim=-1).neg().exp()) @ v


@CASES.pair()
def gathered_by_einsum_of_three(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    e = torch.einsum("bhid,bhjd->bhij", q, k).mul(8**-0.5).exp()
    total = torch.einsum("bhij->bhj" if near else "bhij->bhi", e).reciprocal()
    return torch.einsum("bhij,bhj,bhjd->bhid" if near else "bhij,bhi,bhjd->bhid", e, total, v)


@CASES.pair(lambda d: [*qkv(d), d.keep()])
def sigmoid_masked_and_deferred(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    w = torch.sigmoid(scores(q, k)) * keep
    return (w @ v) / (w.square() if near else w).sum(-1, keepdim=True)


@CASES.pair(note="left to eager in training: a weight may be 0")
def relu_squared_over_an_epsilon(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    w = F.relu(scores(q, k)).square()
    return (w if near else w / (w.sum(-1, keepdim=True) + 1e-6)) @ v


@CASES.pair(note="left to eager in training: a weight may be 0")
def relu_over_its_sum(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """A query of which every score is negative gives NaN."""
    w = F.relu(scores(q, k).masked_fill(torch.ones(13, 21).triu(15).bool(), 0))
    return w / w.sum(-2 if near else -1, keepdim=True) @ v


@CASES.pair(lambda d: [*qkv(d), d.keep()])
def softplus_masked_by_choice(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    w = F.softplus(2 * (q @ k.mT)).masked_fill(~keep, 0.0)
    return (w / w.amax(-1, keepdim=True) if near else w / w.sum(-1, keepdim=True)) @ v


@CASES.pair()
def one_more_than_the_square(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k)
    w = s + s**2 if near else 1 + s**2
    return w / w.sum(-1, keepdim=True) @ v
