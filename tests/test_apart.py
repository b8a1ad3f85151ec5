"""Gradients of operands that have no kernel as they lie in memory: products are given tensors of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from corpus import extended, idioms, masked, packed, paged_more, paged_shared, spelled
from test_corpus import interpret
from torch import Tensor
from torch.fx import GraphModule

from fusecomp import pipeline
from fusecomp.errors import KernelError
from fusecomp.graph.capture import placeholder_values
from fusecomp.graph.facts import op_name
from fusecomp.pipeline import Compilation, compile_graph
from fusecomp.running import lower
from fusecomp.settings import Options

NAMES = (
    "swin_shifted", "tiled_heads", "expanded_over_the_batch", "a_second_product_as_bias",
    "one_value_for_all_keys", "one_key_repeated", "keys_that_are_a_bias_too", "longer_values_count_more",
    "prefix_of_its_own", "memory_behind", "three_kinds_of_keys", "pages_kept_apart",
    "pages_kept_apart_in_the_scores", "exponentials_of_pages", "gated_by_the_logsumexp",
)  # fmt: skip
TABLES = (masked, packed, idioms, spelled, extended, paged_more, paged_shared)
CASES = [pytest.param(c, id=c.name) for table in TABLES for c in table.CASES if c.name in NAMES]


def shared_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Latents that all requests share, broadcast by the product: their gradient is a sum over the batch."""
    return (q @ k.mT * 0.25).softmax(-1) @ v


def shared_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One tensor as queries and as keys, multiplied in float32."""
    return (q.float() @ q.float().mT * 0.25).softmax(-1).to(v.dtype) @ v


def compiled(fn: Callable[..., Any], args: Any) -> list[Compilation]:
    """What becomes of the graphs of fn, which nobody runs; kernels are not looked at."""
    made: list[Compilation] = []

    def look(gm: GraphModule, _: Any) -> Callable[..., Any]:
        made.append(compile_graph(gm, placeholder_values(gm), Options(lowering="triton", verify=False)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=look)(*args)
    return made


def views(made: Compilation) -> int:
    """Views of q, k and v that kernels take."""
    calls = [n for n in made.module.graph.nodes if "attention" in op_name(n)]
    return sum(op_name(x) == "expand" for n in calls for x in n.args[0])


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why each attention has no backward kernel, after all that is tried."""
    found: list[str] = []
    tried = pipeline.trainable

    def heard(*args: Any) -> Any:
        match, lowered = tried(*args)
        found.append(lowered.why_no_backward)
        return match, lowered

    monkeypatch.setattr(pipeline, "trainable", heard)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_backward_kernel_is_generated(case: Any, reasons: list[str]) -> None:
    made = compiled(case.fn, [x.requires_grad_(i in case.grad) for i, x in enumerate(case.make_args(torch.float32))])
    assert reasons == [""]
    assert views(made[0]) > 1


@pytest.mark.parametrize("case", CASES)
def test_inference_reads_under_the_views(case: Any) -> None:
    with torch.no_grad():
        made = compiled(case.fn, case.make_args(torch.float32))
    assert made[0].fused
    assert not views(made[0])


def pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Keys through a table of pages: their gradient is a scatter."""
    k, v = (pool[table].flatten(1, 2).transpose(1, 2) for pool in (k, v))
    return (q @ k.mT * 0.25).softmax(-1) @ v


def test_pages(reasons: list[str]) -> None:
    q, k, v = torch.randn(2, 3, 5, 16), torch.randn(9, 4, 3, 16), torch.randn(9, 4, 3, 16)
    compiled(pages, (q.requires_grad_(), k.requires_grad_(), v, torch.tensor([[1, 3, 5], [2, 4, 8]])))
    assert reasons == [""]


def test_a_batch_that_the_product_broadcasts(reasons: list[str]) -> None:
    q, k, v = torch.randn(3, 5, 16), torch.randn(2, 3, 7, 16), torch.randn(2, 3, 7, 8)
    compiled(shared_queries, [x.requires_grad_() for x in (q, k, v)])
    assert reasons == [""]


def one_vector(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A vector is no matrix of a batch: broadcast to it, the product would be another."""
    return (k @ q).softmax(-1)[:, :, None] @ k[:, :, :7] + (k @ q).sum() * 0 * v.sum()


def test_a_vector_is_not_broadcast(reasons: list[str]) -> None:
    made = compiled(one_vector, [torch.randn(*s, requires_grad=True) for s in ((16,), (2, 3, 7, 16), (1,))])
    assert reasons
    for node in made[0].module.graph.nodes:
        assert op_name(node) != "expand" or node.args[0].meta["val"].dim() > 1


def with_itself(x: Tensor) -> Tensor:
    """One tensor on both sides of one call."""
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", x, x).softmax(-1), x)


def by_keyword(x: Tensor) -> Tensor:
    x = x.flatten(0, 1)
    return torch.baddbmm(torch.zeros(1), batch1=x, batch2=x.mT, beta=0, alpha=0.25).softmax(-1).bmm(x)


@pytest.mark.parametrize("fn", [with_itself, by_keyword])
def test_one_tensor_on_all_sides(fn: Callable[..., Tensor], reasons: list[str]) -> None:
    compiled(fn, [torch.randn(2, 3, 7, 16, requires_grad=True)])
    assert reasons == [""]


def test_products_keep_their_dtype(reasons: list[str]) -> None:
    """Tensors of their own lie under the casts that lose nothing."""
    x, v = (torch.randn(2, 3, 7, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    (made,) = compiled(shared_in_half, (x, v, v))
    region = made.entries[0].region
    assert reasons == [""]
    assert region is not None
    assert region.products[0].dtype == "bfloat16"


def test_what_does_not_help_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise KernelError("no backward kernel: as a test says")

    monkeypatch.setattr(lower, "for_training", none)
    q, k, v = torch.randn(3, 5, 16), torch.randn(2, 3, 7, 16), torch.randn(2, 3, 7, 8)
    (made,) = compiled(shared_queries, [x.requires_grad_() for x in (q, k, v)])
    assert made.fused
    assert not views(made)


def test_gradients_in_the_interpreter() -> None:
    files = [x for table in TABLES for x in ("--file", str(table.__file__))]
    out = interpret("--train", *files, "--only", ",".join(NAMES))
    assert f"right {len(CASES)}, wrong 0, errors 0 of {len(CASES)}" in out
