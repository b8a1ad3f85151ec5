"""What is timed: a variant, its sizes, and the mode that says how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from fusecomp.bench import decoding, variants  # noqa: F401 - they enter their programs
from fusecomp.bench.variant import VARIANTS, Shape, Variant
from fusecomp.errors import OptionError

MODES = {
    "forward": ("burst", "sustained"),
    "variants": ("burst", "sustained", "graph"),
    "backward": ("burst", "sustained"),
    "small": ("sustained", "graph"),
    "decode": ("graph",),
    "paged": ("graph",),
}
"""The protocols of each mode. Replayed from a CUDA graph, the host holds up nothing."""
READS = ("decode", "paged")
"""Modes that are bound by reading K and V."""


@dataclass(frozen=True)
class Case:
    """One variant at given sizes. `quick`: also part of a quick run."""

    variant: Variant
    mode: str
    shape: Shape
    quick: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """As "causal D128 B4 H32/8 N4096"."""
        s = self.shape
        heads = f"{s.h}" if s.key_heads == s.h else f"{s.h}/{s.key_heads}"
        keys = "+".join(f"{s.held.count(n)}x{n}" for n in dict.fromkeys(s.held)) if s.lengths else str(s.n)
        queries = f" M{s.queries}" if s.queries not in (1, s.n) else ""
        page = f" page {s.page}" if s.page else ""
        return f"{self.variant.name} D{s.d} B{s.b} H{heads} N{keys}{queries}{page}"

    @property
    def learns(self) -> bool:
        """Forward and backward are timed together."""
        return self.mode == "backward"

    @property
    def reads(self) -> bool:
        """Its work is bytes read, not products."""
        return self.mode in READS

    def protocols(self, device: torch.device) -> tuple[str, ...]:
        """How it is timed; a CPU has no idle clocks and no graphs."""
        return MODES[self.mode] if device.type == "cuda" else ("sustained",)

    @property
    def read_bytes(self) -> int:
        """Of K and V, each read once."""
        return 2 * self.dtype.itemsize * sum(self.shape.held) * self.shape.key_heads * self.shape.d

    def flops(self, share: float) -> float:
        """4 B H M N D of the `share` of pairs that count; two and a half times as many in the backward pass."""
        s = self.shape
        return (3.5 if self.learns else 1.0) * 4 * s.b * s.h * s.queries * s.n * s.d * share

    def tiny(self) -> Case:
        """The same in a size that a CPU runs in no time."""
        s = self.shape
        h, hkv = (4, 2) if s.key_heads != s.h else (2, 0)
        lengths = (300,) + (20,) * (min(s.b, 3) - 1) if s.lengths else ()
        n = 300 if s.n > 1024 or self.mode == "variants" else 40
        return replace(self, shape=replace(s, b=min(s.b, 3), h=h, hkv=hkv, n=n, d=16, lengths=lengths))


def _cases(mode: str, rows: Sequence[tuple[str, Shape]], quick: Sequence[int]) -> list[Case]:
    return [Case(VARIANTS[name], mode, shape, i in quick) for i, (name, shape) in enumerate(rows)]


def _forward() -> list[Case]:
    d64, d128, d256 = Shape(4, 16, 4096, 64), Shape(4, 16, 4096, 128), Shape(2, 8, 4096, 256)
    rows = [
        ("causal", d128), ("full", d128), ("causal", d64), ("full", d64), ("full", d256), ("causal", d256),
        ("causal", Shape(1, 16, 16384, 128)), ("causal", Shape(1, 8, 18000, 128)),
        ("causal", Shape(4, 32, 4096, 128, hkv=8)), ("causal", Shape(4, 16, 4001, 128)),
        ("full", Shape(16, 16, 1024, 128)),
    ]  # fmt: skip
    return _cases("forward", rows, (0, 1))


def _variants() -> list[Case]:
    d64, d128 = Shape(4, 16, 4096, 64), Shape(4, 16, 4096, 128)
    others = ("full", "causal", "cache", "paged")
    names = [name for name, found in VARIANTS.items() if name not in others and not found.learned]
    return _cases("variants", [*((name, d64) for name in names), ("soft cap", d128)], (0, 3))


def _backward() -> list[Case]:
    d64, d128 = Shape(4, 16, 4096, 64), Shape(4, 16, 4096, 128)
    rows = [("causal", d128), ("full", d128), ("causal", d64), ("full", d64)]
    names = "soft cap", "ALiBi", f"window {variants.WINDOW}", "bias", "learned bias", "documents"
    return _cases("backward", [*rows, *((name, d64) for name in names)], (0,))


def _small() -> list[Case]:
    rows = [("causal", Shape(1, 16, 512, 64)), ("full", Shape(1, 12, 128, 64)), ("ALiBi", Shape(1, 16, 256, 64))]
    return _cases("small", rows, (0,))


def _decode() -> list[Case]:
    shapes = [(64, 4096), (1, 65536), (1, 4096)]
    return _cases("decode", [("cache", Shape(b, 32, n, 128, hkv=8, m=1)) for b, n in shapes], (0,))


def _paged() -> list[Case]:
    one = Shape(64, 32, 4096, 128, hkv=8, m=1, page=16)
    ragged = replace(one, n=65536, lengths=(65536, *(1024,) * 63))
    rows = [one, *(replace(one, b=b, n=n) for b, n in ((32, 4096), (1, 65536), (1, 16384), (1, 1024))), ragged]
    rows += [replace(one, page=128), replace(one, m=4)]
    return _cases("paged", [("paged", shape) for shape in rows], (0,))


def _in_turn(*lists: Sequence[Case]) -> list[Case]:
    """One of each list, then the next of each: a run that ends early has some of every mode."""
    return [case for turn in zip_longest(*lists) for case in turn if case is not None]


CASES = _in_turn(_forward(), _variants(), _backward(), _decode(), _paged(), _small())


# ----------------------------------------------------------------------------------------------------------------
# The choice on a command line


def chosen(only: str = "", names: str = "", modes: str = "", quick: bool = False) -> list[Case]:
    """The cases that are asked for. OptionError for a word that asks for none."""
    asked = [_one_of("--modes", word, MODES, str.__eq__) for word in words(modes)]
    named = [_one_of("--cases", word, VARIANTS, _same) for word in words(names)]
    found = [
        c for c in CASES
        if (c.mode in asked or not asked) and (c.variant.name in named or not named)
        and (any(word.lower() in c.name.lower() for word in words(only)) or not only) and (c.quick or not quick)
    ]  # fmt: skip
    if not found:
        all_names = "\n  ".join(f"{c.mode}: {c.name}" for c in CASES if c.quick or not quick)
        raise OptionError(f"--only, --cases and --modes leave no case to time; there are\n  {all_names}")
    return found


def tiny(cases: Sequence[Case]) -> list[Case]:
    """What remains different of them in a CPU's sizes."""
    return list({(case.mode, case.name): case for case in map(Case.tiny, cases)}.values())


def words(text: str) -> list[str]:
    """Of a list with commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _same(word: str, name: str) -> bool:
    return word.lower() == name.lower()


def _one_of(option: str, word: str, known: Iterable[str], same: Callable[[str, str], bool]) -> str:
    for name in known:
        if same(word, name):
            return name
    raise OptionError(f"{option} takes a list of {', '.join(known)}; got {word!r}")
