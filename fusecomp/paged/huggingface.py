"""A transformers cache that keeps keys and values in pages. An unmodified model generates through it:

    model.generate(**inputs, cache=PagedCache(model.config, num_blocks=256, max_len=512))

The model's own attention receives keys and values gathered through the block table, so any attention implementation
works, and where the forward is compiled with backend="fusecomp" the gather is part of what is recognised: the kernel
reads the pages. Taking blocks is the host's work: a compiled forward stops for it once, and then takes all that the
batch may need; one of fullgraph=True must be given its blocks before (`cache.early_initialization`, `cache.reserve`).
Beams share blocks until they part. Where every layer has a sliding window, blocks before it are given back; beside
layers that see all, such layers keep all their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, get_layer_types_and_kwargs
except ImportError as error:
    raise ImportError("PagedCache needs transformers 5.24 or later: pip install 'transformers>=5.24'") from error

from fusecomp.errors import OptionError, OutOfBlocks
from fusecomp.paged import attention
from fusecomp.paged.cache import PagedKVCache
from fusecomp.paged.tables import GONE

BEFORE = (
    "the host makes pages and takes blocks: for a whole graph, call cache.early_initialization(batch, kv_heads, "
    "head_dim, dtype, device) and cache.reserve(batch, tokens) before the compiled model, for all it will generate"
)
KNOWN = ("full_attention", "sliding_attention", "dummy")


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's pages, `length` tokens of each sequence."""

    is_croppable = True
    is_sliding = False  # it keeps what has left the window: the mask hides it

    def __init__(self, rows: Rows, kind: str) -> None:
        super().__init__()
        self.rows, self.kind = rows, kind
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pages, (_, heads, _, d) = self.rows.pages(key_states.device), key_states.shape
        layer = pages.add_layer(heads, d, value_states.shape[3], key_states.dtype)
        self.keys, self.values = pages.keys[layer], pages.values[layer]
        self.is_initialized = True

    def fits(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Whether its pages are made for heads like these; once there are tokens in them, writing tells."""
        if not self.is_initialized or self.length:
            return self.is_initialized
        pairs = ((self.keys, key_states), (self.values, value_states))
        return all(pages.shape[2:] == (new.shape[1], new.shape[3]) for pages, new in pairs)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values, [B, Hkv, M, D]; those of all tokens so far, [B, Hkv, N, D]."""
        if not self.fits(key_states, value_states):
            self.rows.make(self, key_states, value_states)
        batch, _, new, _ = key_states.shape
        if self.length + new > self.rows.room or batch != self.rows.batch:
            self.rows.grow(batch, self.length, self.length + new, ahead=torch.compiler.is_compiling())
        slots = self.rows.slots(self.length, new)
        self.length += new
        attention.write(self.keys, key_states.transpose(1, 2), slots)
        attention.write(self.values, value_states.transpose(1, 2), slots)
        width = self.rows.width(self.length)
        table = self.rows.table_of(width)
        k, v = (pages[table].flatten(1, 2)[:, :width].transpose(1, 2) for pages in (self.keys, self.values))
        return k, v

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows.width(self.length + query_length), 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.rows.max_len


class Rows:
    """The sequences of a batch, all of one length, and their table. `room` tokens fit without the host's help."""

    def __init__(self, num_blocks: int, block_size: int, max_len: int, window: int | None = None) -> None:
        self.num_blocks, self.block_size, self.max_len, self.window = num_blocks, block_size, max_len, window
        self.places = -(-max_len // block_size)
        self.layers: list[PagedLayer] = []
        self.seqs: list[int] = []
        self.room = self.batch = 0
        self.table: Tensor | None = None
        self._pages: PagedKVCache | None = None

    def pages(self, device: torch.device) -> PagedKVCache:
        if self._pages is None:
            sizes: dict[str, int] = {
                "num_blocks": self.num_blocks,
                "block_size": self.block_size,
                "max_len": self.max_len,
            }
            self._pages = PagedKVCache(**sizes, share_prefixes=False, window=self.window, device=device)
        return self._pages

    @torch._dynamo.disable(reason=BEFORE)  # type: ignore[untyped-decorator]
    def make(self, layer: PagedLayer, key_states: Tensor, value_states: Tensor) -> None:
        """Pages for keys and values like these, of a layer and of all of its kind that have none."""
        layer.is_initialized = False
        for other in self.layers:
            if other.kind == layer.kind and not other.is_initialized:
                other.lazy_initialization(key_states, value_states)

    @torch._dynamo.disable(reason=BEFORE)  # type: ignore[untyped-decorator]
    def grow(self, batch: int, length: int, wanted: int, ahead: bool = False) -> None:
        """Room for `wanted` tokens in each of `batch` rows of `length`; a last block that is shared is copied. `ahead`:
        for as many as `max_len` and the free blocks allow."""
        if self._pages is None:
            raise OptionError("there are no pages yet: call cache.early_initialization(...), or run the prompt, before")
        if not self.seqs:
            self.seqs = [self._pages.add() for _ in range(batch)]
        if batch != len(self.seqs):
            raise OptionError(
                f"the cache holds {len(self.seqs)} sequences, the batch {batch}: reset it, or make another"
            )
        self.settle(length)
        if ahead:
            more = self._pages.allocator.free // batch - 1  # one may be the copy of a shared block
            wanted = max(wanted, min(self.max_len, (length // self.block_size + more) * self.block_size))
        try:
            for seq in self.seqs:
                self._pages.reserve(seq, wanted - length)
        except OutOfBlocks:
            for seq in self.seqs:
                self._pages.truncate(seq, length)
            self.room = 0  # what was reserved ahead is given back
            raise
        self._pages.flush()
        tables = [self._pages.table(seq) for seq in self.seqs]
        self._lay(tables)
        self.batch, self.room = batch, min(len(t) for t in tables) * self.block_size

    def _lay(self, tables: list[tuple[int, ...]]) -> None:
        """The tables as a tensor [B, T], the same one as long as the batch has the same size."""
        assert self._pages is not None
        null = self._pages.null
        filled = [[null if block == GONE else block for block in t] + [null] * (self.places - len(t)) for t in tables]
        rows = torch.tensor(filled, dtype=torch.int32, device="cpu")
        if self.table is None or len(self.table) != len(tables):
            self.table = torch.empty_like(rows, device=self._pages.device)
            torch._dynamo.mark_static_address(self.table)
        self.table.copy_(rows)

    def settle(self, length: int) -> None:
        """Tell the tables how many tokens were written since they were last asked."""
        assert self._pages is not None
        for seq in self.seqs:
            self._pages.append(seq, length - self._pages.length(seq))
            self._pages.commit(seq)

    def slots(self, begin: int, count: int) -> Tensor:
        """table[b, n // size] * size + n % size of the tokens from `begin` on, [B, count]."""
        assert self.table is not None
        n = torch.arange(count, device=self.table.device) + begin
        return self.table[:, n // self.block_size] * self.block_size + n % self.block_size

    def width(self, length: int) -> int:
        """Keys that a layer hands out: all there may be, as a graph needs, or those that an operator should gather."""
        return self.places * self.block_size if torch.compiler.is_compiling() else length

    def table_of(self, width: int) -> Tensor:
        """The part of the table that leads to so many keys."""
        assert self.table is not None
        return self.table[:, : -(-width // self.block_size)]

    def choose(self, parents: Iterable[int], length: int) -> None:
        """Row i becomes a copy of row parents[i]: blocks are shared until the next write."""
        assert self._pages is not None
        self.settle(length)
        chosen = [self._pages.fork(self.seqs[i]) for i in parents]
        for seq in self.seqs:
            self._pages.free(seq)
        self.seqs, self.room = chosen, 0

    def cut(self, before: int, length: int) -> None:
        """Forget the tokens from `length` on."""
        assert self._pages is not None
        self.settle(before)
        for seq in self.seqs:
            self._pages.truncate(seq, length)
        self.room = 0

    def clear(self) -> None:
        for seq in self.seqs:
            self._pages.free(seq)  # type: ignore[union-attr]
        self.seqs, self.room, self.batch = [], 0, 0


class PagedCache(Cache):  # type: ignore[misc]
    """Keys and values of all layers in `num_blocks` blocks of `block_size` tokens; a sequence has at most `max_len`."""

    def __init__(self, config: Any, *, num_blocks: int, max_len: int, block_size: int = 16) -> None:
        text = config.get_text_config(decoder=True)
        types, _ = get_layer_types_and_kwargs(text)
        window = text.sliding_window if set(types) == {"sliding_attention"} else None
        self.rows = Rows(num_blocks, block_size, max_len, window)
        unknown = sorted(set(types) - set(KNOWN))
        if unknown:
            raise OptionError(f"layers of the kind {', '.join(unknown)} keep no pages: use transformers' own cache")
        super().__init__(layers=[DummyLayer() if t == "dummy" else PagedLayer(self.rows, t) for t in types])
        self.rows.layers = self.paged

    @property
    def pages(self) -> PagedKVCache:
        """The blocks and tables behind it, brought up to date: `cache.pages.usage()`."""
        self.rows.settle(self.length)
        assert self.rows._pages is not None
        return self.rows._pages

    @property
    def paged(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @property
    def length(self) -> int:
        return self.paged[0].length

    def reserve(self, batch: int, tokens: int) -> None:
        """Room for `tokens` tokens in each of `batch` rows, so that no compiled forward has to stop for more blocks."""
        self.rows.grow(batch, self.length, tokens)

    def _now(self, length: int) -> None:
        for layer in self.paged:
            layer.length = length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from row beam_idx[i]."""
        if self.length:
            self.rows.choose(beam_idx.tolist(), self.length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.length:
            self.rows.choose([row for row in range(len(self.rows.seqs)) for _ in range(repeats)], self.length)

    def batch_select_indices(self, indices: Tensor) -> None:
        """These rows only."""
        if self.length:
            self.rows.choose(torch.arange(len(self.rows.seqs), device="cpu")[indices.cpu()].tolist(), self.length)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}")
        if self.length and tokens_to_remove:
            self.rows.cut(self.length, self.length + tokens_to_remove)
            self._now(self.length + tokens_to_remove)

    def reset(self) -> None:
        """Forget all sequences; the pages stay."""
        self.rows.clear()
        self._now(0)
