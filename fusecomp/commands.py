"""`fusecomp tiles`, `fusecomp io`, `fusecomp kv`: the functions of `calculator`, as a person types them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console

from fusecomp import calculator
from fusecomp.equations import Bounds, Equations
from fusecomp.errors import OptionError

Json = Annotated[bool, typer.Option("--json", help="print JSON")]


class Answer(Protocol):
    """What rich prints, and JSON."""

    def to_dict(self) -> dict[str, Any]: ...


def tiles(
    n: Annotated[int | None, typer.Option(help="keys (the context)")] = None,
    d: Annotated[int, typer.Option(help="head size of Q and K")] = 128,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or tf32")] = "bf16",
    device: Annotated[str | None, typer.Option(help="h100, l4 ... or a .toml file; default: the GPU, or h200")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="a query sees the keys up to its own")] = False,
    heads: Annotated[int, typer.Option(help="query heads")] = 16,
    batch: Annotated[int, typer.Option(help="batch size")] = 1,
    kv_heads: Annotated[int | None, typer.Option(help="key and value heads; default: as many as query heads")] = None,
    dv: Annotated[int | None, typer.Option(help="head size of V; default: that of Q and K")] = None,
    m: Annotated[int | None, typer.Option(help="query rows; default: as many as keys, 1 with --decode")] = None,
    window: Annotated[int | None, typer.Option(help="keys seen up to a query's own; not causal: also after it")] = None,
    softcap: Annotated[float | None, typer.Option(help="c tanh(s / c)")] = None,
    bias: Annotated[bool, typer.Option("--bias", help="add a bias tensor [H, M, N]")] = False,
    budget: Annotated[str | None, typer.Option(help="shared memory of one program: 98304, 100KB (K = 1024)")] = None,
    page_size: Annotated[int | None, typer.Option(help="keys and values lie in pages of so many tokens")] = None,
    decode: Annotated[bool, typer.Option("--decode", help="one query a request, its keys split over programs")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="also the kernels of the gradients")] = False,
    plot: Annotated[str | None, typer.Option(help="draw the Br x Bc map and the roofline: plan.png, .svg")] = None,
    equations: Annotated[bool, typer.Option("--equations", help="print every equation; with --n, its value")] = False,
    every: Annotated[bool, typer.Option("--all", help="list every tile, not the first dozen")] = False,
    as_json: Json = False,
) -> None:
    """Choose Br x Bc, warps and stages for attention of given sizes, and say why not another tile."""
    if n is None and equations:
        kernels = ["decode"] if decode else ["forward", *(["query gradient"] if backward else [])]
        return _say_all([Equations(kernel) for kernel in kernels], as_json)
    answer = calculator.tiles(
        _given(n), d, dtype, device, causal=causal, heads=heads, batch=batch, kv_heads=kv_heads, dv=dv, m=m,
        window=window, softcap=softcap, bias=bias, budget=budget, page_size=page_size, decode=decode, backward=backward,
    )  # fmt: skip
    if plot is not None:
        answer.plot(plot)
        answer = replace(answer, notes=(*answer.notes, f"Drawn into {plot}."))
    if equations:
        return _say_all(answer.equations(), as_json)
    return say(replace(answer, rows=None) if every else answer, as_json)


def io(
    n: Annotated[int | None, typer.Option(help="keys and queries of one head")] = None,
    d: Annotated[int, typer.Option(help="head size")] = 128,
    sram: Annotated[
        str, typer.Option(help="on-chip memory of one program: 25000 elements, or bytes as 100KB (K = 1024)")
    ] = "25000",
    dtype: Annotated[str, typer.Option(help="of the elements: fp32, bf16 ...")] = "fp32",
    symbolic: Annotated[bool, typer.Option("--symbolic", help="print the equations, with what they mean")] = False,
    as_json: Json = False,
) -> None:
    """Compare what one head moves when its scores are stored with the bound for tiles, N^2 d^2 / M."""
    say(Bounds() if symbolic else calculator.io(_given(n), d, sram, dtype), as_json)


def kv(
    layers: Annotated[int, typer.Option(help="layers")],
    hidden: Annotated[int, typer.Option(help="elements of the keys of one token in one layer: Hkv * D")],
    tokens: Annotated[int, typer.Option(help="tokens that a request holds")],
    dtype: Annotated[str, typer.Option(help="of the cache: fp16, bf16, fp8 ...")] = "fp16",
    block: Annotated[int, typer.Option(help="tokens of a block")] = 16,
    max_context: Annotated[
        int, typer.Option("--max-context", "--context", help="tokens that a request may hold at most")
    ] = 2048,
    memory: Annotated[str | None, typer.Option(help="memory for the cache, to count requests: 24GB (K = 1024)")] = None,
    as_json: Json = False,
) -> None:
    """Compare a key-value cache that reserves whole contexts with one in blocks."""
    say(calculator.kv(layers, hidden, tokens, dtype, block, max_context, memory), as_json)


def _given(n: int | None) -> int:
    if n is None:
        raise OptionError("give the number of keys: --n 4096")
    return n


def _say_all(answers: Sequence[Equations], as_json: bool) -> None:
    """One after the other; as JSON by kernel."""
    if as_json:
        print(json.dumps({x.kernel.replace(" ", "_"): x.to_dict() for x in answers}, indent=2, allow_nan=False))
    for answer in () if as_json else answers:
        say(answer, as_json)


def say(answer: Answer, as_json: bool) -> None:
    """In colour on a terminal, else as text of one width; or JSON."""
    if as_json:
        print(json.dumps(answer.to_dict(), indent=2, allow_nan=False))
        return
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(answer)
    else:
        print(answer)
