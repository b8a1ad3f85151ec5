"""The backward kernels for Hopper's tensor cores: what they express, that they compile, and when they are taken.

They run on a GPU only (tests/test_gpu_hopper_backward.py): Triton's interpreter has no Gluon."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kernels import tiles
from regions import N, age, apply, causal, grouped
from test_hopper import CAPPED, DOCUMENTS, EXPRESSED, SCALED, WINDOW, half, written_in
from test_hopper import planned as at_length

from fusecomp.codegen.backward import BackwardSource, emit_backward
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.hopper import specialised as forward
from fusecomp.codegen.hopper_backward import expresses, specialised
from fusecomp.errors import KernelError
from fusecomp.ir.expr import Const, Size
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.backward import BackwardPlan, backward_plan
from fusecomp.running import hopper

QKV = frozenset({"q", "k", "v"})
HAS = {
    **{name: region for name, region in EXPRESSED.items() if not name.startswith(("bias", "boolean", "large"))},
    "keys that a window behind sees too": half(SCALED, apply("lt", age, Const(200)), apply("gt", age, Const(-77))),
    "soft cap in bfloat16": half(CAPPED, causal, d=128),
    "log-sum-exp": half(SCALED, causal, lse=True),
}
SINK = EXPRESSED["sink"]
NOT = {
    "a sink that learns": (SINK, QKV | {"load0"}),
    "a number for each pair": (next(r for name, r in EXPRESSED.items() if name.startswith("bias")), QKV),
    "another head size": (half(d=80), QKV),
    "large heads": (EXPRESSED["large heads"], QKV),
}


def planned(region: AttentionRegion) -> BackwardPlan:
    return specialised(region, forward(region, tiles(region)))


def made(region: AttentionRegion) -> BackwardSource:
    return emit_backward(region, planned(region))


@pytest.mark.parametrize("region", HAS.values(), ids=HAS)
def test_what_they_express(region: AttentionRegion) -> None:
    assert expresses(region, QKV)
    assert made(region).text.count("gl.warp_specialize(") == 2


@pytest.mark.parametrize(("region", "learned"), NOT.values(), ids=NOT)
def test_what_they_do_not(region: AttentionRegion, learned: frozenset[str]) -> None:
    assert not expresses(region, learned)
    plan = backward_plan(region)
    plan = replace(plan, queries=replace(plan.queries, consumers=2), keys=replace(plan.keys, consumers=2))
    with pytest.raises(KernelError, match="plan portable ones"):
        emit_backward(region, plan, learned - QKV)


def test_short_rows_are_walked_in_shorter_tiles() -> None:
    """Documents, and windows of a known width; not what is seen from some distance on."""
    wide, far = apply("lt", age, Const(1024)), apply("gt", age, Const(256))
    found = {}
    for name, keep in {"window": WINDOW, "wide": wide, "far": far, "documents": DOCUMENTS}.items():
        region = half(SCALED, causal, keep, loads=[((Size("B"), N), "int64")] * (keep == DOCUMENTS))
        plan = specialised(region, forward(region, at_length(region)))
        found[name] = (plan.keys.block_m, plan.queries.block_n)
    assert found == {"window": (64, 64), "wide": (128, 128), "far": (128, 128), "documents": (64, 64)}


@written_in
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_they_compile(name: str) -> None:
    source = made(HAS[name])
    assert cross_compile(source, 90, "row_products").shared < 1024
    for kernel in ("query_gradient", "key_gradients"):
        info = cross_compile(source, 90, kernel)
        assert "wgmma.mma_async" in info.ptx
        assert "setmaxnreg" in info.ptx
        assert 0 < info.shared <= 232_448
        assert info.spills is None or info.spills <= 128


@written_in
@pytest.mark.slow
@pytest.mark.parametrize("name", HAS)
def test_all_of_them_compile(name: str) -> None:
    source = made(HAS[name])
    for kernel in ("query_gradient", "key_gradients"):
        assert cross_compile(source, 90, kernel).shared <= 232_448


def test_a_derivative_that_varies_walks_shorter_tiles() -> None:
    """Its values take registers: of 64 keys and 128 queries there are too many."""
    assert [planned(half(s, causal)).keys.block_m for s in (SCALED, CAPPED)] == [128, 64]


def test_what_lies_past_the_end_of_the_queries_is_not_read() -> None:
    """Rows past the end have dO = 0 and lse = inf; only what the mask loads for a query has to be kept inside."""
    assert "live = q_start + m < M" not in made(HAS["causal"]).text
    assert "mask=live[None, :]" in made(HAS["documents"]).text


def test_heads_that_share_keys_are_summed_in_one_program() -> None:
    text = made(half(SCALED, causal, **grouped(4))).text
    assert text.count("for h_member in range(4):") == 2  # the warp that copies, and those that multiply
    assert "atomic" not in text


def test_who_trains_on_hopper() -> None:
    learns = SimpleNamespace(region=HAS["causal"], learned=QKV)
    assert hopper.trains(learns)
    assert hopper.trains(SimpleNamespace(region=SINK, learned=frozenset()))
    assert not hopper.trains(SimpleNamespace(region=SINK, learned=QKV | {"load0"}))


FAILS = """
import torch, fusecomp
from fusecomp.backend import explain
from fusecomp.codegen.hopper import specialised
from fusecomp.planning.plan import plan
from fusecomp.running import hopper
hopper.takes = lambda match, sizes, _: specialised(match.region, plan(match.region, sizes))
def attend(q, k, v):
    s = (q @ k.mT) * 0.125
    return s.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), float("-inf")).softmax(-1) @ v
args = [torch.randn(1, 2, 40, 64, dtype=torch.float16, requires_grad=True) for _ in range(3)]
[entry] = explain(attend, *args).entries
fast = torch.compile(attend, backend="fusecomp", options={"inner": "aot_eager", "strict": True})
up = torch.randn(1, 2, 40, 64, dtype=torch.float16)
for a, e in zip(torch.autograd.grad(fast(*args), args, up), torch.autograd.grad(attend(*args), args, up)):
    torch.testing.assert_close(a, e, atol=5e-3, rtol=5e-3)
print(entry.status, entry.plan.consumers)
"""


def test_the_portable_kernels_take_over() -> None:
    """Where they cannot be launched, as in the interpreter, nobody notices."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", FAILS], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["fused", "0"], done.stderr[-2000:]
