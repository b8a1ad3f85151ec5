"""Generated backward kernels hold the gradients of their regions, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from golden_kernels import BACKWARD, paged
from gradients import SIZES, agree, inputs_of, qkv, small
from kernels import Interpreter, tiles
from regions import (
    B,
    H,
    M,
    N,
    age,
    attention,
    b,
    blhd,
    causal,
    grouped,
    h,
    kv_idx,
    load,
    q_idx,
    scaled_score,
    score,
    times,
)
from test_codegen import normal, packed_projection
from test_reference import _two_products
from torch import Tensor
from variants import by_name

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.derivative import d_score
from fusecomp.codegen.emit import emit
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr
from fusecomp.ir.reference import bind, evaluate_expr, masked_logits, product_scores
from fusecomp.ir.region import Access, AttentionRegion
from fusecomp.patterns.spellings import POINTWISE
from fusecomp.planning.backward import backward_plan
from fusecomp.planning.device import find

SOFT = times(apply("tanh", apply("div", scaled_score, Const(2.0))), 2.0)


def bool_masked() -> AttentionRegion:
    return attention(scaled_score, load(0, q_idx, kv_idx, dtype="bool"), loads=[((M, N), "bool")], empty_row="zero")


REGIONS: dict[str, AttentionRegion] = {
    "plain": attention(scaled_score),
    "causal": attention(scaled_score, causal),
    "bottom_right": attention(scaled_score, apply("ge", apply("add", q_idx, apply("sub", N, M)), kv_idx)),
    "window": attention(scaled_score, causal, apply("lt", age, Const(9))),
    "symmetric_window": attention(
        scaled_score, apply("lt", age, Const(9)), apply("gt", age, Const(-7)), empty_row="zero"
    ),
    "soft_cap": attention(SOFT, causal),
    "alibi": attention(apply("add", scaled_score, apply("mul", age, apply("exp2", apply("neg", h)))), causal),
    "bias": attention(apply("add", scaled_score, load(0, b, h, q_idx, kv_idx)), loads=[((B, H, M, N), "float32")]),
    "slopes": attention(apply("add", scaled_score, apply("mul", age, load(0, h))), causal, loads=[((H,), "float32")]),
    "temperature": attention(apply("mul", scaled_score, load(0, h)), loads=[((H,), "float32")]),
    "per_query": attention(apply("mul", scaled_score, load(0, q_idx)), causal, loads=[((M,), "float32")]),
    "key_padding": attention(scaled_score, load(0, b, kv_idx, dtype="bool"), loads=[((B, N), "bool")]),
    "bool_mask": bool_masked(),
    "sink": attention(scaled_score, causal, loads=[((H,), "float32")], sink=load(0, h)),
    "weight": attention(scaled_score, causal, loads=[((N,), "float32")], weight=load(0, kv_idx)),
    "quadratic": attention(times(apply("mul", score, score), 0.05), causal),
    "clamped": attention(apply("min", apply("max", scaled_score, Const(-0.6)), Const(0.8))),
    "sigmoid": attention(apply("mul", scaled_score, apply("sigmoid", scaled_score)), causal),
    "blhd": blhd(),
}  # fmt: skip


@pytest.mark.parametrize("name", REGIONS)
def test_gradients(interpreter: Interpreter, name: str) -> None:
    agree(interpreter, REGIONS[name], inputs_of(REGIONS[name], SIZES), SIZES)


@pytest.mark.parametrize(("heads", "kv"), [(6, 2), (4, 4), (3, 1)])
def test_grouped_heads(interpreter: Interpreter, heads: int, kv: int) -> None:
    region = attention(SOFT, causal, **grouped(heads // kv, kv))
    agree(interpreter, region, qkv(16, heads=heads, kv=kv), {**SIZES, "H": heads})


def test_slopes_of_grouped_heads(interpreter: Interpreter) -> None:
    s = apply("add", scaled_score, apply("mul", age, apply("mul", load(0, h), load(1, q_idx))))
    region = attention(s, causal, loads=[((H,), "float32"), ((M,), "float32")], **grouped(3, 2))
    agree(interpreter, region, [*qkv(16, heads=6, kv=2), normal(6), normal(23)], {**SIZES, "H": 6})


def test_one_key_head(interpreter: Interpreter) -> None:
    """K and V [B, N, D]: their gradients are sums over all heads."""
    variant = by_name("one_key_head")
    args = variant.make_args()
    agree(interpreter, variant.region, args, variant.sizes(args))


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (40, 24), (80, 80), (32, 64)])
def test_head_sizes(interpreter: Interpreter, d: int, dv: int) -> None:
    region = attention(times(score, d**-0.5), causal, d=d, dv=dv)
    agree(interpreter, region, qkv(d, dv, m=20, n=23), {**SIZES, "M": 20, "N": 23})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(interpreter: Interpreter, dtype: str) -> None:
    bias = load(0, b, h, q_idx, kv_idx, dtype=dtype)
    region = attention(apply("add", scaled_score, bias), causal, loads=[((B, H, M, N), dtype)], dtype=dtype)
    args = [*qkv(16, dtype=dtype), normal(2, 3, 23, 37, dtype=getattr(torch, dtype))]
    agree(interpreter, region, args, SIZES)


def test_one_batch_axis(interpreter: Interpreter) -> None:
    region = attention(scaled_score, causal, batch=(b,))
    agree(interpreter, region, [normal(2, 23, 16), normal(2, 37, 16), normal(2, 37, 16)], SIZES)


def test_two_products(interpreter: Interpreter) -> None:
    """The second product's K is shared by all heads, the first's is not."""
    with pytest.raises(KernelError, match="shared differently"):
        emit_backward(_two_products(), small(_two_products()))


def test_slices_of_one_tensor(interpreter: Interpreter) -> None:
    region = packed_projection()
    agree(interpreter, region, [normal(2, 37, 3, 3, 16)], {**SIZES, "N": 37})


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v", "q")])
def test_some_gradients(interpreter: Interpreter, wanted: tuple[str, ...]) -> None:
    agree(interpreter, REGIONS["causal"], qkv(16), SIZES, wanted=wanted)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (16, 64), (53, 20)])
def test_lengths(interpreter: Interpreter, m: int, n: int) -> None:
    region = REGIONS["causal"]
    agree(interpreter, region, qkv(16, m=m, n=n), {**SIZES, "M": m, "N": n}, small(region, 32, 16))


def test_saved_lse(interpreter: Interpreter) -> None:
    """log sum exp(S), with packed heads too; -inf where no key is seen."""
    region = attention(scaled_score, apply("gt", q_idx, kv_idx), empty_row="zero", **grouped(3, 2))
    sizes = {**SIZES, "H": 6}
    args = qkv(16, heads=6, kv=2)
    env = bind(region, args, sizes)
    env = replace(env, scores=tuple(product_scores(region, p, env) for p in region.products))
    expected = torch.logsumexp(masked_logits(region, env)[0], -1)
    for pack in (1, 3):
        source = emit(region, tiles(region, 32, 32, pack=pack), saves_lse=True)
        out, lse = torch.empty(2, 6, 23, 16), torch.empty(2, 6, 23, 2)
        *_, lse = interpreter.launch(source, out, args, [sizes[n] for n in region.sizes], lse)
        torch.testing.assert_close(lse.sum(-1).double(), expected, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------
# Derivatives and refusals


SMOOTH = [
    "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "tanh", "sigmoid", "asinh", "atan",
    "abs", "neg",
]  # fmt: skip


@pytest.mark.parametrize("op", SMOOTH)
def test_derivative_of_a_function(op: str) -> None:
    e = apply(op, times(score, 0.7))
    x = torch.linspace(0.3, 2.0, 7, dtype=torch.float64, requires_grad=True)
    env = replace(bind(REGIONS["plain"], qkv(16), SIZES), scores=(x,))
    assert_derivative(e, x, env)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "max", "min"])
def test_derivative_of_two_arguments(op: str) -> None:
    x = torch.linspace(-2.1, 2.0, 7, dtype=torch.float64, requires_grad=True)
    env = replace(bind(REGIONS["plain"], qkv(16), SIZES), scores=(x,))
    for a, c in ((score, Const(0.5)), (Const(0.5), score), (score, apply("mul", score, score))):
        assert_derivative(apply(op, a, c), x, env)


def test_a_quotient_of_what_vanishes() -> None:
    """The parts of its derivative are 1 / x large and cancel, so that they are divided by x as one."""
    assert str(d_score(apply("div", apply("tanh", score), score))).count(" / ") == 2


def test_sinc_near_0() -> None:
    """Its derivative keeps the digits of float32, of which a quotient's cancel: sin(x) / x is almost cos(x)."""
    e = POINTWISE["sinc"](score)
    assert e is not None
    x = torch.cat([torch.linspace(-2.1, 2.0, 9), torch.tensor([1e-2, 1e-3, 1e-4])])
    exact = x.double().requires_grad_()
    expected = torch.autograd.grad(torch.sinc(exact).sum(), exact)[0]
    env = bind(REGIONS["plain"], qkv(16), SIZES)
    found = evaluate_expr(d_score(e), replace(env, scores=(x,), dtype=x.dtype))
    torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=0.0)
    assert_derivative(e, exact, replace(env, scores=(exact,)))


def test_sines_divided_by_another_number() -> None:
    e = apply("div", apply("sin", score), times(score, 2.0))
    x = torch.linspace(-2.1, 2.0, 7, dtype=torch.float64, requires_grad=True)
    assert_derivative(e, x, replace(bind(REGIONS["plain"], qkv(16), SIZES), scores=(x,)))
    assert " < " not in str(d_score(e))


def assert_derivative(e: Expr, x: Tensor, env: object) -> None:
    (expected,) = torch.autograd.grad(evaluate_expr(e, env).sum(), x)  # type: ignore[arg-type]
    found = evaluate_expr(d_score(e), env)  # type: ignore[arg-type]
    torch.testing.assert_close(found.expand(x.shape), expected)


def test_no_kernel_where_it_would_not_be_exact() -> None:
    with pytest.raises(KernelError, match="table"):
        emit_backward(paged(), small(paged()))
    same = replace(REGIONS["plain"], v=Access("k", (*REGIONS["plain"].v.index[:-1], REGIONS["plain"].dv)))
    with pytest.raises(KernelError, match="same element"):
        emit_backward(same, small(same))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_plans_fit(d: int) -> None:
    region = attention(scaled_score, d=d, dtype="bfloat16")
    plan = backward_plan(region, find("l4"))
    assert plan.queries.block_n >= 16
    assert plan.keys.block_m >= 16


# ----------------------------------------------------------------------------------------------------------------
# Generated files


@pytest.mark.parametrize("kernel", ["row_products", "query_gradient", "key_gradients"])
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_without_a_gpu(arch: int, kernel: str) -> None:
    info = cross_compile(emit_backward(*BACKWARD["causal_gqa_backward"]), arch, kernel)
    assert info.shared <= {80: 166_912, 90: 232_448}[arch]
    if arch == 90:
        # dK and dV whose sums spill a little were the fastest of examples/bench/records/tiles_h200.json
        assert (info.spills or 0) <= (768 if kernel == "key_gradients" else 0)


def test_a_generated_file_checks_itself(tmp_path: Path) -> None:
    region = attention(SOFT, causal)
    source = emit_backward(region, small(region, 64, 64))
    path = tmp_path / f"{source.name}.py"
    path.write_text(source.text)
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True)
    assert "agrees with PyTorch" in done.stdout, done.stderr
    assert "launch(out, tensors, sizes, lse)" in emit(region, tiles(region), saves_lse=True).text


def test_what_both_need_is_computed_once() -> None:
    body = emit_backward(REGIONS["soft_cap"], small(REGIONS["soft_cap"])).text.partition("def launch")[0]
    assert "d_score = p * (d_p - delta) * (1.0 - tanh_score * tanh_score)" in body
    assert body.count("tanh_score = ") == 4  # a full and an edge tile, in two kernels


def test_the_key_says_what_the_text_depends_on() -> None:
    region = REGIONS["causal"]
    assert emit_backward(region, small(region)).key != emit_backward(region, small(region, 32)).key
    assert emit(region, tiles(region), saves_lse=True).key != emit(region, tiles(region)).key
