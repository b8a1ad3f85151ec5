"""A small paged key-value cache for plain PyTorch. Its attention is plain PyTorch too, and recognised like anyone's.

    blocks      who holds each block, which are free, which holds which tokens
    tables      sequences in blocks: reserve, append, fork, truncate, free, swap
    step        the tensors of one step of the model
    attention   write and attend over pages
    cache       all of it together
    huggingface a cache for unmodified transformers models (not imported here: it needs transformers)
"""

from __future__ import annotations

from fusecomp.paged.blocks import BlockAllocator
from fusecomp.paged.cache import PagedKVCache
from fusecomp.paged.step import Step
from fusecomp.paged.tables import BlockTables, Usage

__all__ = ["BlockAllocator", "BlockTables", "PagedKVCache", "Step", "Usage"]
