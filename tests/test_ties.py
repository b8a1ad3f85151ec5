"""Where a function has a kink, its gradient there is PyTorch's: scores of padding and biases not yet learned are 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from agreement import agree
from torch import Tensor

from fusecomp.codegen.derivative import derivative
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Load, Score, Var
from fusecomp.ir.reference import Env, evaluate_expr
from fusecomp.patterns.spellings import POINTWISE

i = Var("i", Const(36))
score, other = Score(0), Load("other", (i,), "float32")
zero, one = Const(0.0), Const(1.0)
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Expr | None]] = {
    "relu": (lambda x, y: x.relu(), POINTWISE["relu"](score)),
    "clamp": (lambda x, y: x.clamp(-1.0, 1.0), POINTWISE["clamp"](score, Const(-1.0), one)),
    "clamp_min": (lambda x, y: x.clamp_min(0.0), POINTWISE["clamp_min"](score, zero)),
    "clamp_max": (lambda x, y: x.clamp_max(0.0), POINTWISE["clamp_max"](score, zero)),
    "clamp above a tensor": (lambda x, y: x.clamp(min=y), POINTWISE["clamp"](score, other)),
    "clamp below a tensor": (lambda x, y: x.clamp(max=y), POINTWISE["clamp"](score, None, other)),
    "maximum": (torch.maximum, POINTWISE["maximum"](score, other)),
    "minimum": (torch.minimum, POINTWISE["minimum"](score, other)),
    "maximum of a number": (lambda x, y: torch.maximum(x, torch.zeros(())), POINTWISE["maximum"](score, zero)),
    "minimum of a number": (lambda x, y: torch.minimum(torch.ones(()), x), POINTWISE["minimum"](one, score)),
    "abs": (lambda x, y: x.abs(), POINTWISE["abs"](score)),
    "elu": (lambda x, y: F.elu(x, 0.5), POINTWISE["elu"](score, Const(0.5))),
    "leaky_relu": (lambda x, y: F.leaky_relu(x, 0.1), POINTWISE["leaky_relu"](score, Const(0.1))),
    "hardtanh": (lambda x, y: F.hardtanh(x, -2.0, 1.0), POINTWISE["hardtanh"](score, Const(-2.0), one)),
    "relu6": (lambda x, y: F.relu6(x * 6.0), POINTWISE["relu6"](apply("mul", score, Const(6.0)))),
    "hardsigmoid": (lambda x, y: F.hardsigmoid(x * 3.0), POINTWISE["hardsigmoid"](apply("mul", score, Const(3.0)))),
    "hardswish": (lambda x, y: F.hardswish(x * 3.0), POINTWISE["hardswish"](apply("mul", score, Const(3.0)))),
    "threshold": (lambda x, y: F.threshold(x, 1.0, -5.0), POINTWISE["threshold"](score, one, Const(-5.0))),
    "softshrink": (lambda x, y: F.softshrink(x, 1.0), POINTWISE["softshrink"](score, one)),
    "hardshrink": (lambda x, y: F.hardshrink(x, 1.0), POINTWISE["hardshrink"](score, one)),
    "selu": (lambda x, y: F.selu(x), POINTWISE["selu"](score)),
    "celu": (lambda x, y: F.celu(x, 0.7), POINTWISE["celu"](score, Const(0.7))),
    "mish": (lambda x, y: F.mish(x), POINTWISE["mish"](score)),
    "sign": (lambda x, y: x.sign() * x, apply("mul", POINTWISE["sign"](score), score)),
    "a power of the size": (lambda x, y: x.abs() ** 1.5, POINTWISE["pow"](POINTWISE["abs"](score), Const(1.5))),
    "a whole power": (lambda x, y: x**5, POINTWISE["pow"](score, Const(5))),
    "a power that differs": (
        lambda x, y: x.abs().pow(y.relu()), POINTWISE["pow"](POINTWISE["abs"](score), POINTWISE["relu"](other)),
    ),
    "a power of what is not 0": (
        lambda x, y: (x.abs() + 1).pow(y),
        POINTWISE["pow"](apply("add", POINTWISE["abs"](score), one), other),
    ),
    "remainder": (lambda x, y: x % 0.75, POINTWISE["remainder"](score, Const(0.75))),
    "remainder by a negative number": (lambda x, y: x % -0.75, POINTWISE["remainder"](score, Const(-0.75))),
    "fmod": (lambda x, y: x.fmod(0.75), POINTWISE["fmod"](score, Const(0.75))),
    "trunc": (lambda x, y: (x * 0.6).trunc(), POINTWISE["trunc"](apply("mul", score, Const(0.6)))),
    "softplus": (lambda x, y: F.softplus(x), POINTWISE["softplus"](score)),
    "log_sigmoid": (lambda x, y: F.logsigmoid(x), POINTWISE["log_sigmoid"](score)),
    "logaddexp": (torch.logaddexp, POINTWISE["logaddexp"](score, other)),
    "where": (lambda x, y: torch.where(x > 0, x, y), POINTWISE["where"](POINTWISE["gt"](score, zero), score, other)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_at_a_kink(name: str) -> None:
    """Of generated kernels, and of the region's meaning under autograd."""
    f, e = FUNCTIONS[name]
    assert e is not None
    values = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    x, y = (t.flatten().requires_grad_() for t in torch.meshgrid(values, values.clone(), indexing="ij"))
    eager = torch.autograd.grad(f(x, y).sum(), [x, y], materialize_grads=True)
    torch.testing.assert_close(worth(e, x, y), f(x, y))
    meaning = torch.autograd.grad(worth(e, x, y).sum(), [x, y], materialize_grads=True)
    kernel = [worth(derivative(e, by), x, y).expand(x.shape) for by in (score, other)]
    for found in (meaning, kernel):
        for got, wanted in zip(found, eager, strict=True):
            torch.testing.assert_close(got, wanted)


def worth(e: Expr, x: Tensor, y: Tensor) -> Tensor:
    """e at every pair of values."""
    return evaluate_expr(e, Env(("i",), {"i": range(len(x))}, scores=(x,), tensors={"other": y}))


def test_not_a_number_passes() -> None:
    nan = torch.tensor([float("nan")], dtype=torch.float64)
    names = ("relu", "clamp", "maximum", "softplus", "elu", "log_sigmoid", "hardtanh", "hardswish", "threshold",
             "softshrink", "hardshrink", "selu", "mish", "remainder", "trunc", "a power of the size")  # fmt: skip
    for name in names:
        assert worth(FUNCTIONS[name][1], nan, torch.zeros(1, dtype=torch.float64)).isnan(), name  # type: ignore[arg-type]
    assert worth(FUNCTIONS["clamp above a tensor"][1], torch.zeros_like(nan), nan).isnan()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        lambda s, bias: s.relu(),
        lambda s, bias: s.clamp(-2.0, 2.0),
        lambda s, bias: s + F.relu(bias),
        lambda s, bias: torch.maximum(s, bias),
        lambda s, bias: F.softplus(s),
    ],
    ids=["relu", "clamp", "bias", "maximum", "softplus"],
)
def test_scores_of_whole_numbers(change: Callable[[Tensor, Tensor], Tensor]) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return change(q @ k.mT, bias).softmax(-1) @ v

    torch.manual_seed(0)
    shapes = [(2, 3, 7, 4), (2, 3, 9, 4), (2, 3, 9, 4)]
    args = [torch.randn(shape).round().requires_grad_() for shape in shapes]
    agree(attention, [*args, torch.zeros(3, 7, 9, requires_grad=True)], train=True)
