"""The log-sum-exp as a result beside O: value and gradient, in kernels, on the CPU path and through autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from agreement import INF, agree, compiled, qkv, reasons
from golden_kernels import GOLDEN
from kernels import Interpreter, poisoned, tiles
from regions import MIN, H, M, N, age, attention, causal, dropout, grouped, h, kv_idx, load, q_idx, scaled_score, times
from test_backward_codegen import SIZES, small
from test_backward_codegen import qkv as inputs
from test_codegen import normal
from torch import Tensor

import fusecomp
from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_launcher import learned
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.emit import emit
from fusecomp.codegen.logsumexp import saved
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const
from fusecomp.ir.logsumexp import evaluate_lse
from fusecomp.ir.reference import evaluate
from fusecomp.ir.region import AttentionRegion, Operand
from fusecomp.running import cpu
from fusecomp.running.backward import gradients

later = apply("gt", q_idx, kv_idx)  # the first query sees no key
BIASED = apply("add", scaled_score, load(0, h, q_idx, kv_idx))
REGIONS: dict[str, AttentionRegion] = {
    "plain": attention(scaled_score),
    "causal": attention(scaled_score, causal),
    "window": attention(scaled_score, causal, apply("lt", age, Const(9))),
    "empty_rows": attention(scaled_score, later, empty_row="zero"),
    "grouped": attention(scaled_score, causal, **grouped(3, 1)),
    "soft_cap": attention(times(apply("tanh", apply("div", scaled_score, Const(2.0))), 2.0), causal),
    "sink": attention(scaled_score, causal, loads=[((H,), "float32")], sink=load(0, h)),
    "bias": attention(BIASED, loads=[((H, M, N), "float32")]),
    "dropout": dropout(attention(scaled_score, causal)),
}  # fmt: skip
FILLED: dict[str, AttentionRegion] = {
    f"{fill:g} {name}": attention(s, later, filled_score=apply("where", later, s, Const(fill)), fill=fill, **more)
    for fill in (-1e4, MIN)
    for name, s, more in (("plain", scaled_score, {}), ("grouped", scaled_score, grouped(3, 1)),
                          ("bias", BIASED, {"loads": [((H, M, N), "float32")]}))
}  # fmt: skip
"""The first query sees no key: it is softmax of the fill, the same for all."""
REGIONS = {name: replace(region, lse=True) for name, region in REGIONS.items()}
FILLED = {name: replace(region, lse=True) for name, region in FILLED.items()}


def operands(region: AttentionRegion) -> list[Tensor]:
    heads = 1 if region.q_per_kv() > 1 else 3
    sizes = {**SIZES, "H": 3}
    return [*inputs(16, kv=heads), *(drawn(o, sizes) for o in region.operands[3:])]


def drawn(o: Operand, sizes: dict[str, int]) -> Tensor:
    if o.name == "seed":
        return torch.tensor(12345)
    return normal(*(sizes[str(n)] for n in o.shape))


def whole(region: AttentionRegion, lse: Tensor) -> Tensor:
    """The two parts in one: with a bias, which may hold a fill, they are saved apart."""
    return (lse.sum(-1) if saved(region) else lse).double()


@pytest.mark.parametrize("skeleton", ["prefill", "decode"])
@pytest.mark.parametrize("name", [*REGIONS, *FILLED])
def test_value_in_the_kernel(interpreter: Interpreter, name: str, skeleton: str) -> None:
    region = {**REGIONS, **FILLED}[name]
    args, lengths = operands(region), [SIZES[n] for n in region.sizes]
    for pack in {1, region.q_per_kv()}:
        source = emit(region, tiles(region, 16, 32, skeleton, pack=pack))
        out, lse = torch.empty(2, 3, 23, 16), torch.full((2, 3, 23, *saved(region)), 123.0)
        out, *_, lse = interpreter.launch(source, out, [poisoned(x) for x in args], lengths, lse)
        expected = evaluate_lse(region, args, SIZES)
        torch.testing.assert_close(whole(region, lse), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.double(), evaluate(region, args, SIZES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*REGIONS, *FILLED])
def test_value_on_the_cpu(name: str) -> None:
    region = {**REGIONS, **FILLED}[name]
    args = operands(region)
    out, lse = torch.empty(2, 3, 23, 16), torch.full((2, 3, 23, *saved(region)), 123.0)
    cpu.lower(region)(out, args, SIZES, lse)
    torch.testing.assert_close(whole(region, lse), evaluate_lse(region, args, SIZES), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), evaluate(region, args, SIZES), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*REGIONS, *FILLED])
def test_gradient_of_the_kernels(interpreter: Interpreter, name: str) -> None:
    """dS += P dlse, against autograd in float64; what dlse is where a row saw no key is of no account."""
    region = {**REGIONS, **FILLED}[name]
    args, lengths = operands(region), [SIZES[n] for n in region.sizes]
    others = frozenset(o.name for o in region.loads if o.dtype == "float32")
    names = learned(GradientFrame(region, tiles(region), learned=others))
    places = [i for i, o in enumerate(region.operands) if o.name in names]
    leaves = [x.clone().requires_grad_(i in places) for i, x in enumerate(args)]
    results = [evaluate(region, leaves, SIZES), evaluate_lse(region, leaves, SIZES)]
    given = [normal(2, 3, 23, 16), normal(2, 3, 23)]
    expected = torch.autograd.grad(results, [leaves[i] for i in places], [g.double() for g in given])
    if name == "empty_rows":
        given[1][:, :, 0] = float("nan")

    out, lse = torch.empty(2, 3, 23, 16), torch.empty(2, 3, 23, *saved(region))
    out, *_, lse = interpreter.launch(emit(region, tiles(region)), out, args, lengths, lse)
    grads = [torch.full_like(x, float("nan")) if i in places else None for i, x in enumerate(args)]
    found, *_ = interpreter.launch(
        emit_backward(region, small(region), others), grads, out, given[0], lse, given[1], args, lengths
    )
    recomputed = gradients(region, given[0], args, lengths, places, given[1])
    for i, want, again in zip(places, expected, recomputed, strict=True):
        torch.testing.assert_close(found[i].double(), want.double(), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(again.double(), want.double(), rtol=2e-5, atol=2e-5)


def test_no_keys(interpreter: Interpreter) -> None:
    region, sizes = REGIONS["causal"], {**SIZES, "N": 0}
    for skeleton in ("prefill", "decode"):
        source, out = emit(region, tiles(region, 16, 32, skeleton)), torch.empty(2, 3, 23, 16)
        out, *_, lse = interpreter.launch(
            source, out, inputs(16, n=0), [sizes[n] for n in region.sizes], torch.empty(2, 3, 23)
        )
        assert (out == 0).all()
        assert (lse == -INF).all()


def test_kernels_compile_for_a_gpu() -> None:
    region, plan = GOLDEN["causal"]
    region = replace(region, lse=True)
    assert cross_compile(emit(region, plan), 90, "attention").shared
    decode = emit(region, tiles(region, 16, 64, "decode"))
    assert all(cross_compile(decode, 90, kernel).shared for kernel in ("attention", "combine"))
    assert cross_compile(emit_backward(region, small(region, 64, 64)), 90, "row_products").ptx


def test_files_say_it() -> None:
    region = replace(attention(scaled_score, causal), lse=True)
    assert "lse = log sum exp(S), beside O" in str(region)
    assert region.key != replace(region, lse=False).key
    forward, backward = emit(region, tiles(region)), emit_backward(region, small(region))
    assert "def launch(out, tensors, sizes, lse):" in forward.text
    assert "def launch(grads, out, grad_out, lse, grad_lse, tensors, sizes):" in backward.text
    assert "delta = sum over dv of  O dO - dlse" in backward.text


# ----------------------------------------------------------------------------------------------------------------
# In programs


def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = (q @ k.mT) * 0.3
    return s.softmax(-1) @ v, s.logsumexp(-1)


def half(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = both(q, k, v)
    return out, lse.bfloat16()


LOSSES = {
    "output": lambda out, lse: out.sum(),
    "log-sum-exp": lambda out, lse: lse.square().mean() + out.detach().sum(),
    "both": lambda out, lse: out.mean() * lse.mean(),
}  # fmt: skip


@pytest.mark.parametrize("use", LOSSES)
def test_loss_by_either_result(use: str) -> None:
    args = qkv(learn=True)
    args[2].requires_grad_(use != "log-sum-exp")
    agree(lambda *args: LOSSES[use](*both(*args)), args, train=True)


def test_written_in_place_afterwards() -> None:
    """What is written must be a copy of what the kernel saved, or stay the graph's own."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = both(q, k, v)
        return out, lse.mul_(2.0)

    assert "read elsewhere" in reasons(fn, qkv())[0]
    agree(fn, qkv(), fused=0)


def test_two_attentions_of_one_softmax() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = (q @ k.mT) * 0.3
        p = s.softmax(-1)
        return p @ v, p @ v.cos(), s.logsumexp(-1)

    agree(fn, qkv(), fused=2)
    agree(fn, qkv(learn=True), fused=2, train=True)


def test_maximum_detached_in_one_place() -> None:
    """m + log sum exp(S - detach(m)) has the gradient of m beside that of the log-sum-exp."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = (q @ k.mT) * 0.3
        m = s.amax(-1, keepdim=True)
        e = (s - m.detach()).exp()
        total = e.sum(-1, keepdim=True)
        return (e / total) @ v, m + total.log()

    assert reasons(fn, qkv(learn=True)) == ["the maximum is detached in one place and not in another"]
    agree(fn, qkv(learn=True), fused=0, train=True)
    agree(fn, qkv(), fused=1)


def test_mask_is_the_weights_own() -> None:
    """A mask that the log-sum-exp has and the softmax has not, and the other way round."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        s = (q @ k.mT) * 0.3
        return s.softmax(-1) @ v, s.masked_fill(j > i + 8, -INF).logsumexp(-1)

    agree(fn, qkv(), fused=0)


def test_half_precision() -> None:
    agree(half, qkv(dtype=torch.bfloat16), tolerance=2e-2)
    assert compiled(half)(*qkv(dtype=torch.bfloat16))[1].dtype == torch.bfloat16


def test_second_order_is_an_error_or_right() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = both(q, k, v)
        return out.square().sum() + lse.square().sum()

    q, k, v = qkv(learn=True)
    (grad,) = torch.autograd.grad(compiled(fn)(q, k, v), [q], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|does not require grad|not implemented"):
        torch.autograd.grad(grad.sum(), [k])


def test_report_names_the_result() -> None:
    report = fusecomp.explain(both, *qkv())
    assert "lse = log sum exp(S), beside O" in str(report)
