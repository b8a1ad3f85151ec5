"""The cost model by itself: tiles, traffic and cache memory from numbers alone, with no model and no GPU.

    fusecomp.tiles(n=18000, d=128, causal=True, device="h200")     the ranked tiles of a workload
    fusecomp.io(n=1024, d=64, sram=25000)                          elements moved, scores stored against tiles
    fusecomp.kv(layers=40, hidden=5120, tokens=90)                 a cache that reserves against one in blocks

Each prints as `fusecomp tiles`, `io` and `kv` do, and has `to_dict()` for JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

from fusecomp.equations import Equations
from fusecomp.errors import OptionError
from fusecomp.planning.device import Device, current, find
from fusecomp.planning.plan import DECODE_KEYS, DECODE_ROWS, rows
from fusecomp.planning.ranking import HOPPER_FORWARD, Line, Ranking, rank, rank_backward, rank_hopper, worked_out
from fusecomp.planning.textbook import CacheUse, KVCache, Traffic
from fusecomp.planning.units import element, held, number_of_bytes, number_of_elements, size
from fusecomp.planning.workload import Workload
from fusecomp.tables import grid, left_out, printed, tile_table

ON_HOPPER = "The second kernel runs instead of the first, where Triton has the Gluon that it is written in: 3.6 to 3.8."
ROWS = 12
"""Tiles that are printed; --all and `to_dict` have every one."""


def tiles(
    n: int,
    d: int = 128,
    dtype: str = "bf16",
    device: str | Device | None = None,
    *,
    causal: bool = False,
    heads: int = 16,
    batch: int = 1,
    kv_heads: int | None = None,
    dv: int | None = None,
    m: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    bias: bool = False,
    budget: int | str | None = None,
    page_size: int | None = None,
    decode: bool = False,
    backward: bool = False,
) -> Tiles:
    """Rank Br x Bc, warps and stages for attention of given sizes, and say why each loser lost.

    Q is [batch, heads, m, d], K [batch, kv_heads, n, d], V [batch, kv_heads, n, dv]; `dtype` bf16, fp16, fp32 or tf32.
    `device`: a name such as "h200" or "a100-40", a .toml file, a Device; None is the GPU, or the H200 without one.
    `budget`: shared memory that one program may use, in B or as "100KB" (K = 1024); at most the device's. `decode`: one
    query (or `m`) a request, its keys split over programs. `page_size`: K and V lie in pages of so many tokens.
    `backward`: also the kernels of the gradients, dQ and dK with dV.

    PlanError where nothing fits or sizes make no attention, DeviceError for an unknown device, OptionError for a
    budget that is none or options that exclude each other.
    """
    if decode and (m or 1) > DECODE_ROWS:
        raise OptionError(f"a decode step has at most {DECODE_ROWS} queries a request; got m = {m}")
    queries = 1 if decode and m is None else m
    if backward and (decode or page_size):
        raise OptionError(f"{'a decode step' if decode else 'a paged cache'} has no backward pass: leave one out")
    workload = Workload(
        n, d, dtype, causal, heads, batch, kv_heads, dv, queries, window, softcap, bias, page_size
    )
    on = device if isinstance(device, Device) else current() if device is None else find(device)
    allowed = on.smem_bytes if budget is None else min(number_of_bytes(budget), on.smem_bytes)
    ranked = rows(workload.region, workload.sizes, on, allowed, describable=page_size is None)
    first = rank(workload.region, workload.sizes, on, ranked, allowed)
    own = () if decode or page_size or allowed < on.smem_bytes else _on_hopper(workload, on)
    gradients = rank_backward(workload.region, workload.sizes, on, allowed) if backward else ()
    notes = [ON_HOPPER] if own else []
    if decode and n < DECODE_KEYS:
        notes.append(f"With fewer than {DECODE_KEYS} keys they are not split: one program walks all keys of a head.")
    return Tiles(workload, on, allowed, (first, *own, *gradients), tuple(notes))


def _on_hopper(workload: Workload, device: Device) -> tuple[Ranking, ...]:
    """The one tile of the kernel for Hopper's tensor cores, where that is predicted to be faster than the portable."""
    from fusecomp.codegen.hopper_choice import planned

    plan = planned(workload.region, workload.sizes, device)
    return (rank_hopper(plan),) if plan is not None else ()


@dataclass(frozen=True)
class Tiles:
    """The ranked tiles of a workload on a device. Prints as a table; `to_dict()` is JSON."""

    workload: Workload
    device: Device
    budget: int
    """B of shared memory that one program may use."""
    rankings: tuple[Ranking, ...]
    """One for each kernel."""
    notes: tuple[str, ...] = ()
    rows: int | None = ROWS
    """Tiles of a ranking that are printed; None: all."""

    @property
    def best(self) -> Line:
        """The tile that is taken for the first kernel."""
        return self.rankings[0].taken

    def to_dict(self) -> dict[str, Any]:
        """Device, sizes and every tile. Bytes, FLOP, seconds."""
        hopper = [r for r in self.rankings if r.kernel == HOPPER_FORWARD]
        gradients = [r for r in self.rankings[1:] if r not in hopper]
        return {
            "device": self.device.name,
            "sizes": self.workload.sizes,
            "budget_bytes": self.budget,
            "kernel": self.rankings[0].kernel,
            "shares": self.rankings[0].shares,
            "tiles": [line.to_dict() for line in self.rankings[0].lines],
            **{r.kernel.replace(" ", "_"): [x.to_dict() for x in r.lines] for r in hopper},
            "backward": {r.kernel.replace(" ", "_"): [x.to_dict() for x in r.lines] for r in gradients},
            "notes": list(self.notes),
        }

    def equations(self) -> tuple[Equations, ...]:
        """Every equation behind the taken tile of each kernel whose time is predicted, with its value."""
        return tuple(map(self._equations, (r for r in self.rankings if r.taken.cost is not None)))

    def _equations(self, ranking: Ranking) -> Equations:
        t, w = ranking.taken.tile, self.workload
        head = f"{ranking.kernel}, {t.block_m} x {t.block_n}, {t.warps} warps, {t.stages} stages, on {self.device.name}"
        known = worked_out(w.region, w.sizes, self.device, ranking)
        return Equations(ranking.kernel, known, (head, _words(w.sizes)))

    def plot(self, path: str | Path) -> None:
        """Draw the Br x Bc map and the roofline into a .png, .svg or .pdf file. Needs matplotlib."""
        from fusecomp.plot import draw

        draw(self.workload, self.device, self.rankings[0], path)

    def __str__(self) -> str:
        return printed(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(str(self.workload.region).replace(" at workload", "", 1))
        yield Text(f"\non {_described(self.device)}")
        yield Text(_words(self.workload.sizes))
        for ranking in self.rankings:
            yield from self._kernel(ranking)
        for note in self.notes:
            yield Text(f"\n{note}", "yellow")
        what = "SRAM of a program, registers of a thread (+ spilled), HBM of the launch"
        yield Text(f"\n{what}; times are predicted", "dim")

    def _kernel(self, ranking: Ranking) -> RenderResult:
        best, within = ranking.taken.cost, f", within {held(self.budget)}" * (self.budget < self.device.smem_bytes)
        many = f"{len(ranking.lines)} {'tile' if len(ranking.lines) == 1 else 'tiles'} considered{within}"
        yield Text.assemble("\n", (ranking.kernel, "bold"), f": {many}")
        yield Padding(tile_table(ranking, self.rows), (1, 0, 0, 0))
        if rest := left_out(ranking, self.rows):
            yield Text(f"\n{rest}: --all", "dim")
        if best is not None:
            yield Text(f"\nHBM {size(best.hbm_bytes)}; unfused, with its scores stored, {size(best.unfused_hbm_bytes)}")
        if ranking.shares > 1:
            keys, pack = -(-self.workload.n // ranking.shares), ranking.taken.tile.pack
            together = f"; its {pack} query heads share a tile" if pack > 1 else ""
            yield Text(f"split-KV: {ranking.shares} shares of about {keys:,} keys a KV head, combined after{together}")


def _described(device: Device) -> str:
    tera = f"{device.flops_half / 1e12:,.0f} TFLOP/s in half precision, {device.hbm_rate / 1e12:.3g} TB/s"
    return f"{device.name}: {device.sms} multiprocessors, {held(device.smem_bytes)} of SRAM a program, {tera}"


def _words(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} = {number:,}" for name, number in numbers.items())


def io(n: int, d: int = 128, sram: int | str = 25000, dtype: str = "fp32") -> IO:
    """Compare what one head moves when its scores are stored, N d + N^2 elements, with tiles, N^2 d^2 / M.

    `n` keys and queries, `d` elements a row; `sram` is M, the on-chip memory of a program: elements where it is a plain
    number (25000), bytes where it has a unit ("100KB", K = 1024), which `dtype` makes elements. Both counts are the
    bounds of Dao et al. 2022, theorem 2, without their constants. OptionError for sizes below one.
    """
    name, width = element(dtype)
    return IO(Traffic(n, d, number_of_elements(sram, width), width), name)


@dataclass(frozen=True)
class IO:
    """The traffic of one head, in elements. Prints as a table; `to_dict()` is JSON."""

    traffic: Traffic
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """Elements, unless a name says bytes."""
        return {**self.traffic.to_dict(), "dtype": self.dtype}

    def __str__(self) -> str:
        return printed(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        t = self.traffic
        each = f"{self.dtype} ({t.width} B an element)"
        yield Text(f"one head of {t.n:,} keys and queries, d = {t.d}, {each}")
        yield Text(f"on chip: M = {t.on_chip:,} elements ({held(t.on_chip * t.width)}); largest tile {_tile(t)}\n")
        yield grid(_traffic_rows(t))


def _traffic_rows(t: Traffic) -> list[tuple[str, ...]]:
    rows = [
        ("standard", "N d + N^2", *_counted(t.standard, t.width), "scores stored"),
        ("tiled", "N^2 d^2 / M", *_counted(t.tiled, t.width), f"{t.saved:.2f}x less"),
    ]
    if (half := t.halved) is not None:
        grown = f"{half.tiled / t.tiled:.3g}x, with half the M; largest tile {_tile(half)}"
        rows.append(("tiled", "N^2 d^2 / (M/2)", *_counted(half.tiled, t.width), grown))
    return [*rows, ("scores", "N^2", *_counted(t.n**2, t.width), "what tiles never store")]


def _counted(elements: float, width: int) -> tuple[str, str]:
    return f"{elements:,.0f} elements", size(elements * width, 4)


def _tile(t: Traffic) -> str:
    return "none" if t.tile is None else f"{t.tile[0]} x {t.tile[1]}"


def kv(
    layers: int,
    hidden: int,
    tokens: int,
    dtype: str = "fp16",
    block: int = 16,
    max_context: int = 2048,
    memory: int | str | None = None,
) -> KV:
    """Compare a key-value cache that reserves whole contexts with one in blocks, and count the requests that fit.

    `hidden`: elements of the keys of one token in one layer, Hkv * D. A request holds `tokens` tokens, `max_context` at
    most; `block` tokens a block; `memory` for all requests, in B or as "24GB" (G = 1024^3). OptionError for sizes that
    make no cache.
    """
    name, width = element(dtype)
    room = None if memory is None else number_of_bytes(memory)
    return KV(CacheUse(KVCache(layers, hidden, width), tokens, max_context, block, room), name)


@dataclass(frozen=True)
class KV:
    """The memory of a key-value cache. Prints as a table; `to_dict()` is JSON."""

    use: CacheUse
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """Bytes, tokens, and shares of one."""
        return {**self.use.to_dict(), "dtype": self.dtype}

    def __str__(self) -> str:
        return printed(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        use, token = self.use, self.use.cache.token_bytes
        yield Text(f"{use.cache.layers} layers of keys and values, {use.cache.hidden:,} elements each, {self.dtype}")
        yield Text(f"one token: {token:,} B ({held(token)})")
        yield Text(f"one request: {use.tokens:,} of at most {use.context:,} tokens, {held(use.tokens * token)}\n")
        yield grid(_cache_rows(use))
        if use.memory is not None:
            d = use.to_dict()
            fit = f"{d['reserved_requests']:,} such requests reserved, {d['paged_requests']:,} in blocks"
            yield Text(f"\nin {held(use.memory)}: {fit}")


def _cache_rows(use: CacheUse) -> list[tuple[str, ...]]:
    d = use.to_dict()
    waste = f"{d['slots'] - use.tokens} free in the last block, {d['waste']:.1%}"
    reserved = f"{use.context:,} tokens", held(d["reserved_bytes"]), f"{d['reserved_utilisation']:.1%} used", ""
    paged = f"{d['slots']:,} tokens", held(d["paged_bytes"]), f"{d['paged_utilisation']:.1%} used"
    blocks = f"{d['blocks']} {'block' if d['blocks'] == 1 else 'blocks'} of {use.block}"
    return [("reserved", *reserved), (blocks, *paged, f"{d['saved']:.1f}x less; {waste}")]
