"""float64 numbers beside shorter ones: what has no axis has no say, and kernels read it in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels import Interpreter, agree, tiles
from recognising import region_of
from torch import Tensor

from fusecomp.ir.expr import text
from fusecomp.running.verdict import floor_of

Q, K, V = (torch.randn(2, 3, n, 16) for n in (13, 21, 21))
NUMBER, SIZES = torch.tensor(0.29, dtype=torch.float64), {"B": 2, "H": 3, "M": 13, "N": 21}


def scaled(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return (q @ k.mT * t).softmax(-1) @ v


def computed(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """What is computed of it alone is computed in float64."""
    return (q @ k.mT / (t * t + 1)).softmax(-1) @ v


def rounded(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return (q @ k.mT + t[None].to(q.dtype)).softmax(-1) @ v


def placed(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """Positions are compared with it in float64: 100 t is less than 29, in float32 it is not."""
    return (q @ k.mT).masked_fill(torch.arange(k.shape[2]) > t * 100, -torch.inf).softmax(-1) @ v


MEANT = {
    scaled: "score * float32(load0)",
    computed: "score / float32(load0 * load0 + 1)",
    rounded: "score + float32(load0)",
    placed: "not kv_idx > load0 * 100",
}


@pytest.mark.parametrize("fn", MEANT, ids=lambda f: f.__name__)
def test_a_float64_without_axes(interpreter: Interpreter, fn: Callable[..., Tensor]) -> None:
    region = region_of(fn, Q, K, V, NUMBER)
    assert MEANT[fn] in (text(region.score), *map(text, region.keep))
    agree(interpreter, region, [Q, K, V, NUMBER], SIZES, tiles(region, 16, 16))


def test_the_gradient_of_one_that_learns_is_as_exact_as_a_float32() -> None:
    region = region_of(scaled, Q, K, V, NUMBER)
    single, double = (floor_of(d, region, Q.device) for d in ("float32", "float64"))
    assert single == double
