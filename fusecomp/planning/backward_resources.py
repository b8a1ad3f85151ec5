"""Shared memory of the two kernels of a backward pass, as Triton allocates it: equations, by what multiplies.

A program keeps two tiles of its own rows (`fixed`) and walks the others (`moving`), two tiles at a time: `first` enters
the product that gives scores, `second` the one that gives dP. Each enters another product too:

    dQ       fixed Q, dO   first K, second V           dQ = dS K
    dK, dV   fixed K, V    first Q, second dO          dV = P^T dO, dK = dS^T Q

Symbols as in `resources`; dS takes the place of P.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sympy import Piecewise

from fusecomp.planning.device import Device
from fusecomp.planning.equations import Page
from fusecomp.planning.facts import Facts
from fusecomp.planning.resources import TENSOR_COLUMNS, columns, drawn_bytes, instruction, triton_release, usable
from fusecomp.planning.symbols import *
from fusecomp.planning.tile import Tile

FIXED, MOVING, D_FIRST, D_LAST, DV_FIRST, DV_LAST, D_EARLY, DV_EARLY, TURNED = symbols(
    "FIXED MOVING D_FIRST D_LAST DV_FIRST DV_LAST D_EARLY DV_EARLY TURNED"
)
KEYS_TOO, REPEATS, DRAWING, GRAD_BASE, GRAD_SUM, GRAD_PAIR, GRAD_VECTOR, GRAD_DRAW, GRAD_LOAD = symbols(
    "KEYS_TOO REPEATS DRAWING GRAD_BASE GRAD_SUM GRAD_PAIR GRAD_VECTOR GRAD_DRAW GRAD_LOAD"
)
"""Rows that stay and rows that come; the first and the last chunk of D and Dv; columns that tcgen05 takes a
product earlier, each time; 1 where operands are float32, which the tensor cores do not take turned."""

pairs = FIXED * MOVING
fixed = WIDTH * FIXED * (D + DV)
first, second = WIDTH * MOVING * D, WIDTH * MOVING * DV
shared = CROSSES * WIDTH * pairs
drawing = Min(1, DRAWS)
drawn = drawing * DRAWN * pairs
vector = 16 * threads
# Both walks go along the rows of a bias: 16 B a thread, copied ahead (cp.async). That of dK and dV goes across the rows
# of a mask: a byte a thread, through registers. Beside a bias P and dS are turned before they are multiplied.
rows_ahead = (STAGES - 1) * LOAD * pairs
columns_ahead = Piecewise((rows_ahead, LOAD > 1), (0, True))
turned, turned_loads, exchanged = (Piecewise((x, LOAD > 1), (0, True)) for x in (WIDTH * pairs, LOAD * pairs, 512))
loaded = Min(LOAD * pairs, 32 * LOAD * threads)
narrow, whole = Piecewise((0, LOAD >= 4), (loaded, True)), Piecewise((0, LOAD >= 4), (LOAD * pairs, True))
statistics = (STAGES - 1) * 4 * MOVING * (2 + Min(1, LOAD))  # log-sum-exp, in two parts beside a bias, and delta
bytes_ = Max(drawing, BYTES)  # where P is made with what has a byte a pair, mma.sync takes four of its rows at once


def across(columns: Any) -> Any:
    """B that threads exchange where one chunk of columns of a tile that lies in rows is multiplied along its rows."""
    return Min(WIDTH * MOVING * columns, Max(8 * (1 + bytes_) * WIDTH * columns, vector * (1 + 3 * TURNED)))


def along(columns: Any) -> Any:
    """The same where it is multiplied along its columns; warps that share columns hold eight rows each."""
    return Min(WIDTH * MOVING * columns, Max(vector, 8 * WIDTH * columns * (1 + CROSSES * (WARPS - 1))))


# What moves, by the instruction: "fma" as loaded, once for both products; "mma.sync" through registers, K of dQ again
# as its other product wants it; "wgmma" and "tcgen05" from where it was loaded. tcgen05's products run behind each
# other, so that what two of them read is kept one tile longer. Float32 is written a second time, turned.
first_across = Max(first - WIDTH * MOVING * (D - D_FIRST) + across(D_FIRST), first + across(D_LAST))
second_along = Max(second - WIDTH * MOVING * (DV - DV_FIRST) + along(DV_FIRST), second + along(DV_LAST))
QUERIES: dict[str, tuple[Any, Any]] = {
    "fma": (
        first + Max(second, shared),
        (STAGES - 1) * (first + second) + shared,
    ),
    "mma.sync": (
        Max(first_across, shared, along(DV_LAST), loaded, drawn),
        (STAGES - 1) * second + Max(first_across, shared, drawn),
    ),
    "wgmma": (
        first + Max(second, drawn, loaded),
        Piecewise((2 * first + STAGES * second, TURNED > 0), (STAGES * (first + second), True)) + drawn,
    ),
    "tcgen05": (
        first + Max(second, Min(2 * vector, loaded)),
        STAGES * second
        + Piecewise((2 * first, TURNED > 0), ((STAGES + 1) * first + WIDTH * MOVING * D_EARLY, True))
        + Piecewise((BYTES * pairs, pairs <= 8 * threads), (0, True)),
    ),
}
"""Of dQ: (without a pipeline, with one)."""
KEYS: dict[str, tuple[Any, Any]] = {
    "fma": (
        first + second + shared,
        (STAGES - 1) * (first + second) + shared,
    ),
    "mma.sync": (
        first + Max(second_along + TURNED * (1 - drawing) * shared, second + shared, loaded, drawn) + turned_loads,
        Piecewise(
            (first + second_along + (1 - drawing) * shared, TURNED > 0),
            ((STAGES - 1) * (first + second) + Max(shared, drawn, narrow) + exchanged, True),
        ),
    ),
    "wgmma": (
        first + Max(second + TURNED * Max(first, second), drawn, loaded) + turned,
        Piecewise(
            (first + second + Max(first, second), TURNED > 0),
            (STAGES * (first + second) + Max(drawn, whole), True),
        ),
    ),
    "tcgen05": (
        first + Max(second + TURNED * Max(first, second), drawn, loaded) + 2 * turned,
        Piecewise(
            (3 * (first + second) + drawn, TURNED > 0),
            (
                (STAGES + 1) * (first + second) + WIDTH * MOVING * (D_EARLY + DV_EARLY) + Max(drawn, whole) + turned,
                True,
            ),
        ),
    ),
}
"""Of dK and dV."""

# 32-bit registers of one thread: float32 sums of the gradients, scores and dP and what is made of them, an address for
# each 16 bytes loaded; `again` as in `resources`
sums = FIXED * (D + KEYS_TOO * DV) / threads
scores = pairs / threads
again = 1 + Max(0, 16 * WARPS / FIXED - 1) * REPEATS + Max(0, 8 * WARPS / MOVING - 1) * CROSSES * MMA_SYNC
needed = (
    GRAD_BASE
    + GRAD_SUM * sums * (1 + Max(0, 16 * WARPS / FIXED - 1) * MMA_SYNC * (1 - CROSSES))
    + GRAD_PAIR * scores * again
    + GRAD_VECTOR * (first + second) / vector
    + GRAD_DRAW * DRAWING
    + GRAD_LOAD * Piecewise((1 - KEYS_TOO, LOAD > 1), (Min(1, LOAD), True))
)
TAKEN: dict[str, dict[str, float]] = {
    "wgmma": {
        "GRAD_BASE": 79, "GRAD_SUM": 0.92, "GRAD_PAIR": 1.4, "GRAD_VECTOR": 4.15, "GRAD_DRAW": 7, "GRAD_LOAD": 30,
    },
    "mma.sync": {
        "GRAD_BASE": 126, "GRAD_SUM": 0.73, "GRAD_PAIR": 1.35, "GRAD_VECTOR": 3.75, "GRAD_DRAW": 20, "GRAD_LOAD": 29,
    },
    "tcgen05": {
        "GRAD_BASE": 89, "GRAD_SUM": 1.2, "GRAD_PAIR": 0, "GRAD_VECTOR": 0, "GRAD_DRAW": 5, "GRAD_LOAD": 52,
    },
    "fma": {
        "GRAD_BASE": 114, "GRAD_SUM": 0.77, "GRAD_PAIR": 1.76, "GRAD_VECTOR": 2.72, "GRAD_DRAW": 150, "GRAD_LOAD": 40,
    },
}  # fmt: skip
"""Fitted on `examples/bench/records/compiled_resources.json`."""
TAKEN_BY_KEYS = {"tcgen05": {"GRAD_SUM": 0, "GRAD_PAIR": 5}}
"""Of dK and dV, whose sums stay in tensor memory while P, dP and dS are in registers."""


def registers(kernel: str, tile: Tile, known: Facts, device: Device) -> float:
    """32-bit registers that one thread of `kernel` wants; it spills what is over the device's limit."""
    unit = _unit(kernel, tile, known, device)
    given = {**TAKEN[unit], **(TAKEN_BY_KEYS.get(unit, {}) if kernel == "key_gradients" else {})}
    return float(_needed()({**_values(kernel, tile, known, device), **given})["registers"])


def smem(kernel: str, tile: Tile, known: Facts, device: Device) -> int:
    """B of shared memory of one program of `kernel`, "query_gradient" or "key_gradients", at most."""
    page = _page(kernel, _unit(kernel, tile, known, device))
    return int(page(_values(kernel, tile, known, device))["smem"])


def _unit(kernel: str, tile: Tile, known: Facts, device: Device) -> str:
    """What multiplies."""
    return instruction(known, device, tile.block_m if kernel == "query_gradient" else tile.block_n, tile.warps)


def fits(kernel: str, tile: Tile, known: Facts, device: Device) -> bool:
    """Whether a program of `kernel` can be launched at all."""
    return smem(kernel, tile, known, device) <= usable(device) and in_tensor_memory(kernel, tile, known, device)


def in_tensor_memory(kernel: str, tile: Tile, known: Facts, device: Device) -> bool:
    """Whether tensor memory has the sums, the scores and dP of each part of D and Dv, and dS, for keys P too."""
    values = _values(kernel, tile, known, device)
    rows, moving = int(values["FIXED"]), int(values["MOVING"])
    if instruction(known, device, rows, tile.warps) != "tcgen05":
        return True
    products = sum(map(len, known.d_chunks)) + len(known.dv_chunks)
    of_queries = kernel == "query_gradient"
    sums = known.wide if of_queries else known.wide + known.wide_v
    operands = 1 if of_queries or tile.stages < 2 else 2
    return columns(rows, sums, moving, products, operands, known.width) <= TENSOR_COLUMNS


@lru_cache(maxsize=1)
def _needed() -> Page:
    return Page({"registers": (needed, "32-bit registers, one thread")})


@lru_cache(maxsize=8)
def _page(kernel: str, unit: str) -> Page:
    of_queries = kernel == "query_gradient"
    plain, piped = (QUERIES if of_queries else KEYS)[unit]
    rows = ceiling(statistics / 1024) * 1024 if unit == "wgmma" else statistics  # a tile that wgmma reads may follow
    ahead = rows_ahead if of_queries else columns_ahead + rows
    moving = Piecewise((plain, STAGES < 2), (piped + ahead, True))
    return Page({"smem": (fixed + moving + 1024 * int(unit == "tcgen05"), "B")})


def _values(kernel: str, tile: Tile, known: Facts, device: Device) -> dict[str, float]:
    sides = (tile.block_m, tile.block_n)
    rows, moving = sides if kernel == "query_gradient" else sides[::-1]
    unit = _unit(kernel, tile, known, device)
    d = [c for product in known.d_chunks for c in product]
    return {
        "FIXED": rows,
        "MOVING": moving,
        "WARPS": tile.warps,
        "STAGES": tile.stages,
        "WARP": 32,
        "D": known.wide,
        "DV": known.wide_v,
        "D_FIRST": d[0],
        "D_LAST": d[-1],
        "DV_FIRST": known.dv_chunks[0],
        "DV_LAST": known.dv_chunks[-1],
        "D_EARLY": _early(d),
        "DV_EARLY": _early(known.dv_chunks),
        "WIDTH": known.width,
        "LOAD": known.load_width,
        "BYTES": int(known.load_width == 1),
        "DRAWS": known.draws if unit != "fma" else 0,
        "DRAWING": min(1, known.draws),
        "DRAWN": drawn_bytes(triton_release()),
        "CROSSES": int(unit == "fma" or (unit == "mma.sync" and rows < d[-1])),
        "TURNED": int(unit != "fma" and known.width > 2),
        "KEYS_TOO": int(kernel == "key_gradients"),
        "MMA_SYNC": int(unit == "mma.sync"),
        "REPEATS": int(unit == "wgmma" or (unit == "mma.sync" and rows >= d[-1])),
    }


def _early(chunks: Sequence[int]) -> int:
    """Columns whose product runs before another of the same kind, once for each that follows."""
    return sum(c * (len(chunks) - 1 - i) for i, c in enumerate(chunks))
