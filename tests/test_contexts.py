"""Around the attention: lengths that change, options, modes, exported programs, models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus.table import INF, Draw, places, qkv, scores
from torch import Tensor, nn
from torch._dynamo.utils import counters as dynamo_counters
from torch.fx.experimental.proxy_tensor import make_fx

import fusecomp
from fusecomp import backend
from fusecomp.backend import explain
from fusecomp.errors import OptionError


@pytest.fixture(autouse=True)
def fresh(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "contexts"))
    torch._dynamo.reset()
    dynamo_counters.clear()
    fusecomp.reset()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill(j > i + (k.shape[-2] - q.shape[-2]), -INF).softmax(-1) @ v


def draw(m: int = 13, n: int = 21, batch: int = 2) -> list[Tensor]:
    return qkv(Draw(torch.float32, "cpu", 1), m, n, batch=batch)


def compiled(fn: Any, dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="fusecomp", dynamic=dynamic, options={"inner": "eager", "strict": True, **options})


# ----------------------------------------------------------------------------------------------------------------
# Lengths that change


@pytest.mark.parametrize("dynamic", [True, None])
def test_lengths_change_without_a_storm_of_compilations(dynamic: bool | None) -> None:
    fn = compiled(causal, dynamic)
    for m, n, batch in ((13, 21, 2), (17, 29, 3), (5, 40, 4), (33, 33, 2), (1, 64, 7)):
        args = draw(m, n, batch)
        torch.testing.assert_close(fn(*args), causal(*args))
    graphs = dynamo_counters["stats"]["unique_graphs"]
    assert graphs <= (2 if dynamic else 3)  # M = 1 is a graph of its own to Dynamo
    assert fusecomp.counters()["fused"] == graphs


def test_one_length_is_marked_dynamic() -> None:
    fn = compiled(causal)
    for n in (21, 30, 55):
        q, k, v = draw(13, n)
        torch._dynamo.mark_dynamic(k, 2)
        torch._dynamo.mark_dynamic(v, 2)
        torch.testing.assert_close(fn(q, k, v), causal(q, k, v))
    assert dynamo_counters["stats"]["unique_graphs"] == 1


def test_a_decode_loop_compiles_a_few_times_only() -> None:
    fn = compiled(causal)
    cache = torch.randn(2, 3, 40, 8)
    for n in range(20, 40):
        q, k = torch.randn(2, 3, 1, 8), cache[:, :, :n]
        torch.testing.assert_close(fn(q, k, k), causal(q, k, k))
    assert dynamo_counters["stats"]["unique_graphs"] <= 2


def test_scales_that_change_are_followed() -> None:
    fn = compiled(lambda q, k, v, c: ((q @ k.mT) * c).softmax(-1) @ v, True)
    args = draw()
    for c in (0.3, 0.7, 2.0):
        torch.testing.assert_close(fn(*args, c), ((args[0] @ args[1].mT) * c).softmax(-1) @ args[2])


@pytest.mark.parametrize("shape", [(0, 13, 21), (2, 0, 21), (2, 13, 0), (2, 1, 1)])
def test_empty_and_single_lengths(shape: tuple[int, int, int]) -> None:
    batch, m, n = shape
    args = torch.randn(batch, 3, m, 8), torch.randn(batch, 3, n, 8), torch.randn(batch, 3, n, 8)
    for dynamic in (False, True):
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(causal, dynamic)(*args), causal(*args), equal_nan=True)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).tanh().softmax(-1) @ v


@pytest.mark.parametrize("shape", [(0, 13, 21), (2, 0, 21), (2, 13, 0)])
def test_attention_of_nothing_needs_no_kernel(shape: tuple[int, int, int], caplog: pytest.LogCaptureFixture) -> None:
    args = draw(*shape[1:], batch=shape[0])
    found = explain(capped, *args, options={"lowering": "triton", "strict": True})
    assert found.entries[0].status == "declined"
    assert "there is nothing to compute" in found.entries[0].reason
    assert not [r for r in caplog.records if r.levelname == "WARNING" and r.name.startswith("fusecomp")]


# ----------------------------------------------------------------------------------------------------------------
# Options


def test_unknown_options_are_told() -> None:
    with pytest.raises(Exception, match=r"unknown option 'verfy' .did you mean 'verify'") as raised:
        compiled(causal, verfy=True)(*draw())
    assert "OptionError" in repr(raised.value) + repr(raised.value.__cause__)
    with pytest.raises(OptionError):
        backend.fuse(torch.fx.symbolic_trace(causal), draw(), nonsense=1)


def test_the_mode_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    monkeypatch.setattr(backend, "_inductor", lambda mode: heard.append(mode) or (lambda gm, _: gm.forward))
    torch.compile(causal, backend="fusecomp", mode="max-autotune-no-cudagraphs")(*draw())
    torch._dynamo.reset()
    torch.compile(causal, backend="fusecomp", options={"mode": "reduce-overhead"})(*draw())
    assert heard == ["max-autotune-no-cudagraphs", "reduce-overhead"]


def test_lowering_off_only_reports() -> None:
    report = explain(causal, *draw(), options={"lowering": "off"})
    assert [e.reason for e in report.declined] == ["the option lowering is off"]


def test_empty_rows_may_be_zero() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return scores(q, k).masked_fill(~keep, -INF).softmax(-1) @ v

    keep = torch.rand(13, 21) < 0.5
    keep[3] = False
    args = [*draw(), keep]
    assert compiled(fn)(*args)[:, :, 3].isnan().all()
    torch._dynamo.reset()
    assert not compiled(fn, empty_rows="zero")(*args)[:, :, 3].any()


# ----------------------------------------------------------------------------------------------------------------
# Modes of autograd, exported programs


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_autograd_modes(mode: Callable[..., Any]) -> None:
    args = draw()
    with mode():
        torch.testing.assert_close(compiled(causal)(*args), causal(*args))
    assert fusecomp.counters()["fused"] == 1


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72)
        self.register_buffer("mask", torch.ones(64, 64).tril().view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (t.view(b, n, 3, 8).transpose(1, 2) for t in self.qkv(x).split(c, dim=2))
        s = scores(q, k).masked_fill(self.mask[:, :, :n, :n] == 0, -INF)
        return (s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c)


@pytest.mark.parametrize("dynamic", [False, True])
def test_exported_programs(dynamic: bool) -> None:
    model, x = Attend().eval(), torch.randn(2, 21, 24)
    shapes = {"x": {1: torch.export.Dim("n", min=2, max=63)}} if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    fused = fusecomp.fuse(program.module(), (x,))
    assert fusecomp.counters()["fused"] == 1
    assert "fusecomp.attention" in fused.code
    for y in (x, *([torch.randn(2, 33, 24)] if dynamic else [])):
        torch.testing.assert_close(fused(y), model(y))


def test_traced_graphs_without_metadata() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / 3.0, -1) @ v

    args = draw()
    fused = fusecomp.fuse(torch.fx.symbolic_trace(fn), args)
    assert fusecomp.counters()["fused"] == 1
    torch.testing.assert_close(fused(*args), fn(*args))


def test_a_traced_graph_learns_what_the_inputs_do() -> None:
    """A trace of one input records what it looked like, not whether it learns."""

    def fn(x: Tensor) -> Tensor:
        q, k, v = x.unbind(0)
        s = q @ k.mT
        return (s + 0.3 * s.detach()).softmax(-1) @ v

    x = torch.randn(3, 2, 13, 8, requires_grad=True)
    fused = fusecomp.fuse(make_fx(fn, pre_dispatch=True)(x), [x])
    got, wanted = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (fused, fn))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_traced_graphs_with_constants() -> None:
    """A mask that the trace holds as a tensor, and cuts."""
    shown = torch.rand(40, 40) > 0.3
    shown[:, 0] = True

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = shown[: q.shape[-2], : k.shape[-2]]
        return (q @ k.mT).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    args = draw()
    traced = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    for node in traced.graph.find_nodes(op="placeholder"):
        node.meta["val"].fake_mode.allow_non_fake_inputs = False
    fused = fusecomp.fuse(traced, args, strict=True)
    assert fusecomp.counters()["fused"] == 1
    torch.testing.assert_close(fused(*args), fn(*args))


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_models_under_autocast_train(cast: torch.dtype) -> None:
    model, x = Attend(), torch.randn(2, 21, 24)

    def step(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", cast):
            f(x).float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, got = step(model), step(compiled(model))
    assert fusecomp.counters()["fused"] == 1
    for e, g in zip(expected, got, strict=True):
        torch.testing.assert_close(g, e, rtol=0.05, atol=0.02 * e.abs().max().item())


def test_a_capture_that_cannot_be_retraced_is_left_to_the_inner_backend() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.vmap(causal)(q, k, v) + q.to_sparse().to_dense().sum()

    args = draw()
    torch.testing.assert_close(compiled(fn)(*args), fn(*args))


def test_every_attention_of_t5_is_fused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4,
                                   decoder_start_token_id=0, attn_implementation="eager")  # fmt: skip
    model = transformers.T5Model(config).eval()
    ids = torch.randint(0, 64, (2, 20))
    mask = torch.arange(20) < torch.tensor([[20], [9]])
    given = {"input_ids": ids, "decoder_input_ids": ids[:, :12], "attention_mask": mask.long(), "use_cache": False}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = explain(model, **given)
        torch._dynamo.reset()
        got = torch.compile(model, backend="fusecomp", options={"inner": "eager"})(**given).last_hidden_state
        torch.testing.assert_close(got, model(**given).last_hidden_state, rtol=1e-4, atol=1e-4)
    assert (len(report.fused), len(report.entries)) == (6, 6), str(report)


def test_where_is_the_users_line() -> None:
    (entry,) = explain(causal, *draw()).fused
    assert Path(entry.where.partition(":")[0]).name == "test_contexts.py"
    assert entry.source.startswith("return scores(q, k).masked_fill")
