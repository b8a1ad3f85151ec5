"""Head sizes as Triton can hold them: tensors' sides are powers of two, products' sides at least 16.

    chunks(D) = the at most two powers of two >= 16 whose sum is least with sum >= D, the larger first

D = 192 is 128 + 64: rounding it to 256 would take a third more shared memory than its data.
"""

from __future__ import annotations

import math
from functools import lru_cache


def power(n: float) -> int:
    """The least power of two >= n, and at least 1."""
    return 1 << max(0, math.ceil(n) - 1).bit_length()


@lru_cache(maxsize=256)
def chunks(d: int) -> tuple[int, ...]:
    """40 -> (32, 16); 64 -> (64,); 80 -> (64, 16); 112 -> (128,); 192 -> (128, 64)."""
    if d < 1:
        raise ValueError(f"a head size must be at least 1, not {d}")
    whole = max(16, power(d))
    half = whole // 2
    rest = max(16, power(d - half))
    return (half, rest) if half >= 16 and half + rest < whole else (whole,)
