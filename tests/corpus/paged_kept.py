"""Caches that are written and then read, in few bits, latent, and under other scores.

Words and sizes as in `paged`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from corpus.paged import BF16, F16, F32, HKV, PAGE, POOL, B, D, Draw, H, paged, slots
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
S = D**-0.5


def gq(q: Tensor) -> Tensor:
    return q.unflatten(2, (HKV, -1))


def score(q, k):
    return torch.einsum("bmhgd,bnhd->bhgmn", gq(q), k) * S


def weigh(p, v):
    return torch.einsum("bhgmn,bnhd->bmhgd", p, v).flatten(2, 3)


def att(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return weigh(score(q, k).masked_fill(~keep[:, None, None], -INF).softmax(-1), v)


def live(lengths: Tensor, n: Tensor) -> Tensor:
    return (torch.arange(n, device=lengths.device)[None] < lengths[:, None])[:, None]


def fetch(table: Tensor, *pools: Tensor) -> list[Tensor]:
    return [x[table].flatten(1, 2) for x in pools]


# ---------- caches in place
def writes(d: Draw) -> tuple[Tensor, ...]:
    q, kp, vp, t, ends = paged(d)
    last = ends.long() - 1
    slot = t[torch.arange(B, device=d.device), last // PAGE].long() * PAGE + last % PAGE
    return q, d(B, HKV, D), d(B, HKV, D), kp, vp, slot, t, ends


@CASES.fuse(writes)
def write_index_put(
    q: Tensor, kn: Tensor, vn: Tensor, kp: Tensor, vp: Tensor, slot: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    kp.view(-1, HKV, D).index_put_((slot,), kn)
    vp.view(-1, HKV, D).index_put_((slot,), vn)
    k, v = fetch(table, kp, vp)
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(writes)
def write_index_copy(
    q: Tensor, kn: Tensor, vn: Tensor, kp: Tensor, vp: Tensor, slot: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    kp.flatten(0, 1).index_copy_(0, slot, kn)
    vp.flatten(0, 1).index_copy_(0, slot, vn)
    k, v = fetch(table, kp, vp)
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(writes)
def write_scatter(
    q: Tensor, kn: Tensor, vn: Tensor, kp: Tensor, vp: Tensor, slot: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    at = slot[:, None, None].expand(-1, HKV, D)
    kp.view(-1, HKV, D).scatter_(0, at, kn)
    vp.view(-1, HKV, D).scatter_(0, at, vn)
    k, v = fetch(table, kp, vp)
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(writes, note="written through a loop over requests")
def write_loop(
    q: Tensor, kn: Tensor, vn: Tensor, kp: Tensor, vp: Tensor, slot: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    for b in range(len(q)):
        kp.view(-1, HKV, D)[slot[b]] = kn[b]
        vp.view(-1, HKV, D)[slot[b]] = vn[b]
    k, v = fetch(table, kp, vp)
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(writes, note="out of place, both returned")
def write_out_of_place(
    q: Tensor, kn: Tensor, vn: Tensor, kp: Tensor, vp: Tensor, slot: Tensor, table: Tensor, lengths: Tensor
) -> tuple[Tensor, ...]:
    k2 = kp.view(-1, HKV, D).index_put((slot,), kn).view_as(kp)
    v2 = vp.view(-1, HKV, D).index_put((slot,), vn).view_as(vp)
    k, v = fetch(table, k2, v2)
    return att(q, k, v, live(lengths, k.shape[1])), k2, v2


@CASES.either(writes)
def write_keys_after(
    q: Tensor, kn: Tensor, vn: Tensor, kp: Tensor, vp: Tensor, slot: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    (k,) = fetch(table, kp)
    s = score(q, k)
    kp.view(-1, HKV, D)[slot] = kn
    vp.view(-1, HKV, D)[slot] = vn
    return weigh(s.masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF).softmax(-1), vp[table].flatten(1, 2))


@CASES.either(writes)
def write_scaled_after_read(
    q: Tensor, kn: Tensor, vn: Tensor, kp: Tensor, vp: Tensor, slot: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = fetch(table, kp, vp)
    o = att(q, k, v, live(lengths, k.shape[1]))
    vp.mul_(2)
    return o


def static(d: Draw) -> tuple[Tensor, ...]:
    n = d.n(48)
    return d(B, H, 1, D), d(B, HKV, 1, D), d(B, HKV, 1, D), d(B, HKV, n, D), d(B, HKV, n, D), d.ints([29], torch.int64)


@CASES.fuse(static, note="HF StaticCache: index_copy_ at cache_position, mask from arange")
def static_cache(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
    kc.index_copy_(2, pos, kn)
    vc.index_copy_(2, pos, vn)
    k, v = (x[:, :, None].expand(-1, -1, G, -1, -1).reshape(len(q), H, -1, D) for x in (kc, vc))
    mask = torch.full((1, k.shape[2]), torch.finfo(q.dtype).min, device=q.device, dtype=q.dtype)
    mask = mask * (torch.arange(k.shape[2], device=q.device) > pos.reshape(-1, 1))
    w = q @ k.transpose(2, 3) * S + mask[None, None]
    return F.softmax(w, -1, dtype=torch.float32).to(q.dtype) @ v


@CASES.fuse(static, note="DynamicCache: cat")
def dynamic_cache(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
    k, v = torch.cat([kc, kn], 2), torch.cat([vc, vn], 2)
    k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    return (q @ k.mT * S).softmax(-1) @ v, k, v


@CASES.fuse(static, note="sliding window cache: roll, then write the last")
def sliding_cache(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
    kc = torch.cat([kc[:, :, 1:], kn], 2)
    vc = torch.cat([vc[:, :, 1:], vn], 2)
    n = torch.arange(kc.shape[2], device=q.device)
    keep = n >= kc.shape[2] - 1 - pos
    k, v = kc.repeat_interleave(G, 1), vc.repeat_interleave(G, 1)
    return (q @ k.mT * S).masked_fill(~keep, -INF).softmax(-1) @ v, kc, vc


@CASES.fuse(static, note="slice assignment at a Python number")
def static_slice(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
    kc[:, :, 29:30] = kn
    vc[:, :, 29:30] = vn
    k, v = kc[:, :, :30].repeat_interleave(G, 1), vc[:, :, :30].repeat_interleave(G, 1)
    return (q @ k.mT * S).softmax(-1) @ v


@CASES.fuse(static, note="ring buffer: position modulo the window")
def ring_buffer(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
    w = kc.shape[2]
    at = (pos + 40) % w
    kc[:, :, at] = kn
    vc[:, :, at] = vn
    age = (pos + 40 - torch.arange(w, device=q.device)) % w
    keep = age < 31
    k, v = kc.repeat_interleave(G, 1), vc.repeat_interleave(G, 1)
    return (q @ k.mT * S).masked_fill(~keep, -INF).softmax(-1) @ v


@CASES.fuse(lambda d: (*static(d)[:5], d.ints([29, 5, 47], torch.int64)), note="each request at its own position")
def static_positions(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
    b = torch.arange(len(q), device=q.device)
    kc[b, :, pos] = kn[:, :, 0]
    vc[b, :, pos] = vn[:, :, 0]
    keep = torch.arange(kc.shape[2], device=q.device) <= pos[:, None, None, None]
    return F.scaled_dot_product_attention(q, kc, vc, attn_mask=keep, enable_gqa=True)


# ---------- quantised
def q8(kind: torch.dtype, how: str) -> Any:
    def build(d):
        q, kp, vp, t, ends = paged(d)
        if kind == torch.int8:
            k8, v8 = ((x * 20).round().clamp(-127, 127).to(kind) for x in (kp, vp))
        else:
            k8, v8 = (x.clamp(-3, 3).to(kind) for x in (kp, vp))
        shape = {
            "tensor": (),
            "head": (HKV,),
            "token": (kp.shape[0], PAGE),
            "token_head": (kp.shape[0], PAGE, HKV),
            "page": (kp.shape[0],),
        }[how]

        def f() -> Tensor:
            return (d(*shape).abs() if shape else torch.tensor(0.7).to(d.device, d.dtype)) * 0.1 + 0.03

        return q, k8, v8, f().to(d.dtype), f().to(d.dtype), t, ends

    return build


for kind, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")):
    for how in ("tensor", "head", "token", "token_head", "page"):

        def fn(q, k8, v8, ks, vs, table, lengths, how=how):
            k, v = (x[table].to(q.dtype) for x in (k8, v8))
            if how == "tensor":
                k, v = k * ks, v * vs
            elif how == "head":
                k, v = k * ks[:, None], v * vs[:, None]
            elif how == "token":
                k, v = k * ks[table][..., None, None], v * vs[table][..., None, None]
            elif how == "token_head":
                k, v = k * ks[table][..., None], v * vs[table][..., None]
            else:
                k, v = k * ks[table][..., None, None, None], v * vs[table][..., None, None, None]
            k, v = k.flatten(1, 2), v.flatten(1, 2)
            return att(q, k, v, live(lengths, k.shape[1]))

        fn.__name__ = f"quant_{name}_{how}"
        CASES.fuse(q8(kind, how), dtypes=(BF16, F32, F16), grad=(0,))(fn)


@CASES.fuse(q8(torch.int8, "token"), dtypes=(BF16, F32, F16), grad=(0,), note="scales on scores and weights")
def quant_on_scores(
    q: Tensor, k8: Tensor, v8: Tensor, ks: Tensor, vs: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = (x[table].flatten(1, 2).to(q.dtype) for x in (k8, v8))
    a, b = ks[table].flatten(1), vs[table].flatten(1)
    s = score(q, k) * a[:, None, None, None]
    p = s.masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF).softmax(-1)
    return weigh(p * b[:, None, None, None], v)


@CASES.either(q8(torch.int8, "token"), dtypes=(BF16, F32, F16), grad=(0,))
def quant_scale_after_mask_fill(
    q: Tensor, k8: Tensor, v8: Tensor, ks: Tensor, vs: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """value scales inside the softmax's normalisation"""
    k, v = (x[table].flatten(1, 2).to(q.dtype) for x in (k8, v8))
    a, b = ks[table].flatten(1), vs[table].flatten(1)
    s = score(q, k) * a[:, None, None, None]
    p = s.masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF).softmax(-1) * b[:, None, None, None]
    return weigh(p / p.sum(-1, keepdim=True), v)


# ---------- MLA
def mla(d: Draw) -> tuple[Tensor, ...]:
    return d(B, 1, H, 48), d(B, 1, H, 16), d(d.n(POOL), PAGE, 48), d(d.n(POOL), PAGE, 16), d.table(), d.lengths()


@CASES.fuse(mla)
def mla_two_pools(qn: Tensor, qr: Tensor, c: Tensor, r: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    kc, kr = fetch(table, c, r)
    s = (torch.einsum("bmhc,bnc->bhmn", qn, kc) + torch.einsum("bmhc,bnc->bhmn", qr, kr)) * 64**-0.5
    p = s.masked_fill(~live(lengths, kc.shape[1])[:, None], -INF).softmax(-1)
    return torch.einsum("bhmn,bnc->bmhc", p, kc)


@CASES.fuse(mla)
def mla_cat(qn: Tensor, qr: Tensor, c: Tensor, r: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    kc, kr = fetch(table, c, r)
    q, k = torch.cat([qn, qr], -1), torch.cat([kc, kr], -1)
    s = q.transpose(1, 2) @ k[:, None].mT * 64**-0.5
    return (s.masked_fill(~live(lengths, k.shape[1])[:, None], -INF).softmax(-1) @ kc[:, None]).transpose(1, 2)


@CASES.either(mla)
def mla_rope_in_values(qn: Tensor, qr: Tensor, c: Tensor, r: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    kc, kr = fetch(table, c, r)
    s = (torch.einsum("bmhc,bnc->bhmn", qn, kc) + torch.einsum("bmhc,bnc->bhmn", qr, kr)) * 64**-0.5
    p = s.masked_fill(~live(lengths, kc.shape[1])[:, None], -INF).softmax(-1)
    return torch.einsum("bhmn,bnc->bmhc", p, torch.cat([kc, kr], -1))


@CASES.fuse(
    lambda d: (d(B, H, 64), d(d.n(POOL) * PAGE, 1, 64), d.table(), d.lengths()),
    note="SGLang MLA: one buffer, V its first 48",
)
def mla_one_buffer(q: Tensor, buf: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n = torch.arange(table.shape[1] * PAGE, device=q.device)
    kv = buf[slots(table, n)][:, :, 0]
    s = torch.bmm(q, kv.transpose(1, 2)) * 64**-0.5
    s = s.masked_fill(n[None, None] >= lengths[:, None, None], -INF)
    return torch.bmm(torch.softmax(s, -1, dtype=torch.float32).to(q.dtype), kv[..., :48])


# ---------- scores
@CASES.fuse(lambda d: (*paged(d), torch.linspace(0.1, 1, H).to(d.device, d.dtype)))
def alibi_from_end(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, slope: Tensor) -> Tensor:
    k, v = fetch(table, kp, vp)
    n = torch.arange(k.shape[1], device=q.device)
    bias = -(lengths[:, None] - 1 - n).clamp(min=0)[:, None, None].to(q.dtype) * slope.view(1, HKV, G, 1)
    s = score(q, k) + bias[:, :, :, None]
    return weigh(s.masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF).softmax(-1), v)


@CASES.fuse(paged)
def soft_cap_window(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetch(table, kp, vp)
    n = torch.arange(k.shape[1], device=q.device)
    keep = (n < lengths[:, None]) & (n >= lengths[:, None] - 13)
    s = 15 * torch.tanh(score(q, k) / 15)
    return weigh(s.masked_fill(~keep[:, None, None, None], -INF).softmax(-1), v)


@CASES.fuse(lambda d: (*paged(d), d(H)))
def sink_denominator(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, sink: Tensor) -> Tensor:
    k, v = fetch(table, kp, vp)
    s = score(q, k).masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF)
    z = sink.view(1, HKV, G, 1, 1)
    m = torch.maximum(s.amax(-1, keepdim=True), z)
    e = (s - m).exp()
    return weigh(e / (e.sum(-1, keepdim=True) + (z - m).exp()), v)


@CASES.fuse(paged, note="StreamingLLM: four first tokens and a window")
def streaming(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetch(table, kp, vp)
    n = torch.arange(k.shape[1], device=q.device)
    keep = (n < lengths[:, None]) & ((n < 4) | (n >= lengths[:, None] - 9))
    return att(q, k, v, keep[:, None])


@CASES.fuse(paged, note="returns lse")
def returns_lse(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    k, v = fetch(table, kp, vp)
    s = score(q, k).masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF)
    lse = s.logsumexp(-1)
    return weigh((s - lse[..., None]).exp(), v), lse


@CASES.fuse(lambda d: (*paged(d), d.ints([2, 0, 1], torch.int64)), note="beam reorder: tables by parent")
def beam_reorder(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, parent: Tensor) -> Tensor:
    k, v = fetch(table.index_select(0, parent), kp, vp)
    return att(q, k, v, live(lengths[parent], k.shape[1]))


@CASES.fuse(
    lambda d: (d(B, 2, H, D), d(B, HKV, d.n(48), D), d(B, HKV, d.n(48), D), d.ints([48, 11, 16])),
    note="cross attention cache",
)
def cross_cache(q: Tensor, kc: Tensor, vc: Tensor, lengths: Tensor) -> Tensor:
    k, v = kc.repeat_interleave(G, 1), vc.repeat_interleave(G, 1)
    keep = torch.arange(k.shape[2], device=q.device)[None] < lengths[:, None]
    bias = (1.0 - keep.to(q.dtype))[:, None, None] * torch.finfo(q.dtype).min
    return (F.softmax(q.transpose(1, 2) @ k.mT * S + bias, -1) @ v).transpose(1, 2)


@CASES.fuse(
    lambda d: (
        d(B, 1, H, D),
        d(d.n(POOL) * PAGE, HKV, D),
        d(d.n(POOL) * PAGE, HKV, D),
        torch.randperm(d.n(POOL) * PAGE)[: B * d.n(48)].view(B, -1).to(d.device),
        d.lengths(),
    ),
    note="page size 1",
)
def page_one(q: Tensor, kb: Tensor, vb: Tensor, tok: Tensor, lengths: Tensor) -> Tensor:
    k, v = kb[tok], vb[tok]
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(paged, note="MQA: one kv head by expand")
def mqa(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table][..., 0, :].flatten(1, 2)[:, None].expand(-1, H, -1, -1) for x in (kp, vp))
    s = q.transpose(1, 2) @ k.mT * S
    return (s.masked_fill(~live(lengths, k.shape[2])[:, None], -INF).softmax(-1) @ v).transpose(1, 2)


@CASES.fuse(paged, note="pages as an axis of the softmax: flattened in the softmax alone")
def page_axis(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = kp[table], vp[table]
    s = torch.einsum("bmhgd,bwphd->bhgmwp", gq(q), k) * S
    pos = torch.arange(table.shape[1] * PAGE, device=q.device).view(-1, PAGE)
    s = s.masked_fill((pos[None] >= lengths[:, None, None])[:, None, None, None], -INF)
    p = s.flatten(-2).softmax(-1).view_as(s)
    return torch.einsum("bhgmwp,bwphd->bmhgd", p, v).flatten(2, 3)


@CASES.fuse(paged, note="two-axis amax and sum")
def page_axis_two(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = kp[table], vp[table]
    s = torch.einsum("bmhgd,bwphd->bhgmwp", gq(q), k) * S
    pos = torch.arange(table.shape[1], device=q.device)[:, None] * PAGE + torch.arange(PAGE, device=q.device)
    s = s.masked_fill((pos[None] >= lengths[:, None, None])[:, None, None, None], -INF)
    e = (s - s.amax((-2, -1), keepdim=True)).exp()
    return torch.einsum("bhgmwp,bwphd->bmhgd", e / e.sum((-2, -1), keepdim=True), v).flatten(2, 3)
