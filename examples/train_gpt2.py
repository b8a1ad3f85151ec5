"""Training a GPT-2 small, in plain PyTorch, on the one library that every reader of this has: Python's own.

    python examples/train_gpt2.py            a GPU, some minutes: loss curves, then time and memory by length
    python examples/train_gpt2.py --small    a CPU, some seconds: two small layers, the loss curves alone

With `--json OUT --plot PNG` what was measured becomes a record and a picture; `--parts`, `--lengths` choose from it.
Attention is the four lines that textbooks have: product, mask, softmax with dropout, product. Nothing below knows of
fusecomp but the word `backend`. Each layer is compiled by itself, so that twelve equal layers take the time of one.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as fn

import fusecomp

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
console = Console()

# ---- The model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A transformer's measures: causal, or reading all of each row up to its length."""

    name: str
    layers: int
    heads: int
    width: int
    causal: bool = True
    dropout: float = 0.1


GPT2_SMALL = Shape("GPT-2 small", 12, 12, 768)
BERT_LARGE = Shape("BERT large", 24, 16, 1024, causal=False)
TINY = Shape("a tiny GPT-2", 2, 2, 64)


class Attention(nn.Module):
    """softmax(mask(q k^T / sqrt(D))) v, with dropout of the weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.shape.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        i = torch.arange(x.shape[1], device=x.device)
        seen = i[:, None] >= i if self.shape.causal else i < lengths[:, None, None, None]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return self.out((self.drop(weights) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, then an MLP, each added to what comes in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.first(x), lengths))
        return x + self.drop(self.down(fn.gelu(self.up(self.second(x)))))


class Transformer(nn.Module):
    """Bytes to logits of bytes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, shape.width)
        self.places = nn.Embedding(16384, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width)
        for p in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, lengths)
        return self.last(x) @ self.tokens.weight.T


# ---- The text --------------------------------------------------------------------------------------------------


def library() -> Tensor:
    """The source of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


Batch = tuple[Tensor, Tensor, Tensor]
"""Tokens [B, N], what they should have been, and how many of each row count."""


def batch(text: Tensor, shape: Shape, b: int, n: int, step: int) -> Batch:
    """The same for the same step: the next byte of b random passages; or every seventh byte, blotted out."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - n - 1, (b,), generator=random)
    passages = torch.stack([text[s : s + n + 1] for s in starts.tolist()]).long().to(DEVICE)
    if shape.causal:
        return passages[:, :-1], passages[:, 1:], torch.full((b,), n, device=DEVICE)
    lengths = torch.randint(n // 2, n + 1, (b,), generator=random).to(DEVICE)
    blotted = torch.arange(n, device=DEVICE) % 7 == 0
    asked = blotted & (torch.arange(n, device=DEVICE) < lengths[:, None])
    return passages[:, :-1].masked_fill(blotted, 0), passages[:, :-1].masked_fill(~asked, -100), lengths


# ---- Training --------------------------------------------------------------------------------------------------


class Trainer:
    """A model and its optimiser under one backend; every trainer begins from the same weights."""

    def __init__(self, shape: Shape, backend: str, seed: int = 0) -> None:
        torch._dynamo.reset()
        fusecomp.reset()
        torch.manual_seed(0)
        self.model = Transformer(shape).to(DEVICE)
        options = {} if CUDA or backend != "fusecomp" else {"inner": "aot_eager"}  # which needs no C++ compiler
        for layer in self.model.layers if backend != "eager" else ():
            layer.compile(backend=backend, options=options or None, dynamic=False)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), 3e-4, (0.9, 0.95), fused=CUDA)
        torch.manual_seed(seed)  # of the dropout

    def step(self, given: Batch) -> Tensor:
        tokens, targets, lengths = given
        with torch.autocast(DEVICE, torch.bfloat16) if CUDA else nullcontext():
            logits = self.model(tokens, lengths)
        loss = fn.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.detach()


def curve(text: Tensor, shape: Shape, b: int, n: int, steps: int, backend: str, seed: int = 0) -> list[float]:
    """The loss of every step."""
    trainer = Trainer(shape, backend, seed)
    each = track(range(steps), f"{shape.name}, {backend}", console=console, transient=True)
    losses = [trainer.step(batch(text, shape, b, n, i)) for i in each]
    if backend == "fusecomp":
        assert fusecomp.counters()["fused"] == 1, fusecomp.counters()  # one graph serves all layers
    return [round(x, 5) for x in torch.stack(losses).tolist()]


def apart(a: Sequence[float], b: Sequence[float]) -> float:
    """How far two curves lie apart at their end: the difference of their means over the last quarter."""
    last = slice(-len(a) // 4, None)
    return abs(mean(a[last]) - mean(b[last]))


def curves(text: Tensor, shape: Shape, b: int, n: int, steps: int) -> dict[str, Any]:
    """Eager, eager with other dropout, and fusecomp, which may differ from the first as much as the second does."""
    runs = (("eager", 0), ("eager", 1), ("fusecomp", 0))
    eager, other, fused = (curve(text, shape, b, n, steps, *run) for run in runs)
    noise, difference = apart(eager, other), apart(eager, fused)
    console.print(f"{shape.name}, {b} x {n} bytes: loss {eager[0]:.3f} -> {eager[-1]:.3f}, fusecomp {fused[-1]:.3f}")
    console.print(f"    apart by {difference:.4f} at the end, two seeds of eager by {noise:.4f}")
    assert difference <= 3 * noise + 0.02, "fusecomp's loss is not eager's"
    losses = {"eager": eager, "eager, another seed": other, "fusecomp": fused}
    return {"shape": asdict(shape), "b": b, "n": n, "losses": losses, "apart": difference, "noise": noise}


# ---- Time and memory -------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A step under one backend; None where its memory did not suffice."""

    model: str
    b: int
    n: int
    backend: str
    ms: float | None = None
    peak_gib: float | None = None
    first_s: float | None = None
    fused: int = 0  # one attention stands for all layers


def seconds(trainer: Trainer, given: Batch) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    trainer.step(given).item()
    return time.perf_counter() - began


def measured(text: Tensor, shape: Shape, b: int, n: int, backend: str) -> Row:
    """Median milliseconds of seven steps, the peak of memory, and seconds to the end of the first step."""
    gc.collect()
    torch.cuda.empty_cache()
    row, trainer = Row(shape.name, b, n, backend), Trainer(shape, backend)
    try:
        row.first_s = seconds(trainer, batch(text, shape, b, n, 0))
        torch.cuda.reset_peak_memory_stats()
        times = [seconds(trainer, batch(text, shape, b, n, i)) for i in range(1, 9)][1:]
        row.ms, row.peak_gib = 1e3 * median(times), torch.cuda.max_memory_allocated() / 2**30
        row.fused = fusecomp.counters()["fused"]
    except torch.OutOfMemoryError:
        console.print(f"{backend}: out of memory at {b} x {n}")
    return row


def table(rows: Sequence[Row]) -> Table:
    found = Table("model", "B x N", "backend", "ms", "peak GiB", "first step, s", title="A training step, bfloat16")
    for r in rows:
        told = [f"{x:.1f}" if x is not None else "out of memory" for x in (r.ms, r.peak_gib, r.first_s)]
        found.add_row(r.model, f"{r.b} x {r.n}", r.backend, *told)
    return found


def plot(path: str, training: dict[str, Any] | None, rows: Sequence[Row]) -> None:
    """Loss by step; milliseconds and memory by length."""
    import matplotlib.pyplot as plt

    panels = 3 if rows else 1
    figure, axes = plt.subplots(1, panels, figsize=(5 * panels, 4.5), layout="constrained", squeeze=False)
    for name, losses in (training["losses"] if training else {}).items():
        axes[0, 0].plot(losses, label=name, linewidth=1)
    axes[0, 0].set(xlabel="step", ylabel="nats a byte", title="Loss")
    for axis, what, title in zip(axes[0, 1:], ("ms", "peak_gib"), ("A step, ms", "Peak memory, GiB"), strict=False):
        for backend in dict.fromkeys(r.backend for r in rows):
            mine = [r for r in rows if r.backend == backend and r.model == GPT2_SMALL.name and r.ms is not None]
            axis.plot([r.n for r in mine], [getattr(r, what) for r in mine], "o-", label=backend)
        axis.set(xlabel="length N, as many bytes in each step", title=title)
    for axis in axes.flat:
        axis.legend()
    figure.savefig(path, dpi=150, metadata={"Software": None})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="what a CPU trains in seconds")
    parser.add_argument("--parts", default="curve,lengths,bert")
    parser.add_argument("--lengths", default="1024,2048,4096,16384", help="of the steps that are timed")
    parser.add_argument("--backends", default="eager,inductor,fusecomp", help="of the steps that are timed")
    parser.add_argument("--bytes", type=int, default=1 << 14, help="of each step that is timed, B times N")
    parser.add_argument("--json", default="")
    parser.add_argument("--plot", default="")
    return parser.parse_args()


def main() -> None:
    """Train, compare, and measure where there is a GPU."""
    chosen, text, rows, training = arguments(), library(), list[Row](), None
    torch.set_float32_matmul_precision("high")
    small, parts = chosen.small or not CUDA, chosen.parts.split(",")
    if "curve" in parts:
        shape, b, n, steps = (TINY, 8, 64, 40) if small else (GPT2_SMALL, 8, 1024, 100)
        training = curves(text, shape, b, n, steps)
    cases = [(GPT2_SMALL, int(n)) for n in chosen.lengths.split(",") if "lengths" in parts]
    cases += [(BERT_LARGE, 512)] if "bert" in parts else []
    for shape, n in cases if not small else ():
        rows += [measured(text, shape, chosen.bytes // n, n, backend) for backend in chosen.backends.split(",")]
    console.print(table(rows) if rows else "no step was timed")
    if chosen.plot:
        plot(chosen.plot, training, rows)
    if chosen.json:
        record = {"device": torch.cuda.get_device_name() if CUDA else "cpu", "torch": torch.__version__,
                  "triton": triton.__version__, "date": str(datetime.now(tz=UTC).date()),
                  "command": " ".join(["python", *sys.argv]), "training": training,
                  "rows": [asdict(r) for r in rows]}  # fmt: skip
        Path(chosen.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
