"""`fusecomp bench`: what is right is timed, what is wrong is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusecomp.bench import cases, inputs, measure, page, peers, reading, record, timing
from fusecomp.bench.cases import CASES, Case
from fusecomp.bench.inputs import Inputs
from fusecomp.bench.peers import Peer
from fusecomp.bench.record import Measured, Record
from fusecomp.bench.timing import Bench, Launch, Protocol, Timing

CPU = torch.device("cpu")
BENCH = Bench(CPU, quick=True)
TINY = cases.tiny(CASES)


def tiny(name: str, mode: str) -> Case:
    return next(c for c in TINY if c.variant.name == name and c.mode == mode)


def measured(case: Case, rivals: Sequence[Peer], say: measure.Say = lambda _: None) -> Measured:
    """The only case of a run."""
    (last,) = measure.records([case], rivals, BENCH, {"device": "CPU"}, say)
    return last.cases[0]


def computed(name: str, change: Callable[[Tensor], Tensor]) -> Peer:
    """A peer that is eager but for a change of its result."""
    return Peer(name, lambda case: lambda x: lambda: change(case.variant.fn(*x.all)), devices=("cpu",))


# ----------------------------------------------------------------------------------------------------------------
# What is right


@pytest.mark.parametrize("case", [c for c in TINY if not c.learns], ids=lambda c: f"{c.mode} {c.name}")
def test_flex_attention_is_told_the_same_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    x = inputs.draw(case, CPU)
    truth = inputs.exact(case, x)
    attends = [peers.flex(case, each_time=each_time)(x) for each_time in (False, True)]
    assert attends[0] is not None
    assert all(inputs.error((attend(),), truth) < 0.01 for attend in attends if attend is not None)


@pytest.mark.parametrize("case", TINY, ids=lambda c: f"{c.mode} {c.name}")
def test_what_is_exact_is_the_whole_programs_in_float64(case: Case) -> None:
    with torch.set_grad_enabled(case.learns):
        x = inputs.draw(case, CPU)
        q, k, v, *extra = (inputs._wide(t, t.requires_grad) for t in x.all)
        whole = Inputs(q, k, v, tuple(extra), None if x.grad is None else x.grad.double())
        results = inputs.run(case, whole, lambda: case.variant.fn(*whole.all))()
        parts = inputs.exact(case, x)
        assert all(r.dtype == torch.float64 for part in parts for r in part.results)
        gradients = 3 + case.variant.learned if case.learns else 0
        assert all(len(part.results) == len(results) == 1 + gradients for part in parts)
        assert inputs.error(results, parts) < 1e-12


@pytest.mark.parametrize("name", ["full", "causal", "window 256"])
def test_what_a_mask_keeps_is_counted(name: str) -> None:
    case = tiny(name, "variants" if name.startswith("window") else "forward")
    n = case.shape.n
    expected = {"full": n * n, "causal": n * (n + 1) // 2, "window 256": n * 256 - 256 * 255 // 2}
    assert inputs.share(case, inputs.draw(case, CPU)) == expected[name] / n**2


def fake_fa3() -> SimpleNamespace:
    """FlashAttention-3's two functions, [B, N, H, D], from their documentation."""

    def func(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, **more: Any) -> tuple[Tensor, None]:
        q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        s = q @ k.mT * q.shape[-1] ** -0.5
        if cap := more.get("softcap", 0.0):
            s = cap * torch.tanh(s / cap)
        i, j = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])
        left = more.get("window_size", (-1, -1))[0]
        keep = ((j <= i) | (not causal)) & ((i - j <= left) | (left < 0))
        return (s.masked_fill(~keep, float("-inf")).softmax(-1) @ v).to(torch.bfloat16).transpose(1, 2), None

    def cached(q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, causal: bool, pack_gqa: bool,
               page_table: Tensor | None = None) -> Tensor:  # fmt: skip
        if page_table is not None:
            k, v = (pool[page_table].flatten(1, 2) for pool in (k, v))
        rows = [func(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], causal)[0] for b, n in enumerate(cache_seqlens)]
        return torch.cat(rows)

    return SimpleNamespace(flash_attn_func=func, flash_attn_with_kvcache=cached)


@pytest.mark.parametrize("case", [c for c in TINY if c.variant.fa3 is not None and not c.learns], ids=lambda c: c.name)
def test_flash_attention_3_is_told_the_same_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fake_fa3())
    x = inputs.draw(case, CPU)
    attend = peers.fa3(case)(x)
    assert attend is not None
    assert inputs.error((attend(),), inputs.exact(case, x)) < 0.01


def test_a_wrong_result_is_not_timed() -> None:
    nan = computed("nan", lambda out: out.masked_fill(torch.ones_like(out, dtype=torch.bool).tril(-20), float("nan")))
    rivals = [computed("eager", lambda out: out), computed("scaled", lambda out: out * 1.05), nan]
    found = measured(tiny("causal", "forward"), rivals)
    assert {row.peer: bool(row.timings) for row in found.rows} == {"eager": True, "scaled": False, "nan": False}
    scaled, lost = found.row("scaled"), found.row("nan")
    assert scaled is not None
    assert scaled.problem == "wrong: relative error 0.05, of at most 0.02"
    assert lost is not None
    assert lost.problem.startswith("wrong: relative error nan")
    shown = str(page.Found(Record({"device": "CPU"}, cases=(found,))))
    assert "wrong: relative error 0.05" in shown


def test_a_wrong_gradient_is_not_timed() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 1.1 * grad

    found = measured(tiny("causal", "backward"), [computed("wrong", Doubled.apply), computed("right", torch.clone)])
    assert [bool(row.timings) for row in found.rows] == [False, True]
    assert found.rows[0].problem.startswith("wrong: relative error 0.1")


def test_what_a_peer_raises_is_its_row() -> None:
    def broken(out: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this device\nand a long explanation")

    found = measured(tiny("full", "small"), [computed("broken", broken), computed("eager", lambda out: out)])
    assert found.rows[0].problem == "RuntimeError: no kernel for this device"
    assert found.rows[1].timings


def test_a_peer_that_cannot_say_a_variant_has_no_row() -> None:
    found = measured(tiny("soft cap", "variants"), peers.chosen("math,eager", "cpu"))
    assert [row.peer for row in found.rows] == ["eager"]


def test_what_is_tuned_is_not_timed_untuned_too() -> None:
    def rivals(mode: str, name: str, words: str = "", quick: bool = False) -> list[str]:
        case = next(c for c in CASES if c.mode == mode and c.variant.name == name)
        found = peers.asked(case, peers.chosen(words, "cuda", quick))
        return [p.name for p in found if p.name.startswith("Flex")]

    assert rivals("forward", "causal") == ["FlexAttention autotuned"]
    assert rivals("variants", "documents") == ["FlexAttention autotuned", "FlexAttention + its mask"]
    assert rivals("backward", "ALiBi") == ["FlexAttention autotuned"]
    assert rivals("backward", "causal") == ["FlexAttention"]  # cuDNN is ahead of it, tuned for minutes too
    assert rivals("forward", "causal", quick=True) == ["FlexAttention"]
    assert rivals("forward", "causal", "FlexAttention") == ["FlexAttention"]


def test_inputs_that_do_not_fit_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(case: Case, device: torch.device) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 90 GiB")

    monkeypatch.setattr(measure, "sets", full)
    (row,) = measured(tiny("full", "small"), peers.chosen("eager", "cpu")).rows
    assert (row.peer, row.problem) == ("the inputs", "OutOfMemoryError: Tried to allocate 90 GiB")


def test_ours_that_is_not_fused_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    off = next(p for p in peers.PEERS if p.name == record.OURS and "cpu" in p.devices)
    monkeypatch.setenv("FUSECOMP_LOWERING", "off")
    (row,) = measured(tiny("full", "small"), [off]).rows
    assert row.note.startswith("not fused: 1 declined")


# ----------------------------------------------------------------------------------------------------------------
# Times


READING = """
import torch
from fusecomp.bench.reading import readers
x = torch.randn(5000)
*_, read = readers(x)  # of the fewest programs: the interpreter runs them one after the other
read()
torch.testing.assert_close(read.args[1].sum(), x.sum())
"""


def test_the_kernels_that_only_read_read_all() -> None:
    variables = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", READING], env=variables, check=True, timeout=300)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_the_kernels_that_only_read_compile() -> None:
    signature = {"x_ptr": "*bf16", "out_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(reading._read, signature=signature, constexprs={"BLOCK": 1024})
    assert "ld.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_the_middle_and_where_nine_tenths_lie() -> None:
    found = timing.summary("burst", [float(x) for x in range(1, 12)])
    assert found == Timing("burst", 6.0, 2.0, 10.0, 11)
    assert found.spread == pytest.approx(4 / 6)
    assert timing.summary("burst", [3.0]) == Timing("burst", 3.0, 3.0, 3.0, 1)


def test_peers_take_turns_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FAR", float("inf"))
    order: list[str] = []
    launches = {name: Launch(lambda name=name: order.append(name)) for name in "abc"}
    found = timing.times(launches, Protocol("sustained", 0.0, 0.0, 0.001), CPU)
    assert [name for name, _ in groupby(order)] == ["a", "b", "c", "b", "a"]
    assert list(found) == ["a", "b", "c"]
    assert all(t.count >= 6 for t in found.values())


def test_who_is_far_behind_takes_one_turn() -> None:
    order: list[str] = []
    takes = {"slow": 0.02, "near": 0.006, "best": 0.004}
    launches = {n: Launch(lambda n=n, s=s: (order.append(n), time.sleep(s))) for n, s in takes.items()}
    found = timing.times(launches, Protocol("sustained", 0.0, 0.0, 0.001), CPU)
    assert [name for name, _ in groupby(order)] == ["slow", "near", "best", "near"]
    assert [found[name].count for name in takes] == [3, 6, 6]


def test_a_launch_of_many_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "GROUP", 0.0)
    monkeypatch.setattr(timing, "_host", lambda go, together, readings: [8.0] * readings)
    assert set(timing.turn(Launch(lambda: None, 4), Protocol("graph", 0.0, 0.0, 0.01), CPU)) == {8.0 / 4}
