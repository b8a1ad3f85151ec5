"""Scores that are made piece by piece, and put together before the softmax."""

from __future__ import annotations

from typing import Any

import torch
from corpus.table import INF, Table, places, qkv, scores
from torch import Tensor, einsum

CASES = Table()


def blocks(d: Any) -> list[Tensor]:
    return [d(2, 3, 24, 8) for _ in range(3)]


@CASES.fuse()
def head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.stack([q[:, h] @ k[:, h].mT * 8**-0.5 for h in range(3)], 1)
    return s.softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3)], grad=(0, 1, 2, 3))
def head_by_head_with_slopes(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    i, j = places(q, k)
    s = [(q[:, h] * 0.3) @ k[:, h].mT + slopes[h] * (i - j).abs().to(q.dtype) for h in range(3)]
    return torch.stack(s, 1).softmax(-1) @ v


@CASES.fuse(blocks)
def chunk_by_chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.stack([(q * 8**-0.5) @ x.mT for x in k.chunk(3, 2)], -2)
    return s.flatten(-2).softmax(-1) @ v


@CASES.fuse(blocks)
def chunk_by_chunk_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(24, device=q.device)
    s = [scores(q, x).masked_fill(j > at[:, None], -INF) for x, j in zip(k.split(8, 2), at.split(8), strict=True)]
    return torch.cat(s, -1).softmax(-1) @ v


@CASES.fuse()
def queries_in_two_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.cat([torch.tanh(q[:, :, :5] @ k.mT), torch.tanh(q[:, :, 5:] @ k.mT)], -2)
    return s.softmax(-1) @ v


@CASES.fuse()
def keys_in_two_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.cat([einsum("bhid,bhjd->bhij", q, x) / 8**0.5 for x in (k[:, :, :8], k[:, :, 8:])], -1).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.fuse(blocks)
def chunks_interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Key 3 n + c is the n-th of chunk c."""
    return torch.stack([q @ x.mT for x in k.chunk(3, 2)], -1).flatten(-2).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Near misses


@CASES.decline()
def softmax_over_the_pieces(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([q[:, h] @ k[:, h].mT for h in range(3)], 1).softmax(1) @ v


@CASES.fuse(blocks)
def pieces_of_two_scales(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = k.chunk(2, 2)
    return torch.cat([q @ first.mT * 0.3, q @ second.mT * 0.5], -1).softmax(-1) @ v


@CASES.decline(blocks, grad=())
def queries_written_between_the_pieces(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.clone()
    first = q @ k[:, :, :12].mT
    q.mul_(2)
    return torch.stack([first, q @ k[:, :, 12:].mT], -2).flatten(-2).softmax(-1) @ v


@CASES.decline(blocks)
def pieces_of_two_functions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = k.chunk(2, 2)
    return torch.stack([q @ first.mT, torch.tanh(q @ second.mT)], -2).flatten(-2).softmax(-1) @ v


@CASES.decline()
def pieces_that_are_read_again(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = [q[:, h] @ k[:, h].mT for h in range(3)]
    return torch.stack(s, 1).softmax(-1) @ v, s[1]
