"""Decoding over a paged cache, written in plain PyTorch, against the memory floor and its peers on one GPU.

    python examples/bench/paged.py [OUT.json] [--only b64,ragged]

Everything is replayed from a CUDA graph, over enough copies of the inputs that none is found in L2. The floor is a
kernel that only reads as many bytes. Peers: eager and Inductor on the same function (the first case in two spellings);
SDPA on keys gathered beforehand (the gather is not timed). A result that is off is not timed.
"""

from __future__ import annotations

import inspect
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from options import options
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import fusecomp
from fusecomp.bench.record import machine

Run = Callable[[], Any]
Peer = Callable[["Inputs"], Run]
COLD = 512 * 2**20
"""B of inputs that one replay goes through, at least."""
WARM = 0.05
"""s of replays that are not timed: clocks rise again after a compilation."""


@dataclass(frozen=True)
class Case:
    """Requests of the given lengths, each with `queries` new tokens."""

    name: str
    lengths: Sequence[int]
    heads: int = 32
    kv_heads: int = 8
    d: int = 128
    page: int = 16
    queries: int = 1

    @property
    def bytes(self) -> int:
        """Of K and V, each read once."""
        return 4 * sum(self.lengths) * self.kv_heads * self.d


CASES = [
    Case("b64 ctx4096", [4096] * 64),
    Case("b32 ctx4096", [4096] * 32),
    Case("b1 ctx65536", [65536]),
    Case("b1 ctx16384", [16384]),
    Case("b1 ctx1024", [1024]),
    Case("ragged 64k + 63 x 1k", [65536] + [1024] * 63),
    Case("uniform, as many keys as ragged", [2032] * 64),
    Case("b64 ctx4096 page 128", [4096] * 64, page=128),
    Case("b64 ctx4096 4 queries", [4096] * 64, queries=4),
    Case("b16 ctx8192 32 KV heads", [8192] * 16, kv_heads=32),
    Case("b64 ctx4096 D64", [4096] * 64, d=64),
]


def decode(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """q [B, H, M, D]; pools [pages, page, KV heads, D]; the last query of a request sees all of its keys."""
    group, m = q.shape[1] // k_pool.shape[2], q.shape[2]
    k, v = (pool[table].flatten(1, 2).transpose(1, 2).repeat_interleave(group, 1) for pool in (k_pool, v_pool))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    last = lengths[:, None] - m + torch.arange(m, device=q.device)
    seen = torch.arange(k.shape[2], device=q.device) <= last[:, :, None]
    weights = scores.masked_fill(~seen[:, None], float("-inf")).float().softmax(-1).to(q.dtype)
    return weights @ v


def decode_in_place(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The same for q [B, H, D], heads left where the cache has them: products are einsums over [B, N, H, D]."""
    n, kv_heads, d = table.shape[1] * k_pool.shape[1], *k_pool.shape[2:]
    group = q.shape[1] // kv_heads
    k = k_pool[table.long()].view(len(q), n, kv_heads, d).repeat_interleave(group, 2)
    v = v_pool[table.long()].view(len(q), n, kv_heads, d).repeat_interleave(group, 2)
    scores = torch.einsum("bhd,bnhd->bhn", q, k) / d**0.5
    unseen = torch.arange(n, device=q.device) >= lengths[:, None, None]
    weights = scores.masked_fill(unseen, float("-inf")).float().softmax(-1).to(q.dtype)
    return torch.einsum("bhn,bnhd->bhd", weights, v)


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def all(self) -> tuple[Tensor, ...]:
        return self.q, self.k_pool, self.v_pool, self.table, self.lengths

    @property
    def one_query(self) -> tuple[Tensor, ...]:
        return self.q.squeeze(2), *self.all[1:]


def draw(case: Case) -> Inputs:
    """Pages in random order; a table as wide as the longest request."""
    pages = [-(-n // case.page) for n in case.lengths]
    order = torch.randperm(sum(pages), device="cuda", dtype=torch.int32)
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
    for row, mine in zip(table, order.split(pages), strict=True):
        row[: len(mine)] = mine
    shape = (sum(pages), case.page, case.kv_heads, case.d)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(len(pages), case.heads, case.queries, case.d, device="cuda", dtype=torch.bfloat16)
    return Inputs(q, k, v, table, torch.tensor(case.lengths, dtype=torch.int32, device="cuda"))


def exact(x: Inputs, request: int) -> Tensor:
    """One request in float64."""
    n = int(x.lengths[request])
    own = Inputs(x.q[request : request + 1].double(), x.k_pool, x.v_pool, x.table[request : request + 1],
                 x.lengths[request : request + 1])  # fmt: skip
    page = x.k_pool.shape[1]
    rows = own.table[0, : -(-n // page)].long()
    pools = [pool[rows].double() for pool in (x.k_pool, x.v_pool)]
    return decode(own.q, *pools, torch.arange(len(rows), device="cuda")[None], own.lengths)


def replayed(runs: Sequence[Run], repeats: int = 15) -> float:
    """Median microseconds of one run, of graphs of at least eight, on a device that has been at work for a while."""
    runs = [*runs] * -(-8 // len(runs))
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    begun = time.monotonic()
    while time.monotonic() - begun < WARM:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(runs) * 1e3)
    return statistics.median(times)


@triton.jit
def read(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def floor_us(size: int) -> float:
    """Microseconds of the fastest of a few kernels that read `size` bytes."""
    copies = max(2, -(-COLD // size))
    memory = [torch.randn(size // 2, device="cuda", dtype=torch.bfloat16) for _ in range(min(copies, 16))]
    found = []
    for block, programs in ((1024, 1056), (2048, 528), (4096, 528), (2048, 2112), (4096, 264)):
        kernel, out = read[(programs,)], torch.empty(programs, device="cuda")
        how = {"BLOCK": block, "num_warps": 8}
        found.append(replayed([partial(kernel, x, out, size // 2, **how) for x in memory]))
    return min(found)


def gathered(x: Inputs) -> Run:
    """SDPA on dense K and V."""
    k, v = (pool[x.table].flatten(1, 2).transpose(1, 2).contiguous() for pool in (x.k_pool, x.v_pool))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(x.q, k, v, enable_gqa=True)


def flex(x: Inputs) -> Run:
    """FlexAttention, its decoding kernel autotuned, on dense K and V."""
    k, v = (pool[x.table].flatten(1, 2).transpose(1, 2).contiguous() for pool in (x.k_pool, x.v_pool))
    attend = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")
    return lambda: attend(x.q, k, v, enable_gqa=True)


def varlen(x: Inputs) -> Run:
    """PyTorch's own attention over pages, where the installed one has it."""
    from torch.nn.attention.varlen import varlen_attn

    b, _, m, _ = x.q.shape
    starts = torch.arange(0, (b + 1) * m, m, dtype=torch.int32, device="cuda")
    most, q = int(x.lengths.max()), x.q.transpose(1, 2).flatten(0, 1)
    given: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": x.lengths, "block_table": x.table}
    attend = partial(varlen_attn, q, x.k_pool, x.v_pool, starts, None, m, most, **given)
    return lambda: attend().unflatten(0, (b, m)).transpose(1, 2)


def has_paged_varlen() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen_attn).parameters


def called(f: Callable[..., Tensor]) -> Peer:
    return lambda x: lambda: f(*x.all)


def with_one_query(f: Callable[..., Tensor]) -> Peer:
    return lambda x: lambda: f(*x.one_query).unsqueeze(2)


def spelled(f: Callable[..., Tensor], call: Callable[[Callable[..., Tensor]], Peer]) -> dict[str, Peer]:
    """One spelling of the function, run three ways."""
    compiled = {backend: torch.compile(f, backend=backend, dynamic=False) for backend in ("fusecomp", "inductor")}
    return {name: call(run) for name, run in (compiled | {"eager": f}).items()}


def measure(case: Case, slow: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    fusecomp.reset()
    sets = [draw(case) for _ in range(max(2, min(16, -(-COLD // case.bytes))))]
    peers: dict[str, Peer] = {"fusecomp": called(torch.compile(decode, backend="fusecomp", dynamic=False))}
    if len(set(case.lengths)) == 1 and case.queries == 1:
        peers["sdpa on gathered keys"] = gathered
    if has_paged_varlen():
        peers["varlen_attn"] = varlen
    if slow:
        peers |= {"flex on gathered keys": flex} | spelled(decode, called)
        peers |= {f"{name}, second spelling": p for name, p in spelled(decode_in_place, with_one_query).items()}
    rows = [{"case": case.name, "impl": "floor", "us": floor_us(case.bytes)}]
    checked = {r: exact(sets[0], r) for r in {0, len(case.lengths) - 1}}
    for name, peer in peers.items():
        try:
            first = peer(sets[0])()
        except RuntimeError as problem:
            rows.append({"case": case.name, "impl": name, "error": f"{type(problem).__name__}: {str(problem)[:120]}"})
            continue
        off = max(float((first[r].double() - e[0]).norm() / e.norm()) for r, e in checked.items())
        row: dict[str, Any] = {"case": case.name, "impl": name, "relative_error": off}
        rows.append(row)
        if not off < 0.02:
            row["error"] = "not timed: the result is off"
            continue
        used = sets[:1] if name.startswith(("inductor", "eager", "flex")) else sets
        row["us"] = replayed([peer(x) for x in used])
        row["tb_s"] = case.bytes / row["us"] / 1e6
        row["of_floor"] = rows[0]["us"] / row["us"]
    counted = fusecomp.counters()
    assert counted["fused"] == counted["candidates"], counted
    return rows


def main() -> None:
    chosen = options(__doc__)
    if chosen is None:
        return
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if chosen.only and not any(w in case.name for w in chosen.only.split(",")):
            continue
        with torch.no_grad():
            rows += measure(case, slow=case is CASES[0])
        for row in (r for r in rows if r["case"] == case.name):
            print({k: round(x, 4) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
        if chosen.out:
            head = {**machine(), "command": "python examples/bench/paged.py", "protocol": "CUDA-graph replay, cold L2"}
            Path(chosen.out).write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
