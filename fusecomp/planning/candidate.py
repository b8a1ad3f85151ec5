"""The values that the equations of `cost` take for one tile."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fusecomp.ir.expr import Const, Expr, Load, Var, parts, variables
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.cost import FITTED, FORWARD
from fusecomp.planning.device import Device
from fusecomp.planning.equations import Model
from fusecomp.planning.facts import WIDTH, Facts, Visits, facts, lengths, value, visits
from fusecomp.planning.rates import RATES
from fusecomp.planning.resources import ALLOCATED, compiler
from fusecomp.planning.tile import Tile

RUN_PAIR = 4.8
"""FMA slots to test a pair where a kernel is told which run of keys each query sees: on sm_90 a tile of 64 x 64 keys is
448 instructions of a thread, and 295 without a mask (probes_h200.json)."""


class Launch:
    """One region at its lengths on one device: what every tile shares, worked out once."""

    def __init__(
        self, region: AttentionRegion, sizes: Mapping[str, int], device: Device, decode: bool, shown: float = 1.0,
        runs: bool = False,
    ) -> None:  # fmt: skip
        self.region, self.sizes, self.device, self.decode, self.shown = region, dict(sizes), device, decode, shown
        self.runs = runs
        """Whether the kernel is told which run of keys each query sees."""
        self.known, self.at = facts(region), lengths(region, sizes)
        fitted = ALLOCATED, RATES, *(_decoding()[1:3] if decode else (FITTED,))
        found = of_region(self.known), of_device(device, self.known), self._of_lengths()
        self.fixed = {name: x for held in (*fitted, *found) for name, x in held.items()}
        self.describable = not decode and device.descriptors and self.known.describable
        """Whether descriptors may bring K and V, provided that they lie as descriptors want them."""
        self._visits: dict[tuple[int, int], Visits] = {}

    def visits(self, rows: int, block_n: int) -> Visits:
        """The tiles of one head."""
        key = rows, block_n
        if key not in self._visits:
            found = visits(self.region, self.sizes, rows, block_n)
            if not found.visited:  # a mask that hides every key at these lengths: times are shares of a tile's
                found = Visits(1, found.tested, 1)
            part = self.shown < 1.0
            self._visits[key] = in_part(found, -(-self.at.m // rows), rows / block_n, self.shown) if part else found
        return self._visits[key]

    def quantities(self, tile: Tile) -> dict[str, float]:
        """Every quantity of the pages of equations for one tile."""
        return (_decoding()[0] if self.decode else FORWARD).evaluate(self.inputs(tile))

    def inputs(self, tile: Tile) -> dict[str, float]:
        """A number for each symbol."""
        made = compiler(tile, self.known, self.device)
        seen = self.visits(max(1, tile.block_m // tile.pack), tile.block_n)
        return {
            **self.fixed,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "WARPS": tile.warps,
            "STAGES": tile.stages,
            "PACK": tile.pack,
            "RESIDENT": tile.resident,
            "DESC": int(tile.loads == "descriptor"),
            "TILES": seen.visited,
            "TESTED": seen.tested,
            "LONGEST": seen.longest,
            **made,
            "NATIVE": int(made["WGMMA"] or self.device.capability < 90),
            **self._held(tile),
            **({"TEST": 0, "TEST_PAIR": RUN_PAIR} if self.runs and self.device.arch == "sm_90" else {}),
        }

    def _held(self, tile: Tile) -> dict[str, float]:
        """Of decoding: what programs that share a multiprocessor leave each other, and what eight warps take."""
        most = share_of_registers(self.device, tile.resident * tile.warps) if self.decode and tile.resident else 0
        wide = _decoding()[3] if self.decode and tile.warps > 4 else {}
        return {"CAP": most} | ({"REGS_MAX": most} if most else {}) | wide

    def _of_lengths(self) -> dict[str, float]:
        loaded = [elements(x, self.sizes) * WIDTH.get(x.dtype, 1) for x in self.known.loads]
        every_query = visits(self.region, self.sizes, self.at.m, 16).visited
        return {
            "HEADS": self.at.heads,
            "KV_HEADS": self.at.kv_heads,
            "M": self.at.m,
            "N": self.at.n,
            "REACHED": max(1, min(self.at.n, 16 * every_query)),
            "LOAD_UNIQUE": sum(loaded),
            "SPLIT": int(self.decode),
        }

    @property
    def requests(self) -> int:
        """How many ranges of keys there are: one for each place on the batch axes that the range varies with."""
        spans = self.known.reach
        varies = frozenset().union(*(variables(x.edge) for x in (*spans.lower, *spans.upper)))
        return math.prod(_size(v.size, self.sizes) for v in self.region.batch if v.name in varies)


def in_part(seen: Visits, rows: int, square: float, shown: float) -> Visits:
    """That share of the tiles, in one run for each of `rows` tiles of queries, with what is cut at its ends: a tile of
    keys where it begins, and as many as the queries are long where it ends."""
    visited = min(seen.visited, math.ceil(shown * seen.visited) + rows)
    longest = min(seen.longest, math.ceil(shown * seen.longest) + 1)
    return Visits(visited, min(visited, math.ceil(rows * (1 + square))), longest)


def _decoding() -> tuple[Model, dict[str, float], dict[str, float], dict[str, float]]:
    """The page of decoding and its constants, when first asked for: sympy takes as long for it as for all others."""
    from fusecomp.planning.cost_decode import DECODE, DECODE_FITTED, DECODE_REGISTERS, DECODE_WIDE

    return DECODE, DECODE_FITTED, DECODE_REGISTERS, DECODE_WIDE


REGISTER_UNIT = 8
"""Registers of a thread are given out in eights (CUDA C++ Programming Guide, technical specifications)."""


def share_of_registers(device: Device, warps: int) -> int:
    """Of a thread, where a multiprocessor holds so many warps; 0 where it is more than a thread can have.

    Programs that share the keys equally all run at once: one more register, and a fourth of them would run after."""
    each = device.registers_per_sm // (warps * device.warp) // REGISTER_UNIT * REGISTER_UNIT
    return each if each < device.registers_per_thread else 0


def of_region(known: Facts) -> dict[str, float]:
    """The region's symbols."""
    return {
        "D": known.wide,
        "DV": known.wide_v,
        "CHUNK": max(max(known.dv_chunks), *(max(c) for c in known.d_chunks)),
        "KV_TILES": sum(map(len, known.d_chunks)) + len(known.dv_chunks),
        "WIDTH": known.width,
        "HELD": known.held,
        "Q_ROW": known.q_row,
        "K_ROW": known.k_row,
        "V_ROW": known.v_row,
        "O_ROW": known.o_row,
        "FMA": known.fma,
        "SFU": known.sfu,
        "TEST": known.test_fma,
        "DRAWS": known.draws,
        "LOAD": known.load_width,
        "LOOKED_UP": known.looked_up,
        "PASSES": known.passes,
    }


def of_device(device: Device, known: Facts) -> dict[str, float]:
    """The device's symbols."""
    return {
        "SMS": device.sms,
        "SMEM_SM": device.smem_per_sm,
        "REGS_SM": device.registers_per_sm,
        "REGS_MAX": device.registers_per_thread,
        "THREADS_SM": device.threads_per_sm,
        "WARP": device.warp,
        "MMA": device.matmul_rate(known.dtype, known.precision),
        "SFUS": device.sfu_rate,
        "FMAS": device.fma_rate,
        "SMEM": device.smem_rate,
        "L2RATE": device.l2_rate,
        "HBM": device.hbm_rate,
        "L2": device.l2_bytes,
        "LAUNCH": device.launch,
    }


def elements(x: Load, sizes: Mapping[str, int]) -> int:
    """Elements of a loaded tensor that one launch can read: the product of the extents of the indices it is read at."""
    axes = {v for e in x.index for v in parts(e) if isinstance(v, Var)}
    return math.prod(_size(v.size, sizes) for v in axes)


def _size(e: Expr, sizes: Mapping[str, int]) -> int:
    return int(e.value) if isinstance(e, Const) else (value(e, sizes) or 1)
