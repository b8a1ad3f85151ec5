"""The operator that gives the log-sum-exp too: its gradients, and what of it stays in a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from regions import attention, causal, scaled_score
from test_running import call

from fusecomp.ir.logsumexp import evaluate_lse
from fusecomp.ir.reference import evaluate
from fusecomp.running import operator

pytestmark = pytest.mark.usefixtures("own_cache")


def with_lse(grad: bool = True) -> tuple[Any, ...]:
    """The same, with the lengths of the log-sum-exp."""
    tensors, sizes, shape, order, dtype, key = call(attention(scaled_score, causal), grad=grad)
    return tensors, sizes, shape, order, [2, 3, 13], dtype, key


def test_operator_with_an_lse_keeps_the_rules() -> None:
    torch.library.opcheck(torch.ops.fusecomp.attention_and_lse.default, with_lse())


def test_gradients_of_o_and_of_the_lse_through_the_operator() -> None:
    args = with_lse()
    leaves, region = args[0], operator.kernel_of(args[-1]).region
    out, lse = torch.ops.fusecomp.attention_and_lse(*args)
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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_without_a_gradient(mode: Callable[[], Any]) -> None:
    with mode():
        assert not any(x.requires_grad for x in torch.ops.fusecomp.attention_and_lse(*with_lse(grad=False)))
    assert torch.ops.fusecomp.attention_and_lse(*with_lse())[0].requires_grad


def test_a_compiled_graph_calls_below_autograd() -> None:
    seen: list[str] = []

    def note(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(n.target) for n in gm.graph.nodes)
        return gm

    tensors, *rest = with_lse()
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=note, bw_compiler=note)
    run = torch.compile(lambda *t: torch.ops.fusecomp.attention_and_lse(list(t), *rest)[0], backend=backend)
    got = torch.autograd.grad(run(*tensors).sum(), tensors)
    exact = torch.autograd.grad(torch.ops.fusecomp.attention_and_lse(tensors, *rest)[0].sum(), tensors)
    assert "fusecomp.attention_saving.default" in seen
    assert "fusecomp.attention_and_lse.default" not in seen
    for x, y in zip(got, exact, strict=True):
        torch.testing.assert_close(x, y)
