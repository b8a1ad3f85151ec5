"""What runs in a recognised attention's place: the operator, its gradients, verdicts, the cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus.table import INF, Draw, qkv, scores, square
from regions import attention, causal, scaled_score
from torch import Tensor

import fusecomp
from fusecomp.backend import explain
from fusecomp.errors import KernelError
from fusecomp.ir.region import AttentionRegion
from fusecomp.running import cpu, lower, operator, verdict, verify
from fusecomp.running.operator import Kernel, empty_ordered, register

pytestmark = pytest.mark.usefixtures("own_cache")


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def draw(build: Callable[..., Sequence[Tensor]] = qkv) -> list[Tensor]:
    return list(build(Draw(torch.float32, "cpu", 1)))


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="fusecomp", options={"inner": "eager", **options})


# ----------------------------------------------------------------------------------------------------------------
# The operator


def call(region: AttentionRegion, order: Sequence[int] = (0, 1, 2, 3), grad: bool = False) -> tuple[Any, ...]:
    """Arguments of fusecomp::attention for `region` on q [2, 3, 13, 16] and k, v [2, 3, 21, 16]."""
    key = register(f"{region.key}-test", Kernel(region, cpu.lower(region)))
    q, k, v = (x.requires_grad_(grad) for x in draw(lambda d: qkv(d, d=16)))
    sizes = [{"B": 2, "H": 3, "M": 13, "N": 21}[s] for s in region.sizes]
    return [q, k, v], sizes, [2, 3, 13, 16], list(order), torch.float32, key


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)]


@pytest.mark.parametrize("order", ORDERS)
def test_operator_keeps_the_rules_of_torch_library(order: tuple[int, ...]) -> None:
    torch.library.opcheck(torch.ops.fusecomp.attention.default, call(attention(scaled_score, causal), order))
    args = call(attention(scaled_score, causal), order, grad=True)
    torch.library.opcheck(torch.ops.fusecomp.attention_recomputed.default, args)


@pytest.mark.parametrize("order", ORDERS)
def test_fake_result_has_the_real_strides(order: tuple[int, ...]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors, *rest = call(attention(scaled_score), order)
    real = torch.ops.fusecomp.attention(tensors, *rest)
    with FakeTensorMode() as mode:
        fake = torch.ops.fusecomp.attention([mode.from_tensor(x) for x in tensors], *rest)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    memory = sorted(range(4), key=lambda i: -real.stride(i))
    assert tuple(memory) == order


def test_backward_operator_keeps_the_rules() -> None:
    tensors, sizes, shape, _, _, key = call(attention(scaled_score))
    args = (torch.randn(shape), tensors, sizes, [0, 2], key)
    torch.library.opcheck(torch.ops.fusecomp.attention_backward.default, args)


def test_unknown_key_says_what_to_do() -> None:
    tensors, *rest, _ = call(attention(scaled_score))
    with pytest.raises(KernelError, match="is not loaded in this process; compile the model here"):
        torch.ops.fusecomp.attention(tensors, *rest, "nothing")


@pytest.mark.parametrize("lengths", [(0, 21, 2), (13, 0, 2), (13, 21, 0)])
def test_empty_axes(lengths: tuple[int, int, int]) -> None:
    m, n, b = lengths
    args = torch.randn(b, 3, m, 8), torch.randn(b, 3, n, 8), torch.randn(b, 3, n, 8)
    torch.testing.assert_close(compiled(plain)(*args), plain(*args), equal_nan=True)


def test_empty_ordered() -> None:
    x = empty_ordered([2, 3, 5], (1, 0, 2), torch.empty(0), torch.float16)
    assert (x.shape, x.stride(), x.dtype) == ((2, 3, 5), (5, 10, 1), torch.float16)


# ----------------------------------------------------------------------------------------------------------------
# Gradients


def with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (scores(q, k) + bias).softmax(-1) @ v


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = torch.cat([scores(q, k), sink.view(1, -1, 1, 1).expand(2, 3, 13, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v


def with_scale(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return ((q @ k.mT) * scale).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return with_bias(q, k[:, :1].repeat_interleave(3, 1), v[:, :1].expand(-1, 3, -1, -1), bias)


LEARNED: list[tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = [
    (with_bias, (13, 21), (0, 1, 2, 3)), (with_bias, (2, 3, 13, 21), (3,)), (with_bias, (1, 3, 1, 21), (1, 3)),
    (with_sink, (3,), (0, 1, 2, 3)), (with_scale, (3, 1, 1), (0, 3)), (with_scale, (), (3,)),
    (grouped, (13, 21), (0, 1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "shape", "wanted"), LEARNED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_gradients_are_eagers(fn: Callable[..., Tensor], shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    args = [*draw(), torch.randn(shape)]

    def gradients(f: Callable[..., Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        leaves = [x.to(dtype).requires_grad_(i in wanted) for i, x in enumerate(args)]
        out = f(*leaves)
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        return torch.autograd.grad(out, [leaves[i] for i in wanted], seed)

    got, exact = gradients(compiled(fn, strict=True), torch.float32), gradients(fn, torch.float64)
    assert fusecomp.counters()["fused"] == 1
    for g, e in zip(got, exact, strict=True):  # a scalar's gradient is a sum of 1600 terms that cancel
        torch.testing.assert_close(g.double(), e, rtol=1e-5, atol=1e-4 if e.numel() == 1 else 1e-5)


def test_an_infinite_scale_before_a_cap() -> None:
    """Of Q, it would sum infinities of both signs."""
    args = draw()
    capped = compiled(lambda q, k, v: (5 * torch.tanh(q @ k.mT * INF)).softmax(-1) @ v, strict=True)(*args)
    q, k, v = args
    torch.testing.assert_close(capped, (5 * (q @ k.mT).sign()).softmax(-1) @ v)
    assert fusecomp.counters()["fused"] == 1


def test_a_mask_that_wants_no_gradient_gets_none() -> None:
    q, k, v = draw()
    mask = torch.zeros(13, 21).masked_fill(torch.rand(13, 21) < 0.3, -INF)
    q.requires_grad_()
    compiled(with_bias, strict=True)(q, k, v, mask).sum().backward()
    assert q.grad is not None
    assert mask.grad is None


# ----------------------------------------------------------------------------------------------------------------
# Verdicts


def tampered(monkeypatch: pytest.MonkeyPatch, launch: Callable[..., None]) -> None:
    """Put a wrong kernel in the place of the right one."""
    monkeypatch.setattr(lower.cpu, "lower", lambda region: launch)


def zeros(out: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    out.zero_()


def nothing(out: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    out.fill_(float("nan"))


def failing(out: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    raise RuntimeError("launch failed")


@pytest.mark.parametrize(("launch", "said"), [
    (zeros, "DISAGREES with the program in float64"), (nothing, "are NaN or infinite on one side only"),
    (failing, "RuntimeError: launch failed"),
])  # fmt: skip
def test_a_wrong_kernel_is_never_used(
    launch: Callable[..., None], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tampered(monkeypatch, launch)
    args = draw()
    with caplog.at_level(logging.WARNING, "fusecomp"):
        fn = compiled(plain)
        torch.testing.assert_close(fn(*args), plain(*args), rtol=0, atol=0)
        fn(*args)
    warned = [r.getMessage() for r in caplog.records if r.name.startswith("fusecomp")]
    assert len(warned) == 1
    assert said in warned[0]
    assert "test_running.py" in warned[0]
    assert fusecomp.counters() == {"candidates": 1, "fused": 0, "declined": 0, "fallbacks": 1}


def test_strict_raises_on_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, zeros)
    with pytest.raises(Exception, match="DISAGREES") as raised:
        compiled(plain, strict=True)(*draw())
    assert "VerificationError" in f"{type(raised.value).__name__} {raised.value!r} {raised.value.__cause__!r}"


def test_verify_off_trusts_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered(monkeypatch, zeros)
    assert not compiled(plain, verify=False)(*draw()).any()


@pytest.mark.parametrize("where", ["recognise", "capture", "substitute"])
def test_errors_inside_never_reach_the_model(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AssertionError("a bug in fusecomp")

    monkeypatch.setattr(f"fusecomp.pipeline.{where}", broken)
    args = draw()
    torch.testing.assert_close(compiled(plain)(*args), plain(*args), rtol=0, atol=0)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a bug in fusecomp"):
        compiled(plain, strict=True)(*args)


def test_a_verdict_is_kept_and_a_failure_is_not(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    compared = []
    honest = verify.compare
    monkeypatch.setattr(verify, "compare", lambda *a, **k: compared.append(1) or honest(*a, **k))
    for _ in range(2):
        torch._dynamo.reset()
        compiled(plain)(*draw())
    assert len(compared) == 1
    tampered(monkeypatch, zeros)
    for _ in range(2):
        torch._dynamo.reset()
        compiled(lambda q, k, v: (scores(q, k) * 2).softmax(-1) @ v)(*draw())
    assert len(compared) == 3
    (kept,) = (own_cache / "verdicts").iterdir()
    assert json.loads(kept.read_text())["passed"] is True
    assert own_cache.stat().st_mode & 0o077 == 0 or (own_cache / "verdicts").stat().st_mode & 0o077 == 0


def test_triton_without_a_device_says_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    args = draw()
    torch.testing.assert_close(compiled(plain, lowering="triton")(*args), plain(*args))
    assert "set TRITON_INTERPRET=1, or lowering='auto'" in caplog.text


def test_layers_alike_share_one_kernel() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(4):
            q = torch.tanh(scores(q, k).softmax(-1) @ v)
        return q

    report = explain(layers, *draw(square))
    assert len(report.fused) == 4
    assert len({e.kernel for e in report.fused}) == 1
    assert len(operator.KERNELS) == 1


def test_judgement_allows_what_eager_gets_wrong_too() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    good, bad = exact.float() + 1e-6, exact.float() + 0.1
    nan = torch.tensor([1.0, 1.0, 1.0, float("nan")])
    verdicts = [verdict.judge(verdict.Judged(got, eager, exact, "it"), "float32").passed
                for got, eager in ((good, good), (bad, good), (bad, bad), (nan, good), (nan, nan))]  # fmt: skip
    assert verdicts == [True, False, True, False, True]


def cut(x: Tensor) -> Tensor:
    """What a product in TF32 reads of float32: ten bits of the fraction."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [("tf32", "cuda", [True, False]), ("ieee", "cuda", [False, False]), ("tf32", "cpu", [False, False])],
)
def test_products_in_tf32_may_round_where_those_of_eager_do_not(
    precision: str, device: str, expected: list[bool]
) -> None:
    q, k, v = draw(lambda d: qkv(d, d=8))
    exact, eager = plain(q.double(), k.double(), v.double()), plain(q, k, v)
    rounded = cut(scores(cut(q), cut(k)).softmax(-1)) @ cut(v)
    wrong = (scores(q, k) * 1.05).softmax(-1) @ v
    floor = verdict.floor_of("float32", replace(attention(), precision=precision), torch.device(device))
    judged = (verdict.Judged(got, eager, exact, "it") for got in (rounded, wrong))
    assert [verdict.judge(x, "float32", floor).passed for x in judged] == expected


def test_products_of_half_types_take_no_tf32() -> None:
    half, device = replace(attention(dtype="bfloat16"), precision="tf32"), torch.device("cuda")
    assert verdict.floor_of("float32", half, device) == verdict.FLOOR[torch.float32]
