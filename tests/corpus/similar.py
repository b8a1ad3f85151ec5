"""Scores by the direction or the distance of queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus.table import FULL, INF, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()
NO_SCORES = "no product of queries and keys lies under the softmax"


def pairs(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries along one axis, keys along the next."""
    return q.unsqueeze(-2), k.unsqueeze(-3)


def square_of_distance(q: Tensor, k: Tensor) -> Tensor:
    q, k = pairs(q, k)
    return (q - k).pow(2).sum(-1)


# ----------------------------------------------------------------------------------------------------------------
# Directions


@CASES.fuse()
def cosine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.cosine_similarity(*pairs(q, k), dim=-1) * 10).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(1)], grad=(0, 1, 2, 3))
def cosine_of_learned_strength(q: Tensor, k: Tensor, v: Tensor, strength: Tensor) -> Tensor:
    i, j = places(q, k)
    s = F.cosine_similarity(q[:, :, :, None], k[:, :, None], -1, 1e-6) * strength.exp()
    return s.masked_fill(j > i, -INF).softmax(-1) @ v


@CASES.fuse(note="the number that lengths are kept above lets gradients pass")
def cosine_of_short_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.cosine_similarity(*pairs(q, k * 0.1), dim=-1, eps=1.0) * 5).softmax(-1) @ v


@CASES.fuse(lambda d: [d(2, d.n(13), 3, 8), d(2, d.n(21), 3, 8), d(2, d.n(21), 3, 8)])
def cosine_of_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = F.cosine_similarity(q[:, :, None], k[:, None], dim=-1)
    return torch.einsum("bijh,bjhd->bihd", (s / 0.2).softmax(2), v)


@CASES.fuse(lambda d: [d(13, 16), d(21, 16), d(21, 8)])
def cosine_along_the_axis_that_is_default(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Counted in what both become: k.T has fewer axes."""
    return (F.cosine_similarity(q.unsqueeze(-1), k.T) * 5).softmax(-1) @ v


@CASES.fuse(lambda d: [d(13, 64).clamp(-3, 3) * 2e4, d(21, 64), d(21, 8)], grad=())
def cosine_of_lengths_that_overflow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float16 such a similarity is 0."""
    return (F.cosine_similarity(q[:, None], k[None], -1) * 5).softmax(-1) @ v


@CASES.either(grad=(), note="autocast takes similarities in float32")
def cosine_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast(q.device.type, torch.bfloat16):
        q, k = (torch.einsum("bhnd,de->bhne", x, x.new_ones(8, 8).tril()) for x in (q, k))
        return ((F.cosine_similarity(*pairs(q, k), dim=-1) * 10).softmax(-1) @ v).to(v.dtype)


# ----------------------------------------------------------------------------------------------------------------
# Distances


def cdist_by_product(q: Tensor, k: Tensor) -> Tensor:
    return torch.cdist(q, k, compute_mode="use_mm_for_euclid_dist")


@CASES.fuse(lambda d: [*qkv(d), d.keep()], dtypes=FULL)
def cdist(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.softmax((-0.5 * cdist_by_product(q, k) ** 2).masked_fill(~keep, -INF), -1) @ v


@CASES.fuse(lambda d: [d(2, d.n(21), 8)], grad=(0,), dtypes=FULL)
def cdist_of_one_with_itself(x: Tensor) -> Tensor:
    return torch.softmax(-(cdist_by_product(x, x) ** 2), -1) @ x


@CASES.fuse(lambda d: [*qkv(d), d(1)], grad=(0, 1, 2, 3), dtypes=FULL)
def cdist_of_learned_width(q: Tensor, k: Tensor, v: Tensor, width: Tensor) -> Tensor:
    return (cdist_by_product(q, k).square() * -width.exp() + 1.0).softmax(-1) @ v


@CASES.fuse(lambda d: qkv(d, 13, 34), dtypes=FULL, note="of more than 25 rows")
def cdist_of_many(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(-(torch.cdist(q, k) ** 2), -1) @ v


@CASES.either(grad=())
def cdist_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast(q.device.type, torch.bfloat16):
        q, k = (torch.einsum("bhnd,de->bhne", x, x.new_ones(8, 8).tril()) for x in (q, k))
        return ((cdist_by_product(q, k) ** 2 * -0.1).softmax(-1) @ v).to(v.dtype)


# ----------------------------------------------------------------------------------------------------------------
# Other functions


@CASES.decline(qkv, NO_SCORES, dtypes=FULL)
def not_squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Near 0 a root shows the last bits of its square."""
    return torch.softmax(-torch.cdist(q, k), -1) @ v


@CASES.decline(qkv, NO_SCORES, dtypes=FULL)
def sum_of_absolute_differences(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(-(torch.cdist(q, k, p=1.0) ** 2) / 8, -1) @ v


@CASES.decline(qkv, NO_SCORES)
def squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of differences, which are exact where a key is near to a query, however long both are."""
    return torch.softmax(-square_of_distance(q, k) / 8**0.5, -1) @ v


@CASES.decline(lambda d: [*(d(1, 1, d.n(13), 1) + 1e4 * torch.arange(d.n(13), device=d.device)[:, None] for _ in "qk"),
                          d(1, 1, d.n(13), 8)], dtypes=FULL)  # fmt: skip
def kernel_regression(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of times that lie far apart."""
    q, k = pairs(q, k)
    w = torch.exp(-((q - k) ** 2).sum(-1) / 2)
    return (w @ v) / w.sum(-1, keepdim=True)


@CASES.decline(qkv, NO_SCORES)
def norm_squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = pairs(q, k)
    far = torch.linalg.vector_norm(k - q, dim=-1)
    return (far * far * -0.3).softmax(-1) @ v


@CASES.decline(qkv, NO_SCORES, dtypes=FULL)
def cdist_of_differences(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    far = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.softmax(-far.square(), -1) @ v


@CASES.decline(qkv, NO_SCORES, dtypes=FULL)
def cdist_of_few(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch takes differences of at most 25 rows."""
    return torch.softmax(-(torch.cdist(q, k) ** 2), -1) @ v


@CASES.decline(lambda d: [d(1, 1, d.n(13), 8), torch.cat([d(1, 1, 20, 8), d(1, 1, 1, 8) * INF], 2), d(1, 1, 21, 8)],
               NO_SCORES, dtypes=FULL)  # fmt: skip
def squared_beside_a_key_that_holds_no_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.arange(21, device=k.device) == 20
    return torch.softmax((-square_of_distance(q, k)).masked_fill(hidden, -INF), -1) @ v


@CASES.decline(lambda d: [d(13, 1), d(21, 16), d(21, 8)], NO_SCORES)
def cosine_with_one_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """It is repeated along the axis, and so is its length."""
    return (F.cosine_similarity(q[:, None], k[None], -1) * 5).softmax(-1) @ v


@CASES.decline(qkv, NO_SCORES)
def root_of_the_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(-(square_of_distance(q, k) + 1e-6).sqrt(), -1) @ v


@CASES.decline(qkv, NO_SCORES)
def inverse_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(4 / (1e-3 + square_of_distance(q, k)), -1) @ v


@CASES.decline(qkv, NO_SCORES)
def fourth_power(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    far = square_of_distance(q, k)
    return torch.softmax(far * far * -0.01, -1) @ v


@CASES.decline(qkv, NO_SCORES)
def third_powers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = pairs(q, k)
    return torch.softmax((q - k).pow(3).sum(-1) / 8, -1) @ v


@CASES.decline(square)
def distance_over_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The sum leaves the head axis and loses the queries: nothing has both a query and a key axis."""
    q, k = pairs(q, k)
    return torch.einsum("bhnd,bhnd->bhd", (-(q - k).pow(2).sum(2)).softmax(2), v)


@CASES.decline(qkv, NO_SCORES)
def queries_written_under_the_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 1.0
    far = q.unsqueeze(-2) - k.unsqueeze(-3)
    q.zero_()
    return torch.softmax(-far.square().sum(-1), -1) @ (v + q.sum())


@CASES.decline(qkv, "read elsewhere too")
def similarity_that_is_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = F.cosine_similarity(*pairs(q, k), dim=-1)
    return s.softmax(-1) @ v, s + scores(q, k)
