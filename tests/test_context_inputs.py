"""Inputs of every kind: dtypes, layouts, ranks, parameters, lengths that only the run knows, other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import INF, agree, attend, compiled, plain, qkv, reasons
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fusecomp

# ----------------------------------------------------------------------------------------------------------------
# Dtypes and devices


@pytest.mark.parametrize(
    ("args", "fn", "reason"),
    [
        (qkv(dtype=torch.float64), attend, "products in float64 have no kernel"),
        (qkv(), lambda q, k, v: (q @ k.mT).softmax(-1).double() @ v.double(), "products in float64 have no kernel"),
        (qkv(dtype=torch.complex64), lambda q, k, v: (q @ k.mT).abs().softmax(-1) @ v.abs(), "products in complex64"),
        ([x.int() for x in qkv()[:2]] + qkv()[2:], lambda q, k, v: (q @ k.mT).float().softmax(-1) @ v, "int32"),
        ([x.to("meta") for x in qkv()], plain, "no kernel for tensors on meta"),
        ([x[..., :0] for x in qkv()], lambda q, k, v: (q @ k.mT).softmax(-1) @ v, "head size 0"),
        ([torch.randn(2, 2, 2, 2, 3, n, 8) for n in (13, 21, 21)], plain, "5 batch axes; at most 4"),
    ],
)
def test_what_no_kernel_takes_is_declined(args: list[Tensor], fn: Callable[..., Tensor], reason: str) -> None:
    assert agree(fn, args, fused=0)["declined"] == 1
    assert reason in reasons(fn, args)[0]


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: (q.half().float() @ k.mT).softmax(-1) @ v,
        lambda q, k, v: ((q > 0).float() @ k.mT).softmax(-1) @ v,
        lambda q, k, v: (q @ (k * 50).to(torch.int8).float().mT * 0.02).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT).double().softmax(-1).float() @ v,
        lambda q, k, v: (q @ k.mT * torch.tensor(0.3, dtype=torch.float64)).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT + k.sum(-1)[:, :, None].to(torch.float8_e4m3fn).float()).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT + ((k[..., 0] > 0) + (k[..., 1] > 0))[:, :, None]).softmax(-1) @ v,
        lambda q, k, v: (q @ k.clone().transpose_(-1, -2)).softmax(-1).unsqueeze_(0).squeeze_(0) @ v,
    ],
)
def test_casts_to_what_kernels_take(fn: Callable[..., Tensor]) -> None:
    agree(fn, qkv())


@pytest.mark.parametrize("learn", [False, True])
def test_operands_of_eight_bits_are_not_trained_through(learn: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.to(torch.float8_e4m3fn).float() @ k.mT).softmax(-1) @ v

    agree(fn, qkv(learn=learn), train=learn, fused=0 if learn else 1)


# ----------------------------------------------------------------------------------------------------------------
# Layouts


def layouts() -> dict[str, list[Tensor]]:
    big = torch.randn(5, 6, 50, 32)
    return {
        "offsets": [big[1:3, :3, 2:15, 3:11], big[2:4, :3, 5:26, 7:15], big[0:2, :3, 19:40, 12:20]],
        "steps": [big[:4:2, ::2, :26:2, ::4], big[1:5:2, 1::2, 1:43:2, 1::4], big[:4:2, ::2, :42:2, ::4]],
        "channels last": [x.to(memory_format=torch.channels_last) for x in qkv()],
        "axes reversed": [torch.randn(8, n, 3, 2).permute(3, 2, 1, 0) for n in (13, 21, 21)],
        "shared by heads and batch": [torch.randn(2, 1, 13, 8).expand(2, 3, 13, 8),
                                      torch.randn(1, 1, 21, 8).expand(2, 3, 21, 8), torch.randn(2, 3, 21, 8)],
        "one key for all": [*qkv()[:1], torch.randn(2, 3, 1, 8).expand(2, 3, 21, 8), *qkv()[2:]],
    }  # fmt: skip


@pytest.mark.parametrize("name", layouts())
def test_strides(name: str) -> None:
    torch._dynamo.reset()
    args = layouts()[name]
    torch.testing.assert_close(compiled(attend)(*args), attend(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "split",
    [
        lambda x: x.view(2, 13, 3, 3, 8).permute(2, 0, 3, 1, 4),
        lambda x: x.view(2, 13, 3, 8, 3).permute(4, 0, 2, 1, 3),
        lambda x: [x[..., i::3].reshape(2, 13, 3, 8).transpose(1, 2) for i in range(3)],
        lambda x: [t.view(2, 13, 3, 8).transpose(1, 2).flip(2) for t in x.chunk(3, -1)],
    ],
)
def test_q_k_and_v_packed_in_one(split: Callable[[Tensor], Any]) -> None:
    agree(lambda x: attend(*split(x)), [torch.randn(2, 13, 72, requires_grad=True)], train=True)


@pytest.mark.parametrize("rank", [2, 3, 5, 6])
def test_ranks(rank: int) -> None:
    agree(attend, [torch.randn(*(2, 2, 2, 3)[: rank - 2], n, 8) for n in (13, 21, 21)])


def test_tensors_that_are_one() -> None:
    x = torch.randn(2, 3, 13, 8, requires_grad=True)
    agree(lambda x: plain(x, x, x), [x], train=True)
    agree(plain, [x, x, x], train=True)
    agree(lambda q, k: plain(q, k, k[..., :5]), [x, torch.randn(2, 3, 21, 8, requires_grad=True)], train=True)


def test_axes_of_length_one_are_shared() -> None:
    args = [torch.randn(*s, 8, requires_grad=True) for s in ((2, 1, 13), (1, 3, 21), (1, 1, 21))]
    agree(plain, args, train=True)


class Learned(nn.Module):
    """Parameters, a buffer and a plain tensor in the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.bias = nn.Parameter(torch.randn(3, 1, 1)), nn.Parameter(torch.randn(3, 40, 40))
        self.register_buffer("drop", torch.rand(40, 40) < 0.3)
        self.shift, self.keys = torch.randn(13, 1), nn.Parameter(torch.randn(3, 21, 8))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ (k + self.keys).mT * self.temperature.exp() + self.bias[:, :13, :21] + self.shift
        return s.masked_fill(self.drop[:13, :21], -1e9).softmax(-1) @ v


@pytest.mark.parametrize("learn", [True, False])
def test_parameters_learn(learn: bool) -> None:
    agree(Learned(), qkv(learn=learn), train=True)


# ----------------------------------------------------------------------------------------------------------------
# Lengths and numbers that only the run knows


@pytest.fixture
def captured_numbers() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def kept_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    at = keep.nonzero().squeeze(1)
    return plain(q, k[:, :, at], v[:, :, at])


def kept_queries(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return plain(q[:, :, keep[:13]], k, v)


def first_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    n = keep.sum().item()
    torch._check(n >= 2)
    torch._check(n <= 21)
    return plain(q, k[:, :, :n], v[:, :, :n])


def length_in_the_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(torch.arange(21) >= keep.sum().item(), -INF).softmax(-1) @ v


def scale_from_a_tensor(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * keep.float().mean().item()).softmax(-1) @ v


@pytest.mark.usefixtures("captured_numbers")
@pytest.mark.parametrize("fn", [kept_keys, kept_queries, first_keys, length_in_the_mask, scale_from_a_tensor])
def test_numbers_out_of_tensors(fn: Callable[..., Tensor]) -> None:
    args = [*qkv(), torch.arange(21) % 3 > 0]
    agree(fn, args)


def test_keys_repeated_by_data() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, times: Tensor) -> Tensor:
        at = torch.repeat_interleave(times, output_size=6)
        return plain(q, k[:, :, at], v[:, :, at])

    agree(fn, [*qkv(), torch.tensor([2, 3, 1])])


# ----------------------------------------------------------------------------------------------------------------
# Tensors of other kinds


def test_other_tensors_are_left_alone() -> None:
    args = [TwoTensor(x, x.clone()) for x in qkv()]
    torch._dynamo.reset()
    fusecomp.reset()
    got, wanted = compiled(plain)(*args), plain(*args)
    assert isinstance(got, TwoTensor)
    torch.testing.assert_close(got.a, wanted.a)
    assert fusecomp.counters()["fused"] == 0


def test_jagged_tensors_beside_attention() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(q[0, 0], offsets)
        return plain(q, k, v) + rows.values()[0]

    agree(fn, [*qkv(), torch.tensor([0, 5, 13])], fused=0, strict=False, fullgraph=False)


def test_sparse_masks_beside_attention() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = torch.eye(13, 21).to_sparse().to_dense()
        return (q @ k.mT + bias).softmax(-1) @ v

    torch._dynamo.reset()
    args = qkv()
    torch.testing.assert_close(compiled(fn, fullgraph=False, strict=False)(*args), fn(*args), rtol=1e-4, atol=1e-4)


class Named(Tensor):
    """A class that changes no operator."""


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_tensors_of_a_class_without_operators_of_its_own(inner: str, learn: bool) -> None:
    """PyTorch's own operators refuse them in a compiled graph, where no kernel replaces those."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    torch._dynamo.reset()
    q, k, v = (x.as_subclass(Named) for x in qkv(learn=learn))
    fast = torch.compile(fn, backend="fusecomp", options={"inner": inner, "strict": True})
    out, expected = fast(q, k, v), fn(q, k, v)
    assert type(out) is Named
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(*(torch.autograd.grad(o.sum(), (q, k, v)) for o in (out, expected)), strict=True) if learn else ():
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


SHRINK = 32**-0.5


def test_a_number_that_the_graph_is_compiled_for() -> None:
    """Under dynamic=True it is a tensor's item: verification takes its value, not that of whatever stands for the
    tensor."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.mT, beta=0, alpha=SHRINK)
        return scores.softmax(-1) @ v

    fusecomp.reset()
    fast = torch.compile(fn, backend="fusecomp", dynamic=True, options={"inner": "aot_eager"})
    args = [torch.randn(4, 9, 16) for _ in range(3)]
    torch.testing.assert_close(fast(*args), fn(*args))
    assert fusecomp.counters()["fallbacks"] == 0
    assert fusecomp.counters()["fused"] >= 1
