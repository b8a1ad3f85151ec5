"""Heads take turns: every tile of every head has one program, in the arithmetic that the kernel does it in."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import tiles as tiles_of
from regions import attention, causal, scaled_score

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.hopper_skeletons import HELPERS
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.turns import constants, tile_of_turn

MOST = 2**31 - 1
MOST_TILES = MOST // 16
"""Of a head: each has 16 rows at least, whose numbers are 32 bits wide."""
TEXT = "\n".join(tile_of_turn("tiles")).replace("tl.num_programs(0)", "programs")
CODE = compile(f"{TEXT}\ntile = inside // turns", "codegen/turns.py", "exec")
MANY = settings(max_examples=200, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Int32:
    """An integer as a device holds it: what leaves 32 bits is an error, and quotients are of natural numbers."""

    value: int

    def __post_init__(self) -> None:
        assert -MOST - 1 <= self.value <= MOST

    def _with(self, op: str, other: Any) -> Int32:
        x, y = self.value, other.value if isinstance(other, Int32) else other
        assert op in "+-*" or (x >= 0 < y), "Triton divides towards zero"
        return Int32({"+": x + y, "-": x - y, "*": x * y, "/": y and x // y, "%": y and x % y}[op])

    def __add__(self, other: Any) -> Int32:
        return self._with("+", other)

    def __sub__(self, other: Any) -> Int32:
        return self._with("-", other)

    def __mul__(self, other: Any) -> Int32:
        return self._with("*", other)

    def __floordiv__(self, other: Any) -> Int32:
        return self._with("/", other)

    def __mod__(self, other: Any) -> Int32:
        return self._with("%", other)


def cdiv(x: Int32, y: Int32) -> Int32:
    return (x + y - 1) // y


LANGUAGE = SimpleNamespace(
    minimum=lambda x, y: Int32(min(x.value, y.value)), cast=lambda x, _: x, int32=None, int64=None, cdiv=cdiv
)


def taken(program: int, programs: int, tiles: int, turn: int) -> tuple[int, int]:
    """(outer, tile) of a program, as the portable kernels' text says: tiles of most work first."""
    given_to = {"program": program, "programs": programs, "tiles": tiles, "TURN": turn}
    names: dict[str, Any] = {**{k: Int32(v) for k, v in given_to.items()}, "tl": LANGUAGE}
    exec(CODE, names)
    return names["outer"].value, names["tile"].value


@cache
def place_of() -> Callable[..., tuple[Int32, Int32]]:
    """The function of the kernel for Hopper."""
    text = fill(HELPERS, {"length": ", M", "m": "M"})
    found = next(f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef) and f.name == "place_of")
    found.decorator_list = []
    names: dict[str, Any] = {"gl": LANGUAGE, "BLOCK_M": Int32(1)}
    exec(ast.unparse(found), names)
    return names["place_of"]  # type: ignore[no-any-return]


def placed(program: int, programs: int, tiles: int, section: int) -> tuple[int, int]:
    """The same of the kernel for Hopper, whose tiles are counted backwards."""
    start, outer = place_of()(Int32(program), Int32(programs), Int32(section), Int32(tiles))
    return outer.value, tiles - 1 - start.value


def section_of(outers: int, tiles: int, turn: int) -> int:
    """How many heads take turns: as many as have `turn` programs."""
    return min((tiles + turn - 1) // tiles, outers)


SMALL = st.tuples(st.integers(1, 24), st.integers(1, 12))
LARGE = st.integers(1, MOST_TILES).flatmap(lambda tiles: st.tuples(st.integers(1, MOST // tiles), st.just(tiles)))


@MANY
@given(SMALL, st.integers(1, 300))
def test_every_tile_has_one_program(size: tuple[int, int], turn: int) -> None:
    """And no program begins with a tile of less work while one of more is left to the heads that take turns."""
    outers, tiles = size
    section = section_of(outers, tiles, turn)
    for found in (
        [taken(p, outers * tiles, tiles, turn) for p in range(outers * tiles)],
        [placed(p, outers * tiles, tiles, section) for p in range(outers * tiles)],
    ):
        assert sorted(found) == list(product(range(outers), range(tiles)))
        assert found == sorted(found, key=lambda x: (x[0] // section, x[1]))


@MANY
@given(LARGE, st.integers(1, 1 << 16), st.data())
def test_grids_of_any_size(size: tuple[int, int], turn: int, data: st.DataObject) -> None:
    """A program is the one that its tile leads back to, and nothing on the way leaves 32 bits."""
    outers, tiles = size
    programs, section = outers * tiles, section_of(outers, tiles, turn)
    program = data.draw(st.one_of(st.integers(0, programs - 1), st.integers(max(0, programs - 9), programs - 1)))
    for outer, tile in (taken(program, programs, tiles, turn), placed(program, programs, tiles, section)):
        first = outer // section * section
        assert program == first * tiles + tile * min(section, outers - first) + outer - first


def test_constants_are_32_bits_wide() -> None:
    region = attention(scaled_score, causal)
    assert all(0 < value <= MOST for value, _ in constants(Frame(region, tiles_of(region))).values())
