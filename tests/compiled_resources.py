"""What the compiler takes for generated kernels, over a grid of regions, tiles and architectures; no GPU is needed.

    python tests/compiled_resources.py        measures again every row of the record, which it writes

A row is a point and what it took: shared memory and stack in bytes, registers of a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from golden_kernels import NOTHING, WINDOW, _softcap, paged
from kernels import tiles
from regions import (
    B,
    H,
    M,
    N,
    age,
    attention,
    b,
    causal,
    dropout,
    filled,
    grouped,
    h,
    kv_idx,
    load,
    q_idx,
    score,
    times,
)

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.compiled import CompiledInfo, cross_compile
from fusecomp.codegen.emit import emit
from fusecomp.codegen.source import KernelSource
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Score, Var
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product
from fusecomp.planning import backward_resources
from fusecomp.planning.backward import BackwardPlan
from fusecomp.planning.candidate import Launch
from fusecomp.planning.device import find
from fusecomp.planning.facts import facts
from fusecomp.planning.tile import Tile

RECORD = Path(__file__).parents[1] / "examples" / "bench" / "records" / "compiled_resources.json"
DEVICES = {80: find("a100"), 90: find("h200"), 100: find("b200")}
SIZES = {"B": 2, "H": 12, "M": 1024, "N": 1024, "P": 100}
GRADIENTS = ("query_gradient", "key_gradients")


@dataclass(frozen=True)
class Point:
    """One kernel of one tile, for one architecture."""

    region: str
    kernel: str
    """"attention", of decoding "decode attention", "decode combine", "decode rescue", or one of GRADIENTS."""
    arch: int
    block_m: int
    block_n: int
    warps: int
    stages: int
    pack: int = 1
    loads: str = "pointer"

    @property
    def tile(self) -> Tile:
        return Tile(self.block_m, self.block_n, self.warps, self.stages, self.pack, self.loads)

    @property
    def decode(self) -> bool:
        return self.kernel.startswith("decode")


@dataclass(frozen=True)
class Taken:
    """By one program; registers and stack by one thread."""

    shared: int
    registers: int
    stack: int

    @property
    def spills(self) -> bool:
        """Up to four registers the assembler puts aside without need; its releases differ by so much."""
        return self.stack > 16


def source(point: Point) -> tuple[KernelSource, str]:
    """(the generated file, the name of the kernel in it)."""
    region = REGIONS[point.region]
    plan = tiles(region, point.block_m, point.block_n, "decode" if point.decode else "prefill", point.pack)
    plan = replace(plan, warps=point.warps, stages=point.stages, loads=point.loads)
    if point.kernel in GRADIENTS:
        return emit_backward(region, BackwardPlan(plan, plan), NOTHING), point.kernel
    return emit(region, plan), point.kernel.split()[-1]


def measured(point: Point) -> Taken:
    info: CompiledInfo = cross_compile(*source(point)[:1], point.arch, source(point)[1])
    return Taken(info.shared, info.registers or 0, info.spills or 0)


@lru_cache(maxsize=512)
def launch(region: str, arch: int, decode: bool) -> Launch:
    sizes = {**SIZES, **({"M": 4} if decode else {})}
    return Launch(REGIONS[region], sizes, DEVICES[arch], decode)


def predicted(point: Point) -> tuple[int, bool]:
    """(shared memory, whether registers spill)."""
    if point.kernel in GRADIENTS:
        given = point.kernel, point.tile, facts(REGIONS[point.region]), DEVICES[point.arch]
        return backward_resources.smem(*given), backward_resources.registers(*given) > 255
    if point.kernel == "decode combine":
        return 0, False
    found = launch(point.region, point.arch, point.kernel == "decode attention").quantities(point.tile)
    needed = launch(point.region, point.arch, False).quantities(point.tile)["registers"]  # as `resources` says
    return int(found["smem"]), needed > DEVICES[point.arch].registers_per_thread


def record() -> tuple[str, dict[Point, Taken]]:
    """(Triton's release, what it took)."""
    held = json.loads(RECORD.read_text())
    return held["triton"], {Point(*row[:-3]): Taken(*row[-3:]) for row in held["rows"]}


def write(rows: dict[Point, Taken]) -> None:
    lines = (json.dumps([*astuple(p), *astuple(t)]) for p, t in sorted(rows.items(), key=lambda r: astuple(r[0])))
    columns = [*Point.__dataclass_fields__, *Taken.__dataclass_fields__]
    head = f'{{"triton": "{triton.__version__}", "columns": {json.dumps(columns)}, "rows": [\n'
    RECORD.write_text(head + ",\n".join(lines) + "\n]}\n")


# ----------------------------------------------------------------------------------------------------------------
# Regions


def plain(*keep: Expr, d: int = 64, s: Expr | None = None, dtype: str = "bfloat16", **more: Any) -> AttentionRegion:
    return attention(times(score, d**-0.5) if s is None else s, *keep, d=d, dtype=dtype, **more)


def tf32(region: AttentionRegion) -> AttentionRegion:
    return replace(region, precision="tf32")


def bias(d: int, *keep: Expr, dtype: str = "bfloat16", kind: str = "bfloat16") -> AttentionRegion:
    s = apply("add", times(score, d**-0.5), load(0, h, q_idx, kv_idx, dtype=kind))
    return plain(*keep, d=d, s=s, dtype=dtype, loads=[((H, M, N), kind)])


def mask(d: int) -> AttentionRegion:
    return plain(load(0, b, 0, q_idx, kv_idx, dtype="bool"), d=d, loads=[((B, 1, M, N), "bool")])


def padded(d: int, dtype: str = "bfloat16") -> AttentionRegion:
    """Rows that see no key average over all of them: two passes, in decoding a third kernel."""
    seen = apply("lt", kv_idx, load(0, b, dtype="int64"))
    return plain(seen, d=d, s=times(score, 0.25), dtype=dtype, loads=[((B,), "int64")], **filled(-1e9, seen))


def alibi(d: int) -> AttentionRegion:
    slope = apply("exp2", apply("mul", apply("neg", apply("add", h, Const(1))), Const(0.5)))
    return plain(causal, d=d, s=apply("add", times(score, d**-0.5), apply("mul", apply("neg", age), slope)))


def capped(d: int, **more: Any) -> AttentionRegion:
    return plain(causal, WINDOW, d=d, s=_softcap(times(score, 0.125), 30.0), **more)


def two_products(d: int, other: int) -> AttentionRegion:
    x, region = Var("d1", Const(other)), plain(causal, d=d)
    more = Product(Access("q1", (b, h, q_idx, x)), Access("k1", (b, kv_idx, x)), x, "bfloat16")
    q1, k1 = Operand("q1", (B, H, M, x.size), "bfloat16"), Operand("k1", (B, N, x.size), "bfloat16")
    s = times(apply("add", Score(0), Score(1)), (d + other) ** -0.5)
    return replace(region, operands=(*region.operands, q1, k1), products=(*region.products, more), score=s)


HALF = {f"plain {d}": plain(d=d) for d in (16, 32, 64, 80, 96, 128, 256)}
CAUSAL = {f"causal {d}": plain(causal, d=d) for d in (40, 64, 80, 96, 112, 128, 192, 256, 512, 576)}
FLOAT = {f"float32 {d}": plain(*keep, d=d, dtype="float32") for d, keep in
         {16: (), 64: (causal,), 80: (), 128: (causal,), 256: (causal,)}.items()}  # fmt: skip
TF32 = {f"tf32 {d}": tf32(plain(causal, d=d, dtype="float32")) for d in (64, 96, 128)}
REGIONS: dict[str, AttentionRegion] = {
    **HALF, **CAUSAL, **FLOAT, **TF32,
    "tf32 64, every key": tf32(plain(d=64, dtype="float32")),
    "latent 192 128": plain(causal, d=192, dv=128),
    "latent 576 512": plain(causal, d=576, dv=512),
    "wide values": plain(causal, d=64, dv=128),
    "narrow values": plain(d=128, dv=64),
    "softcap 64": capped(64, **grouped(3)),
    "softcap 128": capped(128),
    "alibi 64": alibi(64),
    "alibi 128": alibi(128),
    "bias 64": bias(64),
    "bias 80": bias(80),
    "bias 128": bias(128),
    "bias 128, causal": bias(128, causal),
    "bias 64, float32": bias(64, kind="float32"),
    "bias 64, all float32": bias(64, dtype="float32", kind="float32"),
    "mask 64": mask(64),
    "mask 128": mask(128),
    "dropout 64": dropout(plain(causal, d=64)),
    "dropout 64, every key": dropout(plain(d=64)),
    "dropout 80": dropout(plain(d=80)),
    "dropout 128": dropout(plain(causal, d=128)),
    "dropout and bias 64": dropout(bias(64)),
    "dropout 64, float32": dropout(plain(causal, d=64, dtype="float32")),
    "dropout 64, tf32": tf32(dropout(plain(causal, d=64, dtype="float32"))),
    "padded 64": padded(64),
    "padded 128": padded(128),
    "padded 64, float32": padded(64, "float32"),
    "groups 64": plain(d=64, **grouped(3)),
    "groups 128": plain(causal, d=128, **grouped(4)),
    "pages 64": paged(d=64),
    "pages 128": paged(),
    "pages 256": paged(d=256),
    "two products 64 32": two_products(64, 32),
    "two products 128 64": two_products(128, 64),
}  # fmt: skip


def again() -> Iterator[tuple[Point, Taken]]:
    for point in record()[1]:
        yield point, measured(point)
        print(point, flush=True)


if __name__ == "__main__":
    write(dict(again()))
