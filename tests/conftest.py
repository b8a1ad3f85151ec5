"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from kernels import Interpreter
from torch import Tensor
from torch._dynamo import guards
from triton.backends.compiler import GPUTarget

import fusecomp


@pytest.fixture(scope="session", autouse=True)
def guards_untimed() -> Iterator[None]:
    """Dynamo times the guards of each graph that it compiles, behind a cleared cache: long beside a short program's
    compilation, and for a line of its log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """A process that runs kernels in Triton's interpreter."""
    found = Interpreter()
    yield found
    found.close()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels and verdicts of this test alone; nothing compiled before it is left."""
    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    fusecomp.reset()
    return tmp_path / "cache"


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The driver that launches nothing, then (grid, stream, what was compiled, arguments) of each launch."""
    calls: list[Any] = []

    class Launcher:
        def __init__(self, src: Any, metadata: Any) -> None:
            self.compiled = str((src.signature, src.constants, src.attrs, metadata.num_warps))

        def __call__(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
            given = [a.data_ptr() if isinstance(a, Tensor) else a for a in args[5:]]
            calls.append(((x, y, z), stream, self.compiled, given))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: driver.device)
    driver = SimpleNamespace(
        launcher_cls=Launcher, device=0, get_current_device=lambda: driver.device,
        get_current_stream=lambda device: 70 + (device or 0), get_current_target=lambda: GPUTarget("cuda", 90, 32),
        utils=SimpleNamespace(
            load_binary=lambda *_: (object(), object(), 32, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        ),
    )  # fmt: skip
    calls.append(driver)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return calls
