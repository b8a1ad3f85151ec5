"""Writing to and attending over pages, in plain PyTorch: torch.compile(backend="fusecomp") recognises it like anyone's.

Pages are [P, page, Hkv, D]; block_table [B, T] names the pages of each sequence in order. A step is either *rows*, q
[B, M, H, D], M places for the new tokens of each sequence, or *packed*, q [T, H, D], the new tokens of all sequences
one after another, those of sequence b from cu_seqlens_q[b] on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def write(pages: Tensor, new: Tensor, slot_mapping: Tensor) -> None:
    """pages[slot // page, slot % page] = new, in place. new [B, M, Hkv, D] or [T, Hkv, D]; its slots [B, M] or [T].

    A slot of -1 is the last of the pool: give it a page of its own that no table names.
    """
    pages.view(-1, *pages.shape[2:])[slot_mapping.flatten()] = new.reshape(-1, *pages.shape[2:]).to(pages.dtype)


@dataclass(frozen=True)
class Seen:
    """The keys of each row: those at its places of `block_table` [B, T], of which it has `live` [B, N] and sees `keep`
    [B, M or 1, N]."""

    block_table: Tensor
    live: Tensor
    keep: Tensor


def seen_by_rows(
    block_table: Tensor, page: int, seq_lens: Tensor, cu_seqlens_q: Tensor, columns: int, window: int | None = None
) -> Seen:
    """Row b holds the last cu_seqlens_q[b + 1] - cu_seqlens_q[b] tokens of sequence b: each sees the keys up to its own
    place, the last `window` of them if given. An unused row (seq_lens 0) sees one key."""
    key = torch.arange(block_table.shape[1] * page, device=block_table.device)
    live = key < seq_lens.clamp(min=1)[:, None]
    keep = live[:, None]
    if columns > 1 or window is not None:
        first = (seq_lens - cu_seqlens_q.diff())[:, None]
        place = (first + torch.arange(columns, device=block_table.device))[:, :, None]
        keep = keep & (key <= place) if columns > 1 else keep
        keep = keep & (key > place - window) if window is not None else keep
    return Seen(block_table, live, keep)


def seen_by_tokens(
    block_table: Tensor, page: int, positions: Tensor, cu_seqlens_q: Tensor, window: int | None = None
) -> Seen:
    """Each token, at its position, is a row of its own. Tokens past the last sequence are unused."""
    token = torch.arange(positions.shape[0], device=block_table.device)
    sequence = torch.bucketize(token, cu_seqlens_q[1:-1], right=True)
    key = torch.arange(block_table.shape[1] * page, device=block_table.device)
    live = key <= positions[:, None]
    keep = live if window is None else live & (key > positions[:, None] - window)
    return Seen(block_table[sequence], live, keep[:, None])


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    seen: Seen,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(f(scale Q K^T) where keep) V, q [B, M, H, D]. What is not live may be anything: 0 times NaN were NaN."""
    k, v = (pages[seen.block_table].flatten(1, 2) for pages in (k_pages, v_pages))
    v = v.masked_fill(~seen.live[:, :, None, None], 0.0)
    (b, m, h, d), hkv = q.shape, k.shape[2]
    scores = torch.einsum("bmhgd,bnhd->bhgmn", q.view(b, m, hkv, h // hkv, d), k)
    scores = scores * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen.keep[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.view(1, hkv, h // hkv, 1, 1).expand(b, -1, -1, m, 1).to(scores.dtype)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    weights = weights[..., :-1] if sinks is not None else weights
    out = torch.einsum("bhgmn,bnhd->bmhgd", weights.to(v.dtype), v)
    return out.reshape(b, m, h, v.shape[3])
