"""Predicted shared memory and spilling against what the compiler took, as recorded and, for a few points, now."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import triton
from compiled_resources import GRADIENTS, REGIONS, Point, Taken, measured, predicted, record, source

RELEASE, ROWS = record()
HERE = triton.__version__ == RELEASE
KINDS = ("attention", "decode attention", "decode combine", "decode rescue", *GRADIENTS)


def near(said: int, taken: int) -> bool:
    """Within 1 KB or 2 %."""
    return abs(said - taken) <= max(1024, taken // 50)


def of(kind: str, arch: int) -> dict[Point, Taken]:
    return {p: t for p, t in ROWS.items() if (p.kernel, p.arch) == (kind, arch)}


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_memory_is_what_the_compiler_takes(kind: str, arch: int) -> None:
    wrong = {p: (predicted(p)[0], t.shared) for p, t in of(kind, arch).items() if not near(predicted(p)[0], t.shared)}
    assert not wrong
