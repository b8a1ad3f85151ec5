"""The operator that stands in the rewritten graph: opaque to Inductor, known to autograd, fake tensors and export.

    fusecomp::attention(tensors, sizes, shape, order, dtype, key) -> O

`key` names a kernel that this process has loaded; everything that the shape of O depends on is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusecomp.errors import KernelError
from fusecomp.ir.region import AttentionRegion
from fusecomp.running.backward import gradients

Launch = Callable[..., None]
"""launch(out, tensors, sizes): fills `out`; tensors in the order of region.operands, sizes of region.sizes. A kernel
that has a backward takes `lse` too, and fills it with the log-sum-exp of each row, [batch axes, M] in float32."""
Gradients = Callable[..., None]
"""launch(grads, out, grad_out, lse, tensors, sizes): fills grads[i], the gradient of tensors[i], unless it is None."""


@dataclass(frozen=True)
class Kernel:
    """A region and what runs it."""

    region: AttentionRegion
    launch: Launch
    backward: Gradients | None = None


KERNELS: dict[str, Kernel] = {}
"""Key -> kernel, for this process."""


def register(key: str, kernel: Kernel) -> str:
    """Make a kernel callable under `key`. The same key always means the same kernel."""
    KERNELS.setdefault(key, kernel)
    return key


def kernel_of(key: str) -> Kernel:
    try:
        return KERNELS[key]
    except KeyError:
        raise KernelError(
            f"attention kernel {key} is not loaded in this process; compile the model here with backend='fusecomp'"
        ) from None


def empty_ordered(shape: Sequence[int], order: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor of `shape` whose axes lie in memory in the given order, outermost first."""
    memory = torch.empty([shape[i] for i in order], dtype=dtype, device=like.device)
    return memory.permute([list(order).index(i) for i in range(len(order))])


@torch.library.custom_op("fusecomp::attention", mutates_args=())
def attention(
    tensors: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int], order: Sequence[int],
    dtype: torch.dtype, key: str,
) -> Tensor:  # fmt: skip
    """O of one region: `shape` in the order of region.out_axes, memory in `order`."""
    out = empty_ordered(shape, order, tensors[0], dtype)
    if out.numel():
        with torch.cuda.device_of(out):
            kernel_of(key).launch(out, tensors, sizes)
    return out


@attention.register_fake
def _(
    tensors: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int], order: Sequence[int],
    dtype: torch.dtype, key: str,
) -> Tensor:  # fmt: skip
    return empty_ordered(shape, order, tensors[0], dtype)


@torch.library.custom_op("fusecomp::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], wanted: Sequence[int], key: str
) -> list[Tensor]:
    """Gradients of O with respect to tensors[i] for i in `wanted`, each in its tensor's dtype."""
    return gradients(kernel_of(key).region, grad, tensors, sizes, wanted)


def _contiguous_like(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


@attention_backward.register_fake
def _(
    grad: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], wanted: Sequence[int], key: str
) -> list[Tensor]:
    return [_contiguous_like(tensors[i]) for i in wanted]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, sizes, _, _, _, key = inputs
    ctx.save_for_backward(*tensors)
    ctx.sizes, ctx.key = sizes, key
    ctx.wanted = [i for i, t in enumerate(tensors) if t.requires_grad and t.is_floating_point()]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    found = attention_backward(grad, tensors, ctx.sizes, ctx.wanted, ctx.key)
    by_place: dict[int, Tensor] = dict(zip(ctx.wanted, found, strict=True))
    return [by_place.get(i) for i in range(len(tensors))], None, None, None, None, None


attention.register_autograd(_backward, setup_context=_setup)


# ----------------------------------------------------------------------------------------------------------------
# With a generated backward


@torch.library.custom_op("fusecomp::attention_and_lse", mutates_args=())
def attention_and_lse(
    tensors: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int], order: Sequence[int],
    rows: Sequence[int], dtype: torch.dtype, key: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(O, log-sum-exp of each row of scores, of shape `rows` in float32)."""
    out = empty_ordered(shape, order, tensors[0], dtype)
    lse = torch.empty(rows, dtype=torch.float32, device=out.device)
    if out.numel():
        with torch.cuda.device_of(out):
            kernel_of(key).launch(out, tensors, sizes, lse)
    return out, lse


@attention_and_lse.register_fake
def _(
    tensors: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int], order: Sequence[int],
    rows: Sequence[int], dtype: torch.dtype, key: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = empty_ordered(shape, order, tensors[0], dtype)
    return out, torch.empty(rows, dtype=torch.float32, device=out.device)


@torch.library.custom_op("fusecomp::attention_gradients", mutates_args=())
def attention_gradients(
    grad: Tensor, out: Tensor, lse: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], wanted: Sequence[int],
    key: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of O with respect to tensors[i] for i in `wanted`, by the generated backward kernels."""
    grads = [_contiguous_like(t) if i in wanted else None for i, t in enumerate(tensors)]
    backward = kernel_of(key).backward
    assert backward is not None
    with torch.cuda.device_of(out):
        backward(grads, out, grad, lse, tensors, sizes)
    return [g for g in grads if g is not None]


@attention_gradients.register_fake
def _(
    grad: Tensor, out: Tensor, lse: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], wanted: Sequence[int],
    key: str,
) -> list[Tensor]:  # fmt: skip
    return [_contiguous_like(tensors[i]) for i in wanted]


def _setup_with_lse(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, sizes, *_, key = inputs
    out, lse = output
    ctx.save_for_backward(out, lse, *tensors)
    ctx.mark_non_differentiable(lse)
    ctx.sizes, ctx.key = sizes, key
    ctx.wanted = [i for i, t in enumerate(tensors) if t.requires_grad and t.is_floating_point()]


def _backward_with_lse(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    found = attention_gradients(grad, out, lse, tensors, ctx.sizes, ctx.wanted, ctx.key)
    by_place: dict[int, Tensor] = dict(zip(ctx.wanted, found, strict=True))
    return [by_place.get(i) for i in range(len(tensors))], None, None, None, None, None, None


attention_and_lse.register_autograd(_backward_with_lse, setup_context=_setup_with_lse)
