"""Continuous batching on a paged cache: many requests through one Llama-style model, each as if it ran alone.

    python examples/serving.py [--device cuda] [--requests 40]

Requests arrive over time and begin with one of two instructions, whose blocks they share; some ask for two replies,
which share their prompt until they part. There are fewer blocks than all of it needs: then a reply is swapped out to
the host and comes back later. The model is plain PyTorch; it is served uncompiled and compiled with fusecomp, and every
reply is held, token for token, against the same request alone, without a cache, in eager PyTorch.

Compare throughput on a GPU: on a CPU fusecomp runs PyTorch operators a sequence at a time, for checking.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import silu

import fusecomp
from fusecomp.errors import OutOfBlocks
from fusecomp.paged import PagedKVCache, Step

VOCAB, LAYERS, H, HKV, D = 512, 2, 8, 2, 32
BATCH, READERS, CHUNK = 12, 4, 32  # replies at once; prompts read at once, a piece at a time
BLOCKS, BLOCK, MAX_LEN = 110, 8, 256
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [B, M, H, D], k, v [B, M, Hkv, D]) -> [B, M, H, D]"""


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [B, M, heads, D] at its positions [B, M]."""
    rate = 10_000.0 ** (-torch.arange(0, D, 2, device=x.device) / D)
    angle = (positions[..., None] * rate)[:, :, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Layer(nn.Module):
    """Attention with grouped heads, then a gated feed-forward."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norms = nn.ModuleList(nn.RMSNorm(H * D) for _ in range(2))
        self.qkv = nn.Linear(H * D, (H + 2 * HKV) * D, bias=False)
        self.out = nn.Linear(H * D, H * D, bias=False)
        self.up, self.gate = (nn.Linear(H * D, 3 * H * D, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * H * D, H * D, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, D)).split([H, HKV, HKV], 2)
        x = x + self.out(attend(self.number, rotated(q, positions), rotated(k, positions), v).flatten(2))
        y = self.norms[1](x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Logits of the next token, [B, M, VOCAB]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H * D)
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))
        self.norm = nn.RMSNorm(H * D)
        self.head = nn.Linear(H * D, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return self.head(self.norm(x))


def causal(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without a cache."""
    k, v = (x.repeat_interleave(H // HKV, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.mT * D**-0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(future, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def paged(model: Llama, cache: PagedKVCache, tokens: Tensor, step: Step) -> Tensor:
    """The same model over the pages: all that changes is where keys and values are kept."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.write(layer, k, v, step)
        return cache.attend(layer, q, step)

    return model(tokens, step.positions, attend)


@dataclass(frozen=True)
class Request:
    """A prompt; `replies` replies of `length` tokens, the i-th of which begins with the i-th best token."""

    prompt: list[int]
    length: int
    replies: int
    arrival: int


def make_requests(count: int) -> list[Request]:
    draw = random.Random(0)
    instructions = [[draw.randrange(VOCAB) for _ in range(n)] for n in (70, 45)]
    return [
        Request([*draw.choice(instructions), *(draw.randrange(VOCAB) for _ in range(draw.randrange(5, 60)))],
                draw.randrange(8, 64), draw.choice((1, 1, 2)), 2 * i)
        for i in range(count)
    ]  # fmt: skip


def alone(model: Llama, request: Request, which: int) -> list[int]:
    """One reply, computed anew from the first token for each token."""
    tokens, device = list(request.prompt), model.head.weight.device
    for n in range(request.length):
        given = torch.tensor([tokens], device=device)
        logits = model(given, torch.arange(len(tokens), device=device)[None], causal)[0, -1]
        tokens.append(int(logits.argmax() if n else logits.topk(which + 1).indices[which]))
    return tokens[len(request.prompt) :]


# ----------------------------------------------------------------------------------------------------------------
# The server


@dataclass
class Reply:
    """One reply under way: its sequence in the cache, the tokens that it still has to read, what came out."""

    request: Request
    number: int
    which: int
    seq: int
    todo: list[int]
    out: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)  # appended for the step that is being built


@dataclass
class Server:
    """Serves requests on one cache; `run` is the model over pages, compiled or not."""

    cache: PagedKVCache
    run: Callable[[Tensor, Step], Tensor]
    replies: list[Reply] = field(default_factory=list)
    swapped: list[Reply] = field(default_factory=list)
    done: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    swaps: int = 0
    saved: int = 0
    waste: list[tuple[float, float]] = field(default_factory=list)  # in blocks, and were the longest reply reserved

    def serve(self, requests: list[Request], tick: Callable[[int], object] = lambda _: None) -> float:
        """All requests; the seconds it took."""
        waiting, now, begin = list(enumerate(requests)), 0, time.perf_counter()
        while waiting or self.replies or self.swapped:
            self.bring_back()
            while waiting and waiting[0][1].arrival <= now and not self.swapped and len(self.replies) < BATCH:
                number, request = waiting.pop(0)
                seq = self.cache.add(request.prompt)
                self.replies.append(Reply(request, number, 0, seq, request.prompt[self.cache.length(seq) :]))
            self.advance([r for r in self.replies if len(r.todo) > 1][:READERS], READERS, CHUNK)
            tick(self.advance([r for r in self.replies if len(r.todo) == 1][:BATCH], BATCH, 1))
            self.measure()
            self.retire()
            now += 1
        return time.perf_counter() - begin

    def advance(self, replies: list[Reply], rows: int, columns: int) -> int:
        """One step of the model: up to `columns` tokens of each of these. How many took part."""
        for reply in replies:
            self.append(reply, columns)
        ready = [r for r in replies if r.fed]  # making room may have swapped some out
        if not ready:
            return 0
        tokens = [r.fed + [0] * (columns - len(r.fed)) for r in ready] + [[0] * columns] * (rows - len(ready))
        step = self.cache.step([r.seq for r in ready], rows=rows, columns=columns)
        logits = self.run(torch.tensor(tokens, device=self.cache.device), step)
        last = logits[range(len(ready)), [len(r.fed) - 1 for r in ready]]
        for reply, best in zip(ready, last.topk(2).indices.tolist(), strict=True):
            reply.fed = []
            if not reply.todo:
                self.emit(reply, best)
        return len(ready)

    def append(self, reply: Reply, columns: int) -> None:
        """Give the cache the next tokens of a reply; while there are no blocks, the youngest reply is swapped out."""
        while reply in self.replies:
            try:
                self.cache.append(reply.seq, reply.todo[:columns])
            except OutOfBlocks:
                self.swap_out(self.replies[-1])
            else:
                reply.fed, reply.todo = reply.todo[:columns], reply.todo[columns:]
                return

    def swap_out(self, reply: Reply) -> None:
        self.cache.truncate(reply.seq, self.cache.length(reply.seq) - len(reply.fed))
        reply.fed, reply.todo = [], reply.fed + reply.todo
        self.cache.swap_out(reply.seq)
        self.replies.remove(reply)
        self.swapped.append(reply)
        self.swaps += 1

    def bring_back(self) -> None:
        """Swap in what has room, the oldest first."""
        while self.swapped and len(self.replies) < BATCH:
            try:
                self.cache.swap_in(self.swapped[-1].seq)
            except OutOfBlocks:
                return
            self.replies.append(self.swapped.pop())

    def emit(self, reply: Reply, best: list[int]) -> None:
        """The next token; after the prompt, a second reply on the same blocks if two were asked for."""
        if not reply.out and reply.request.replies == 2:
            seq = self.cache.fork(reply.seq)
            self.replies.append(Reply(reply.request, reply.number, 1, seq, [best[1]], [best[1]]))
        reply.out.append(best[0])
        reply.todo = [best[0]]

    def measure(self) -> None:
        used = self.cache.usage()
        self.saved = max(self.saved, used.saved)
        if self.replies:
            held = sum(self.cache.length(r.seq) for r in self.replies)
            self.waste.append((used.waste, 1 - held / (MAX_LEN * len(self.replies))))

    def retire(self) -> None:
        for reply in [r for r in self.replies if len(r.out) >= r.request.length]:
            self.done[reply.number, reply.which] = reply.out
            self.cache.free(reply.seq)
            self.replies.remove(reply)


def server_of(model: Llama, how: str) -> Server:
    """A server with a cache of its own; the model over pages as it is, or compiled."""
    device = model.head.weight.device
    cache = PagedKVCache(layers=LAYERS, kv_heads=HKV, head_dim=D, num_blocks=BLOCKS, block_size=BLOCK, max_seqs=BATCH,
                         max_len=MAX_LEN, max_tokens=READERS * CHUNK, device=device)  # fmt: skip
    options = {} if device.type == "cuda" else {"inner": "aot_eager"}  # no C++ compiler needed for the rest
    model_over_pages = torch.compile(paged, backend="fusecomp", options=options) if how == "fusecomp" else paged
    return Server(cache, lambda tokens, step: model_over_pages(model, cache, tokens, step))


def show(console: Console, servers: dict[str, tuple[Server, float]]) -> None:
    table = Table(title="Served")
    for column in ("", "tokens", "tokens/s", "waste in blocks", "waste if reserved", "blocks saved", "swapped out"):
        table.add_column(column, justify="right")
    for how, (server, seconds) in servers.items():
        tokens = sum(map(len, server.done.values()))
        waste = [f"{sum(x) / len(x):.1%}" for x in zip(*server.waste, strict=True)]
        table.add_row(how, str(tokens), f"{tokens / seconds:.0f}", *waste, str(server.saved), str(server.swaps))
    console.print(table)


@torch.no_grad()
def main() -> None:
    """Serve, compare, show."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=16)
    given = parser.parse_args()
    torch.manual_seed(0)
    model, requests, console = Llama().to(given.device).eval(), make_requests(given.requests), Console()
    total = sum(r.length * r.replies for r in requests)
    servers = {}
    with Progress(console=console) as progress:
        for how in ("eager", "fusecomp"):
            server = server_of(model, how)
            server_of(model, how).serve(requests[:1])  # what is compiled is compiled here
            task = progress.add_task(how, total=total - sum(r.replies for r in requests))
            seconds = server.serve(requests, lambda tokens, task=task: progress.advance(task, tokens))
            servers[how] = server, seconds
        task = progress.add_task("each alone", total=total)
        for (number, which), reply in servers["fusecomp"][0].done.items():
            expected = alone(model, requests[number], which)
            assert reply == expected == servers["eager"][0].done[number, which], (number, which, reply, expected)
            progress.advance(task, len(reply))
    show(console, servers)
    assert fusecomp.counters() == {"candidates": 2 * LAYERS, "fused": 2 * LAYERS, "declined": 0, "fallbacks": 0}
    print(f"{len(servers['fusecomp'][0].done)} replies, each equal, token for token, to its request alone")


if __name__ == "__main__":
    main()
