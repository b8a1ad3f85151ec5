"""Plans and costs from numbers alone, with no model: `fusecomp tiles`, `fusecomp io`, `fusecomp kv`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fusecomp.errors import OptionError
from fusecomp.report import seconds, size

ROWS = 12
"""Tiles that are listed; --all and --json have every one."""

UNITS = {"": 1, "b": 1, "kb": 1 << 10, "kib": 1 << 10, "mb": 1 << 20, "mib": 1 << 20, "gb": 1 << 30, "gib": 1 << 30}
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ "

Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def tiles(
    n: Annotated[int, typer.Option(help="keys")],
    d: Annotated[int, typer.Option(help="head size of Q and K")] = 128,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or tf32")] = "bf16",
    device: Annotated[str | None, typer.Option(help="h100, l4 ... or a .toml file; default: the GPU, or h200")] = None,
    causal: Annotated[bool, typer.Option(help="a query sees the keys up to its own")] = False,
    heads: Annotated[int, typer.Option(help="query heads")] = 16,
    batch: Annotated[int, typer.Option(help="batch size")] = 1,
    kv_heads: Annotated[int | None, typer.Option(help="key and value heads; default: as many as query heads")] = None,
    dv: Annotated[int | None, typer.Option(help="head size of V; default: that of Q and K")] = None,
    m: Annotated[int | None, typer.Option(help="query rows; default: as many as keys")] = None,
    window: Annotated[int | None, typer.Option(help="a query sees this many keys up to its own")] = None,
    softcap: Annotated[float | None, typer.Option(help="c tanh(s / c)")] = None,
    bias: Annotated[bool, typer.Option(help="add a bias tensor [H, M, N]")] = False,
    budget: Annotated[str | None, typer.Option(help="shared memory that one program may use: 98304, 96KB")] = None,
    every: Annotated[bool, typer.Option("--all", help="list every tile, not the first dozen")] = False,
    as_json: Json = False,
) -> None:
    """Choose Br x Bc, warps and stages for attention of given sizes, and say why not another tile."""
    from fusecomp.planning.device import current, find
    from fusecomp.planning.plan import table
    from fusecomp.planning.plan import tiles as ranked
    from fusecomp.planning.workload import Workload

    work = Workload(n, d, dtype, causal, heads, batch, kv_heads, dv, m, window, softcap, bias)
    on = find(device) if device else current()
    rows = table(ranked(work, on, number_of_bytes(budget) if budget else None))
    if as_json:
        print(json.dumps({"device": on.name, "sizes": work.sizes, "tiles": rows}, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"{work.region}\n\non {on.name}, {_words(work.sizes)}\n", markup=False)
    console.print(_table(rows if every else rows[:ROWS]))
    if len(rows) > ROWS and not every:
        console.print(f"\n{len(rows) - ROWS} more with --all")


def _words(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} = {number}" for name, number in numbers.items())


def _table(rows: list[dict[str, Any]]) -> Table:
    """A row for each tile, the chosen one first."""
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in ("Br", "Bc", "warps", "stages", "shared memory", "registers", "HBM"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    for r in rows:
        shape = [str(r[k]) for k in ("block_m", "block_n", "warps", "stages")]
        cost = [f"{r['smem_bytes']} B", str(r["registers"]), size(r["hbm_bytes"])]
        taken = f"taken: {seconds(r['seconds'])} predicted, limited by {r['bound']}"
        table.add_row(*shape, *cost, r["reason"] or taken, style="" if r["reason"] else "bold green")
    return table


def io(
    n: Annotated[int, typer.Option(help="keys and queries of one head")],
    d: Annotated[int, typer.Option(help="head size")] = 128,
    sram: Annotated[str, typer.Option(help="on-chip memory of one program: 98304, 96KB")] = "96KB",
    width: Annotated[int, typer.Option(help="bytes of an element")] = 2,
    as_json: Json = False,
) -> None:
    """Compare what one head moves when its scores are stored with the bound for tiles, N^2 d^2 / M."""
    from fusecomp.planning.textbook import flash_bound, score_bytes, standard_hbm_elements

    on_chip = number_of_bytes(sram) // width
    if n < 1 or d < 1 or on_chip < 1:
        raise OptionError(f"--n, --d and --sram must be at least one; got n {n}, d {d}, {on_chip} elements on chip")
    numbers = {
        "standard_elements": standard_hbm_elements(n, d),
        "tiled_elements": flash_bound(n, d, on_chip),
        "on_chip_elements": on_chip,
        "score_bytes": score_bytes(n, width),
    }
    words = {
        "standard: N d + N^2": f"{numbers['standard_elements']:,} elements",
        "tiled: N^2 d^2 / M": f"{numbers['tiled_elements']:,.0f} elements, with M = {on_chip:,} on chip",
        "scores, were they stored": f"{size(numbers['score_bytes'])} a head",
    }
    _say(numbers, words, as_json)


def kv(
    layers: Annotated[int, typer.Option(help="layers")],
    hidden: Annotated[int, typer.Option(help="elements of the keys of one token in one layer: Hkv * D")],
    tokens: Annotated[int, typer.Option(help="tokens that a request holds")],
    context: Annotated[int, typer.Option(help="tokens that a request may hold at most")] = 2048,
    block: Annotated[int, typer.Option(help="tokens of a block")] = 16,
    width: Annotated[int, typer.Option(help="bytes of an element")] = 2,
    memory: Annotated[str | None, typer.Option(help="memory for the cache: 24GB")] = None,
    as_json: Json = False,
) -> None:
    """Compare a key-value cache that reserves whole contexts with one in blocks."""
    from fusecomp.planning.textbook import KVCache, utilisation

    given = {"layers": layers, "hidden": hidden, "tokens": tokens, "context": context, "block": block, "width": width}
    if min(given.values()) < 1 or tokens > context:
        raise OptionError(f"all numbers must be at least 1, and tokens at most the context; got {_words(given)}")
    cache = KVCache(layers, hidden, width)
    used, reserved = cache.paged(tokens, block), cache.reserved_bytes(context)
    numbers: dict[str, Any] = {
        "token_bytes": cache.token_bytes,
        "reserved_bytes": reserved,
        "reserved_utilisation": utilisation(tokens, context),
        "blocks": used.blocks,
        "paged_bytes": used.bytes,
        "paged_utilisation": used.utilisation,
    }
    words = {
        "one token": size(cache.token_bytes),
        f"a request, {context} tokens reserved": f"{size(reserved)}, {numbers['reserved_utilisation']:.1%} used",
        f"a request, {used.blocks} blocks of {block}": f"{size(used.bytes)}, {used.utilisation:.1%} used",
    }
    if memory is not None:
        room = number_of_bytes(memory)
        numbers |= {"reserved_requests": room // reserved, "paged_requests": cache.requests(room, tokens, block)}
        fit = f"{numbers['reserved_requests']} reserved, {numbers['paged_requests']} in blocks"
        words[f"requests in {memory}"] = fit
    _say(numbers, words, as_json)


def _say(numbers: dict[str, Any], words: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(numbers, indent=2))
        return
    table = Table.grid(padding=(0, 2))
    for what, how in words.items():
        table.add_row(what, how)
    Console(highlight=False).print(table)


def number_of_bytes(text: str) -> int:
    """ "96KB" -> 98304; powers of 1024, as on-chip memory is counted."""
    number = text.rstrip(LETTERS)
    unit = text[len(number) :].strip().lower()
    if not number.isdecimal() or unit not in UNITS or int(number) == 0:
        raise OptionError(f"bytes are written 98304 or 96KB; got {text!r}")
    return int(number) * UNITS[unit]
