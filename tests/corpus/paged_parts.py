"""Keys in parts that are put together by hand, beside prefixes, and under drafts.

Words and sizes as in `paged`.
"""

from __future__ import annotations

import torch
from corpus.paged import HKV, PAGE, PAGES, B, D, Draw, H, paged
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


# ---------- PagedAttention v2 and split-KV by hand
@CASES.either(paged, note="PagedAttention v2: partitions of pages, partials combined")
def v2_partitions(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    parts = 3
    k, v = fetch(table, kp, vp)
    n = k.shape[1]
    s = score(q, k).masked_fill(~live(lengths, n)[:, None, None], -INF)
    s = s.unflatten(-1, (parts, -1))
    m = s.amax(-1, keepdim=True)
    e = torch.where(m == -INF, 0.0, (s - m).exp())
    ends = e.sum(-1)
    o = torch.einsum("bhgmpn,bpnhd->bhgmpd", e, v.unflatten(1, (parts, -1)))
    m = m[..., 0]
    top = m.amax(-1, keepdim=True)
    w = (m - top).exp()
    out = (o * w[..., None]).sum(-2) / (ends * w).sum(-1)[..., None]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.fuse(paged, note="partials normalised, then weighed by their sums")
def v2_partitions_normalised(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    parts = 2
    k, v = fetch(table, kp, vp)
    s = score(q, k).masked_fill(~live(lengths, k.shape[1])[:, None, None], -1e30).unflatten(-1, (parts, -1))
    lse = s.logsumexp(-1)
    o = torch.einsum("bhgmpn,bpnhd->bhgmpd", s.softmax(-1), v.unflatten(1, (parts, -1)))
    w = lse.softmax(-1)
    return (o * w[..., None]).sum(-2).permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.fuse(paged, note="trained, it is left to eager")
def v2_partitions_lse_shift(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    parts = 3
    k, v = fetch(table, kp, vp)
    s = score(q, k).masked_fill(~live(lengths, k.shape[1])[:, None, None], -1e30).unflatten(-1, (parts, -1))
    lse = s.logsumexp(-1)
    o = torch.einsum("bhgmpn,bpnhd->bhgmpd", (s - lse[..., None]).exp(), v.unflatten(1, (parts, -1)))
    w = (lse - lse.logsumexp(-1, keepdim=True)).exp()
    return torch.einsum("bhgmpd,bhgmp->bmhgd", o, w).flatten(2, 3)


@CASES.either(paged)
def v2_partitions_unweighed(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """mean of the partitions: another function"""
    parts = 2
    k, v = fetch(table, kp, vp)
    s = (
        score(q, k)
        .masked_fill(~live(lengths.clamp(min=PAGE * PAGES), k.shape[1])[:, None, None], -1e30)
        .unflatten(-1, (parts, -1))
    )
    o = torch.einsum("bhgmpn,bpnhd->bhgmpd", s.softmax(-1), v.unflatten(1, (parts, -1)))
    return o.mean(-2).permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.fuse(paged, note="a loop over partitions; lists stacked; trained, it is left to eager")
def v2_loop_stacked(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    outs, lses = [], []
    for c in range(0, table.shape[1], 2):
        k, v = fetch(table[:, c : c + 2], kp, vp)
        keep = c * PAGE + torch.arange(k.shape[1], device=q.device)[None] < lengths[:, None]
        s = score(q, k).masked_fill(~keep[:, None, None, None], -1e30)
        lse = torch.logsumexp(s, -1)
        outs.append(torch.einsum("bhgmn,bnhd->bhgmd", (s - lse[..., None]).exp(), v))
        lses.append(lse)
    lse, o = torch.stack(lses), torch.stack(outs)
    w = torch.softmax(lse, 0)[..., None]
    return (w * o).sum(0).permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.fuse(paged, note="flash-decoding loop, running max")
def loop_online(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    m = q.new_full((len(q), HKV, G, q.shape[1], 1), -INF)
    ends = torch.zeros_like(m)
    acc = q.new_zeros(len(q), HKV, G, q.shape[1], D)
    for c in range(table.shape[1]):
        k, v = kp[table[:, c]], vp[table[:, c]]
        keep = c * PAGE + torch.arange(PAGE, device=q.device)[None] < lengths[:, None]
        s = score(q, k).masked_fill(~keep[:, None, None, None], -INF)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p = (s - new).exp()
        a = (m - new).exp()
        ends = ends * a + p.sum(-1, keepdim=True)
        acc = acc * a + torch.einsum("bhgmn,bnhd->bhgmd", p, v)
        m = new
    return (acc / ends).permute(0, 3, 1, 2, 4).flatten(2, 3)


# ---------- cascade
def cascade(d: Draw) -> tuple[Tensor, ...]:
    q, kp, vp, t, ends = paged(d)
    return q, d(d.n(16), HKV, D), d(d.n(16), HKV, D), kp, vp, t, ends


@CASES.fuse(cascade, note="shared prefix and pages: scores side by side")
def cascade_cat_scores(
    q: Tensor, pk: Tensor, pv: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = fetch(table, kp, vp)
    s1 = torch.einsum("bmhgd,nhd->bhgmn", gq(q), pk) * S
    s2 = score(q, k).masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF)
    p = torch.cat([s1, s2], -1).softmax(-1)
    p1, p2 = p.split([pk.shape[0], k.shape[1]], -1)
    return (torch.einsum("bhgmn,nhd->bmhgd", p1, pv) + torch.einsum("bhgmn,bnhd->bmhgd", p2, v)).flatten(2, 3)


@CASES.fuse(cascade)
def cascade_cat_keys(
    q: Tensor, pk: Tensor, pv: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = fetch(table, kp, vp)
    k, v = (torch.cat([a.expand(len(q), -1, -1, -1), x], 1) for a, x in ((pk, k), (pv, v)))
    n = torch.arange(k.shape[1], device=q.device)
    return att(q, k, v, (n < pk.shape[0] + lengths[:, None])[:, None])


@CASES.fuse(cascade, count=2, note="merged by lse (FlashInfer merge_state)")
def cascade_merge_state(
    q: Tensor, pk: Tensor, pv: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = fetch(table, kp, vp)

    def part(s, v, eq):
        lse = s.logsumexp(-1)
        return torch.einsum(eq, (s - lse[..., None]).exp(), v), lse

    o1, l1 = part(torch.einsum("bmhgd,nhd->bhgmn", gq(q), pk) * S, pv, "bhgmn,nhd->bhgmd")
    o2, l2 = part(score(q, k).masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF), v, "bhgmn,bnhd->bhgmd")
    top = torch.maximum(l1, l2)
    a, b = (l1 - top).exp()[..., None], (l2 - top).exp()[..., None]
    return ((o1 * a + o2 * b) / (a + b)).permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.either(cascade)
def cascade_merge_swapped(
    q: Tensor, pk: Tensor, pv: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = fetch(table, kp, vp)

    def part(s, v, eq):
        lse = s.logsumexp(-1)
        return torch.einsum(eq, (s - lse[..., None]).exp(), v), lse

    o1, l1 = part(torch.einsum("bmhgd,nhd->bhgmn", gq(q), pk) * S, pv, "bhgmn,nhd->bhgmd")
    o2, l2 = part(score(q, k).masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF), v, "bhgmn,bnhd->bhgmd")
    w = torch.sigmoid(l2 - l1)[..., None]
    return (o1 * w + o2 * (1 - w)).permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.fuse(cascade, note="two parts, one global maximum and sum")
def cascade_global_max(
    q: Tensor, pk: Tensor, pv: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    k, v = fetch(table, kp, vp)
    s1 = torch.einsum("bmhgd,nhd->bhgmn", gq(q), pk) * S
    s2 = score(q, k).masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF)
    m = torch.maximum(s1.amax(-1, keepdim=True), s2.amax(-1, keepdim=True))
    e1, e2 = (s1 - m).exp(), (s2 - m).exp()
    o = torch.einsum("bhgmn,nhd->bhgmd", e1, pv) + torch.einsum("bhgmn,bnhd->bhgmd", e2, v)
    return (o / (e1.sum(-1, keepdim=True) + e2.sum(-1, keepdim=True))).permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.fuse(lambda d: (*paged(d), d(B, 1, HKV, D), d(B, 1, HKV, D)), note="the new token beside the pages")
def new_token_beside(
    q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, kn: Tensor, vn: Tensor
) -> Tensor:
    k, v = fetch(table, kp, vp)
    s = torch.cat([score(q, k).masked_fill(~live(lengths, k.shape[1])[:, None, None], -INF), score(q, kn)], -1)
    return weigh(s.softmax(-1), torch.cat([v, vn], 1))


# ---------- speculative decoding
@CASES.fuse(lambda d: paged(d, M=4))
def spec_tril(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    m = q.shape[1]
    k, v = fetch(table, kp, vp)
    n = torch.arange(k.shape[1], device=q.device)
    tail = n[None, :] - (lengths[:, None] - m)
    keep = tail[:, None, :] <= torch.arange(m, device=q.device)[None, :, None]
    return att(q, k, v, keep)


@CASES.either(lambda d: paged(d, M=4))
def spec_tril_off_by_one(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    m = q.shape[1]
    k, v = fetch(table, kp, vp)
    n = torch.arange(k.shape[1], device=q.device)
    tail = n[None, :] - (lengths[:, None] - m)
    return att(q, k, v, tail[:, None, :] < torch.arange(m, device=q.device)[None, :, None])


def tree(d: Draw) -> tuple[Tensor, ...]:
    q, kp, vp, t, ends = paged(d, M=4)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool, device=d.device)
    return q, kp, vp, t, ends, mask


@CASES.fuse(tree, note="tree mask gathered by clamped offset")
def spec_tree(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, tree: Tensor) -> Tensor:
    m = q.shape[1]
    k, v = fetch(table, kp, vp)
    off = torch.arange(k.shape[1], device=q.device)[None] - (lengths[:, None] - m)
    inside = tree[:, off.clamp(0, m - 1)].permute(1, 0, 2)
    keep = torch.where((off < 0)[:, None], True, inside & (off < m)[:, None])
    return att(q, k, v, keep)


@CASES.fuse(
    lambda d: (*tree(d)[:5], d.ints([-1, 0, 0, 1], torch.int64)), note="parents -> ancestors by repeated lookup"
)
def spec_tree_parents(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, parent: Tensor) -> Tensor:
    m = q.shape[1]
    anc = torch.eye(m, dtype=torch.bool, device=q.device)
    for _ in range(m - 1):
        up = torch.where((parent >= 0)[:, None], anc[parent.clamp(min=0)], False)
        anc = anc | up
    k, v = fetch(table, kp, vp)
    off = torch.arange(k.shape[1], device=q.device)[None] - (lengths[:, None] - m)
    keep = (off < 0)[:, None] | (anc[:, off.clamp(0, m - 1)].transpose(0, 1) & (off < m)[:, None])
    return att(q, k, v, keep)


@CASES.fuse(lambda d: (*paged(d, M=4), d(4, d.n(PAGES) * PAGE) > 0.2), note="a mask [M, N] given for all")
def spec_given_mask(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    k, v = fetch(table, kp, vp)
    return att(q, k, v, live(lengths, k.shape[1]) & (mask | (torch.arange(k.shape[1], device=q.device) == 0))[None])


@CASES.fuse(lambda d: paged(d, M=3), note="queries flattened into the batch: q [B*M, H, D], table repeated")
def spec_as_batch(q: Tensor, kp: Tensor, vp: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    b, m = q.shape[:2]
    t = table.repeat_interleave(m, 0)
    ln = (lengths[:, None] - m + 1 + torch.arange(m, device=q.device)).reshape(-1)
    k, v = fetch(t, kp, vp)
    return att(q.reshape(b * m, 1, H, D), k, v, live(ln, k.shape[1])).view(b, m, H, D)
