"""The operator that gives the log-sum-exp too: its gradients, and what of it stays in a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from regions import attention, causal, scaled_score
from test_running import ORDERS, call
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusecomp.ir.logsumexp import evaluate_lse
from fusecomp.ir.reference import evaluate
from fusecomp.running import operator
from fusecomp.running.calls import as_given, fixed
from fusecomp.running.sums import whole

pytestmark = pytest.mark.usefixtures("own_cache")


def with_lse(grad: bool = True) -> tuple[Any, ...]:
    """The same, with the lengths of the log-sum-exp."""
    tensors, sizes, shape, order, dtype, key = call(attention(scaled_score, causal), grad=grad)
    return tensors, sizes, shape, order, [2, 3, 13, *operator.kernel_of(key).saved], dtype, key


def test_operator_with_an_lse_keeps_the_rules() -> None:
    torch.library.opcheck(torch.ops.fusecomp.attention_and_lse.default, with_lse())


def test_gradients_of_o_and_of_the_lse_through_the_operator() -> None:
    args = with_lse()
    leaves, region = args[0], operator.kernel_of(args[-1]).region
    out, parts = torch.ops.fusecomp.attention_and_lse(*args)
    lse = whole(parts, region)
    seeds = [torch.randn_like(out), torch.randn_like(lse)]
    own = evaluate(region, leaves, args[1], torch.float64), evaluate_lse(region, leaves, args[1], torch.float64)
    torch.testing.assert_close([out, lse], [x.float() for x in own])
    for some in ((0, 1), (0,), (1,)):
        got = torch.autograd.grad([(out, lse)[i] for i in some], leaves, [seeds[i] for i in some],
                                  retain_graph=True, allow_unused=True)  # fmt: skip
        exact = torch.autograd.grad([own[i] for i in some], leaves, [seeds[i].double() for i in some],
                                    retain_graph=True, allow_unused=True)  # fmt: skip
        for x, y in zip(got, exact, strict=True):
            torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y)


def test_values_alone_learn_beside_a_lse() -> None:
    args = with_lse(grad=False)
    args[0][2].requires_grad_()
    out, lse = torch.ops.fusecomp.attention_and_lse(*args)
    (got,) = torch.autograd.grad(out.sum() + lse.sum(), args[0][2])
    own = evaluate(operator.kernel_of(args[-1]).region, args[0], args[1], torch.float64)
    torch.testing.assert_close(got, torch.autograd.grad(own.sum(), args[0][2])[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_without_a_gradient(mode: Callable[[], Any]) -> None:
    with mode():
        assert not any(x.requires_grad for x in torch.ops.fusecomp.attention_and_lse(*with_lse(grad=False)))
    assert torch.ops.fusecomp.attention_and_lse(*with_lse())[0].requires_grad


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_calls_below_autograd(dynamic: bool) -> None:
    seen: list[str] = []

    def note(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(n.target) for n in gm.graph.nodes)
        return make_boxed_func(gm)

    tensors, _, _, order, _, dtype, key = with_lse()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, m, d = q.shape
        sizes = [{"B": b, "H": h, "M": m, "N": k.shape[2]}[s] for s in operator.kernel_of(key).region.sizes]
        more = (sizes, [b, h, m, d], order, [b, h, m, *operator.kernel_of(key).saved], dtype, key)
        return torch.ops.fusecomp.attention_and_lse([q, k, v], *more)[0]

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=note, bw_compiler=note)
    got = torch.autograd.grad(torch.compile(run, backend=backend, dynamic=dynamic)(*tensors).sum(), tensors)
    exact = torch.autograd.grad(run(*tensors).sum(), tensors)
    assert f"fusecomp.attention_saving{'' if dynamic else '_fixed'}.default" in seen
    assert "fusecomp.attention_and_lse.default" not in seen
    for x, y in zip(got, exact, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("order", ORDERS)
def test_a_call_of_fixed_lengths(order: tuple[int, ...]) -> None:
    tensors, *more = call(attention(scaled_score, causal), order)
    args = tensors, fixed(*more)
    torch.library.opcheck(torch.ops.fusecomp.attention_fixed.default, args)
    got, own = torch.ops.fusecomp.attention_fixed(*args), torch.ops.fusecomp.attention(tensors, *more)
    assert torch.equal(got, own)
    assert got.stride() == own.stride()
    assert as_given(args[1]) == tuple(more)
    tensors, *more = with_lse(grad=False)
    torch.library.opcheck(torch.ops.fusecomp.attention_saving_fixed.default, (tensors, fixed(*more)))


def test_a_length_that_may_change_is_not_fixed() -> None:
    _, sizes, shape, *more = call(attention(scaled_score, causal))
    assert fixed(sizes, shape, *more) is not None
    for moving in (torch.fx.Graph().placeholder("n"), ShapeEnv().create_unbacked_symint(), True):
        assert fixed([moving, *sizes[1:]], shape, *more) is None
        assert fixed(sizes, [*shape[:-1], moving], *more) is None
