"""Programs that train: every gradient is eager's, from generated kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from corpus import dense, idioms, learned, masked, score, spelled
from test_corpus import interpret, options, score_name
from torch import Tensor
from torch.fx import GraphModule

import fusecomp
from fusecomp.errors import KernelError
from fusecomp.graph.capture import placeholder_values
from fusecomp.graph.facts import op_name
from fusecomp.pipeline import compile_graph
from fusecomp.running import lower, operator
from fusecomp.running.lower import Lowered
from fusecomp.settings import Options

CASES = [pytest.param(c, id=c.name) for c in learned.CASES]
MODELS = [
    pytest.param(c, id=c.name)
    for c in dense.CASES
    if c.name in ("nanogpt_block", "timm_vit_block", "hf_opt_eager", "hf_bloom_eager", "mla_head_sizes")
]


@pytest.mark.parametrize("case", CASES)
def test_case_is_right_where_it_is_recomputed(case: Any) -> None:
    result = score.score(case, score_name(case), options("--train"))
    assert result.verdict == "right", result.detail
    assert result.fused


@pytest.mark.parametrize("case", [*CASES, *MODELS])
@pytest.mark.parametrize("which", [0, 1])
def test_kernels_are_generated(case: Any, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all that learns; none of them is run."""
    asked: list[str] = []
    monkeypatch.setattr(lower, "for_training", asking(lower.for_training, asked))
    monkeypatch.setattr(operator, "run", lambda *_: None)
    torch._dynamo.reset()
    args = [x.requires_grad_(i in case.grad) for i, x in enumerate(case.make_args(case.dtypes[which]))]
    how = {"inner": "eager", "verify": False, "lowering": "triton"}
    torch.compile(case.fn, backend="fusecomp", options=how)(*args)
    assert asked == [""] * len(asked)
    assert asked


def asking(generate: Callable[..., Lowered], heard: list[str]) -> Callable[..., Lowered]:
    """The same, with why there was no kernel written down."""

    def asked(*args: Any) -> Lowered:
        try:
            found = generate(*args)
        except KernelError as error:
            heard.append(str(error))
            raise
        heard.append("")
        return found

    return asked


def test_kernels_in_the_interpreter() -> None:
    only = "bias_of_each_head,t5_buckets,sinks,swin_temperature,bert_padding,packed_projection,in_place,zeroed"
    out = interpret("--train", "--file", learned.__file__, "--only", only)
    assert "wrong 0, errors 0" in out


def test_verification_does_not_turn_good_kernels_down() -> None:
    """For a row of its random inputs that sees no key, norms near 0, large scores that forward and backward add up in
    another order; nor does a query without an axis."""
    files = [x for table in (dense, masked, spelled) for x in ("--file", str(table.__file__))]
    only = "documents_of_different,padding_vector_by_index,cosine_scores,learned_per_head_scale,one_query"
    assert "wrong 0, errors 0 of 8; fused 8 of 8" in interpret("--train", *files, "--only", only)


@pytest.mark.parametrize("learns", [False, True])
def test_what_is_written_into_later_is_copied_only_for_a_gradient(learns: bool) -> None:
    """A cache, say, that the next layer writes into."""
    copies: list[int] = []

    def look(gm: GraphModule, _: Any) -> Callable[..., Any]:
        made = compile_graph(gm, placeholder_values(gm), Options(lowering="cpu", strict=True))
        assert made.fused
        copies.append(sum(op_name(n) == "clone" for n in made.module.graph.nodes))
        return gm.forward

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = (q @ k.mT * 0.25).softmax(-1) @ v
        k[:, :, 0] = 0.0
        return out

    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 3, n, 16) for n in (5, 9, 9))
    torch.compile(fn, backend=look)(q.requires_grad_(learns), k, v)
    assert copies == [int(learns)]


def test_numbers_made_of_integers_stay_in_the_reference() -> None:
    """Else a mask of positions in bfloat16 is another in float64, and a kernel may be as far off as the two are."""
    case = next(c for c in idioms.CASES if c.name == "positions_in_bfloat16")
    torch._dynamo.reset()
    (entry,) = fusecomp.explain(case.fn, *case.make_args(torch.float32)).entries
    assert "of 3.8e-06 allowed" in entry.verdict


@pytest.mark.slow
def test_every_kernel_in_the_interpreter() -> None:
    assert "wrong 0, errors 0" in interpret("--train", "--file", learned.__file__, "--dtype", "all")
