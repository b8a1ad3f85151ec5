"""Bytes and seconds, as people write and read them.

Sizes on chip and of caches are counted in powers of 1024, whatever the spelling: KB = KiB = 1024 B. What crosses a bus
is counted in powers of 1000, as bandwidths are quoted: kB, MB, GB.
"""

from __future__ import annotations

import re

from fusecomp.errors import OptionError

FACTORS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "tf32": "float32",
    "fp8": "float8_e4m3fn", "int8": "int8",
    "bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "float8_e4m3fn": "float8_e4m3fn",
}  # fmt: skip
"""Names that people use. "tf32" is float32 data with tf32 products."""
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
"""Bytes of an element."""


def number_of_bytes(text: str | int) -> int:
    """ "96KB" -> 98304, "0.2MiB" -> 209715, 98304 -> 98304; K is 1024. OptionError for what is no positive size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(?:([kmgt]?)(i?)b)?\s*", str(text), re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise OptionError(f"bytes are written 98304, 96KB or 0.2MiB (K = 1024); got {str(text)!r}")
    count = int(float(found[1]) * FACTORS[f"{(found[2] or '').upper()}B"])
    if count < 1:
        raise OptionError(f"a size must be at least 1 B; got {str(text)!r}")
    return count


def number_of_elements(text: str | int, width: int) -> int:
    """Elements of `width` bytes: a number with no unit counts elements, one with a unit bytes. 25000 -> 25000;
    "100KB" of 4 bytes -> 25600."""
    if str(text).strip().isdecimal():
        return int(text)
    try:
        return number_of_bytes(text) // width
    except OptionError:
        wanted = "a number of elements, such as 25000, or bytes with their unit, such as 100KB"
        raise OptionError(f"on-chip memory is {wanted}; got {str(text)!r}") from None


def element(dtype: str) -> tuple[str, int]:
    """(torch's name, bytes) of a dtype as people call it. OptionError for an unknown one."""
    name = DTYPES.get(str(dtype).lower().removeprefix("torch."))
    if name is None:
        raise OptionError(f"unknown dtype {str(dtype)!r}; known are {', '.join(DTYPES)}")
    return name, WIDTHS[name]


def size(count: float, digits: int = 3) -> str:
    """Bytes moved: "1.5 MB"; powers of 1000, as memory bandwidth is quoted."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.{digits}g} {unit}"
        count /= 1000
    return f"{count:.{digits}g} TB"


def held(count: float) -> str:
    """Bytes held: "1,600 MiB"; powers of 1024, as memory is built. Exact where three decimals are."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024 or (unit == "MiB" and abs(count) < 1 << 14):
            return f"{count:,.4g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB" if count < 1000 else f"{count:,.0f} GiB"


def seconds(time: float) -> str:
    """A time for people: "0.42 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if time * factor >= 1:
            return f"{time * factor:.3g} {unit}"
    return f"{time * 1e9:.3g} ns"
