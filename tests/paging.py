"""A small paged cache filled with keys and values that say what they belong to, and dense attention beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusecomp.paged import PagedKVCache

H, HKV, D, DV, BLOCK = 6, 2, 16, 24, 4
INF = float("inf")


def cache_of(**sizes: Any) -> PagedKVCache:
    given = {"layers": 2, "kv_heads": HKV, "head_dim": D, "v_head_dim": DV, "num_blocks": 40, "block_size": BLOCK}
    return PagedKVCache(**{**given, "max_seqs": 5, "max_len": 40, **sizes})


def told(layer: int, seq: list[int], width: int) -> Tensor:
    """A key or value of each token that says the layer, and the tokens up to it. [N, Hkv, width]."""
    made = []
    for n in range(len(seq)):
        seed = hash((layer, width, *seq[: n + 1])) % 2**31
        made.append(torch.randn(HKV, width, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(made) if made else torch.zeros(0, HKV, width)


def queries(seq: list[int]) -> Tensor:
    """[N, H, D]."""
    return told(7, seq, D * H // HKV).reshape(-1, H, D)


def run(
    cache: PagedKVCache,
    seqs: dict[int, list[int]],
    attend: Callable[..., Tensor] | None = None,
    columns: int | None = None,
    rows: int | None = None,
    tokens: int = 0,
    **variant: Any,
) -> dict[int, Tensor]:
    """One step of what is pending, on both layers; the attention of layer 1 for each sequence's new tokens."""
    new = {seq: cache.pending(seq) for seq in seqs}
    step = cache.step(list(seqs), rows=rows, columns=columns, tokens=tokens)

    def laid(x: dict[int, Tensor]) -> Tensor:
        """The new tokens' rows of x where the step has them, NaN elsewhere."""
        flat = torch.full((step.slot_mapping.numel(), *next(iter(x.values())).shape[1:]), float("nan"))
        for row, (seq, count) in enumerate(new.items()):
            at = row * columns if columns else sum(list(new.values())[:row])
            flat[at : at + count] = x[seq][-count:] if count else flat[:0]
        return flat.view(*step.slot_mapping.shape, *flat.shape[1:])

    for layer in range(len(cache.keys)):
        k = laid({s: told(layer, t, D) for s, t in seqs.items()})
        cache.write(layer, k, laid({s: told(layer, t, DV) for s, t in seqs.items()}), step)
    q = laid({s: queries(t) for s, t in seqs.items()})
    out = (attend or cache.attend)(1, q, step, **variant).reshape(-1, H, DV)
    starts = [row * columns if columns else sum(list(new.values())[:row]) for row in range(len(new))]
    return {seq: out[at : at + new[seq]] for at, seq in zip(starts, seqs, strict=True)}


def dense(seq: list[int], count: int, scale: float | None = None, softcap: float | None = None,
          window: int | None = None, sinks: Tensor | None = None) -> Tensor:  # fmt: skip
    """The last `count` rows of attention over the whole sequence, [count, H, Dv]."""
    n = len(seq)
    k, v = (told(1, seq, w).repeat_interleave(H // HKV, 1).double() for w in (D, DV))
    s = torch.einsum("mhd,nhd->hmn", queries(seq).double(), k) * (D**-0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    i, j = torch.arange(n)[:, None], torch.arange(n)
    s = s.masked_fill((j > i) | (j <= i - (window or n)), -INF)
    column = torch.full((H, n, 1), -INF) if sinks is None else sinks.view(H, 1, 1).expand(H, n, 1)
    p = torch.cat([s, column.double()], -1).softmax(-1)[..., :-1]
    return torch.einsum("hmn,nhd->mhd", p, v)[n - count :]


def holds(cache: PagedKVCache, seqs: dict[int, list[int]]) -> None:
    """Each page holds its sequence's keys and values, of each layer; the spare page is still zero."""
    for seq, tokens in seqs.items():
        table = torch.tensor(cache.table(seq), dtype=torch.long)
        for layer in range(2):
            for pages, width in ((cache.keys, D), (cache.values, DV)):
                got = pages[layer][table].flatten(0, 1)[: len(tokens)]
                torch.testing.assert_close(got, told(layer, tokens, width), rtol=0, atol=0)
    assert not any(pages[cache.null].any() for pages in (*cache.keys, *cache.values))


def filled(cache: PagedKVCache, lengths: tuple[int, ...] = (17, 4, 9), **variant: Any) -> dict[int, list[int]]:
    """Sequences of these lengths, written."""
    seqs = {}
    for i, length in enumerate(lengths):
        tokens = [(100 * i + n) for n in range(length)]
        seq = cache.add(tokens)
        cache.append(seq, tokens[cache.length(seq) :])
        seqs[seq] = tokens
    run(cache, seqs, **variant)
    return seqs


def more(cache: PagedKVCache, seqs: dict[int, list[int]], counts: tuple[int, ...]) -> None:
    for (seq, tokens), count in zip(seqs.items(), counts, strict=True):
        new = [1000 + len(tokens) + n for n in range(count)]
        cache.append(seq, new)
        tokens += new
