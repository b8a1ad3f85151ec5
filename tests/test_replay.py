"""Calls of static graphs, done again: whatever of one has changed, what its host function would launch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import triton
from torch import Tensor

from fusecomp.codegen.source import KernelSource
from fusecomp.running import replay
from fusecomp.running.launching import Launched, quickened
from fusecomp.running.loader import load
from fusecomp.running.replay import Replayed, run_of

FILE = '''"""{}"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def add(x_ptr, y_ptr, z_ptr, x_stride_0, y_stride_0, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n * x_stride_0, mask=n < N)
    tl.store(z_ptr + n, x + tl.load(y_ptr + n * y_stride_0, mask=n < N), mask=n < N)


def launch(out, x, y, half):
    add[(2,)](x, y, half, x.stride(0), y.stride(0), x.shape[0], BLOCK=32, num_warps=2)
    add[(4,)](half, x, out, 1, x.stride(0), x.shape[0], BLOCK=16, num_warps=1)
'''


class Host:
    """A call that makes two tensors, one of them zeros, and launches two kernels. `more`: what else it does."""

    def __init__(self, module: Any, more: Callable[[Tensor], object] = lambda _: None) -> None:
        self.module, self.more, self.calls = module, more, 0

    def __call__(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        x, y = tensors
        out, half = torch.empty(x.shape, dtype=x.dtype), torch.empty_like(y).zero_()
        self.more(x)
        self.module.launch(out, x, y, half)
        return out, half


@pytest.fixture
def module(tmp_path: Path, heard: list[Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    assert len(heard) == 1
    monkeypatch.setitem(replay.DEVICES, "cpu", "_empty_strided_cpu")
    monkeypatch.setattr(replay, "triton_release", lambda: replay.RELEASES[0])
    heard[0].device = None  # as tensors on the CPU have it
    text = FILE.format(request.node.name)
    return quickened(load(cast(KernelSource, SimpleNamespace(name="add", text=text)), tmp_path), text)


def said(heard: list[Any], call: Callable[[list[Tensor]], Any], tensors: list[Tensor]) -> list[Any]:
    """What a call launches, the tensors that it makes by name."""
    del heard[1:]
    out, half = call(tensors)
    assert not half.any()
    names = {out.data_ptr(): "out", half.data_ptr(): "half"}
    return [(*rest, [names.get(a, a) for a in given]) for *rest, given in heard[1:]]


def draw(n: int = 64, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(n).to(dtype) for _ in range(2)]


def test_other_tensors_get_the_same(module: Any, heard: list[Any]) -> None:
    host = Host(module)
    again = Replayed(host)
    for tensors in (draw(), draw(), draw()):
        assert said(heard, again, tensors) == said(heard, Host(module), tensors)
    assert host.calls == 1
    assert [x.data_ptr() for x in again(draw())] != [x.data_ptr() for x in again(draw())]


def test_every_change_of_a_tensor_is_seen(module: Any, heard: list[Any]) -> None:
    host, (x, y) = Host(module), draw(128)
    again = Replayed(host)
    calls = {
        "first": [x[:64], y[:64]],
        "shape": [x[:48], y[:48]],
        "stride": [x[::2], y[:64]],
        "dtype": [x[:64].half(), y[:64]],
    }
    for name, tensors in calls.items():
        before = host.calls
        assert said(heard, again, tensors) == said(heard, Host(module), tensors), name
        assert host.calls == before + 1, name
    for tensors in calls.values():
        assert said(heard, again, tensors) == said(heard, Host(module), tensors)
    assert host.calls == len(calls)


def test_a_tensor_that_is_not_aligned(module: Any, heard: list[Any]) -> None:
    host, (x, y) = Host(module), draw(128)
    again = Replayed(host)
    for offset in (0, 1, 0, 3):
        tensors = [x[offset : offset + 64], y[:64]]
        assert said(heard, again, tensors) == said(heard, Host(module), tensors)
    assert host.calls == 3


def test_one_tensor_in_two_places(module: Any, heard: list[Any]) -> None:
    again, (x, y) = Replayed(Host(module)), draw()
    for tensors in ([x, x], [x, y], [y, y], [y, x]):
        assert said(heard, again, tensors) == said(heard, Host(module), tensors)
    assert len(again.known) == 1


OTHERWISE = [torch.clone, torch.neg, lambda x: x[1:], lambda x: x[0].item(), lambda x: x.zero_()]


@pytest.mark.parametrize("more", OTHERWISE)
def test_who_does_more_is_not_replayed(module: Any, heard: list[Any], more: Callable[[Tensor], object]) -> None:
    host = Host(module, more)
    again = Replayed(host)
    for calls in range(1, replay.MOST + 3):
        tensors = draw()
        assert said(heard, again, tensors) == said(heard, Host(module, more), tensors)
        assert host.calls == calls
    assert not again.known


def test_where_it_cannot_be_the_same(module: Any, heard: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(module)
    again = Replayed(host)
    again(draw())
    hook = triton.knobs.runtime.launch_enter_hook
    with monkeypatch.context() as m:
        m.setattr(hook, "calls", [print])  # a profiler
        again(draw())
    heard[0].device = 1
    again(draw())
    heard[0].device = None
    again(draw())
    assert host.calls == 3


def test_recordings_are_bounded(module: Any, heard: list[Any]) -> None:
    again = Replayed(host := Host(module))
    for n in range(16, 16 * 9, 16):
        tensors = draw(n)
        assert said(heard, again, tensors) == said(heard, Host(module), tensors)
    assert len(again.known) == replay.MOST
    assert host.calls == 8


def test_a_release_that_is_not_known(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "triton_release", lambda: (3, 9))
    again = Replayed(host := Host(module))
    for _ in range(3):
        again(draw())
    assert host.calls == 3


def test_a_launcher_that_is_not_as_it_was_read(module: Any, heard: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_: Any) -> Any:
        raise AttributeError("launch")

    monkeypatch.setattr(replay, "opened", changed)
    again = Replayed(host := Host(module))
    for calls in (1, 2):
        tensors = draw()
        assert said(heard, again, tensors) == said(heard, Host(module), tensors)
        assert host.calls == calls


def test_no_tensor_is_kept(module: Any) -> None:
    again, tensors = Replayed(Host(module)), draw()
    results = again(tensors)
    gone = [weakref.ref(x) for x in (*tensors, *results)]
    del tensors, results
    gc.collect()
    assert all(x() is None for x in gone)


def test_what_another_thread_launches_meanwhile_is_not_recorded(module: Any, heard: list[Any]) -> None:
    others = draw()

    def meanwhile(_: Tensor) -> None:
        other = Thread(target=Host(module), args=(others,))
        other.start()
        other.join()

    again = Replayed(Host(module, meanwhile))
    again(draw())
    tensors = draw()
    assert said(heard, again, tensors) == said(heard, Host(module), tensors)


@pytest.mark.parametrize(("other", "alike"), [("cpu", True), ("meta", False)])
def test_tensors_of_another_device(module: Any, heard: list[Any], other: str, alike: bool) -> None:
    x, y = torch.zeros(4), torch.zeros(4, device=other)
    plain = SimpleNamespace(run=None, function=None, packed_metadata=None, metadata=SimpleNamespace())
    found = replay.recorded([x, y], replay.Watch([]), [Launched(plain, (1, 1, 1), (x, y))], x)
    assert (found is not None) == alike


def test_launches_that_are_not_recorded() -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    plain = SimpleNamespace(run=None, function=None, packed_metadata=None, metadata=SimpleNamespace())
    scratch = SimpleNamespace(**{**vars(plain), "metadata": SimpleNamespace(global_scratch_size=128)})
    for launch in (
        None,  # Triton's own
        Launched(scratch, (1, 1, 1), (x, y)),
        Launched(plain, (1, 1, 1), (x, torch.zeros(4))),
        Launched(plain, (1, 1, 1), (SimpleNamespace(base=x), y)),
    ):
        assert run_of(launch, [x, y], []) is None


def test_numbers_stand_between_tensors() -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    plain = SimpleNamespace(run=None, function=None, packed_metadata=None, metadata=SimpleNamespace())
    run = run_of(Launched(plain, (1, 1, 1), (y, 3, x, None, 5)), [x, y], [])
    assert run is not None
    assert run.pick([*run.numbers, "x", "y"]) == ("y", 3, "x", None, 5)
