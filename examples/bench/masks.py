"""Masks passed as data, timed with the table of tiles they leave and without, against their peers on one GPU.

    python examples/bench/masks.py [OUT.json] [--only "D64 N4096 bool"]

A program is compiled once for each shape and takes every mask. Every result is checked against float64 before it is
timed; `table_ms` is what the table alone costs, once for all layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from options import options
from torch import Tensor

import fusecomp
from fusecomp.bench.inputs import relative
from fusecomp.bench.record import machine
from fusecomp.bench.timing import PROTOCOLS, Launch, median, peak
from fusecomp.planning import visits as planned
from fusecomp.running import visits

Run = Callable[[], Tensor]
B, H = 4, 16
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """One shape: what a mask hides is data."""

    n: int
    d: int
    each: bool = False
    """A mask for each sequence, [B, 1, N, N], rather than [1, 1, N, N]."""
    added: bool = False
    """Added to the scores, hidden keys at finfo.min, rather than boolean."""
    layers: int = 1

    @property
    def name(self) -> str:
        kind, of = "added" if self.added else "bool", "B" if self.each else "1"
        return f"D{self.d} N{self.n} {kind} [{of},1,N,N], layers: {self.layers}"


CASES = [
    Case(4096, 64), Case(4096, 64, each=True), Case(4096, 64, each=True, added=True), Case(4096, 64, layers=8),
    Case(4096, 128), Case(8192, 64),
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# Masks: [B or 1, 1, N, N], True where the query sees the key


def causal(n: int, b: int) -> Tensor:
    return torch.ones(b, 1, n, n, dtype=torch.bool, device="cuda").tril()


def padding(n: int, b: int) -> Tensor:
    """Keys up to a random length of each sequence."""
    lengths = torch.randint(n // 8, n, (b, 1, 1, 1), device="cuda")
    return (torch.arange(n, device="cuda") < lengths).expand(b, 1, n, n).contiguous()


def window(n: int, b: int) -> Tensor:
    return causal(n, b) & ~torch.ones(b, 1, n, n, dtype=torch.bool, device="cuda").tril(-256)


def documents(n: int, b: int) -> Tensor:
    """Packed: causal inside documents of random lengths, 512 on average."""
    ends = torch.rand(b, 1, n, device="cuda") < 1 / 512
    label = ends.cumsum(-1)
    return causal(n, b) & (label[..., :, None] == label[..., None, :])


def blocks(n: int, b: int) -> Tensor:
    """A quarter of all blocks of 128 x 128, at random, and the diagonal."""
    tiles = (torch.rand(b, 1, n // 128, n // 128, device="cuda") < 0.25) | torch.eye(n // 128, device="cuda").bool()
    return tiles.repeat_interleave(128, -1).repeat_interleave(128, -2)


def full(n: int, b: int) -> Tensor:
    return torch.ones(b, 1, n, n, dtype=torch.bool, device="cuda")


MASKS = [causal, padding, window, documents, blocks, full]


# ----------------------------------------------------------------------------------------------------------------
# Programs


def boolean(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask).softmax(-1) @ v


def program(case: Case, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`layers` attentions of one mask, each of the last one's output."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        for _ in range(case.layers):
            q = attend(q, k, v, mask)
        return q

    return run


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def compiled(fn: Callable[..., Tensor], share: float, args: Sequence[Tensor]) -> Callable[..., Tensor]:
    """`fn` by fusecomp where a table may take `share` of the time. An option tells Dynamo's caches apart."""
    fast = torch.compile(fn, backend="fusecomp", dynamic=False, options={"strict": True, "tune": int(share > 0)})
    kept, planned.SHARE = planned.SHARE, share
    try:
        fast(*args)
    finally:
        planned.SHARE = kept
    return fast


def table(run: Run) -> Run | None:
    """What makes the table of a program, alone; None where it has none."""
    found: list[Run] = []

    def listening(make: visits.ListVisits) -> visits.ListVisits:
        def listen(masks: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
            found.append(lambda: make(masks, sizes))
            return make(masks, sizes)

        return listen

    kept = dict(visits.TABLES)
    visits.TABLES.update({name: listening(make) for name, make in kept.items()})
    try:
        run()
    finally:
        visits.TABLES.update(kept)
    return found[0] if found else None


# ----------------------------------------------------------------------------------------------------------------
# Measurements


def measure(case: Case) -> list[dict[str, Any]]:
    """Rows of every mask: check, then time in one order and in the other."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    fusecomp.reset()
    b = B if case.each else 1
    q, k, v = (torch.randn(B, H, case.n, case.d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attend = added if case.added else boolean
    fn, sdpa = program(case, attend), program(case, by_sdpa)
    first = form(case, causal(case.n, b))
    inductor = torch.compile(fn, dynamic=False)
    programs: dict[str, Callable[..., Tensor]] = {
        "fusecomp": compiled(fn, planned.SHARE, (q, k, v, first)),
        "fusecomp without a table": compiled(fn, 0.0, (q, k, v, first)),
        "eager": fn,
        "inductor": inductor,
        "sdpa": sdpa,
    }
    rows: list[dict[str, Any]] = []
    for mask in MASKS:
        made = mask(case.n, b)
        head = {"case": case.name, "mask": mask.__name__, "shape": [B, H, case.n, case.d], "layers": case.layers,
                "shown": float(made.float().mean())}  # fmt: skip
        rows += [{**head, **row} for row in times(case, programs, (q, k, v), form(case, made))]
    return rows


def form(case: Case, mask: Tensor) -> Tensor:
    """The mask as the program takes it."""
    if not case.added:
        return mask
    return torch.zeros(mask.shape, dtype=torch.bfloat16, device="cuda").masked_fill(
        ~mask, torch.finfo(torch.bfloat16).min
    )


def sustained(run: Run) -> float:
    """ms, of launches back to back."""
    return median(Launch(run), PROTOCOLS["sustained"], CUDA)


def times(
    case: Case, programs: dict[str, Callable[..., Tensor]], args: tuple[Tensor, ...], mask: Tensor
) -> list[dict[str, Any]]:
    """A row for each program on one mask."""
    one = [x[:1, :1].double() for x in args]
    exact = programs["eager"](*one, mask[:1].double() if mask.is_floating_point() else mask[:1])
    runs: dict[str, Run] = {name: (lambda p=p: p(*args, mask)) for name, p in programs.items()}  # type: ignore[misc]
    rows: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        off = float(relative(run()[:1, :1], exact))
        rows[name] = {"relative_error": off, "peak_gib": (peak(run, CUDA) or 0) / 2**30}
        if off > 0.02 * math.sqrt(case.layers):
            rows[name]["error"] = "not timed: the result is off"
    timed = [n for n in runs if "error" not in rows[n]]
    samples = {n: [sustained(runs[n])] for n in timed}
    for n in reversed(timed):
        samples[n].append(sustained(runs[n]))
    for n in timed:
        rows[n]["sustained_ms"] = sum(samples[n]) / 2
    if (alone := table(runs["fusecomp"])) is not None:
        rows["fusecomp"]["table_ms"] = sustained(alone)
    return [{"impl": name, **row} for name, row in rows.items()]


def main() -> None:
    chosen = options(__doc__)
    if chosen is None:
        return
    about = machine() | {"command": "python examples/bench/masks.py", "protocol": "0.15 s back to back; both orders"}
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if chosen.only not in case.name:
            continue
        with torch.no_grad():
            found = measure(case)
        rows += found
        for row in found:
            print({k: round(x, 4) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
        if chosen.out:
            Path(chosen.out).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
