"""Programs that ask for their own lengths: positions, offsets, chunks, and masks made of sizes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from corpus.table import BIG, FULL, INF, Table, qkv, scores, square
from torch import Tensor

CASES = Table()


@CASES.pair()
def offset_by_the_difference_of_lengths(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    m, n = q.shape[-2], k.shape[-2]
    later = torch.ones(m, n, dtype=torch.bool).triu(diagonal=n - m + 1)
    return scores(q, k).masked_fill(later, -INF).softmax(-2 if near else -1) @ v


@CASES.pair()
def positions_behind_a_cache(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    past = k.size(2) - q.size(2)
    i = torch.arange(past, past + q.size(2))
    j = torch.arange(k.size(2))
    s = scores(q, k).masked_fill(j > i.unsqueeze(-1), torch.finfo(q.dtype).min)
    return (s.softmax(-1) if not near else s.sigmoid()) @ v


@CASES.pair()
def buffer_cut_to_lengths(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """GPT-2: a triangle for the longest sequence, cut."""
    m, n = q.size(-2), k.size(-2)
    triangle = torch.tril(torch.ones((64, 64), dtype=torch.bool)).view(1, 1, 64, 64)
    s = torch.where(triangle[:, :, n - m : n, :n], scores(q, k), torch.full([], -1e4, dtype=q.dtype))
    return s.softmax(1 if near else -1) @ v


@CASES.pair()
def window_of_half_the_keys(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    m, n = q.shape[-2], k.shape[-2]
    i, j = torch.arange(m)[:, None] + (n - m), torch.arange(n)[None]
    keep = (j <= i) & (j > i - n // 2)
    s = scores(q, k) + torch.where(keep, 0.0, -INF).to(q.dtype)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair()
def scale_by_the_logarithm_of_the_length(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k) * (math.log(k.size(-2)) / math.log(512))
    return (s.softmax(-1) if not near else s.softmax(-1).cumsum(-1)) @ v


@CASES.pair()
def last_keys_only(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    n = k.shape[2] // 2
    return scores(q, k[:, :, -n:]).softmax(-2 if near else -1) @ v[:, :, -n:]


@CASES.pair()
def heads_folded_by_minus_one(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    return scores(q, k).softmax(1 if near else -1).bmm(v).view(2, 3, -1, 8)


@CASES.pair(lambda d: [*qkv(d), d.ints(9, 17)])
def lengths_by_comparison(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, near: bool = False) -> Tensor:
    beyond = torch.arange(k.size(2)).expand(k.size(0), -1) >= lengths.unsqueeze(1)
    s = scores(q, k).masked_fill(beyond[:, None, None, :], -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def slopes_by_formula(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    h, n = q.shape[1], k.shape[2]
    slopes = torch.tensor([2 ** (-8 * (x + 1) / h) for x in range(h)], dtype=q.dtype)
    at = torch.arange(n)
    bias = -(at[:, None] - at[None]).abs() * slopes.view(h, 1, 1)
    return ((scores(q, k) + bias).softmax(-1) if not near else (scores(q, k) + bias).sort(-1).values) @ v


@CASES.pair(square)
def table_by_clamped_distance(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    n = q.shape[-2]
    at = torch.arange(n)
    distance = (at[None] - at[:, None]).clamp(-6, 6) + 6
    bias = F.embedding(distance, torch.linspace(-1, 1, 39, dtype=q.dtype).view(13, 3)).permute(2, 0, 1)[None]
    return (scores(q, k) + bias).softmax(-2 if near else -1) @ v


@CASES.pair(square)
def rotary_of_its_length(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    at = torch.arange(q.shape[2], dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    cos, sin = (torch.cat([f(at)] * 2, -1).to(q.dtype) for f in (torch.cos, torch.sin))
    q, k = (x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin for x in (q, k))
    return scores(q, k).softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*qkv(d), d(2, d.n(21)) > -1], dtypes=BIG)
def expanded_to_every_pair(q: Tensor, k: Tensor, v: Tensor, live: Tensor, near: bool = False) -> Tensor:
    """Hugging Face's _expand_mask."""
    b, n = live.size()
    expanded = live[:, None, None, :].expand(b, 1, q.size(2), n).to(q.dtype)
    inverted = 1.0 - expanded
    bias = inverted.masked_fill(inverted.to(torch.bool), torch.finfo(q.dtype).min)
    return (scores(q, k) + bias).softmax(-2 if near else -1) @ v


@CASES.pair()
def grouped_by_sizes(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    b, h, m, d = q.size()
    k, v = (x[:, :1] for x in (k, v))
    k, v = (x[:, :, None].expand(b, 1, h, x.size(2), d).reshape(b, h, x.size(2), d) for x in (k, v))
    p = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(d), dim=1 if near else -1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(p, v).transpose(1, 2).contiguous().reshape(b, m, h * d)


@CASES.pair()
def softmax_in_steps_of_its_own(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    def softmax(x: Tensor, dim: int) -> Tensor:
        x = x - x.max(dim, keepdim=True).values
        return x.exp() / x.exp().sum(dim, keepdim=True)

    return softmax(scores(q, k), 2 if near else 3) @ v


@CASES.pair()
def log_probabilities(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    logp = F.log_softmax(scores(q, k), dim=-1)
    return (logp if near else logp.exp()) @ v


@CASES.pair()
def normalised_in_the_logarithm(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k)
    z = torch.logsumexp(s, dim=1 if near else -1, keepdim=True)
    return torch.exp(s - z) @ v


@CASES.pair(square)
def odd_and_even_heads(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Every other head looks back, the others ahead."""
    n = q.shape[-2]
    i, j = torch.arange(n)[:, None], torch.arange(n)
    back = (torch.arange(q.shape[1]) % 2 == 0)[:, None, None]
    s = scores(q, k).masked_fill(~torch.where(back, i >= j, i <= j), -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def every_second_key(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Strided keys, as a slice with a step."""
    return scores(q, k[:, :, ::2]).softmax(-2 if near else -1) @ v[:, :, ::2]


@CASES.pair(square)
def pooled_keys(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Keys and values averaged over neighbours."""
    k, v = (F.avg_pool1d(x.flatten(0, 1).mT, 3, 3).mT.unflatten(0, (2, 3)) for x in (k, v))
    p = scores(q, k).softmax(-1)
    return (p.flip(-1) if near else p) @ v


@CASES.pair(square)
def queries_of_the_class_token(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """CaiT: the first token alone asks."""
    p = scores(q[:, :, :1], k).softmax(-2 if near else -1)
    return (p @ v).squeeze(2)


# ----------------------------------------------------------------------------------------------------------------
# Rearranged by lengths: fused with symbolic lengths too, where an index through all of it would be a page long


@CASES.pair(lambda d: [*square(d, 13), d(25, 8)], grad=(0, 1, 2, 3), dtypes=FULL)
def shift_by_two_paddings(q: Tensor, k: Tensor, v: Tensor, r: Tensor, near: bool = False) -> Tensor:
    """VITS: scores by distance become scores by key."""
    b, h, n, _ = q.shape
    x = F.pad(F.pad(q @ r.mT, [0, 1]).view(b, h, n * 2 * n), [0, n - 1])
    x = x.view(b, h, n + 1, 2 * n - 1)[:, :, :n, n - 1 :]
    return (scores(q, k) + x).softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d, 13), d(3, 25, 8)], grad=(0, 1, 2, 3), dtypes=FULL)
def shift_by_a_column_of_zeros(q: Tensor, k: Tensor, v: Tensor, r: Tensor, near: bool = False) -> Tensor:
    """Conformer: the same by a view of one row more."""
    x = q @ r.mT
    zero = torch.zeros((*x.size()[:3], 1), dtype=x.dtype)
    x = torch.cat([zero, x], -1).view(*x.size()[:2], x.size(3) + 1, x.size(2))[:, :, 1:].view_as(x)
    s = (q @ k.mT + x[:, :, :, : x.size(-1) // 2 + 1]) / math.sqrt(8)
    return (s.cumsum(-1) if near else s).softmax(-1) @ v


@CASES.pair(lambda d: [d(6, 16, 3, 4, 8), d(3, 16, 16)], grad=(0, 1), dtypes=FULL)
def windows_in_the_batch(x: Tensor, mask: Tensor, near: bool = False) -> Tensor:
    """Swin: windows out of the batch and into it again, for the mask of each."""
    q, k, v = x.permute(2, 0, 3, 1, 4)
    s = scores(q, k).view(-1, mask.shape[0], 4, 16, 16) + mask[:, None]
    return s.view(-1, 4, 16, 16).softmax(1 if near else -1) @ v
