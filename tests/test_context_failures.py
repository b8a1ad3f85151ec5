"""What goes wrong inside fusecomp never reaches the user's result; torch.compile around it is as with any backend."""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import INF, agree, attend, compiled, plain, qkv, reasons
from torch import Tensor, nn

import fusecomp
from fusecomp.running import expected
from fusecomp.running.subgraph import Section


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    fusecomp.reset()


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


STAGES = [
    "capture", "write_out", "mark", "recognise", "lower", "verify", "register", "substitute", "put_back",
    "without_dead_code",
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_at_any_stage_costs_one_warning(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"fusecomp.pipeline.{stage}", broken)
    args = qkv()
    with caplog.at_level(logging.WARNING, "fusecomp"):
        got = compiled(attend, strict=False)(*args)
    torch.testing.assert_close(got, attend(*args), rtol=1e-4, atol=1e-4)
    ours = [r for r in caplog.records if r.name.startswith("fusecomp")]
    assert len(ours) == 1
    assert fusecomp.counters() == {"candidates": 1, "fused": 0, "declined": 0, "fallbacks": 1}
    assert reasons(attend, args) == ["RuntimeError: broken on purpose"]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="broken on purpose"):
        compiled(attend, strict=True)(*args)


def test_an_error_in_one_of_two_costs_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusecomp import pipeline

    lower = pipeline.lower
    monkeypatch.setattr(pipeline, "lower", lambda match, *a: broken() if match.region.keep else lower(match, *a))
    counts = agree(lambda q, k, v: attend(plain(q, k, v), k, v), qkv(), strict=False)
    assert (counts["fused"], counts["fallbacks"]) == (1, 1)


def test_wrong_numbers_are_never_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fusecomp.running.cpu.lower", lambda _: lambda out, *_: out.fill_(0.5))
    assert agree(attend, qkv(), fused=0, strict=False)["fallbacks"] == 1
    assert "DISAGREES" in reasons(attend, qkv())[0]


def test_inputs_of_a_verification_that_are_written_into(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest, seen = Section.run, []

    def writing(section: Section, tensors: list[Tensor], *more: Any) -> Any:
        found = honest(section, tensors, *more)
        seen.append(tensors[0].zero_())
        return found

    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Section, "run", writing)
    monkeypatch.setattr(expected, "EXACT_SCORES", {"cpu": 1000})  # eager alone is run so
    agree(attend, qkv())
    assert seen


def test_operators_of_the_user() -> None:
    @torch.library.custom_op("contexts::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    args = qkv()
    twice.register_fake(torch.empty_like)
    agree(lambda q, k, v: attend(twice(q), k, v), args)
    agree(lambda q, k, v: twice(q @ k.mT).softmax(-1) @ v, args, fused=0)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda s: s.masked_fill(s < s.topk(5, -1).values[..., -1:], -INF),
    "sort": lambda s: s.sort(-1).values,
    "roll": lambda s: s.roll(1, -1),
    "cumsum": lambda s: s.cumsum(-1),
    "layer_norm": lambda s: nn.functional.layer_norm(s, (21,)),
    "conv2d": lambda s: nn.functional.conv2d(s, torch.ones(3, 3, 3, 3), padding=1),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_operations_that_mix_scores_are_named(name: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return BETWEEN[name](q @ k.mT).softmax(-1) @ v

    agree(fn, qkv(), fused=0)
    assert f"`{name}` is not a pointwise function" in reasons(fn, qkv())[0]


def test_a_branch_on_data_between_the_products() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        return (s * 2 if s.max() > 0 else s).softmax(-1) @ v

    agree(fn, qkv(), fused=0, fullgraph=False)


# ----------------------------------------------------------------------------------------------------------------
# torch.compile around it


def test_no_graph_breaks_of_our_own() -> None:
    before = torch._dynamo.explain(attend)(*qkv())
    torch._dynamo.reset()
    compiled(attend)(*qkv())
    after = torch._dynamo.explain(attend)(*qkv())
    assert (before.graph_count, before.graph_break_count) == (after.graph_count, after.graph_break_count) == (1, 0)


def test_compiled_again_after_a_reset() -> None:
    args = qkv()
    for _ in range(2):
        torch.compiler.reset()
        torch.testing.assert_close(compiled(attend)(*args), attend(*args), rtol=1e-4, atol=1e-4)
    assert fusecomp.counters()["fused"] == 2


def test_a_mode_and_options_together_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Either mode or options"):
        torch.compile(attend, backend="fusecomp", mode="max-autotune", options={"strict": True})
    with pytest.raises(Exception, match="takes one of default, lite"):
        torch.compile(attend, backend="fusecomp", mode="fastest")(*qkv())


def test_two_threads_compile_at_once() -> None:
    args, results = qkv(), {}

    def work(fn: Callable[..., Tensor]) -> None:
        results[fn] = compiled(fn)(*args)

    threads = [threading.Thread(target=work, args=(fn,)) for fn in (attend, plain)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for fn in (attend, plain):
        torch.testing.assert_close(results[fn], fn(*args), rtol=1e-4, atol=1e-4)
    assert fusecomp.counters()["fused"] == 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 3, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return attend(q, k, v).transpose(1, 2).flatten(2)


def test_a_compiled_module_is_saved_copied_and_cast() -> None:
    model, x = Layer(), torch.randn(2, 13, 24)
    run = compiled(model)
    wanted = run(x)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Layer()
    other.load_state_dict(torch.load(file))
    for again in (compiled(other), compiled(copy.deepcopy(model)), copy.deepcopy(run)):
        torch.testing.assert_close(again(x), wanted, rtol=1e-4, atol=1e-4)
    before = fusecomp.counters()["fused"]
    model.to(torch.bfloat16)
    torch.testing.assert_close(run(x.bfloat16()).float(), wanted, rtol=5e-2, atol=5e-2)
    assert fusecomp.counters()["fused"] == before + 1


# ----------------------------------------------------------------------------------------------------------------
# Many in one graph


@pytest.mark.parametrize("learn", [False, True])
def test_a_mask_that_many_layers_share(learn: bool) -> None:
    def fn(x: Tensor, lengths: Tensor) -> Tensor:
        i = torch.arange(13)
        drop = (i[:, None] < i) | (i >= lengths[:, None, None, None])
        bias = torch.zeros(drop.shape).masked_fill(drop, torch.finfo(torch.float32).min)
        for _ in range(3):
            x = x + (x @ x.mT + bias).softmax(-1) @ x
        return x

    agree(fn, [torch.randn(2, 3, 13, 8, requires_grad=learn), torch.tensor([13, 5])], fused=3, train=learn)


def test_self_and_cross_attention_feed_each_other() -> None:
    def fn(x: Tensor, memory: Tensor, w: Tensor, drop: Tensor) -> Tensor:
        q = x @ w
        a = plain(q, q, q)
        b = (a @ memory.mT).masked_fill(drop, -INF).softmax(-1) @ memory
        return attend(b, a, x) + plain(x, memory, memory)

    args = [torch.randn(2, 3, 13, 8), torch.randn(2, 3, 21, 8), torch.randn(8, 8), torch.rand(13, 21) < 0.3]
    agree(fn, args, fused=4)


def shared_scores(q: Tensor, k: Tensor, v: Tensor) -> Any:
    s = q @ k.mT
    return s.softmax(-1) @ v, s.masked_fill(s > 3, -INF).softmax(-1) @ v


def returned_scores(q: Tensor, k: Tensor, v: Tensor) -> Any:
    s = q @ k.mT
    return s.softmax(-1) @ v, s


def returned_weights(q: Tensor, k: Tensor, v: Tensor) -> Any:
    p = (q @ k.mT).softmax(-1)
    return p @ v, p


def test_scores_that_only_attentions_share_are_never_kept() -> None:
    agree(shared_scores, qkv(), fused=2)


@pytest.mark.parametrize("fn", [returned_scores, returned_weights])
def test_scores_that_somebody_else_needs_stay(fn: Callable[..., Any]) -> None:
    agree(fn, qkv(), fused=0)
    assert "read elsewhere too" in reasons(fn, qkv())[0]


def test_an_error_in_one_rewriting_costs_what_it_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusecomp.patterns import written

    def stopping(module: Any) -> Any:
        node = next(n for n in module.graph.nodes if "softmax" in str(n.target))
        with module.graph.inserting_before(node):
            module.graph.call_function(torch.ops.aten.neg.default, (node.args[0],))
        yield from written.define(module)
        broken()

    monkeypatch.setattr(written, "MEANINGS", (stopping, *written.MEANINGS))
    counts = agree(attend, qkv(), strict=False)
    assert (counts["fused"], counts["fallbacks"]) == (1, 1)
    assert reasons(attend, qkv()) == ["`stopping` stopped with RuntimeError: broken on purpose"]


def test_an_error_in_reading_one_costs_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusecomp.patterns import attention

    build, first = attention.build, iter([True])
    monkeypatch.setattr(attention, "build", lambda *a: broken() if next(first, False) else build(*a))
    counts = agree(lambda q, k, v: attend(plain(q, k, v), k, v), qkv(), strict=False)
    assert (counts["fused"], counts["fallbacks"]) == (1, 1)
