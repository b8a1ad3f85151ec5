"""PyTorch's own modules and functions of attention, and bodies of other operators."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import INF, agree, attend, compiled, plain, qkv, reasons
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import fusecomp

# ----------------------------------------------------------------------------------------------------------------
# nn.MultiheadAttention and what is built of it


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("mask", ["attn_mask", "boolean", "key_padding_mask"])
def test_multihead_attention(mask: str, extra: dict[str, bool], train: bool) -> None:
    model = nn.MultiheadAttention(24, 3, batch_first=True, **extra).train(train)
    masks = {
        "attn_mask": {"attn_mask": torch.randn(13, 21)},
        "boolean": {"attn_mask": torch.rand(13, 21) < 0.3},
        "key_padding_mask": {"key_padding_mask": torch.arange(21) >= torch.tensor([[21], [15]])},
    }[mask]
    args = [torch.randn(2, 13, 24), torch.randn(2, 21, 24)]
    agree(lambda q, x: model(q, x, x, need_weights=False, **masks)[0], args)


@pytest.mark.parametrize("how", ["attn_mask", "key_padding_mask"])
def test_a_module_of_torch_compiled_itself_trains(how: str) -> None:
    """None of its nodes has a source line of the user's."""
    model, x = nn.MultiheadAttention(24, 3, batch_first=True), torch.randn(2, 13, 24)
    mask = {how: torch.randn(13, 13) if how == "attn_mask" else torch.arange(13) >= torch.tensor([[13], [8]])}
    grads = []
    torch._dynamo.reset()
    fusecomp.reset()
    for run in (model, compiled(model)):
        model.zero_grad()
        run(x, x, x, need_weights=False, **mask)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert fusecomp.counters()["fused"] == 1
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("average", [True, False])
def test_weights_that_are_returned_are_not_fused(average: bool) -> None:
    model = nn.MultiheadAttention(24, 3, batch_first=True).eval()

    def fn(q: Tensor, x: Tensor) -> Any:
        return model(q, x, x, need_weights=True, average_attn_weights=average)

    args = [torch.randn(2, 13, 24), torch.randn(2, 21, 24)]
    agree(fn, args, fused=0)
    assert "read elsewhere too" in reasons(fn, args)[0]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder(norm_first: bool, grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(24, 3, 48, batch_first=True, norm_first=norm_first)
    with warnings.catch_warnings(action="ignore"):
        model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.arange(13) >= torch.tensor([[13], [5]])
    with torch.set_grad_enabled(grad):
        agree(lambda x: model(x, src_key_padding_mask=padding), [torch.randn(2, 13, 24)], fused=2)


def test_decoder_layer_trains() -> None:
    layer = nn.TransformerDecoderLayer(24, 3, 48, batch_first=True, dropout=0.0)
    mask = nn.Transformer.generate_square_subsequent_mask(13)
    padding = torch.arange(21) >= torch.tensor([[21], [5]])
    args = [torch.randn(2, 13, 24, requires_grad=True), torch.randn(2, 21, 24, requires_grad=True)]
    agree(lambda x, y: layer(x, y, tgt_mask=mask, memory_key_padding_mask=padding), args, fused=2, train=True)


# ----------------------------------------------------------------------------------------------------------------
# F.scaled_dot_product_attention


def test_calls_of_all_kinds_in_one_graph() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
        q = scaled_dot_product_attention(q, k, v)
        q = scaled_dot_product_attention(q, k, v, attn_mask=bias)
        q = scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=0.2)
        q = scaled_dot_product_attention(q, k, v, is_causal=True)
        return attend(q, k, v)

    keep = torch.rand(13, 21) < 0.8
    keep[3] = False
    agree(fn, [*qkv(), torch.randn(13, 21), keep], fused=3)


@pytest.mark.parametrize("learn", [False, True])
def test_an_additive_mask_of_a_whole_row_gives_0(learn: bool) -> None:
    bias = torch.randn(13, 21)
    bias[3] = -INF
    args = [*qkv(learn=learn), bias.requires_grad_(learn)]
    agree(lambda *args: scaled_dot_product_attention(*args), args, train=learn)


def test_a_mask_and_is_causal_together_are_pytorchs() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=True)

    args = [*qkv(), torch.randn(13, 21)]
    try:
        fn(*args)
    except RuntimeError as refusal:  # PyTorch from 2.14 on refuses it
        with pytest.raises(Exception, match=re.escape(str(refusal).split(": ", 1)[-1])):
            compiled(fn)(*args)
        return
    agree(fn, args, fused=0)
    assert "a mask tensor and is_causal" in reasons(fn, args)[0]


def test_the_choice_of_a_backend_stays() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            q = scaled_dot_product_attention(q, k, v)
        return attend(q, k, v)

    agree(fn, qkv())


# ----------------------------------------------------------------------------------------------------------------
# Bodies


def cast(fn: Callable[..., Any], dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> Callable[..., Any]:
    def run(*args: Tensor) -> Any:
        with torch.autocast("cpu", dtype, enabled=enabled):
            return fn(*args)

    return run


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(attend, q, k, v, use_reentrant=False)


def products_alone_cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = cast(torch.matmul)(q, k.mT)
    return s.float().softmax(-1) @ v


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def either(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cond(q.sum() > 0, turned, lambda q, k, v: q @ k.transpose(-1, -2) @ v, (q, k, v))


def softmax_not_cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = cast(lambda s: s.float().softmax(-1), enabled=False)(q @ k.mT)
    return p @ v


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (cast(attend), 1),
        (cast(checkpointed), 1),
        (cast(softmax_not_cast), 1),
        (products_alone_cast, 1),
        (cast(lambda *a: (attend(*a), cast(plain, enabled=False)(*a))), 2),
        (cast(lambda *a: (cast(attend, torch.float16)(*a), attend(*a))), 2),
        (cast(either), 1),
    ],
)
def test_autocast(fn: Callable[..., Any], count: int) -> None:
    agree(fn, qkv(), fused=count, tolerance=2e-2)


def test_both_branches() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        return torch.cond(first, turned, lambda q, k, v: turned(q, k * 2, v), (q, k, v))

    for first in (True, False):
        agree(fn, [*qkv(), torch.tensor(first)], fused=2)


def test_loops() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        body = lambda i, q: (i + 1, attend(q, k, v))  # noqa: E731
        return torch._higher_order_ops.while_loop(lambda i, q: i < 3, body, (torch.tensor(0), q))[1]

    agree(step, qkv())


def test_flex_attention_is_left_alone() -> None:
    def causal(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i >= j, s.exp(), -INF)

    args = [torch.randn(2, 3, 16, 16) for _ in range(3)]
    agree(lambda q, k, v: attend(flex_attention(q, k, v, score_mod=causal), k, v), args)


def test_a_region_that_is_compiled_once() -> None:
    @torch.compiler.nested_compile_region
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return turned(q, k, v)

    args = [torch.randn(3, n, 8) for n in (13, 21, 21)]
    agree(lambda q, k, v: layer(layer(q, k, v), k, v), args)
