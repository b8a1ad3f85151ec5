"""Pools as engines lay them out, and pages as lists, slots and numbers that may be missing.

Words and sizes as in `paged`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus.paged import HKV, PAGE, D, Draw, H, paged, slots
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
S = D**-0.5


def gq(q: Tensor) -> Tensor:
    return q.unflatten(2, (HKV, -1))


def att(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float = S) -> Tensor:
    """q [B,M,H,D] k,v [B,N,HKV,D] keep [B,M,N]-like"""
    s = torch.einsum("bmhgd,bnhd->bhgmn", gq(q), k) * scale
    s = s.masked_fill(~keep[:, None, None], -INF)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


def live(lengths: Tensor, n: Tensor) -> Tensor:
    return (torch.arange(n, device=lengths.device)[None] < lengths[:, None])[:, None]


# ---------- vLLM
def v0x(d: Draw) -> tuple[Tensor, ...]:
    q, kp, vp, t, ends = paged(d)
    x = 8
    k5 = kp.view(-1, PAGE, HKV, D // x, x).permute(0, 2, 3, 1, 4).contiguous()
    v4 = vp.permute(0, 2, 3, 1).contiguous()
    return q, k5, v4, t, ends


@CASES.fuse(v0x, note="vLLM v0: x-split keys [P,KV,D/x,page,x], values [P,KV,D,page]")
def vllm_v0(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    b = q.shape[0]
    k = kc[table.long()]  # B,W,KV,D/x,page,x
    k = k.permute(0, 1, 4, 2, 3, 5).reshape(b, -1, HKV, D)
    v = vc[table.long()].permute(0, 1, 4, 2, 3).reshape(b, -1, HKV, D)
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(v0x)
def vllm_v0_flat_index(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    b = q.shape[0]
    k = (
        kc.index_select(0, table.reshape(-1))
        .view(b, -1, HKV, D // 8, PAGE, 8)
        .permute(0, 2, 1, 4, 3, 5)
        .reshape(b, HKV, -1, D)
    )
    v = vc.index_select(0, table.reshape(-1)).view(b, -1, HKV, D, PAGE).permute(0, 2, 1, 4, 3).reshape(b, HKV, -1, D)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=live(lengths, k.shape[2])[:, None], enable_gqa=True
    ).transpose(1, 2)


@CASES.either(v0x)
def vllm_v0_x_wrong(q: Tensor, kc: Tensor, vc: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """x and D/x swapped: another permutation of D for K alone"""
    b = q.shape[0]
    k = kc[table.long()].permute(0, 1, 4, 2, 5, 3).reshape(b, -1, HKV, D)
    v = vc[table.long()].permute(0, 1, 4, 2, 3).reshape(b, -1, HKV, D)
    return att(q, k, v, live(lengths, k.shape[1]))


def v1(d: Draw) -> tuple[Tensor, ...]:
    q, kp, vp, t, ends = paged(d)
    return q, torch.stack([kp, vp]), t, ends


@CASES.fuse(v1, note="vLLM v1: [2, blocks, page, KV, D]")
def vllm_v1(q: Tensor, kv: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    kc, vc = kv.unbind(0)
    k, v = (c[table].flatten(1, 2) for c in (kc, vc))
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(v1)
def vllm_v1_both_at_once(q: Tensor, kv: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = kv[:, table].flatten(2, 3).unbind(0)
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.either(v1)
def vllm_v1_keys_twice(q: Tensor, kv: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = kv[:, table].flatten(2, 3).unbind(0)
    return att(q, v, v, live(lengths, k.shape[1]))


def v1hnd(d: Draw) -> tuple[Tensor, ...]:
    q, kp, vp, t, ends = paged(d)
    return q, torch.stack([kp, vp], 1).transpose(2, 3).contiguous(), t, ends


@CASES.fuse(v1hnd, note="FlashInfer [P,2,KV,page,D]")
def flashinfer_hnd(q: Tensor, kv: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    g = kv[table.flatten().long()].view(q.shape[0], -1, 2, HKV, PAGE, D)
    k, v = (g[:, :, i].permute(0, 1, 3, 2, 4).flatten(1, 2) for i in (0, 1))
    return att(q, k, v, live(lengths, k.shape[1]))


# ---------- ragged page lists (FlashInfer indptr/indices)
def indptr(d: Draw) -> tuple[Tensor, ...]:
    q, kp, vp, t, ends = paged(d)
    used = [(int(n) + PAGE - 1) // PAGE for n in ends.tolist()]
    ind = torch.cat([t[b, :u] for b, u in enumerate(used)])
    ptr = d.ints([0, *torch.tensor(used).cumsum(0).tolist()])
    last = d.ints([(int(n) - 1) % PAGE + 1 for n in ends.tolist()])
    return q, kp, vp, ptr, ind, last


@CASES.fuse(indptr, note="FlashInfer: indptr, indices, last_page_len")
def flashinfer_indptr(q: Tensor, kp: Tensor, vp: Tensor, ptr: Tensor, ind: Tensor, last: Tensor) -> Tensor:
    w = ind.shape[0]
    count = ptr[1:] - ptr[:-1]
    j = torch.arange(w, device=q.device)
    at = (ptr[:-1, None] + j).clamp(max=w - 1)
    table = ind[at]
    lengths = (count - 1) * PAGE + last
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(indptr)
def flashinfer_indptr_where(q: Tensor, kp: Tensor, vp: Tensor, ptr: Tensor, ind: Tensor, last: Tensor) -> Tensor:
    w = ind.shape[0]
    j = torch.arange(w, device=q.device)
    ok = j < (ptr[1:] - ptr[:-1])[:, None]
    table = torch.where(ok, ind[(ptr[:-1, None] + j) % w], 0)
    off = torch.arange(PAGE, device=q.device)
    keep = ok[..., None] & ((j[:, None] < (ptr[1:] - ptr[:-1] - 1)[:, None, None]) | (off < last[:, None, None]))
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, keep.flatten(1)[:, None])


@CASES.either(indptr)
def flashinfer_last_page_of_neighbour(
    q: Tensor, kp: Tensor, vp: Tensor, ptr: Tensor, ind: Tensor, last: Tensor
) -> Tensor:
    w = ind.shape[0]
    j = torch.arange(w, device=q.device)
    table = ind[(ptr[:-1, None] + j).clamp(max=w - 1)]
    lengths = (ptr[1:] - ptr[:-1] - 1) * PAGE + last.roll(1)
    k, v = (x[table].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(indptr, note="flat list of slots with owners by repeat_interleave")
def ragged_slots_owner(q: Tensor, kp: Tensor, vp: Tensor, ptr: Tensor, ind: Tensor, last: Tensor) -> Tensor:
    owner = torch.repeat_interleave(
        torch.arange(q.shape[0], device=q.device), (ptr[1:] - ptr[:-1]).long(), output_size=ind.shape[0]
    )
    k, v = (x[ind].flatten(0, 1) for x in (kp, vp))
    own = owner.repeat_interleave(PAGE)
    page = torch.arange(ind.shape[0], device=q.device) - ptr[owner]
    pos = (page[:, None] * PAGE + torch.arange(PAGE, device=q.device)).flatten()
    lengths = (ptr[1:] - ptr[:-1] - 1) * PAGE + last
    keep = (own[None] == torch.arange(q.shape[0], device=q.device)[:, None]) & (pos[None] < lengths[:, None])
    s = torch.einsum("bhgd,nhd->hgbn", gq(q)[:, 0], k) * S
    p = s.masked_fill(~keep, -INF).softmax(-1)
    return torch.einsum("hgbn,nhd->bhgd", p, v).flatten(1, 2)[:, None]


# ---------- SGLang
def sgl(d: Draw) -> tuple[Tensor, ...]:
    q, kp, vp, t, ends = paged(d)
    n = t.shape[1] * PAGE
    req = slots(t, torch.arange(n, device=d.device))
    pool = torch.zeros(7, n, dtype=torch.int32, device=d.device)
    idx = d.ints([5, 2, 3], torch.int64)
    pool[idx] = req.int()
    return q[:, 0].flatten(1), kp.reshape(-1, HKV, D), vp.reshape(-1, HKV, D), pool, idx, ends


@CASES.fuse(sgl, note="SGLang: req_to_token[req_pool_indices, :max] token slots")
def sglang_tokens(q: Tensor, k_buf: Tensor, v_buf: Tensor, req_to_token: Tensor, req: Tensor, lens: Tensor) -> Tensor:
    o = q.view(-1, H, D)
    tok = req_to_token[req]
    k, v = k_buf[tok], v_buf[tok]
    s = torch.einsum("bhgd,bnhd->bhgn", o.unflatten(1, (HKV, G)), k) * S
    s = torch.where((torch.arange(tok.shape[1], device=q.device) < lens[:, None])[:, None, None], s, float("-inf"))
    return torch.einsum("bhgn,bnhd->bhgd", s.softmax(-1), v).reshape(q.shape)


@CASES.fuse(sgl)
def sglang_tokens_index_select(
    q: Tensor, k_buf: Tensor, v_buf: Tensor, req_to_token: Tensor, req: Tensor, lens: Tensor
) -> Tensor:
    tok = req_to_token.index_select(0, req)
    n = tok.size(1)
    k = k_buf.index_select(0, tok.reshape(-1)).reshape(-1, n, HKV, D).permute(0, 2, 1, 3)
    v = v_buf.index_select(0, tok.reshape(-1)).reshape(-1, n, HKV, D).permute(0, 2, 1, 3)
    bias = torch.zeros(len(lens), n, device=q.device, dtype=q.dtype).masked_fill(
        torch.arange(n, device=q.device) >= lens[:, None], -INF
    )
    return F.scaled_dot_product_attention(
        q.view(-1, H, 1, D), k, v, attn_mask=bias[:, None, None], enable_gqa=True
    ).reshape(q.shape)


@CASES.fuse(sgl, note="SGLang sliding window: last 16 tokens, gathered by position from the end")
def sglang_window(q: Tensor, k_buf: Tensor, v_buf: Tensor, req_to_token: Tensor, req: Tensor, lens: Tensor) -> Tensor:
    w = 16
    pos = lens[:, None] - w + torch.arange(w, device=q.device)
    tok = req_to_token[req[:, None], pos.clamp(min=0)]
    k, v = k_buf[tok], v_buf[tok]
    s = torch.einsum("bhgd,bnhd->bhgn", q.view(-1, HKV, G, D), k) * S
    s = s.masked_fill((pos < 0)[:, None, None], -INF)
    return torch.einsum("bhgn,bnhd->bhgd", s.softmax(-1), v).reshape(q.shape)


@CASES.either(sgl)
def sglang_window_unmasked(
    q: Tensor, k_buf: Tensor, v_buf: Tensor, req_to_token: Tensor, req: Tensor, lens: Tensor
) -> Tensor:
    """the clamp repeats the first token: not masked"""
    w = 16
    pos = lens[:, None] - w + torch.arange(w, device=q.device)
    tok = req_to_token[req[:, None], pos.clamp(min=0)]
    k, v = k_buf[tok], v_buf[tok]
    s = torch.einsum("bhgd,bnhd->bhgn", q.view(-1, HKV, G, D), k) * S
    return torch.einsum("bhgn,bnhd->bhgd", s.softmax(-1), v).reshape(q.shape)


@CASES.fuse(sgl, note="LightLLM: b_start_loc-like table rows, Req_to_tokens + b_seq_len, softmax by hand in float32")
def lightllm(
    q: Tensor, k_buf: Tensor, v_buf: Tensor, Req_to_tokens: Tensor, B_req_idx: Tensor, b_seq_len: Tensor
) -> Tensor:
    q3 = q.view(-1, HKV, G, D)
    loc = Req_to_tokens[B_req_idx]
    att_ = torch.matmul(q3.float(), k_buf[loc].permute(0, 2, 3, 1).float()) * S
    m = torch.arange(loc.shape[1], device=q.device).expand(loc.shape) >= b_seq_len.unsqueeze(1)
    att_ = att_.masked_fill(m[:, None, None], -1e9)
    att_ = att_ - att_.max(-1, keepdim=True).values
    e = att_.exp()
    p = (e / e.sum(-1, keepdim=True)).to(q.dtype)
    return torch.matmul(p, v_buf[loc].transpose(1, 2)).reshape(q.shape)


# ---------- tables padded with -1
def minus(d: Draw) -> tuple[Tensor, ...]:
    q, kp, vp, t, ends = paged(d)
    used = torch.arange(t.shape[1], device=t.device)[None] * PAGE < ends[:, None]
    return q, kp, vp, t.masked_fill(~used, -1), ends


@CASES.fuse(minus, note="validity from the table: pages of -1")
def minus_one_clamped(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table.clamp(min=0)].flatten(1, 2) for x in (kp, vp))
    keep = live(lengths, k.shape[1]) & (table >= 0).repeat_interleave(PAGE, 1)[:, None]
    return att(q, k, v, keep)


@CASES.fuse(minus)
def minus_one_where(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    ok = table != -1
    t = torch.where(ok, table, torch.zeros_like(table))
    k, v = (x.index_select(0, t.flatten()).view(len(q), -1, HKV, D) for x in (kp, vp))
    keep = ok[:, :, None].expand(-1, -1, PAGE).reshape(len(q), 1, -1) & live(lengths, k.shape[1])
    return att(q, k, v, keep)


@CASES.fuse(minus, note="only the table says what is valid: whole pages")
def minus_one_only(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table.clamp_min(0)].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, (table >= 0).repeat_interleave(PAGE, 1)[:, None])


@CASES.fuse(minus, note="F.embedding into rows of pages")
def minus_one_embedding(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    t = table.clamp(min=0).long()
    k, v = (F.embedding(t, x.flatten(1)).view(len(q), -1, HKV, D) for x in (kp, vp))
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(minus, note="relu of the table")
def minus_one_relu(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    t = F.relu(table)
    k, v = (x[t].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(minus)
def minus_one_times_valid(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    t = table * (table >= 0)
    k, v = (x[t].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, live(lengths, k.shape[1]))


@CASES.fuse(minus, note="a scratch page at the end: -1 + pool size by remainder")
def minus_one_remainder(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    t = torch.remainder(table, kp.shape[0])
    k, v = (x[t].flatten(1, 2) for x in (kp, vp))
    return att(q, k, v, live(lengths, k.shape[1]))
