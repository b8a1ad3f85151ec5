"""Generated files: how they read, what is checked before they are used, how they are loaded and compiled."""

from __future__ import annotations

import ast
import os
import pickle
import re
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from golden_kernels import BACKWARD, FOLDER, GOLDEN, paged, text
from kernels import tiles
from regions import N, attention, b, causal, h, kv_idx, load, q_idx, scaled_score, score, times
from test_codegen import substituted
from variants import VARIANTS, Variant

from fusecomp.codegen.base2 import LOG2E, exponent
from fusecomp.codegen.cheaper import cheaper
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.emit import emit
from fusecomp.codegen.interpreter import nearest_bfloat16
from fusecomp.codegen.printer import Names, triton_text
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.source import KernelSource, check
from fusecomp.codegen.wrap import wrapped_lines
from fusecomp.errors import CacheError, KernelError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Cast, Const, Expr, Var
from fusecomp.planning.device import find
from fusecomp.planning.plan import plan
from fusecomp.running.loader import load as load_module

MOVING = frozenset({"q_idx", "kv_idx"})
HALF = attention(times(score, 0.125), causal, d=64, dtype="bfloat16")


# ----------------------------------------------------------------------------------------------------------------
# Text


@pytest.mark.parametrize("name", [*GOLDEN, *BACKWARD])
def test_golden(name: str) -> None:
    assert (FOLDER / f"{name}.py").read_text() == text(name), "run `python tests/golden_kernels.py` and read the diff"


def test_goldens_are_all_there() -> None:
    assert {p.stem for p in FOLDER.glob("*.py")} == {*GOLDEN, *BACKWARD}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_every_variant_has_a_sound_file(variant: Variant) -> None:
    for skeleton in ("prefill", "decode"):
        source = emit(variant.region, tiles(variant.region, skeleton=skeleton))
        assert source.name.endswith(source.key[:8])
        assert not re.search(r"[ \t]\n|\n\n\n\n", source.text)


def test_the_key_says_what_the_text_depends_on() -> None:
    one = emit(HALF, tiles(HALF))
    assert one.key == emit(replace(HALF, origin="model.py:3"), tiles(HALF)).key
    assert one.key != emit(HALF, tiles(HALF, block_n=64)).key
    assert one.key != emit(replace(HALF, out_dtype="float32"), tiles(HALF)).key


def test_only_tiles_that_need_a_mask_have_one() -> None:
    body = text("causal")
    full, edge = body.split("# The tiles that the mask")
    assert "tl.where" not in full
    assert edge.count("tl.where") == 1


def test_a_causal_mask_over_as_many_keys_as_queries_ends_the_keys() -> None:
    """q_idx >= kv_idx says kv_idx < N where q_idx < N: the score needs no other test."""
    row = Var("q_idx", N)
    rows = substituted(replace(HALF, q_idx=row), {q_idx: row})
    body = emit(rows, replace(tiles(rows), loads="descriptor")).text.partition("def in_rows")[0]
    assert 'tl.where(q_idx >= kv_idx, score, float("-inf"))' in body
    assert "live" not in body
    assert "tl.where(live[None, :] & (q_idx >= kv_idx)" in emit(HALF, tiles(HALF)).text


PRINTED = [
    (apply("and", apply("ge", q_idx, kv_idx), apply("lt", kv_idx, Const(9))), "(q_idx >= kv_idx) & (kv_idx < 9)"),
    (apply("not", apply("eq", q_idx, kv_idx)), "q_idx != kv_idx"),
    (apply("sub", q_idx, apply("sub", kv_idx, Const(1))), "q_idx + 1 - kv_idx"),
    (apply("mul", apply("add", load(0, h), Const(1.0)), load(0, b)), "(x + 1.0) * y"),
    (apply("div", load(0, h), apply("mul", load(0, b), Const(3.0))), "x / (y * 3.0)"),
    (apply("exp2", apply("add", h, Const(1))), "tl.exp2((h + 1).to(tl.float32))"),
    (apply("isnan", load(0, h)), "x != x"),
    (apply("max", load(0, h), Const(0.0)), "tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)"),
    (Cast(apply("add", load(0, h), Const(1.0)), "bfloat16"), "(x + 1.0).to(tl.bfloat16).to(tl.float32)"),
    (Const(float("-inf")), 'float("-inf")'),
    (Const(1e300), "3.4028234663852886e+38"),
    (Const(-2.5), "-2.5"),
]


def test_arguments_that_cannot_be_broken_keep_one_comma() -> None:
    wide = " < ".join(f"(value_{i})" for i in range(12))
    body = wrapped_lines(f"keep = where({wide}, {wide}, other)")
    assert ",," not in body
    assert ast.dump(ast.parse(body)) == ast.dump(ast.parse(f"keep = where({wide}, {wide}, other)"))


def test_arguments_on_a_line_of_their_own_get_a_line_each() -> None:
    call = f"copy(\n    {', '.join(f'value_{i}.index([{i}, {i}])' for i in range(8))}\n)"
    body = wrapped_lines(call)
    assert body.splitlines()[1:3] == ["    value_0.index([0, 0]),", "    value_1.index([1, 1]),"]
    assert ast.dump(ast.parse(body)) == ast.dump(ast.parse(call))


def test_a_long_statement_that_cannot_be_broken_stays() -> None:
    statement = f"def f():\n    return {', '.join(f'value_{i}' for i in range(20))}"
    assert wrapped_lines(statement) == statement


def test_the_interpreter_rounds_as_a_device_does() -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, 0.0, 1011.0, 1010.0])
    x = torch.cat([torch.randn(1000) * 300, special])
    bits = torch.from_numpy(nearest_bfloat16(x.numpy()).view("int16"))
    torch.testing.assert_close(bits.view(torch.bfloat16), x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("e", "expected"), PRINTED, ids=lambda x: x if isinstance(x, str) else "")
def test_expressions_print_as_python_binds(e: Expr, expected: str) -> None:
    assert triton_text(e, Names({load(0, h): "x", load(0, b): "y"})) == expected


def test_positions_in_float_arithmetic_are_not_converted_per_element() -> None:
    e = apply("mul", apply("sub", kv_idx, q_idx), load(0, h))
    names = Names({load(0, h): "slope"}, {q_idx: "q_pos", kv_idx: "kv_pos"})
    assert triton_text(e, names) == "(kv_pos - q_pos) * slope"


def test_large_scores_cancel_before_they_are_scaled_where_products_are_exact() -> None:
    assert exponent(scaled_score, MOVING, exact=True).natural
    region = attention(scaled_score)
    assert [replace(region, precision=p).exact for p in ("ieee", "tf32")] == [True, False]
    half = replace(region, products=(replace(region.products[0], dtype="float16"),))
    assert not half.exact


def test_a_scale_is_folded_into_the_exponential() -> None:
    found = exponent(scaled_score, MOVING)
    assert (found.score, found.natural) == (score, False)
    assert found.scale == pytest.approx(0.25 * LOG2E)


def test_a_sum_takes_the_factor_into_its_constants() -> None:
    found = exponent(apply("add", scaled_score, apply("mul", apply("sub", kv_idx, q_idx), Const(0.5))), MOVING)
    assert found.scale == 1.0
    assert str(found.score) == f"score * {0.25 * LOG2E!r} + (kv_idx - q_idx) * {0.5 * LOG2E!r}"


@pytest.mark.parametrize(
    "e", [apply("add", scaled_score, load(0, q_idx, kv_idx)), apply("where", causal, scaled_score, Const(-3e38))]
)
def test_what_may_overflow_stays_in_natural_units(e: Expr) -> None:
    assert exponent(e, MOVING).natural


def test_cheaper_arithmetic() -> None:
    assert str(cheaper(apply("div", times(score, 0.25), Const(5.0)))) == "score * 0.05"
    assert str(cheaper(apply("tanh", score))) == f"1.0 - 2.0 / (exp2(score * {2 * LOG2E!r}) + 1.0)"
    assert cheaper(apply("tanh", load(0, h))) == apply("tanh", load(0, h))


# ----------------------------------------------------------------------------------------------------------------
# Checks, loading


UNSOUND = {
    "def f(:\n": "not Python",
    "def f(x):\n    return y\n": "f reads y, which nothing defines",
    "@g\ndef f(x, y):\n    return x\n\n\ng = None\n": "f does not use its parameter y",
}


@pytest.mark.parametrize("body", UNSOUND, ids=UNSOUND.values())
def test_an_unsound_file_is_refused(body: str) -> None:
    with pytest.raises(KernelError, match=UNSOUND[body]):
        check("a_kernel", body)


def test_holes() -> None:
    filled = fill("if x:\n    «body»\nf(«arg»)\n", {"body": ["a", "", "b"], "arg": "1"})
    assert filled == "if x:\n    a\n\n    b\nf(1)\n"
    with pytest.raises(KernelError, match="nothing fills the hole «a»"):
        fill("«a»\n", {})
    with pytest.raises(KernelError, match="no hole named b"):
        fill("x\n", {"b": "1"})


def harmless() -> KernelSource:
    text = "def launch(out, tensors, sizes):\n    out.fill_(7)\n"
    return KernelSource("harmless", text, "k", tiles(HALF), HALF)


def test_loading_writes_a_private_file_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "kernels"
    module = load_module(harmless(), folder)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert load_module(harmless(), folder) is module
    out = torch.zeros(2)
    module.launch(out, [], [])
    assert out.tolist() == [7, 7]


def test_a_file_that_was_changed_is_written_again(tmp_path: Path) -> None:
    source = replace(harmless(), text=harmless().text + "\n# another\n")
    load_module(source, tmp_path)
    (path,) = tmp_path.glob("*.py")
    path.write_text("raise SystemExit\n")
    program = (
        "import pickle, sys, pathlib; from fusecomp.running.loader import load;"
        "load(pickle.load(sys.stdin.buffer), pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, input=pickle.dumps(source)).returncode == 0
    assert path.read_text() == source.text


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="choose another cache directory"):
        load_module(replace(harmless(), text="x = 1\n"), tmp_path / "file")


def test_text_that_does_not_import(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="ZeroDivisionError"):
        load_module(replace(harmless(), text="x = 1 / 0\n"), tmp_path)


# ----------------------------------------------------------------------------------------------------------------
# The compiler

COMPILED = {
    80: ("causal", "mma.sync"),
    90: ("causal", "wgmma.mma_async"),
    100: ("alibi", "tcgen05"),
}


@pytest.mark.parametrize("arch", COMPILED)
def test_compiles_without_a_gpu(arch: int) -> None:
    name, instruction = COMPILED[arch]
    info = cross_compile(emit(*GOLDEN[name]), arch)
    assert instruction in info.ptx
    assert 0 < info.shared <= 232_448
    assert info.spills in (0, None)
    assert info.registers is None or info.registers <= 255


@pytest.mark.parametrize("name", ["padded_finite_fill", "latent_192_128", "bias", "softcap_window_gqa"])
def test_every_golden_compiles(name: str) -> None:
    spilled = cross_compile(emit(*GOLDEN[name]), 90).spills
    assert (spilled or 0) <= 8  # two registers: assemblers of different Triton releases differ by so much


def test_the_kernels_of_decode_compile() -> None:
    source = emit(paged(), replace(tiles(paged(), 16, 64, "decode", pack=4), overlap=True, registers=128))
    assert (cross_compile(source, 90).spills or 0) <= 64  # it is held to fewer registers than it would take
    assert cross_compile(source, 90, kernel="combine").spills in (0, None)
    source = emit(*GOLDEN["padded_finite_fill_decode"])
    assert cross_compile(source, 90, kernel="rescue").spills in (0, None)


@pytest.mark.parametrize(("dtype", "converts"), [("float8_e4m3fn", "cvt.rn.bf16.f16"), ("int8", "cvt.rn.bf16.s")])
def test_values_of_8_bits_are_turned_when_they_have_16(dtype: str, converts: str) -> None:
    """Read from shared memory 16 bytes at a time, not byte by byte, and not converted where a device has few units."""
    region = paged()
    held = {"k_pool": dtype, "v_pool": dtype}
    region = replace(region, operands=tuple(replace(o, dtype=held.get(o.name, o.dtype)) for o in region.operands))
    source = emit(region, replace(tiles(region, 16, 64, "decode", pack=4), overlap=True, registers=128))
    ptx = cross_compile(source, 90).ptx
    assert not re.search(r"ld\.shared\.[bsu]8", ptx)
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx
    assert converts not in ptx
    planned = plan(region, {"B": 64, "H": 32, "M": 1, "N": 4096, "P": 16384}, find("h200"))
    assert (planned.warps, planned.stages) == (2, 3)
    assert planned.cost.smem_bytes == cross_compile(emit(region, planned), 90).shared
    before = replace(source, text=re.sub(r" +v_tile = tl.where\(widened.*\n", "", source.text))
    assert re.search(r"ld\.shared\.[bsu]8", cross_compile(before, 90).ptx)


def test_a_generated_file_checks_itself(tmp_path: Path) -> None:
    region = attention(scaled_score, causal)
    path = tmp_path / "kernel.py"
    path.write_text(emit(region, tiles(region)).text)
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True)
    assert "agrees with PyTorch" in done.stdout, done.stderr
