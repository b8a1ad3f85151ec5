"""Which tiles are worth costing for a launch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fusecomp.planning.candidate import Launch
from fusecomp.planning.chunks import power
from fusecomp.planning.resources import in_tensor_memory, instruction
from fusecomp.planning.tile import Tile

RESIDENT = (0, 1, 2, 4)
"""Of decoding: programs of a multiprocessor that the keys may be split for; 0: not split."""
UNSPLIT = 512
"""Keys that one program may walk where only the run knows how long requests are, and one may be longer than all others:
for about as long as splitting and combining takes."""
TABLED = (4,), (2, 3)
"""Warps and stages of decoding whose keys are found through a table: two warps have no registers for the addresses."""
NARROW = (2,), (3,)
"""Of decoding whose keys and values have 8 bits. They are converted on the way, which takes as long as their way: two
warps share less of it, and a tile more is under way (probes_h200.json)."""
WIDE, SUMS = ((8,), (1, 2)), 128 * 128
"""Of decoding whose float32 sums are more than SUMS, which four warps cannot hold: latent caches, where 64 heads that
share a tile read each key once (tiles_h200.json)."""
SIDES = (16, 32, 64, 128)


def candidates(launch: Launch, describable: bool = False, pack: int = 1) -> Iterator[Tile]:
    """Every tile worth costing: a packed group fits in it, it is no taller than the rows, eight warps have work.

    Descriptors fill what wgmma or tcgen05 reads, ahead of it."""
    ways = ("pointer", "descriptor") if describable and launch.describable else ("pointer",)
    tallest = max(16, power(launch.at.m * pack))
    shares = (RESIDENT if unsplit(launch, pack) else RESIDENT[1:]) if launch.decode else (0,)
    for block_m in (rows for rows in SIDES if pack <= rows <= tallest):
        for block_n, warps, stages, loads, resident in product(SIDES, *schedules(launch, block_m), ways, shares):
            busy = warps <= 4 or block_m * block_n >= 64 * 64
            if busy and (loads == "pointer" or (block_m >= 64 and stages > 1)):
                tile = Tile(block_m, block_n, warps, stages, pack, loads, resident)
                if in_tensor_memory(tile, launch.known, launch.device) and at_once(launch, tile):
                    yield tile


def schedules(launch: Launch, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Warps and stages of tiles of so many rows."""
    known = launch.known
    if not launch.decode:
        return (4, 8), (1, 2, 3, 4)
    if known.held == 1:
        return NARROW
    if rows * known.wide_v > SUMS and instruction(known, launch.device, rows, *WIDE[0]) == "wgmma":
        return WIDE
    return TABLED if known.looked_up else ((2, 4), (2, 3))


def at_once(launch: Launch, tile: Tile) -> bool:
    """Of decoding: whether a multiprocessor holds as many programs as the keys are split for: none is to run after."""
    return not tile.resident or tile.resident <= launch.quantities(tile)["resident"]


def unsplit(launch: Launch, pack: int) -> bool:
    """Whether a program for each packed query tile may walk all keys: there is one for each multiprocessor, and none
    may have much more to do than the others."""
    even = launch.requests == 1 or launch.at.n <= UNSPLIT
    return even and launch.at.heads // pack >= launch.device.sms


def packs(launch: Launch) -> list[int]:
    """Of decoding: how many heads of a group may share a tile, the most first: what a tile of each height can hold."""
    if not (launch.decode and launch.known.packs):
        return [1]
    return list(dict.fromkeys(packed(launch.known.group, side) for side in reversed(SIDES)))


def packed(group: int, rows: int) -> int:
    """The largest divisor of a group that so many rows hold."""
    return max(p for p in range(1, rows + 1) if group % p == 0)
