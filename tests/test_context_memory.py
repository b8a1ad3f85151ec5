"""Memory: caches written in place, operands overwritten, views of what comes out. No read crosses a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import INF, agree, attend, compiled, copies, plain, qkv, reasons
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusecomp


def cache() -> list[Tensor]:
    """One query, two new keys and values, the cached ones, and where the new ones go."""
    return [torch.randn(2, 3, n, 8) for n in (1, 2, 2, 21, 21)] + [torch.tensor([5, 9])]


def put(cached: Tensor, new: Tensor, at: Tensor) -> None:
    cached[:, :, at] = new


def copied(cached: Tensor, new: Tensor, at: Tensor) -> None:
    cached.index_copy_(2, at, new)


def scattered(cached: Tensor, new: Tensor, at: Tensor) -> None:
    cached.scatter_(2, at[None, None, :, None].expand_as(new), new)


def assigned(cached: Tensor, new: Tensor, at: Tensor) -> None:
    cached[:, :, 3:5] = new


def sliced(cached: Tensor, new: Tensor, at: Tensor) -> None:
    cached[:, :, 3:5].copy_(new)


WRITES = [put, copied, scattered, assigned, sliced]
Write = Callable[[Tensor, Tensor, Tensor], None]


@pytest.mark.parametrize("write", WRITES)
def test_a_cache_is_written_and_then_read(write: Write) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        write(keys, k, at)
        write(values, v, at)
        return plain(q, keys, values)

    agree(fn, cache())


@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_the_products_is_no_attention(write: Write) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        s = q @ keys.mT
        write(keys, k, at)
        return s.softmax(-1) @ values

    agree(fn, cache(), fused=0)
    assert "overwrites an operand" in reasons(fn, cache())[0]


def test_values_written_before_they_are_read() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        s = q @ keys.mT
        copied(values, v, at)
        return s.softmax(-1) @ values

    agree(fn, cache())


def test_two_steps_and_a_write_after() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        assigned(keys, k, at)
        q = plain(q, keys, values)
        copied(keys, k, at)
        q = plain(q, keys, values)
        values.zero_()
        return q

    agree(fn, cache(), fused=2)


def test_a_static_cache_in_buffers() -> None:
    class Cache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.randn(2, 3, 21, 8))

        def forward(self, q: Tensor, k: Tensor, at: Tensor) -> Tensor:
            self.keys.index_copy_(2, at, k)
            keep = torch.arange(21) <= at.max()
            return (q @ self.keys.mT).masked_fill(~keep, -INF).softmax(-1) @ self.keys

    torch.manual_seed(0)
    torch._dynamo.reset()
    fusecomp.reset()
    ours, theirs = Cache(), Cache()
    theirs.load_state_dict(ours.state_dict())
    step = compiled(ours)
    for at in range(3, 7):
        q, k = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 1, 8)
        torch.testing.assert_close(step(q, k, torch.tensor([at])), theirs(q, k, torch.tensor([at])))
    assert torch.equal(ours.keys, theirs.keys)
    assert fusecomp.counters()["fused"] == 1


# ----------------------------------------------------------------------------------------------------------------
# Operands and masks


def view_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turned = k.transpose(1, 2)
    s = q @ k.mT
    turned[:, 3] = 0
    return s.softmax(-1) @ v


def query_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    q.zero_()
    return s.softmax(-1) @ v


def slice_kept(q: Tensor, k: Tensor, v: Tensor) -> Any:
    s = q @ k.mT
    first = s[..., 0]
    s *= 2
    return s.softmax(-1) @ v, first


def weights_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    p[..., 5:] = 0
    return p @ v


def scores_written_elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.empty(2, 3, 13, 21)
    torch.matmul(q, k.mT, out=s)
    return s.softmax(-1) @ v


def result_written_elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros(2, 3, 13, v.shape[-1])
    seen = out.view(-1)
    torch.matmul((q @ k.mT).softmax(-1), v, out=out)
    return seen


LEFT_ALONE = view_written, query_written, slice_kept, scores_written_elsewhere, result_written_elsewhere


@pytest.mark.parametrize("fn", LEFT_ALONE)
def test_what_is_overwritten_or_seen_is_left_alone(fn: Callable[..., Any]) -> None:
    assert agree(fn, qkv(), fused=0)["declined"] == 1


def test_weights_of_which_a_part_is_overwritten() -> None:
    agree(weights_written, qkv())


def test_inputs_that_are_one_memory() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> Tensor:
        s = q @ k.mT
        other[:, :, 3] = 0
        return s.softmax(-1) @ v

    q, k, v = qkv()
    agree(fn, [q, k, v, k], fused=0)
    agree(fn, [q, k, v, k.clone()], fused=1)


@pytest.mark.parametrize("derived", [False, True])
def test_a_mask_that_changes_between_two_attentions(derived: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, drop: Tensor) -> Tensor:
        bias = torch.zeros(13, 21).masked_fill(drop, -INF)
        q = (q @ k.mT + bias).softmax(-1) @ v
        drop[:, 3] = True
        s = q @ k.mT
        return (s + bias if derived else s.masked_fill(drop, -INF)).softmax(-1) @ v

    agree(fn, [*qkv(), torch.rand(13, 21) < 0.3], fused=2)


def test_scores_changed_in_place() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        s.mul_(0.3).tanh_().masked_fill_(torch.arange(21) > 15, -INF)
        return s.softmax(-1) @ v

    agree(fn, qkv())


@pytest.mark.parametrize("join", [lambda a, b: torch.cat([a, b], -1), lambda a, b: torch.stack([a, b], -1).flatten(-2)])
def test_keys_put_together(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    halves = [torch.randn(2, 3, 21, 4, requires_grad=True) for _ in range(2)]
    agree(lambda a, b, q, v: plain(q, join(a, b), v), [*halves, *qkv()[:2]], train=True)


# ----------------------------------------------------------------------------------------------------------------
# Results


def views(q: Tensor, k: Tensor, v: Tensor) -> Any:
    out = plain(q, k, v)
    return out, out.transpose(1, 2), out[..., 0], out


def written_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Any:
    out = plain(q, k, v)
    turned = out.transpose(1, 2)
    out.add_(1)
    out[..., 0] = 3
    return turned


def into_an_input(q: Tensor, k: Tensor, v: Tensor) -> Any:
    q += attend(q, k, v)
    return q


@pytest.mark.parametrize("fn", [views, written_through_a_view, into_an_input])
def test_views_and_writes_of_the_result(fn: Callable[..., Any]) -> None:
    agree(fn, qkv())


def test_results_share_memory_as_in_eager() -> None:
    args = qkv()
    torch._dynamo.reset()
    ours, theirs = compiled(views)(*copies(args)), views(*args)
    for results in (ours, theirs):
        assert len({x.untyped_storage().data_ptr() for x in results}) == 1
    assert [x.stride() for x in ours] == [x.stride() for x in theirs]


# ----------------------------------------------------------------------------------------------------------------
# Bodies that write


def doubled(k: Tensor) -> Tensor:
    k.mul_(2)
    return k + 1


def test_a_body_that_writes_into_its_argument() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before, s = k.clone(), q @ k.mT
        after = checkpoint(doubled, k, use_reentrant=False)
        return plain(q, before, v) + s.softmax(-1) @ v + after.mean()

    assert agree(fn, qkv(), fused=1)["declined"] == 1  # s reads what k was, and no kernel can any more


# ----------------------------------------------------------------------------------------------------------------
# How O lies in memory


@pytest.mark.parametrize("axes", ["bmhd", "hmbd", "bhdm"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_comes_out_lies_as_in_eager(axes: str, dynamic: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum(f"bhmn,bhnd->{axes}", (q @ k.mT * 8**-0.5).softmax(-1), v)

    args = qkv()
    agree(fn, args, dynamic=dynamic)
    assert compiled(fn, dynamic)(*args).stride() == fn(*args).stride()


@pytest.mark.parametrize("learn", [False, True])
def test_a_view_may_count_on_it(learn: bool) -> None:
    """Of heads before rows, though O names rows before heads."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = torch.einsum("bhmn,bhnd->bmhd", (q @ k.mT * 8**-0.5).softmax(-1), v)
        return o.transpose(1, 2).view(-1, *o.shape[1::2])

    agree(fn, qkv(learn=learn), train=learn)


@pytest.mark.parametrize("part", [lambda x: x[:, 1], lambda x: x[..., 1:]])
def test_a_sum_of_parts_of_products_lies_as_in_eager(part: Callable[[Tensor], Tensor]) -> None:
    """One product of all is cut in its place; a sum is a new tensor, which a view may count on."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (q @ k.mT).softmax(-1)
        return (part(p[..., :3] @ v[..., :3, :]) + part(p[..., 3:] @ v[..., 3:, :])).view(-1)

    agree(fn, qkv(), fused=0)
