"""A paged key-value cache in plain PyTorch: blocks on the host, pages and step tensors of fixed address on the device.

    cache = PagedKVCache(layers=2, kv_heads=4, head_dim=64, num_blocks=1024, max_seqs=8, max_len=2048)
    seq = cache.add(prompt)                              # begins with the blocks that others hold already
    cache.append(seq, prompt[cache.length(seq):])        # or OutOfBlocks, and nothing changed
    step = cache.step([seq])                             # the tensors of everything that was appended
    cache.write(layer, k, v, step)                       # in the model, for each layer
    out = cache.attend(layer, q, step)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusecomp.errors import OptionError, SequenceError
from fusecomp.paged import attention
from fusecomp.paged.step import Part, Step, StepBuffers
from fusecomp.paged.tables import BlockTables


class PagedKVCache(BlockTables):
    """Block tables with pages behind them: for each layer keys and values [num_blocks + 2, block_size, Hkv, D].

    The last two pages belong to no sequence: table entries past the end name the first, which stays zero; what has no
    slot (-1) is written to the second, which nobody reads.

    `max_seqs` sequences of at most `max_len` tokens, and `max_tokens` new tokens, are in one step at most. V has heads
    of `v_head_dim`, or of `head_dim`. With `share_prefixes` a sequence begins with full blocks that hold its tokens
    already. With a `window`, the widest of all layers, blocks that no later token sees are given back. Layers may be
    added one by one instead (`layers=0`, `add_layer`). OptionError for sizes that make no cache.
    """

    def __init__(
        self,
        *,
        layers: int = 0,
        kv_heads: int = 1,
        head_dim: int = 1,
        v_head_dim: int | None = None,
        num_blocks: int,
        block_size: int = 16,
        max_seqs: int = 1,
        max_len: int,
        max_tokens: int | None = None,
        share_prefixes: bool = True,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(num_blocks, block_size, max_len, share_prefixes, window)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.device = torch.device(device)
        self.null, self.dump = num_blocks, num_blocks + 1
        width = self._blocks_of(max_len)
        self._buffers = StepBuffers(max_seqs, width, max_tokens or max(max_seqs, max_len), self.null, self.device)
        self._copies: dict[int, int] = {}  # target: source, not copied yet
        for _ in range(layers):
            self.add_layer(kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim, dtype)

    def add_layer(self, kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> int:
        """Pages of one more layer; its number. OptionError for whole numbers, to which keys would be cut."""
        if not dtype.is_floating_point:
            raise OptionError(f"pages of {dtype} hold no keys as a model makes them: give a floating-point dtype")
        for pages, d in ((self.keys, head_dim), (self.values, v_head_dim)):
            shape = (self.allocator.num_blocks + 2, self.block_size, kv_heads, d)
            pages.append(torch.zeros(shape, dtype=dtype, device=self.device))
            torch._dynamo.mark_static_address(pages[-1])
        return len(self.keys) - 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""
        return sum(x[0].numel() * x.element_size() for x in (*self.keys, *self.values))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, over all layers."""
        return self.block_bytes // self.block_size

    # ------------------------------------------------------------------------------------------------------------
    # One step

    def step(self, seqs: Sequence[int], rows: int | None = None, columns: int | None = None, tokens: int = 0) -> Step:
        """What the model computes next: the tokens that were appended to `seqs` and are not written yet.

        Packed one after another, [T], or with `columns` each sequence in a row of so many places, [B, columns]. `rows`
        pads B, and `tokens` T, so that a compiled graph meets one shape. The tensors keep their addresses: a step holds
        until the next is made. Asked again before anything is appended, it is the same step. SequenceError for a
        sequence that is unknown, swapped out or named twice, and for a step that is too large for the cache.
        """
        held = [self._resident(seq, "step") for seq in seqs]
        if len(set(seqs)) < len(seqs):
            raise SequenceError("step: a sequence is named twice: it can have one row only")
        parts = [Part(h.blocks, h.written, h.length) for h in held]
        tokens = max(tokens, sum(part.count for part in parts))
        step = self._buffers.fill(parts, self.block_size, len(seqs) if rows is None else rows, columns, tokens)
        self.flush()
        for h in held:
            h.sent = h.length
        return step

    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """Put the keys and values of the step's tokens, [B, M, Hkv, D] or packed [T, Hkv, D], into their slots.
        OptionError for another shape."""
        pages = self._pages_of(layer, "write")
        for name, new, held in zip("kv", (k, v), pages, strict=True):
            if new.shape != (*step.slot_mapping.shape, *held.shape[2:]):
                wanted = [*step.slot_mapping.shape, *held.shape[2:]]
                raise OptionError(f"write: {name} is {[*new.shape]}, not {wanted}: the step's places, Hkv, head size")
        for new, held in zip((k, v), pages, strict=True):
            attention.write(held, new, step.slot_mapping)

    def attend(
        self,
        layer: int,
        q: Tensor,
        step: Step,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of the step's tokens, once they are written, over all tokens of their sequences.

        q is [B, M, H, D] or packed [T, H, D], and so is the result, with heads of V's size. `scale` is D^-0.5 unless
        given; `softcap` c makes scores c tanh(s / c); a token sees the `window` tokens up to itself, or all; `sinks`
        [H] are logits that take part in the normaliser. OptionError for a wider window than the cache keeps, for
        another shape, and for numbers that make no attention.
        """
        pages = self._pages_of(layer, "attend")
        _refuse(q, pages[0], step, softcap, window, sinks)
        if self.window is not None and (window is None or window > self.window):
            said = f"{'all' if window is None else window} tokens in a cache that keeps the last {self.window}"
            raise OptionError(f"attend: a window of {said}: build it with the widest window of all layers")
        table, size, starts = step.block_table, self.block_size, step.cu_seqlens_q
        if step.packed:
            seen = attention.seen_by_tokens(table, size, step.positions, starts, window)
            return attention.attend(q[:, None], *pages, seen, scale, softcap, sinks)[:, 0]
        seen = attention.seen_by_rows(table, size, step.seq_lens, starts, q.shape[1], window)
        return attention.attend(q, *pages, seen, scale, softcap, sinks)

    def _pages_of(self, layer: int, what: str) -> tuple[Tensor, Tensor]:
        if not 0 <= layer < len(self.keys):
            raise OptionError(f"{what}: there is no layer {layer} in a cache of {len(self.keys)}, counted from 0")
        return self.keys[layer], self.values[layer]

    # ------------------------------------------------------------------------------------------------------------
    # Pages that move

    def _copy(self, source: int, target: int) -> None:
        """Copied with others before the next step; at once what reads or writes the target of an earlier one."""
        if source in self._copies or target in self._copies:
            self.flush()
        self._copies[target] = source

    def flush(self) -> None:
        """Copy what forks have to copy; a step does it."""
        if self._copies:
            to, of = (torch.tensor(list(x), device=self.device) for x in (self._copies, self._copies.values()))
            for pages in (*self.keys, *self.values):
                pages[to] = pages[of]
            self._copies = {}

    def _save(self, blocks: Sequence[int]) -> list[Tensor]:
        self.flush()
        at = torch.tensor(blocks, dtype=torch.long, device=self.device)
        return [pages[at].cpu() for pages in (*self.keys, *self.values)]

    def _load(self, saved: Any, places: Sequence[int], blocks: Sequence[int]) -> None:
        self.flush()
        to = torch.tensor(blocks, dtype=torch.long, device=self.device)
        of = torch.tensor(places, dtype=torch.long, device="cpu")
        for pages, kept in zip((*self.keys, *self.values), saved, strict=True):
            pages[to] = kept[of].to(self.device)


def _refuse(
    q: Tensor, keys: Tensor, step: Step, softcap: float | None, window: int | None, sinks: Tensor | None
) -> None:
    """OptionError for what would fail further on without a word of why, or give numbers that mean nothing."""
    places, (hkv, d), h = step.slot_mapping.shape, keys.shape[2:], q.shape[-2]
    if q.shape[:-2] != places or q.shape[-1] != d or h % hkv:
        wanted = ", ".join(map(str, (*places, f"a multiple of {hkv}", d)))
        raise OptionError(f"attend: q is {[*q.shape]}, not [{wanted}]: the step's places, heads, head size")
    if sinks is not None and sinks.shape != (h,):
        raise OptionError(f"attend: sinks are {[*sinks.shape]}, not [{h}]: one for each query head")
    if window is not None and window < 1:
        raise OptionError(f"attend: a window of {window} tokens: give at least 1, or None to see all")
    if softcap is not None and softcap <= 0:
        raise OptionError(f"attend: a soft cap of {softcap}: give a positive number, or None for none")
