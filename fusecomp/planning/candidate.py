"""One tile, and the values that the equations of `cost` take for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from fusecomp.ir.expr import Const, Expr, Load, Var, parts
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.cost import FITTED, evaluate
from fusecomp.planning.device import Device
from fusecomp.planning.facts import WIDTH, Facts, facts, lengths, value, visits


@dataclass(frozen=True)
class Tile:
    """BLOCK_M x BLOCK_N and its schedule."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    pack: int = 1


def quantities(tile: Tile, decode: bool, region: AttentionRegion, sizes: Mapping[str, int], device: Device) -> dict[str, float]:
    """Every quantity of `cost.QUANTITIES` for one tile."""
    known = facts(region)
    fixed = _constants(region, tuple(sorted(sizes.items())), device)
    visited, tested = _visits(region, tuple(sorted(sizes.items())), max(1, tile.block_m // tile.pack), tile.block_n)
    return evaluate(
        {
            **fixed,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "WARPS": tile.warps,
            "STAGES": tile.stages,
            "PACK": tile.pack,
            "TILES": visited,
            "TESTED": tested,
            "SPLIT": int(decode),
            **compiler(tile, known, device),
        }
    )


def compiler(tile: Tile, known: Facts, device: Device) -> dict[str, float]:
    """What the compiler makes of a tile: which matrix instruction, and what passes through shared memory.

    wgmma (sm_90) takes four warps x 16 rows and reads both operands of Q K^T from shared memory, 64 rows at a time; tcgen05
    (sm_100) 128 rows; mma.sync has each warp read K and V for its own rows.
    """
    tensor = known.dtype != "float32" or known.precision == "tf32"
    direct = tensor and device.capability >= 90 and tile.block_m >= 64
    native = {90: 64, 100: 128}.get(device.capability, 64)
    per_warp = max(16, tile.block_m // tile.warps)
    crosses = tile.block_m <= 16 * tile.warps and (max(known.dv_chunks) >= 128 or tile.block_m == 16)
    return {
        "WGMMA": int(direct),
        "DIRECT": int(direct),
        "MMA_ROWS": native if direct else per_warp,
        "MMA_SHARE": 1.0 if direct or device.capability < 90 or not tensor else FITTED["SYNC_MMA"],
        "SCRATCH": int(not direct and (crosses or not tensor)),
    }


@lru_cache(maxsize=4096)
def _visits(region: AttentionRegion, sizes: tuple[tuple[str, int], ...], rows: int, block_n: int) -> tuple[int, int]:
    return visits(region, dict(sizes), rows, block_n)


@lru_cache(maxsize=512)
def _constants(region: AttentionRegion, sizes: tuple[tuple[str, int], ...], device: Device) -> dict[str, float]:
    """What every tile of one launch shares."""
    known, at = facts(region), lengths(region, dict(sizes))
    return {
        **FITTED,
        **_of_region(known),
        **_of_device(device, known),
        "HEADS": at.heads,
        "KV_HEADS": at.kv_heads,
        "M": at.m,
        "N": at.n,
        "REACHED": _reached(region, sizes, at.n),
        "LOAD_UNIQUE": sum(_elements(x, region, dict(sizes)) * WIDTH.get(x.dtype, 1) for x in known.loads),
    }


def _of_region(known: Facts) -> dict[str, float]:
    return {
        "D": known.wide,
        "DV": known.wide_v,
        "CHUNK": max(max(known.dv_chunks), *(max(c) for c in known.d_chunks)),
        "WIDTH": known.width,
        "Q_ROW": known.q_row,
        "K_ROW": known.k_row,
        "V_ROW": known.v_row,
        "O_ROW": known.o_row,
        "FMA": known.fma,
        "SFU": known.sfu,
        "TEST": known.test_fma,
        "LOAD": known.load_width,
        "PASSES": known.passes,
    }


def _of_device(device: Device, known: Facts) -> dict[str, float]:
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


def _reached(region: AttentionRegion, sizes: tuple[tuple[str, int], ...], n: int) -> int:
    """Keys that any query reaches: N, or less where one tile of all queries reaches less."""
    at = lengths(region, dict(sizes))
    return min(n, 16 * _visits(region, sizes, at.m, 16)[0])


def _elements(x: Load, region: AttentionRegion, sizes: Mapping[str, int]) -> int:
    """Elements of a loaded tensor that one launch can read: the product of the extents of the indices it is read at."""
    axes = {v for e in x.index for v in parts(e) if isinstance(v, Var)}
    return math.prod(_size(v.size, sizes) for v in axes)


def _size(e: Expr, sizes: Mapping[str, int]) -> int:
    return int(e.value) if isinstance(e, Const) else (value(e, sizes) or 1)
