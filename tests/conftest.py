"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernels import Interpreter

import fusecomp


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
