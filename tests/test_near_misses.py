"""What is nearly attention is left alone, and told why: what stands in the way, at which line, what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from corpus.table import Draw, qkv, scores
from recognising import candidates
from torch import Tensor

from fusecomp.backend import explain
from fusecomp.patterns.attention import Declined
from fusecomp.patterns.build import RETURN_LESS, USE_ONCE
from fusecomp.patterns.reasons import (
    ANOTHER_AXIS,
    BOTH_SIDES,
    NEW_TENSOR,
    ON_ITS_OWN,
    ONE_FACTOR,
    OTHER_DTYPE,
    SAME_AXIS,
)  # fmt: skip

CASES: list[Any] = []
ELSEWHERE = "the weights or scores are read elsewhere too, by"


def near_miss(reason: str, line: str, advice: str, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(pytest.param(fn, reason, line, advice, dtype, id=fn.__name__))
        return fn

    return enter


@near_miss(ANOTHER_AXIS, "return p @ v", SAME_AXIS)
def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-2)
    return p @ v


@near_miss(f"{ELSEWHERE} the graph's output", "p = scores(q, k).softmax(-1)", RETURN_LESS)
def weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = scores(q, k).softmax(-1)
    return p @ v, p


@near_miss(f"{ELSEWHERE} `sum`", "p = scores(q, k).softmax(-1)", USE_ONCE)
def weights_summed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = scores(q, k).softmax(-1)
    return p @ v, p.sum(-2)


@near_miss("`cumsum` is not a pointwise function of the scores", "s = scores(q, k).cumsum(-1)", ON_ITS_OWN)
def keys_mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).cumsum(-1)
    return s.softmax(-1) @ v


@near_miss("`roll` is not a pointwise function of the weights", "p = scores(q, k).softmax(-1).roll(1, -1)", ON_ITS_OWN)
def weights_rolled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1).roll(1, -1)
    return p @ v


@near_miss("`amax` is not a pointwise function of the scores", "s = s / s.amax(-1, keepdim=True)", ON_ITS_OWN)
def scale_of_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    s = s / s.amax(-1, keepdim=True)
    return s.softmax(-1) @ v


@near_miss("products in float64 have no kernel", "s = torch.matmul(q, k.mT)", OTHER_DTYPE, torch.float64)
def double_precision(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.matmul(q, k.mT)
    return s.softmax(-1) @ v


@near_miss("the weights are not a softmax of the scores times a factor", "return p @ v", ONE_FACTOR)
def weights_squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1) ** 2
    return p @ v


@near_miss("`fill_` writes into the scores in place", "s[..., ::2] = 0.0", NEW_TENSOR)
def scores_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    s[..., ::2] = 0.0
    return s.softmax(-1) @ v


@near_miss("no product of queries and keys lies under the softmax", "c = k.softmax(-2).mT @ v", BOTH_SIDES)
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    c = k.softmax(-2).mT @ v
    return torch.sigmoid(q) @ c


@near_miss(
    "the normaliser is kept above 1e-12, which may be more than the sum of the exponentials",
    "e = scores(q, k).exp()",
    "subtract each row's maximum first: the sum is then at least 1",
)
def normalize(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return F.normalize(e, p=1.0, dim=-1) @ v


@near_miss(
    "scores are rounded to float8_e4m3fn", "coarse = scores(q, k).to(torch.float8_e4m3fn)",
    "keep them in a floating-point dtype of 16 bits",
)  # fmt: skip
def scores_of_eight_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    coarse = scores(q, k).to(torch.float8_e4m3fn)
    return coarse.to(q.dtype).softmax(-1) @ v


@near_miss(
    "scores are rounded to float8_e5m2", "p = scores(q, k).softmax(-1).to(torch.float8_e5m2)",
    "keep them in a floating-point dtype of 16 bits",
)  # fmt: skip
def weights_of_eight_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1).to(torch.float8_e5m2)
    return p.to(q.dtype) @ v


@near_miss(
    "the product of weights and values keeps the axis that it sums over",
    "p = scores(q, k).softmax(-1)", "sum without keepdim, and unsqueeze the result",
)  # fmt: skip
def summed_axis_kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    weighed = p[..., None] * v[:, :, None]
    v.zero_()
    return weighed.sum(3, keepdim=True)


@pytest.mark.parametrize(("fn", "reason", "line", "advice", "dtype"), CASES)
def test_a_near_miss_is_told(
    fn: Callable[..., Any], reason: str, line: str, advice: str, dtype: torch.dtype
) -> None:
    found = [d for d in candidates(fn, *qkv(Draw(dtype, "cpu", 1))) if isinstance(d, Declined)]
    assert (found[0].reason, found[0].place.source, found[0].advice) == (reason, line, advice)


def router(x: Tensor, w: Tensor, experts: Tensor) -> Tensor:
    weights, which = (x @ w).softmax(-1).topk(2)
    return (weights[..., None] * experts[which]).sum(1)


def classifier(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).softmax(-1)


@pytest.mark.parametrize(("fn", "shapes"), [(router, ((5, 8), (8, 4), (4, 6))), (classifier, ((5, 8), (8, 4)))])
def test_routers_and_classifiers_are_no_near_misses(fn: Callable[..., Any], shapes: Any) -> None:
    assert not explain(fn, *(torch.randn(*s) for s in shapes)).entries
