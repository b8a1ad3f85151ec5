"""Attention variants in plain PyTorch, timed against their peers on one GPU: same inputs, same run, checked first.

    python examples/bench/kernels.py [OUT.json] [--only causal,window]

Peers: eager, Inductor, FlexAttention, SDPA with cuDNN where it expresses the variant. Each is timed in short bursts
after an idle pause and back to back, in one order and in the reverse. A result that is off is not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fusecomp

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Variant:
    """One attention as a person writes it, and how FlexAttention says it."""

    name: str
    fn: Callable[..., Tensor]
    shape: tuple[int, int, int, int]
    """B, H, N, D."""
    share: float
    """Share of the N x N scores that count, for FLOP/s."""
    score_mod: Any = None
    mask_mod: Any = None
    sdpa: dict[str, Any] | None = None


def causal(n: int, device: torch.device) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


def plain_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def plain_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~causal(q.shape[-2], q.device), float("-inf")).softmax(-1) @ v


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 30 * torch.tanh(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) / 30)
    return scores.masked_fill(~causal(q.shape[-2], q.device), float("-inf")).float().softmax(-1).to(q.dtype) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads, n = q.shape[1], q.shape[2]
    slopes = torch.exp2(-8 * torch.arange(1, heads + 1, device=q.device) / heads)
    i = torch.arange(n, device=q.device)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + slopes[:, None, None] * (i[None, :] - i[:, None])
    return scores.masked_fill(i[None, :] > i[:, None], float("-inf")).float().softmax(-1).to(q.dtype) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2], device=q.device)
    age = i[:, None] - i[None, :]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~((age >= 0) & (age < 256)), float("-inf")).float().softmax(-1).to(q.dtype) @ v


def is_causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def in_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 256)


def capped(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 30 * torch.tanh(s / 30)


def sloped(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + torch.exp2(-8 * (h + 1) / 16) * (kv - q)


VARIANTS = [
    Variant("full D64", plain_full, (4, 16, 4096, 64), 1, sdpa={}),
    Variant("full D128", plain_full, (4, 16, 4096, 128), 1, sdpa={}),
    Variant("causal D128", plain_causal, (4, 16, 4096, 128), 0.5, None, is_causal, {"is_causal": True}),
    Variant("causal D64", plain_causal, (4, 16, 4096, 64), 0.5, None, is_causal, {"is_causal": True}),
    Variant("causal D256", plain_causal, (2, 8, 4096, 256), 0.5, None, is_causal, {"is_causal": True}),
    Variant("soft cap D64", soft_cap, (4, 16, 4096, 64), 0.5, capped, is_causal),
    Variant("ALiBi D64", alibi, (4, 16, 4096, 64), 0.5, sloped, is_causal),
    Variant("window 256 D64", window, (4, 16, 4096, 64), 0.5, None, in_window),
    Variant("document N18000 D128", plain_causal, (1, 8, 18000, 128), 0.5, None, is_causal, {"is_causal": True}),
]


def peers(variant: Variant, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Run]:
    """What is timed, by name."""
    n, fn = q.shape[2], variant.fn
    fast = torch.compile(fn, backend="fusecomp", dynamic=False)
    inductor = torch.compile(fn, dynamic=False)
    flex = torch.compile(flex_attention, dynamic=False)
    blocks = create_block_mask(variant.mask_mod, None, None, n, n, device=q.device) if variant.mask_mod else None
    found: dict[str, Run] = {
        "fusecomp": lambda: fast(q, k, v),
        "eager": lambda: fn(q, k, v),
        "inductor": lambda: inductor(q, k, v),
        "flex": lambda: flex(q, k, v, score_mod=variant.score_mod, block_mask=blocks),
    }
    if variant.sdpa is not None:
        found["cudnn"] = lambda: cudnn(q, k, v, variant.sdpa)
    return found


def cudnn(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def error(out: Tensor, exact: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((out.double() - exact).norm() / exact.norm())


def exact_head(variant: Variant, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first head of the first batch in float64; slopes depend on the number of heads, so ALiBi runs them all."""
    heads = slice(None) if variant.fn is alibi else slice(1)
    return variant.fn(*(x[:1, heads].double() for x in (q, k, v)))[:, :1]


def burst(run: Run) -> float:
    """Median milliseconds of about 15 ms of launches on a card that rested for 0.1 s."""
    time.sleep(0.1)
    return float(triton.testing.do_bench(run, warmup=3, rep=15, return_mode="median"))


def sustained(run: Run) -> float:
    """Median milliseconds of 0.1 s of launches back to back."""
    return float(triton.testing.do_bench(run, warmup=40, rep=100, return_mode="median"))


def peak(run: Run) -> float:
    """GiB allocated above what was held."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


def measure(variant: Variant) -> list[dict[str, Any]]:
    """One row a peer: check, then time in one order and in the other."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    fusecomp.reset()
    q, k, v = (torch.randn(variant.shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    runs, rows = peers(variant, q, k, v), {}
    exact = exact_head(variant, q, k, v)
    for name, run in runs.items():
        try:
            off = error(run()[:1, :1], exact)
        except (RuntimeError, torch._dynamo.exc.BackendCompilerFailed) as problem:
            rows[name] = {"error": f"{type(problem).__name__}: {str(problem)[:120]}"}
            continue
        rows[name] = {"relative_error": off, "peak_gib": peak(run)}
        if off > 0.02:
            rows[name]["error"] = "not timed: the result is off"
    del exact
    timed = [n for n in runs if "error" not in rows[n]]
    for protocol, clock in (("burst", burst), ("sustained", sustained)):
        samples = {n: [clock(runs[n])] for n in timed}
        for n in reversed(timed):
            samples[n].append(clock(runs[n]))
        for n in timed:
            rows[n][f"{protocol}_ms"] = sum(samples[n]) / 2
    b, h, n, d = variant.shape
    for row in rows.values():
        if "sustained_ms" in row:
            row["tflops"] = 4 * b * h * n * n * d * variant.share / row["sustained_ms"] / 1e9
    head = {"case": variant.name, "shape": variant.shape}
    return [{**head, "impl": name, **row} for name, row in rows.items()]


def machine() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": str(datetime.now(tz=UTC).date()),
        "command": "python examples/bench/kernels.py",
        "protocol": "burst: 0.1 s idle, then 15 ms; sustained: 0.1 s back to back; both orders, mean of two medians",
    }


def options(description: str | None) -> argparse.Namespace | None:
    """[OUT.json] and --only NAMES of a benchmark's command line; None where there is no GPU to time on."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", nargs="?", default="")
    parser.add_argument("--only", default="")
    chosen = parser.parse_args()
    if torch.cuda.is_available():
        return chosen
    print("no GPU: nothing is timed")
    return None


def main() -> None:
    chosen = options(__doc__)
    if chosen is None:
        return
    wanted = [w for w in chosen.only.split(",") if w]
    rows: list[dict[str, Any]] = []
    for variant in VARIANTS:
        if wanted and not any(w in variant.name for w in wanted):
            continue
        with torch.no_grad():
            rows += measure(variant)
        for row in (r for r in rows if r["case"] == variant.name):
            print({k: round(x, 4) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
        if chosen.out:
            Path(chosen.out).write_text(json.dumps({**machine(), "rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
