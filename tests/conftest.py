"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """A process that runs kernels in Triton's interpreter."""
    found = Interpreter()
    yield found
    found.close()
