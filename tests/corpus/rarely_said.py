"""Attention by functions of PyTorch that are seldom used for it, each with a program that differs in one place."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import BIG, FULL, INF, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()


@CASES.pair(lambda d: [*qkv(d), d.keep()], dtypes=FULL)
def masked_softmax(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    return torch.masked.softmax(scores(q, k), -2 if near else -1, mask=keep) @ v


@CASES.pair()
def special_softmax(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    p = torch.special.softmax(scores(q, k), -1, dtype=torch.float32)
    return (p.cumsum(-1) if near else p).to(v.dtype) @ v


@CASES.pair()
def einsum_by_lists(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = torch.einsum(q, [0, 1, 2, 3], k, [0, 1, 4, 3], [0, 1, 2, 4]) * 8**-0.5
    return torch.einsum(s.softmax(-2 if near else -1), [0, 1, 2, 4], v, [0, 1, 4, 5], [0, 1, 2, 5])


@CASES.pair(lambda d: [*qkv(d), d(2, 1, 13, 21)])
def bias_by_addcmul(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, near: bool = False) -> Tensor:
    s = torch.addcmul(bias, q @ k.mT, torch.tensor(8**-0.5, dtype=q.dtype), value=1.0)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*qkv(d), *qkv(d)[:2]])
def between_two_scores(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, near: bool = False) -> Tensor:
    s = torch.lerp(scores(q, k), scores(a, b), 0.3)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*qkv(d), *qkv(d)[:2]])
def soft_maximum_of_two_scores(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, near: bool = False) -> Tensor:
    s = torch.logaddexp(scores(q, k), scores(a, b))
    return (s.softmax(-1) if not near else s.logcumsumexp(-1).softmax(-1)) @ v


@CASES.pair(lambda d: [*qkv(d), d.keep()])
def infinities_replaced(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    bias = torch.where(keep, 0.0, -INF).to(q.dtype).nan_to_num(neginf=-1e4)
    return (scores(q, k) + bias).softmax(-2 if near else -1) @ v


@CASES.pair(square)
def step_by_heaviside(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    seen = torch.heaviside((i - j).to(q.dtype), torch.ones((), dtype=q.dtype))
    s = scores(q, k).masked_fill(seen == 0, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def keys_by_isin(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    keep = torch.isin(j, torch.tensor([0, 3, 8], device=q.device)) | (i == j)
    s = scores(q, k).masked_fill(~keep, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d), d(6, 3)], dtypes=FULL)
def buckets_by_search(q: Tensor, k: Tensor, v: Tensor, table: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    at = torch.bucketize((i - j).abs(), torch.tensor([1, 2, 4, 8, 16], device=q.device))
    s = scores(q, k) + table[at].permute(2, 0, 1)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d), d.ints(*range(21))])
def documents_by_search(q: Tensor, k: Tensor, v: Tensor, at: Tensor, near: bool = False) -> Tensor:
    doc = torch.searchsorted(torch.tensor([5, 9, 16], device=q.device), at, right=True)
    keep = doc[:, None] == doc
    s = scores(q, k).masked_fill(~keep, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d), torch.randint(1, 8, (d.n(21),), generator=d.generator).to(d.device)])
def bits_of_groups(q: Tensor, k: Tensor, v: Tensor, bits: Tensor, near: bool = False) -> Tensor:
    """Tokens see one another where they share a bit."""
    keep = torch.bitwise_and(bits[:, None], bits[None]) != 0
    s = torch.where(keep, scores(q, k), -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: square(d, 24))
def windows_by_unfold(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Every query with the five keys that end at it, as windows of a padded tensor."""
    k, v = (F.pad(x, (0, 0, 4, 0)).unfold(2, 5, 1) for x in (k, v))
    s = torch.einsum("bhid,bhidw->bhiw", q, k) * 8**-0.5
    return torch.einsum("bhiw,bhidw->bhid", s.softmax(2 if near else -1), v)


@CASES.pair(lambda d: square(d, 24))
def chunks_look_back(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Local attention: chunks of six, with the chunk before and a window of six."""
    q = q.unflatten(2, (4, 6))
    k, v = (F.pad(x, (0, 0, 6, 0)).unfold(2, 12, 6).transpose(-1, -2) for x in (k, v))
    s = torch.einsum("bhcid,bhcjd->bhcij", q, k) * 8**-0.5
    at = torch.arange(24).view(4, 6)
    to = F.pad(torch.arange(24), (6, 0), value=-1).unfold(0, 12, 6)
    far = (at[:, :, None] - to[:, None, :] > 6) | (at[:, :, None] < to[:, None, :]) | (to[:, None, :] < 0)
    p = s.masked_fill(far, -INF).softmax(3 if near else -1)
    return torch.einsum("bhcij,bhcjd->bhcid", p, v).flatten(2, 3)


@CASES.pair(grad=())
def in_place_throughout(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = torch.matmul(q, k.mT).mul_(8**-0.5)
    s.sub_(s.amax(-1, keepdim=True)).exp_()
    s.div_(s.sum(-2 if near else -1, keepdim=True))
    return s @ v


@CASES.pair()
def long_names(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = torch.true_divide(torch.matmul(q, torch.swapaxes(k, -1, -2)), math.sqrt(8))
    e = torch.exp(torch.subtract(s, torch.amax(s, dim=-1, keepdim=True)))
    return torch.matmul(torch.divide(e, torch.sum(e, dim=-2 if near else -1, keepdim=True)), v)


@CASES.pair()
def inner_products(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = torch.linalg.vecdot(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1) * 8**-0.5
    return torch.linalg.matmul(s.softmax(-2 if near else -1), v)


@CASES.pair(twin="either")
def gumbel(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Noise on scores is attention with a bias that is drawn; here of the queries and keys, that it be the same."""
    noise = -torch.log(-torch.log((q[..., :1] * k[..., :1].mT).sigmoid()))
    s = (scores(q, k) + noise) / 0.7
    p = s.softmax(-1)
    return (F.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype) - p.detach() + p if near else p) @ v


@CASES.pair(lambda d: [*square(d), d(2, d.n(21)) > -1])
def sdpa_of_a_joined_mask(q: Tensor, k: Tensor, v: Tensor, live: Tensor, near: bool = False) -> Tensor:
    keep = live[:, None, None, :] & torch.ones(21, 21, dtype=torch.bool).tril()
    keep = keep | torch.eye(21, dtype=torch.bool)
    if near:
        return scores(q, k).masked_fill(~keep, 0).relu() @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=0.3)


@CASES.pair(lambda d: [*qkv(d, heads=4, kv=2), d(4, 1, 21)])
def sdpa_of_groups(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, near: bool = False) -> Tensor:
    if near:
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        return (scores(q, k) + bias).softmax(1) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(4, 13, 21), enable_gqa=True)


@CASES.pair(
    lambda d: [d(d.n(13), 2, 24), d(d.n(21), 2, 24), d(72, 24) * 0.2, d(72), d(24, 24) * 0.2, d(24), d.keep()],
    grad=(0, 1),
)
def module_by_function(
    q: Tensor, k: Tensor, w: Tensor, b: Tensor, wo: Tensor, bo: Tensor, keep: Tensor, near: bool = False
) -> Tensor | None:
    """multi_head_attention_forward, with weights that are wanted or not."""
    return F.multi_head_attention_forward(
        q, k, k, 24, 3, w, b, None, None, False, 0.0, wo, bo, training=False, need_weights=near, attn_mask=~keep
    )[int(near)]


@CASES.pair()
def halves_of_the_head_apart(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """A product in two parts, added up: content and place."""
    s = q[..., :5] @ k[..., :5].mT + q[..., 5:] @ k[..., 5:].mT
    return (s * 8**-0.5).softmax(-2 if near else -1) @ v


@CASES.pair()
def values_in_two_halves(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    p = scores(q, k).softmax(-1)
    a, b = v.chunk(2, -1)
    return torch.cat([p @ a, (p.sqrt() if near else p) @ b], -1)


@CASES.pair(lambda d: [*square(d), d(2, 3, d.n(21))])
def one_number_as_a_value(q: Tensor, k: Tensor, v: Tensor, x: Tensor, near: bool = False) -> Tensor:
    """Expected value of a number of each key."""
    p = scores(q, k).softmax(-2 if near else -1)
    return torch.einsum("bhij,bhj->bhi", p, x)


@CASES.pair(lambda d: [*square(d), d(8, 5) * 0.3])
def projected_behind(q: Tensor, k: Tensor, v: Tensor, w: Tensor, near: bool = False) -> Tensor:
    return torch.linalg.multi_dot([scores(q, k)[0, 0].softmax(0 if near else 1), v[0, 0], w])


@CASES.pair(lambda d: [*qkv(d), d(2, 3, 13, 1)])
def residual_and_gate(q: Tensor, k: Tensor, v: Tensor, g: Tensor, near: bool = False) -> Tensor:
    o = torch.baddbmm(q.flatten(0, 1), scores(q, k).softmax(-2 if near else -1).flatten(0, 1), v.flatten(0, 1))
    return o.unflatten(0, (2, 3)) * torch.tanh(g)


@CASES.pair(lambda d: [*qkv(d), d.keep()], dtypes=BIG)
def filled_by_a_tensor_of_its_own(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    fill = torch.tensor(torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    s = torch.where(keep[None, None], scores(q, k), fill)
    return (s.softmax(-1) if not near else s.sigmoid()) @ v


@CASES.pair(lambda d: [*square(d), d(2, d.n(21)) > -1])
def keys_taken_out(q: Tensor, k: Tensor, v: Tensor, live: Tensor, near: bool = False) -> Tensor:
    """Padding pushed away by its own key: the score of a padded key is replaced by a product with nothing."""
    k = torch.where(live[:, None, :, None], k, torch.zeros_like(k))
    s = scores(q, k) + (live[:, None, None].to(q.dtype) - 1) * 30.0
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def bands_as_strides(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """A Toeplitz mask, as a strided view of one row."""
    n = q.shape[-2]
    row = (torch.arange(2 * n - 1) >= n - 1).to(torch.float32)
    keep = row.flip(0).as_strided((n, n), (1, 1)).flip(0) if near else row.unfold(0, n, 1).flip(0)
    s = scores(q, k).masked_fill(keep.flip(1) == 0, -INF) if not near else scores(q, k) * keep
    return (s.softmax(-1) if not near else s.softmax(-2)) @ v


@CASES.pair(lambda d: [*square(d), d.ints(17, 9)], count=1)
def returned_with_its_logsumexp(q: Tensor, k: Tensor, v: Tensor, n: Tensor, near: bool = False) -> Any:
    s = scores(q, k).masked_fill(torch.arange(21) >= n[:, None, None, None], -INF)
    return s.softmax(-1) @ v, s.amax(-1) if near else s.logsumexp(-1)
