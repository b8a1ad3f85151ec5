"""More attentions as model families write them: positions by tricks, local windows, sets, cached prefixes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import FULL, INF, Table, places, scores, square
from torch import Tensor

CASES = Table()


def tokens(d: Any, n: int = 21, weights: int = 1) -> list[Tensor]:
    """x [2, n, 24] and packed projections [72, 24]."""
    return [d(2, d.n(n), 24), *(d(72, 24) * 0.2 for _ in range(weights))]


def packed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Q, K, V [2, 3, n, 8]."""
    return tuple(t.view(*x.shape[:2], 3, 8).transpose(1, 2) for t in F.linear(x, w).chunk(3, dim=-1))


# ----------------------------------------------------------------------------------------------------------------
# Positions


@CASES.fuse(lambda d: [*square(d, d=16), d(d.n(21), 16), d(3, 16), d(3, 16)], grad=(0, 1, 2, 3, 4, 5))
def transformer_xl(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
    """Distances by a shift: one column more, read one row further."""
    content = torch.einsum("bhid,bhjd->bhij", q + u[:, None], k)
    shifted = torch.einsum("bhid,jd->bhij", q + w[:, None], r)
    b, h, m, n = shifted.shape
    shifted = torch.cat([shifted.new_zeros(b, h, m, 1), shifted], -1).view(b, h, n + 1, m)[:, :, 1:].view_as(content)
    s = (content + shifted) * 16**-0.5
    late = torch.triu(torch.ones(m, n, device=q.device), 1).bool()
    return F.softmax(s.masked_fill(late, -INF), -1) @ v


@CASES.fuse(lambda d: [*square(d, n=16), d(3, d.n(16), 8)], grad=(0, 1, 2, 3))
def music_transformer(q: Tensor, k: Tensor, v: Tensor, distances: Tensor) -> Tensor:
    n = q.shape[2]
    s = torch.einsum("bhld,hmd->bhlm", q, distances)
    s = s * torch.tril(torch.ones(n, n, device=q.device, dtype=q.dtype)).flip(1)
    s = F.pad(s, [1, 0]).reshape(*s.shape[:2], n + 1, n)[:, :, 1:]
    s = (q @ k.transpose(2, 3) + s) / math.sqrt(8)
    return (s + torch.triu(torch.full((n, n), -INF, device=q.device, dtype=q.dtype), 1)).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(16, 3, 8), d(16, 3, 8)], grad=(0, 1, 2, 3, 4))
def deberta(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    n, scale = q.shape[2], math.sqrt(24)
    i = torch.arange(n, device=q.device)
    at = (i[:, None] - i + 8).clamp(0, 15).expand(2, 3, n, n)
    back = (i - i[:, None] + 8).clamp(0, 15).expand(2, 3, n, n)
    s = torch.matmul(q, k.mT / scale)
    s = s + torch.gather(q @ keys.permute(1, 2, 0), -1, at) / scale
    s = s + torch.gather(k @ queries.permute(1, 2, 0), -1, back).mT / scale
    return s.softmax(-1) @ v


@CASES.fuse(lambda d: [d(4, 16, 24), d(72, 24) * 0.2, d(3, 1, 1), d(49, 3)], grad=(0, 1, 2, 3), dtypes=FULL)
def swin_v2(x: Tensor, w: Tensor, logit_scale: Tensor, table: Tensor) -> Tensor:
    q, k, v = packed(x, w)
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    s = s * torch.clamp(logit_scale, max=math.log(100.0)).exp()
    places = torch.cartesian_prod(*[torch.arange(4, device=x.device)] * 2)
    at = (places[:, None] - places + 3) * torch.tensor([7, 1], device=x.device)
    bias = table[at.sum(-1).view(-1)].view(16, 16, 3).permute(2, 0, 1)
    return ((s + 16 * torch.sigmoid(bias)).softmax(-1) @ v).transpose(1, 2).flatten(2)


@CASES.fuse(lambda d: [*square(d), d(2, 3, d.n(21), 1), d(2, 3, d.n(21), 1).abs() + 1], grad=(0, 1, 2, 3, 4))
def predicted_centre(q: Tensor, k: Tensor, v: Tensor, centre: Tensor, width: Tensor) -> Tensor:
    j = torch.arange(k.shape[2], device=q.device, dtype=q.dtype)
    near = -((j - torch.sigmoid(centre) * k.shape[2]) ** 2) / (2 * width**2)
    return (scores(q, k) + near).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(2, d.n(21), 2)], grad=(0, 1, 2, 3))
def distance_of_places(q: Tensor, k: Tensor, v: Tensor, xy: Tensor) -> Tensor:
    far = ((xy[:, :, None] - xy[:, None]) ** 2).sum(-1)
    return (scores(q, k) - far[:, None]).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(3)], grad=(0, 1, 2, 3))
def mapped_function_of_position(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """A score_mod over four axes of `vmap`."""

    def mod(s: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + slopes[h] * (j - i)

    of_keys = torch.vmap(mod, (0, None, None, 0))
    of_all = torch.vmap(torch.vmap(of_keys, (0, None, 0, None)), (0, 0, None, None))
    heads, i, j = (torch.arange(n, device=q.device) for n in (3, q.shape[2], k.shape[2]))
    s = torch.stack([of_all(x, heads, i, j) for x in scores(q, k)])
    return s.softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Windows, sets and groups


@CASES.fuse(lambda d: tokens(d, 24), grad=(0, 1))
def looks_one_window_back(x: Tensor, w: Tensor) -> Tensor:
    b, n = x.shape[:2]
    q, k, v = (t.reshape(b * 3, n // 8, 8, 8) for t in packed(x, w))
    i = torch.arange(n, device=x.device).view(1, n // 8, 8)

    def around(t: Tensor, value: float) -> Tensor:
        t = F.pad(t, (*(0, 0) * (t.dim() - 2), 1, 0), value=value)
        return torch.cat([t[:, c : c + n // 8] for c in range(2)], dim=2)

    s = torch.einsum("bwid,bwjd->bwij", q * 8**-0.5, around(k, -1.0))
    j = around(i, -1)
    hidden = (i[..., :, None] < j[..., None, :]) | (j[..., None, :] == -1)
    s = s.masked_fill(hidden, -torch.finfo(s.dtype).max)
    return torch.einsum("bwij,bwjd->bwid", s.softmax(-1), around(v, -1.0))


@CASES.fuse(lambda d: [d(2, d.n(7), 12), d(2, d.n(21), 12), *(d(24, 12) * 0.3 for _ in range(3))], grad=(0, 1, 2, 3, 4))
def set_transformer(queries: Tensor, keys: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    q, k, v = queries @ wq.T, keys @ wk.T, keys @ wv.T
    q, k, v = (torch.cat(t.split(8, 2), 0) for t in (q, k, v))
    a = torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(24), 2)
    o = torch.cat((q + a.bmm(v)).split(queries.size(0), 0), 2)
    return o + F.relu(o)


@CASES.fuse(lambda d: [d(2, 3, d.n(12), 5, 8) for _ in range(3)] + [d(3, d.n(12), d.n(12))], grad=(0, 1, 2, 3))
def tied_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Scores are summed over the rows of an alignment, and shared by them."""
    s = torch.einsum("bhird,bhjrd->bhij", q, k) * 40**-0.5 + bias
    return torch.einsum("bhij,bhjrd->bhird", s.softmax(-1), v)


@CASES.fuse(square, count=3)
def group_by_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = [(q[:, g : g + 1] @ k[:, g : g + 1].mT * 8**-0.5).softmax(-1) @ v[:, g : g + 1] for g in range(3)]
    return torch.cat(parts, 1)


@CASES.fuse(lambda d: [d(2, 16, d.n(5), 3), d(2, 16, d.n(5), 3)], grad=(0, 1))
def channels_that_differ_most(x: Tensor, g: Tensor) -> Tensor:
    """Attention of channels over channels, by the largest energy less each."""
    e = torch.bmm(x.flatten(2), x.flatten(2).transpose(1, 2))
    e = torch.max(e, -1, keepdim=True)[0].expand_as(e) - e
    return torch.bmm(F.softmax(e, dim=-1), g.flatten(2)).view_as(x)


# ----------------------------------------------------------------------------------------------------------------
# Weights


@CASES.fuse(square)
def no_key_for_the_first_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    p = scores(q, k).masked_fill(j >= i, -1e4).softmax(-1)
    p = torch.cat([torch.zeros_like(p[:, :, :1]), p[:, :, 1:]], 2)
    return p @ v


@CASES.fuse(lambda d: [*square(d), d(2, 3, d.n(21), 1)], grad=(0, 1, 2, 3))
def blended_with_the_mean(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    a = torch.sigmoid(gate)
    return (a * scores(q, k).softmax(-1) + (1 - a) / k.shape[2]) @ v


@CASES.fuse(lambda d: [*square(d), d(2, 3, d.n(21), d.n(21))])
def half_a_teacher(q: Tensor, k: Tensor, v: Tensor, teacher: Tensor) -> Tensor:
    return (0.5 * scores(q, k).softmax(-1) + 0.5 * teacher.softmax(-1)) @ v


# ----------------------------------------------------------------------------------------------------------------
# Other functions


@CASES.decline(square, grad=())
def selective(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What earlier queries saw is subtracted: a sum over queries."""
    i, j = places(q, k)
    s = scores(q, k).masked_fill(j > i, -1e4)
    return (s - F.relu(s[:, :1]).cumsum(-2)).softmax(-1) @ v


@CASES.decline(square)
def positive_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Performer: no softmax at all."""
    q, k = F.relu(q) + 1e-3, F.relu(k) + 1e-3
    total = 1.0 / torch.einsum("...nd,...d->...n", q, k.sum(dim=-2))
    return torch.einsum("...de,...nd,...n->...ne", torch.einsum("...nd,...ne->...de", k, v), q, total)
