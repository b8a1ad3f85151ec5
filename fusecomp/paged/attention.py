"""Writing to and attending over pages, in plain PyTorch: torch.compile(backend="fusecomp") recognises it like anyone's.

Pages are [P, page, Hkv, D]; block_table [B, T] names the pages of each sequence in order. A step is either *rows*, q
[B, M, H, D], M places for the new tokens of each sequence, or *packed*, q [T, H, D], the new tokens of all sequences
one after another, those of sequence b from cu_seqlens_q[b] on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write(pages: Tensor, new: Tensor, slot_mapping: Tensor) -> None:
    """pages[slot // page, slot % page] = new, in place. new [B, M, Hkv, D] or [T, Hkv, D]; its slots [B, M] or [T].

    A slot of -1 is the last of the pool: give it a page of its own that no table names.
    """
    pages.view(-1, *pages.shape[2:])[slot_mapping.flatten()] = new.reshape(-1, *pages.shape[2:]).to(pages.dtype)


def rows(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [B, M, H, D], whose row b is the last cu_seqlens_q[b + 1] - cu_seqlens_q[b] tokens of sequence b.

    Query m sees the keys up to its own place, of the last `window` if given. An unused row (seq_lens 0) sees one key.
    """
    k, v = k_pages[block_table].flatten(1, 2), v_pages[block_table].flatten(1, 2)
    key = torch.arange(k.shape[1], device=q.device)
    keep = (key < seq_lens.clamp(min=1)[:, None])[:, None]
    if q.shape[1] > 1 or window is not None:
        place = (seq_lens - cu_seqlens_q.diff())[:, None] + torch.arange(q.shape[1], device=q.device)
        keep = keep & (key <= place[:, :, None]) if q.shape[1] > 1 else keep
        keep = keep & (key > place[:, :, None] - window) if window is not None else keep
    return _attend(q, k, v, keep, scale, softcap, sinks)


def packed(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    positions: Tensor,
    cu_seqlens_q: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, H, D], token t at positions[t] of its sequence. Tokens past the last sequence are unused."""
    token = torch.arange(q.shape[0], device=q.device)
    sequence = torch.bucketize(token, cu_seqlens_q[1:-1], right=True)
    table = block_table[sequence]
    k, v = k_pages[table].flatten(1, 2), v_pages[table].flatten(1, 2)
    key = torch.arange(k.shape[1], device=q.device)
    keep = key <= positions[:, None]
    keep = keep & (key > positions[:, None] - window) if window is not None else keep
    return _attend(q[:, None], k, v, keep[:, None], scale, softcap, sinks)[:, 0]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """softmax(f(scale Q K^T) where keep) V with q [B, M, H, D], k and v [B, N, Hkv, D], keep [B, M or 1, N]."""
    (b, m, h, d), hkv = q.shape, k.shape[2]
    scores = torch.einsum("bmhgd,bnhd->bhgmn", q.view(b, m, hkv, h // hkv, d), k)
    scores = scores * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~keep[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.view(1, hkv, h // hkv, 1, 1).expand(b, -1, -1, m, 1).to(scores.dtype)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32)
    weights = weights[..., :-1] if sinks is not None else weights
    out = torch.einsum("bhgmn,bnhd->bmhgd", weights.to(v.dtype), v)
    return out.reshape(b, m, h, v.shape[3])
