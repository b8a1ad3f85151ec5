"""Functions of the scores: PyTorch's activations, powers, remainders, roundings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import FULL, Table, places, qkv, scores
from torch import Tensor

CASES = Table()


@CASES.fuse()
def hard_activations(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    total = F.hardtanh(s, -0.5, 0.75) + F.relu6(3 * s) + F.hardsigmoid(s) + F.hardswish(s) + F.threshold(s, 0.1, -0.2)
    return total.softmax(-1) @ v


@CASES.fuse()
def soft_activations(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (F.mish(s) + F.selu(s) + F.celu(s, 0.7) + F.softsign(s) + F.tanhshrink(s)).softmax(-1) @ v


@CASES.fuse()
def shrunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (F.softshrink(s, 0.3) + F.hardshrink(s, 0.1)).softmax(-1) @ v


@CASES.fuse()
def approximate_activation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.gelu(scores(q, k), approximate="tanh").softmax(-1) @ v


@CASES.fuse(grad=())
def in_place_activations(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (scores(q, k) * 4).clamp_(-3, 3)
    return F.hardtanh_(F.selu_(s), -1.5, 2.0).softmax(-1) @ v


@CASES.fuse()
def power_of_the_size(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).abs() ** 1.5).softmax(-1) @ v


@CASES.fuse()
def fifth_power(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) ** 5).clamp(-4, 4).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3).abs() + 1], grad=(0, 1, 2, 3))
def power_of_each_head(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
    return torch.pow(scores(q, k).relu() + 0.25, p[:, None, None]).softmax(-1) @ v


@CASES.fuse(dtypes=FULL)
def size_with_a_sign(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s.sign() * (1 + s.abs()).sqrt()).softmax(-1) @ v


@CASES.fuse()
def signed_logarithm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s.sgn() * s.abs().log1p()).softmax(-1) @ v


@CASES.fuse(dtypes=FULL)
def remainders(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s % 1.5 + torch.fmod(s, 0.75) + s.remainder(-0.5)).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3).abs() + 0.5], grad=(0, 1, 2, 3), dtypes=FULL)
def period_of_each_head(q: Tensor, k: Tensor, v: Tensor, period: Tensor) -> Tensor:
    return torch.remainder(scores(q, k), period[:, None, None]).softmax(-1) @ v


@CASES.fuse(dtypes=FULL)
def rounded_towards_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (torch.trunc(4 * s) / 4 + torch.frac(s)).softmax(-1) @ v


@CASES.fuse()
def hyperbolic(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).clamp(-2, 2)
    return (torch.sinh(s) - torch.cosh(s) + torch.expm1(s) + torch.special.expit(s)).softmax(-1) @ v


@CASES.fuse()
def multiplied_and_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.addcmul(s, s, s, value=0.1).addcdiv(s, s * s + 1, value=0.5).softmax(-1) @ v


@CASES.fuse()
def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (5 * torch.atan(s / 5) + torch.arctan(3 * s) + torch.asinh(s) + torch.arcsinh(4 * s)).softmax(-1) @ v


@CASES.fuse(dtypes=FULL)
def special_functions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    total = torch.erfc(s) + torch.hypot(s, torch.ones_like(s)) + torch.sinc(s / 4) + torch.logit(s.sigmoid() * 0.9)
    return total.softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3), d(1)], grad=(0, 1, 2, 3, 4))
def slope_of_each_head(q: Tensor, k: Tensor, v: Tensor, w: Tensor, one: Tensor) -> Tensor:
    return (F.prelu(scores(q, k), w) + F.prelu(scores(q, k), one) + F.rrelu(scores(q, k))).softmax(-1) @ v


@CASES.fuse()
def penalty_that_grows_with_the_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return (scores(q, k) - 0.1 * (i - j).abs().to(q.dtype) ** 1.5).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Near misses


def with_exponent(d: Any) -> list[Tensor]:
    return [*qkv(d), d.ints(1.0, 2.0, 3.0).to(d.dtype)]


@CASES.decline(with_exponent, "`pow` is not a pointwise function of the scores", grad=(0, 1, 2))
def whole_powers_of_negative_scores(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
    """exp(p log s) is NaN where s^p is not."""
    return scores(q, k).pow(p[:, None, None]).softmax(-1) @ v


@CASES.fuse(dtypes=FULL)
def remainder_of_the_other_sign(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (torch.fmod(s, 0.75) - s % 0.75).softmax(-1) @ v


@CASES.decline(qkv, "`round` is not a pointwise function of the scores")
def rounded_to_even(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).round().softmax(-1) @ v
