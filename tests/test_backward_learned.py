"""Gradients of what learns beside Q, K and V, from generated kernels, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from golden_kernels import BACKWARD
from gradients import SIZES, agree, inputs_of, qkv, small
from kernels import Interpreter
from regions import (
    B,
    H,
    M,
    N,
    age,
    attention,
    b,
    causal,
    dropout,
    grouped,
    h,
    kv_idx,
    load,
    q_idx,
    scaled_score,
    score,
    times,
)
from test_codegen import normal

from fusecomp.codegen import backward_launcher
from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.compiled import cross_compile
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.backward import backward_plan

FLOAT = "float32"


def biased(*index: Expr | int, shape: tuple[Expr | int, ...], keep: tuple[Expr, ...] = (causal,)) -> AttentionRegion:
    """S = score + load0[index]."""
    return attention(apply("add", scaled_score, load(0, *index)), *keep, loads=[(shape, FLOAT)])


def scaled(*index: Expr | int, shape: tuple[Expr | int, ...]) -> AttentionRegion:
    """S = score * load0[index]."""
    return attention(apply("mul", scaled_score, load(0, *index)), causal, loads=[(shape, FLOAT)])


window = (causal, apply("lt", age, Const(9)))
soft_bias = times(apply("tanh", apply("add", scaled_score, load(0, h, q_idx, kv_idx))), 2.0)
REGIONS: dict[str, AttentionRegion] = {
    "bias": biased(b, h, q_idx, kv_idx, shape=(B, H, M, N)),
    "bias_of_heads": biased(h, q_idx, kv_idx, shape=(H, M, N)),
    "bias_of_heads_1": biased(0, h, q_idx, kv_idx, shape=(1, H, M, N)),
    "bias_of_requests": biased(b, 0, q_idx, kv_idx, shape=(B, 1, M, N)),
    "bias_of_all": biased(q_idx, kv_idx, shape=(M, N)),
    "bias_turned": biased(kv_idx, q_idx, h, shape=(N, M, H)),
    "bias_in_a_window": biased(h, q_idx, kv_idx, shape=(H, M, N), keep=window),
    "bias_under_a_cap": attention(soft_bias, causal, loads=[((H, M, N), FLOAT)]),
    "bias_of_keys": biased(b, 0, 0, kv_idx, shape=(B, 1, 1, N)),
    "bias_of_keys_and_heads": biased(h, kv_idx, shape=(H, N)),
    "bias_of_queries": biased(q_idx, 0, shape=(M, 1)),
    "slopes": attention(apply("sub", scaled_score, apply("mul", age, load(0, h))), causal, loads=[((H,), FLOAT)]),
    "slopes_of_an_exponential": attention(
        apply("sub", scaled_score, apply("mul", apply("exp", load(0, h)), apply("abs", age))), loads=[((H,), FLOAT)]
    ),
    "temperature": scaled(h, 0, 0, shape=(H, 1, 1)),
    "temperature_of_all": scaled(shape=()),
    "temperature_of_queries": scaled(b, h, q_idx, 0, shape=(B, H, M, 1)),
    "divided": attention(apply("div", scaled_score, load(0, h)), loads=[((H,), FLOAT)]),
    "divided_by_key": attention(apply("div", scaled_score, load(0, kv_idx)), causal, loads=[((N,), FLOAT)]),
    "divided_by_pair": attention(apply("div", scaled_score, load(0, q_idx, kv_idx)), loads=[((M, N), FLOAT)]),
    "exponent": attention(apply("mul", scaled_score, apply("exp", load(0, h))), causal, loads=[((H,), FLOAT)]),
    "table": biased(h, apply("add", apply("sub", kv_idx, q_idx), M), shape=(H, 60)),
    "gates": attention(scaled_score, causal, loads=[((H,), FLOAT)], weight=load(0, h)),
    "gates_of_keys": attention(scaled_score, causal, loads=[((N,), FLOAT)], weight=apply("sigmoid", load(0, kv_idx))),
    "sink": attention(scaled_score, causal, loads=[((H,), FLOAT)], sink=load(0, h)),
    "sink_of_queries": attention(scaled_score, causal, loads=[((H, M), FLOAT)], sink=times(load(0, h, q_idx), 0.5)),
    "sink_of_none": attention(scaled_score, *window, loads=[((1,), FLOAT)], sink=apply("exp", load(0, 0))),
    "sink_and_slope": attention(
        apply("sub", scaled_score, apply("mul", age, load(0, h))), causal, loads=[((H,), FLOAT)], sink=load(0, h)
    ),
    "bias_and_sink": attention(
        apply("add", scaled_score, load(0, q_idx, kv_idx)),
        loads=[((M, N), FLOAT), ((H,), FLOAT), ((H,), FLOAT)],
        sink=apply("add", load(1, h), load(2, h)),
    ),
    "twice": attention(
        apply("add", apply("mul", scaled_score, load(0, h)), apply("mul", load(0, 0), load(1, kv_idx))),
        causal, loads=[((H,), FLOAT), ((N,), FLOAT)],
    ),
}  # fmt: skip


def learnable(region: AttentionRegion) -> list[str]:
    return [o.name for o in region.loads if o.dtype.startswith(("float", "bfloat"))]


@pytest.mark.parametrize("name", REGIONS)
def test_gradients(interpreter: Interpreter, name: str) -> None:
    region = REGIONS[name]
    args = inputs_of(region, SIZES)
    args = [*args[:3], *(x.sign() * (x.abs() + 0.5) for x in args[3:])] if name.startswith("divided") else args
    agree(interpreter, region, args, SIZES, learn=learnable(region))


def test_keys_that_have_nearly_all_the_weight(interpreter: Interpreter) -> None:
    """Near a temperature of 0 the sum of dS S is of terms that cancel; around their mean they do not."""
    region, args = REGIONS["divided"], inputs_of(REGIONS["divided"], SIZES)
    args[3] = torch.full_like(args[3], 0.02)
    agree(interpreter, region, args, SIZES, wanted=("load0",), learn=["load0"], tolerance=1e-6)


@pytest.mark.parametrize("region", [
    replace(REGIONS["divided"], sink=Const(0.5)),  # whose dS have another sum
    REGIONS["slopes"],  # dS/dx is the same for every S
    replace(REGIONS["divided"], lse=True),
])  # fmt: skip
def test_what_is_summed_around_no_mean(region: AttentionRegion) -> None:
    assert "_mean" not in emit_backward(region, small(region), frozenset({"load0"})).text


@pytest.mark.parametrize("programs", [8, 40])
def test_parts_of_a_sum(interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Fewer programs than requests and heads: each adds up several, and the host adds up theirs."""
    monkeypatch.setattr(backward_launcher, "PROGRAMS", programs)
    region = attention(apply("add", times(score, 0.2), load(0, q_idx, kv_idx)), causal, loads=[((M, N), FLOAT)])
    emit_backward.cache_clear()
    agree(interpreter, region, inputs_of(region, SIZES), SIZES, learn=["load0"])
    emit_backward.cache_clear()


def test_grouped_heads(interpreter: Interpreter) -> None:
    """A bias and a slope for each query head, whose keys are shared; a temperature for each key head."""
    s = apply("mul", apply("add", scaled_score, load(0, h, q_idx, kv_idx)), load(1, h, kv_idx))
    s = apply("mul", s, load(2, apply("floordiv", h, Const(3))))
    loads = [((H, M, N), FLOAT), ((H, N), FLOAT), ((2,), FLOAT)]
    region = attention(s, causal, loads=loads, **grouped(3, 2))
    args = [*qkv(16, heads=6, kv=2), normal(6, 23, 37), normal(6, 37), normal(2)]
    agree(interpreter, region, args, {**SIZES, "H": 6}, learn=learnable(region))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(interpreter: Interpreter, dtype: str) -> None:
    bias = load(0, h, q_idx, kv_idx, dtype=dtype)
    region = attention(
        apply("add", scaled_score, bias), causal, loads=[((H, M, N), dtype), ((H,), dtype)], dtype=dtype,
        sink=load(1, h, dtype=dtype),
    )  # fmt: skip
    agree(interpreter, region, inputs_of(region, SIZES), SIZES, learn=learnable(region))


def test_dropped_weights(interpreter: Interpreter) -> None:
    region = dropout(REGIONS["bias_of_heads"])
    args = [*inputs_of(replace(region, operands=region.operands[:-1]), SIZES), torch.tensor(5)]
    agree(interpreter, region, args, SIZES, learn=["load0"])


def test_one_batch_axis_and_none(interpreter: Interpreter) -> None:
    s, loads = apply("add", scaled_score, load(0, q_idx, kv_idx)), [((M, N), FLOAT)]
    for batch in ((b,), ()):
        region = attention(s, batch=batch, loads=loads)
        agree(interpreter, region, inputs_of(region, SIZES), SIZES, learn=["load0"])


@pytest.mark.parametrize("wanted", [("load0",), ("q",), ("k", "load0"), ("load1",)])
def test_some_gradients(interpreter: Interpreter, wanted: tuple[str, ...]) -> None:
    s = apply("add", apply("mul", scaled_score, load(1, h)), load(0, h, q_idx, kv_idx))
    region = attention(s, causal, loads=[((H, M, N), FLOAT), ((H,), FLOAT)])
    agree(interpreter, region, inputs_of(region, SIZES), SIZES, wanted=wanted, learn=learnable(region))


def test_places_that_labels_choose(interpreter: Interpreter) -> None:
    """A temperature of each document, found through the labels of queries."""
    s = apply("mul", scaled_score, load(0, load(1, b, q_idx, dtype="int64")))
    region = attention(s, loads=[((5,), FLOAT), ((B, M), "int64")])
    args = [*qkv(16), normal(5), torch.randint(0, 5, (2, 23), generator=torch.Generator().manual_seed(1))]
    agree(interpreter, region, args, SIZES, learn=["load0"])


def test_what_is_only_compared_has_no_gradient(interpreter: Interpreter) -> None:
    s = apply("where", apply("gt", load(0, h), Const(0.0)), scaled_score, times(scaled_score, 0.5))
    region = attention(s, loads=[((H,), FLOAT)])
    agree(interpreter, region, inputs_of(region, SIZES), SIZES, wanted=("q", "k", "v"), learn=["load0"])


@pytest.mark.parametrize("kernel", ["query_gradient", "key_gradients", "load0_gradient"])
@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_without_a_gpu(arch: int, kernel: str) -> None:
    info = cross_compile(emit_backward(*BACKWARD["bias_backward"]), arch, kernel)
    assert info.shared <= {80: 166_912, 90: 232_448}[arch]
    if arch == 90:
        assert info.spills in (0, None)


def test_the_sink_compiles_without_a_gpu() -> None:
    source = emit_backward(REGIONS["sink"], backward_plan(REGIONS["sink"]), frozenset({"load0"}))
    cross_compile(source, 90, "row_products")


def test_a_generated_file_checks_itself(tmp_path: Path) -> None:
    region = REGIONS["sink_and_slope"]
    source = emit_backward(region, small(region), frozenset({"load0"}))
    path = tmp_path / f"{source.name}.py"
    path.write_text(source.text)
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True)
    assert "agrees with PyTorch" in done.stdout, done.stderr


def test_only_what_learns_has_a_kernel() -> None:
    region = REGIONS["bias_of_heads"]
    assert "load0_gradient" not in emit_backward(region, small(region)).text
    assert emit_backward(region, small(region)).key != emit_backward(region, small(region), frozenset({"load0"})).key


@pytest.mark.parametrize("keys", [64, 37])
def test_biases_where_tiles_of_keys_are_whole(interpreter: Interpreter, keys: int) -> None:
    """The compiler is told, and reads several keys of a row at once; a last tile that is cut repeats the last key."""
    region = REGIONS["bias_of_heads"]
    sizes = {**SIZES, "N": keys}
    agree(interpreter, region, inputs_of(region, sizes), sizes, learn=["load0"])


def test_biases_are_read_in_vectors() -> None:
    """Of tiles that are whole, as the binary is made for."""
    read = cross_compile(emit_backward(*BACKWARD["bias_backward"]), 90, "key_gradients").ptx
    assert "ld.global.b16" not in read
    assert "ld.global.v4.b32" in read


def documents() -> AttentionRegion:
    """A learned bias of heads, beside a mask that says which pairs are of one document."""
    same = load(1, b, 0, q_idx, kv_idx, dtype="bool")
    s = apply("add", scaled_score, load(0, h, q_idx, kv_idx))
    return attention(s, same, loads=[((H, M, N), FLOAT), ((B, 1, M, N), "bool")])


def test_tiles_of_a_bias_that_data_hides(interpreter: Interpreter) -> None:
    """What the mask hides has a gradient of 0; a tile of which it hides all is left out, as the generated text says."""
    region, sizes = documents(), {**SIZES, "M": 48, "N": 64}
    args = inputs_of(region, sizes)
    args[4] = (torch.arange(48)[:, None] // 20 == torch.arange(64) // 20).expand(2, 1, 48, 64).clone()
    args[4][1, 0, :, 32:] = False
    args[4][..., 0] = True  # each query sees a key
    agree(interpreter, region, args, sizes, learn=["load0"])
    text = emit_backward(region, small(region), frozenset({"load0"})).text
    assert "range(k_first, k_last, BLOCK_N)" in text
    assert "k_first, k_last" not in emit_backward(REGIONS["bias"], small(REGIONS["bias"]), frozenset({"load0"})).text


FIXED = tuple(SIZES.items())


def test_known_lengths_need_no_scatter(interpreter: Interpreter) -> None:
    """A tensor's lengths are numbers where a graph's are: each of its elements is read once all the same."""
    region = biased(0, h, q_idx, kv_idx, shape=(1, 3, 23, 37))
    assert "index_put_" in emit_backward(region, small(region), frozenset({"load0"})).text
    source = emit_backward(region, small(region), frozenset({"load0"}), FIXED)
    assert "index_put_" not in source.text
    agree(interpreter, region, inputs_of(region, SIZES), SIZES, learn=("load0",), fixed=FIXED)


@pytest.mark.parametrize("keep", [(), window, (apply("lt", kv_idx, load(1, b, dtype="int64")), causal)],
                         ids=["all", "window", "lengths"])  # fmt: skip
def test_a_bias_of_all_requests_is_summed_in_one_loop(
    interpreter: Interpreter, keep: tuple[Expr, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward_launcher, "PROGRAMS", 1)
    s = apply("add", scaled_score, load(0, h, q_idx, kv_idx))
    region = attention(s, *keep, loads=[((H, M, N), FLOAT), ((B,), "int64")], empty_row="zero")
    region = region if len(keep) == 2 and keep is not window else attention(s, *keep, loads=[((H, M, N), FLOAT)])
    text = emit_backward(region, small(region), frozenset({"load0"})).text
    loop = text[text.index("for member in range(") :]
    assert "for k_start" not in loop[: loop.index("tl.store")]
    args = inputs_of(region, SIZES)
    args[4:] = [torch.tensor([11, 37])] * bool(args[4:])
    agree(interpreter, region, args, SIZES, learn=("load0",))
