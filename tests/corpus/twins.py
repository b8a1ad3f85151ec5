"""Nearly attention: each differs from a program that is fused by one thing, and is another function."""

from __future__ import annotations

from typing import Any

import torch
from corpus.table import INF, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()
ANOTHER_AXIS = "the softmax runs over another axis than the product of weights and values sums over"
NO_SOFTMAX = "is not a softmax over the axis that the product sums over"


# ----------------------------------------------------------------------------------------------------------------
# Another axis. M = N = D or H = M, so that a wrong axis would pass unseen


def cube(draw: Any) -> list[Tensor]:
    return [draw(2, 8, 8, 8) for _ in range(3)]


@CASES.decline(cube, ANOTHER_AXIS)
def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-2) @ v


@CASES.decline(cube, ANOTHER_AXIS)
def softmax_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(1) @ v


@CASES.decline(cube, ANOTHER_AXIS)
def softmax_over_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(0) @ v


@CASES.decline(cube, ANOTHER_AXIS)
def weights_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).transpose(-2, -1) @ v


@CASES.decline(cube, ANOTHER_AXIS)
def transposed_scores_wrong_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.transpose(-2, -1)).softmax(-1).transpose(-2, -1) @ v


@CASES.decline(cube, ANOTHER_AXIS)
def max_over_keys_sum_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-2, keepdim=True)) @ v


@CASES.decline(cube, "`amax` is not a pointwise function of the scores")
def max_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.amax(-2, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.decline(cube, ANOTHER_AXIS)
def one_sum_for_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e / e.sum((-2, -1), keepdim=True)) @ v


@CASES.decline(cube, NO_SOFTMAX)
def deferred_division_by_another_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e @ v) / e.sum(-2).unsqueeze(-1)


@CASES.decline(cube, ANOTHER_AXIS)
def product_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhqd->bhkd", scores(q, k).softmax(-1), v)


@CASES.decline(cube, "another axis than the product of weights and values sums over")
def einsum_sums_two_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bqd", scores(q, k).softmax(-1), v)


@CASES.decline(cube, "`diagonal` is not a pointwise function of the scores")
def keys_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ k.transpose(-2, -1)).diagonal(dim1=-2, dim2=-1)[:, :, None].expand(2, 8, 8, 8).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# The weights are no softmax


@CASES.either(grad=())
def half_in_the_denominator_after_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No sink of log 0.5: the maximum counts."""
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 0.5)) @ v


@CASES.decline(qkv, "the normaliser is kept above 1e-12")
def normalised_by_at_least_epsilon(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.normalize(scores(q, k).exp(), p=1.0, dim=-1) @ v


@CASES.decline(qkv, "the weights are not a softmax of the scores times a factor")
def weights_of_other_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return ((s * 2).exp() / s.exp().sum(-1, keepdim=True)) @ v


@CASES.decline(qkv, "the weights are not a softmax of the scores times a factor")
def squared_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).square() @ v


@CASES.decline(qkv)
def renormalised_by_l2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    return (p / p.norm(dim=-1, keepdim=True)) @ v


@CASES.decline(qkv, "`softmax` is not a pointwise function of the scores")
def softmax_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).softmax(-1) @ v


@CASES.decline(qkv, "the weights are not a softmax of the scores times a factor")
def log_softmax_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).log_softmax(-1) @ v


@CASES.decline(square, "`flip` is not a pointwise function of the weights")
def weights_flipped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).flip(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Scores that depend on other scores


@CASES.decline(qkv, "`cumsum` is not a pointwise function of the scores")
def cumsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).cumsum(-1).softmax(-1) @ v


@CASES.decline(qkv, "`topk` is not a pointwise function of the scores")
def topk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return s.masked_fill(s < s.topk(4, dim=-1).values[..., -1:], -INF).softmax(-1) @ v


@CASES.decline(qkv, "`sort` is not a pointwise function of the scores")
def sorted_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).sort(-1).values.softmax(-1) @ v


@CASES.decline(square, "`roll` is not a pointwise function of the scores")
def rolled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).roll(1, -1).softmax(-1) @ v


@CASES.decline(qkv, "`layer_norm` is not a pointwise function of the scores")
def normalised_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.nn.functional.layer_norm(s, (s.shape[-1],)).softmax(-1) @ v


@CASES.decline(qkv, "`mean` is not a pointwise function of the scores")
def scores_over_their_mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s / s.abs().mean(-1, keepdim=True)).softmax(-1) @ v


@CASES.decline(qkv, "`amax` is not a pointwise function of the scores")
def scores_times_their_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s * s.amax(-1, keepdim=True)).softmax(-1) @ v


@CASES.decline(lambda d: (*qkv(d), d(3, 3)), "`einsum` mixes scores of different heads, queries or keys")
def talking_heads_before(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("bhij,hg->bgij", scores(q, k), mix).softmax(-1) @ v


@CASES.decline(lambda d: (*qkv(d), d(3, 3)), ANOTHER_AXIS)
def talking_heads_after(q: Tensor, k: Tensor, v: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("bhij,hg->bgij", scores(q, k).softmax(-1), mix) @ v


@CASES.decline(lambda d: (*qkv(d), d(3, 3, 1, 1)), "is not a pointwise function of the scores")
def scores_convolved(q: Tensor, k: Tensor, v: Tensor, kernel: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(scores(q, k), kernel).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# What is inside is needed outside


@CASES.decline(qkv, "the weights or scores are read elsewhere too, by the graph's output")
def weights_escape(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = scores(q, k).softmax(-1)
    return p @ v, p


@CASES.decline(qkv, "the weights or scores are read elsewhere too, by `mean`")
def weights_averaged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = scores(q, k).softmax(-1)
    return p @ v, p.mean(1)


@CASES.decline(qkv, "the weights or scores are read elsewhere too, by `square`")
def scores_escape(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    return s.softmax(-1) @ v, s.square().mean()


@CASES.decline(qkv)
def no_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k) @ v


@CASES.decline(qkv)
def sigmoid_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).sigmoid() @ v) + q.softmax(-1)


@CASES.decline(qkv)
def relu_squared_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).relu().square() @ v


@CASES.decline(qkv)
def weights_of_either_sign_normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = scores(q, k).tanh()
    return (w / w.sum(-1, keepdim=True)) @ v


@CASES.decline(qkv)
def size_of_the_weights_normalised_by_their_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = scores(q, k)
    return (w.square() / w.sum(-1, keepdim=True)) @ v


@CASES.decline(lambda d: (*qkv(d), d.keep()), "no product of queries and keys lies under the softmax")
def softmax_of_a_mask_alone(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.zeros(13, 21, dtype=v.dtype).masked_fill(~keep, -INF).softmax(-1) @ v


@CASES.decline(qkv, "no product of queries and keys lies under the softmax")
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)


@CASES.decline(square, "is not a pointwise function of the scores")
def mask_from_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k)
    return s.masked_fill(s < s.mean(-1, keepdim=True), -INF).masked_fill(j > i + 99, -INF).softmax(-1) @ v


@CASES.decline(lambda d: square(d, 16), "puts the scores together piece by piece in another tensor", grad=())
def window_put_together_from_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.full((2, 3, 16, 16), -INF, dtype=q.dtype, device=q.device)
    for a in range(0, 16, 4):
        s[..., a : a + 4, max(a - 4, 0) : a + 4] = scores(q[..., a : a + 4, :], k[..., max(a - 4, 0) : a + 4, :])
    return s.softmax(-1) @ v
