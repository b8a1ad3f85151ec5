"""Programs that train: every gradient is eager's, from generated kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from corpus import dense, learned, score
from test_corpus import interpret, options, score_name

from fusecomp.errors import KernelError
from fusecomp.running import lower, operator
from fusecomp.running.lower import Lowered

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


@pytest.mark.slow
def test_every_kernel_in_the_interpreter() -> None:
    assert "wrong 0, errors 0" in interpret("--train", "--file", learned.__file__, "--dtype", "all")
