"""The forward kernel for Hopper's tensor cores beside the portable one and their peers, on one GPU, checked first.

    python examples/bench/hopper.py [OUT.json] [--only d=128,bias] [--seconds 90]

`fusecomp bench` times whole calls beside all peers; here are both kernels of each case, whichever a call would take,
and FlashAttention-3 where its wheel is installed and has the variant. All are replayed from CUDA graphs, so that no
host shows: bursts of about 15 ms after 0.1 s of idling, and back to back for 0.1 s, in one order and in the other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from compiling import compile_all, kernel
from launches import Inputs, Judge, inputs, run_of, source_of
from torch import Tensor
from workloads import Case

from fusecomp.bench.record import machine
from fusecomp.codegen.hopper import expresses, specialised
from fusecomp.planning.device import current
from fusecomp.planning.plan import plan
from fusecomp.planning.tile import TilePlan
from fusecomp.running import hopper

Run = Callable[[], Any]
CAUSAL = {"causal": True}
CASES = [
    *(Case(n=4096, batch=4, d=d, causal=c) for d in (64, 128) for c in (False, True)),
    *(Case(n=4096, batch=2, heads=8, d=256, causal=c) for c in (False, True)),
    *(Case(n=16384, causal=c) for c in (False, True)),
    Case(n=18000, heads=8, **CAUSAL),
    Case(n=4096, batch=2, heads=32, kv_heads=8, **CAUSAL),
    *(Case(n=1024, batch=16, causal=c) for c in (False, True)),
    *(Case(n=4000, batch=4, causal=c) for c in (False, True)),
    Case(n=4096, batch=4, softcap=30.0, **CAUSAL),
    *(Case(n=4096, batch=4, d=64, **CAUSAL, **more) for more in ({"softcap": 30.0}, {"alibi": True}, {"prefix": 1024})),
    *(Case(n=4096, batch=4, d=64, **CAUSAL, window=w) for w in (256, 512, 1024, 2048)),
    Case(n=4096, batch=4, d=64, documents=True, **CAUSAL),
    *(Case(n=4096, batch=4, d=d, bias=True, bias_axes=axes) for d in (64, 128) for axes in ("", "h", "bh")),
    Case(n=4096, batch=4, d=64, bias=True, **CAUSAL),
    *(Case(n=n, d=64, **CAUSAL) for n in (512, 1024, 2048)),
    *(Case(n=n, **CAUSAL) for n in (1024, 2048)),
    Case(n=4096, heads=8, **CAUSAL),
    *(Case(n=512, batch=8, d=d, **CAUSAL) for d in (64, 128)),
    Case(n=1024, batch=4, d=64, softcap=30.0, **CAUSAL),
    Case(n=2048, softcap=30.0, **CAUSAL),
    *(Case(n=4096, batch=4, window=w, **CAUSAL) for w in (256, 1024)),
    Case(n=128, batch=64, d=64, **CAUSAL),
]  # fmt: skip
EACH = 1.0
"""ms of launches in one graph, at least."""


PROTOCOL = (
    "CUDA graphs of about 1 ms; burst: 0.1 s idle, then 15 ms; sustained: 0.1 s back to back; both orders, mean of two "
    "medians; causal and masked shapes count half of all pairs"
)


def plans(case: Case) -> dict[str, TilePlan]:
    """The plan of each of the two kernels that has one."""
    portable = replace(plan(case.region, case.sizes), cost=None, rejected=())
    found = {"portable": portable}
    if expresses(case.region):
        found["hopper"] = specialised(case.region, replace(portable, visits="bounds"))
    return found


def runs(case: Case, x: Inputs) -> dict[str, Run]:
    """What is timed, by name; peers return their result."""
    found: dict[str, Run] = {name: run_of(source_of(case, tiles), x) for name, tiles in plans(case).items()}
    if fa3 := by_fa3(case, x):
        found["fa3"] = fa3
    return found


def by_fa3(case: Case, x: Inputs) -> Run | None:
    """FlashAttention-3 on the same numbers, [B, N, H, D], or None. Its wheel is built without windows."""
    other = case.alibi or case.bias or case.documents or case.prefix or case.window
    if other or find_spec("fa3_fwd_interface") is None:
        return None
    import fa3_fwd_interface

    q, k, v = (t.transpose(1, 2).contiguous() for t in x.tensors[:3])
    cap = {"softcap": case.softcap} if case.softcap else {}
    attend = fa3_fwd_interface.flash_attn_func
    return lambda: first(attend(q, k, v, causal=case.causal, **cap)).transpose(1, 2)


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def errors(case: Case, x: Inputs, named: Mapping[str, Run]) -> dict[str, float]:
    """The largest relative error of each, at some rows of some heads; infinite where anything at all is not finite."""
    judge, found = Judge(case, x), {}
    for name, run in named.items():
        judge.forget()
        result = run()
        if result is not None:
            x.out.copy_(result)
        found[name] = judge.error() if x.out.isfinite().all() else float("inf")
    return {name: error if error <= judge.allowed else float("inf") for name, error in found.items()}


def replayed(run: Run) -> tuple[Run, int]:
    """(a CUDA graph of some launches, how many)."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    count = max(1, min(16, round(EACH / begin.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return graph.replay, count


def burst(run: Run) -> float:
    """Median milliseconds of about 15 ms on a card that rested for 0.1 s."""
    time.sleep(0.1)
    return float(triton.testing.do_bench(run, warmup=3, rep=15, return_mode="median"))


def sustained(run: Run) -> float:
    """Median milliseconds of 0.1 s back to back."""
    return float(triton.testing.do_bench(run, warmup=40, rep=100, return_mode="median"))


def timed(named: Mapping[str, Run]) -> dict[str, dict[str, float]]:
    """Milliseconds of one launch by either protocol, mean of two."""
    found: dict[str, dict[str, float]] = {name: {} for name in named}
    graphs = {name: replayed(run) for name, run in named.items()}
    for protocol, clock in (("burst", burst), ("sustained", sustained)):
        for order in (list(graphs), list(reversed(graphs))):
            for name in order:
                graph, count = graphs[name]
                found[name][protocol] = found[name].get(protocol, 0.0) + clock(graph) / count / 2
    return found


def measure(case: Case) -> list[dict[str, Any]]:
    """A row each: which kernel runs by itself, errors, then milliseconds and TFLOP/s."""
    torch.manual_seed(0)
    x = inputs(case)
    named = runs(case, x)
    wrong = errors(case, x, named)
    times = timed({name: run for name, run in named.items() if wrong[name] < float("inf")})
    chosen = "hopper" if hopper.planned(case.region, case.sizes, current()) else "portable"
    flops = 4 * case.batch * case.heads * case.n**2 * case.d * (0.5 if case.causal else 1)
    rows = []
    for name, error in wrong.items():
        row: dict[str, Any] = {"case": case.given, "impl": name, "chosen": name == chosen, "error": error}
        for protocol, ms in times.get(name, {}).items():
            row |= {f"{protocol}_ms": float(f"{ms:.4g}"), f"{protocol}_tflops": float(f"{flops / ms / 1e9:.4g}")}
        rows.append(row)
    return rows


def summary(case: Case, rows: list[dict[str, Any]]) -> str:
    """A line: each by both protocols, ms and TFLOP/s."""
    parts = [f"{r['impl']}{'*' * r['chosen']} " + (
        f"{r['burst_ms']}/{r['sustained_ms']} ms {r['burst_tflops']:.0f}/{r['sustained_tflops']:.0f}"
        if "burst_ms" in r else f"WRONG {r['error']}"
    ) for r in rows]  # fmt: skip
    return f"{case.name}: " + "; ".join(parts)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default="")
    parser.add_argument("--only", default="", help="cases whose name holds one of these words")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after that")
    return parser.parse_args()


def main() -> None:
    chosen, begin = options(), time.monotonic()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("no Hopper GPU: nothing is timed")
        return
    cases = [c for c in CASES if not chosen.only or any(w in c.name for w in chosen.only.split(","))]
    wanted = {kernel(c, tiles): c for c in sorted(cases, key=lambda c: -c.n) for tiles in plans(c).values()}
    compile_all(wanted, begin + chosen.seconds)
    print(f"{time.monotonic() - begin:.0f} s  {len(wanted)} kernels are compiled", flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases:
        if time.monotonic() - begin > chosen.seconds:
            print("out of time")
            break
        found = measure(case)
        rows += found
        print(f"{time.monotonic() - begin:.0f} s  {summary(case, found)}", flush=True)
        if chosen.out:
            lines = ",\n  ".join(json.dumps(row) for row in rows)
            said = {"command": "python examples/bench/hopper.py", "protocol": PROTOCOL}
            head = json.dumps({**machine(), **said}, indent=1)
            Path(chosen.out).write_text(head.removesuffix("\n}") + f',\n "rows": [\n  {lines}\n ]\n}}\n')
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
