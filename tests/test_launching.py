"""Launching again: what Triton would launch, whatever of a call has changed. A driver that launches nothing listens."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fusecomp.codegen.source import KernelSource
from fusecomp.running import launching
from fusecomp.running.launching import Descriptors, launched, quickened
from fusecomp.running.loader import load

FILE = '''"""{}"""

import triton
import triton.language as tl


@triton.jit
def doubled(x):
    return x + x


@triton.jit(do_not_specialize=["N"])
def double(x_ptr, y_ptr, x_stride_0, y_stride_0, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n * x_stride_0, mask=n < N)
    tl.store(y_ptr + n * y_stride_0, doubled(x), mask=n < N)


def launch(out, x, n, block=32, warps=1):
    double[(n // block + 1,)](x, out, x.stride(0), out.stride(0), n, BLOCK=block, num_warps=warps)
'''


@dataclass(frozen=True)
class Files:
    """The same file twice: as Triton launches it, and quickened."""

    plain: Any
    quick: Any


@pytest.fixture
def files(tmp_path: Path, heard: list[Any], request: pytest.FixtureRequest) -> Files:
    texts = [FILE.format(f"{name}, {request.node.name}") for name in ("plain", "quick")]
    sources = [SimpleNamespace(name="double", text=text) for text in texts]
    plain, quick = (load(cast(KernelSource, source), tmp_path) for source in sources)
    return Files(plain, quickened(quick, texts[1]))


def same(files: Files, heard: list[Any], *args: Any) -> str:
    """What is compiled for a call, the same twice in either file."""
    del heard[1:]
    for module in (files.plain, files.quick, files.quick):
        module.launch(*args)
    first, *others = heard[1:]
    assert others == [first, first]
    return str(first[2])


def test_every_change_of_a_call_is_seen(files: Files, heard: list[Any]) -> None:
    x, y = torch.zeros(4096), torch.zeros(4096)
    calls = {
        "first": (y, x, 100),
        "another length": (y, x, 64),
        "another tensor": (torch.zeros(4096), torch.zeros(4096), 100),
        "a stride": (y, x[::2], 100),
        "a multiple of 16": (y, x[::16], 100),
        "half precision": (y, x.half(), 100),
        "not aligned": (y, x[1:], 100),
        "a length of 64 bits": (y, x, 1 << 32),
        "a constant": (y, x, 100, 64),
        "warps": (y, x, 100, 32, 2),
    }
    compiled = {name: same(files, heard, *args) for name, args in calls.items()}
    alike = {"first", "another length", "another tensor"}
    assert {compiled[name] for name in alike} == {compiled["first"]}
    others = [compiled[name] for name in calls.keys() - alike]
    assert len({compiled["first"], *others}) == len(others) + 1
    assert same(files, heard, y, x, 100) == compiled["first"]


def test_a_kernel_belongs_to_its_device(files: Files, heard: list[Any]) -> None:
    x = torch.zeros(64)
    same(files, heard, x, x, 32)
    heard[0].device = 1
    same(files, heard, x, x, 32)
    assert heard[1][1] == 71
    assert len(files.quick.double.known) == 2


def test_strides_that_always_change_fill_no_memory(
    files: Files, heard: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "MOST", 3)
    for step in range(2, 9):
        same(files, heard, torch.zeros(8), torch.zeros(64)[::step], 4)
    assert len(files.quick.double.known) <= 3


def test_kernels_are_compiled_together_and_not_launched(
    files: Files, heard: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    x = torch.zeros(64)
    calls = [partial(files.quick.launch, x, x, 32, block) for block in (32, 64, 128)]
    with launching.compiling([*calls, partial(files.quick.launch, x.bool(), x, 32, 3)], torch.device("cpu")):
        assert not heard[1:]
    assert len(files.quick.double.kernel.device_caches[0][0]) == 3  # a block of 3 does not compile
    other = Thread(target=files.quick.launch, args=(x, x, 32))
    with monkeypatch.context() as m:
        m.setattr(launching._thread, "wanted", [])
        other.start()
        other.join()
    assert len(heard[1:]) == 1  # another thread launches meanwhile
    assert same(files, heard, x, x, 32)


def test_what_a_file_launches() -> None:
    assert launched(FILE) == {"double"}
    assert launched("def launch(x):\n    BOXES[len(x)]\n    x[0](1)\n    f(x[1])\n") == {"x"}


def test_descriptors_differ_in_what_they_describe_alone() -> None:
    @dataclass
    class Descriptor:
        base: Any
        shape: list[int]
        block: list[int]

    made: list[Tensor] = []

    def described(x: Tensor, block: list[int], rows: int) -> Descriptor:
        made.append(x.dtype)
        return Descriptor(x, [rows, x.shape[1]], block)

    quick = Descriptors(described)
    x, y = torch.zeros(6, 8), torch.ones(6, 8)
    for tensor, block, rows in ((x, [2, 8], 6), (y, [2, 8], 6), (x, [2, 8], 4), (x.half(), [2, 8], 6), (x, [1, 8], 6)):
        got, new = quick(tensor, block, rows), described(tensor, block, rows)
        assert got == new
        assert got.base is tensor
    assert len(made) == 5 + 4


@dataclass
class Described:
    base: Any
    rows: int


def test_no_tensor_is_kept() -> None:
    quick = Descriptors(lambda x, block, rows: Described(x, rows))
    x = torch.zeros(4)
    quick(x, [1], 4)
    quick(x, [1], 4)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
