"""The operators that stand in the rewritten graph: opaque to Inductor, known to autograd, fake tensors and export.

    attention             O alone: nothing learns. The lightest to call
    attention_recomputed  O, whose gradients are recomputed a block of rows at a time
    attention_and_lse     (O, log-sum-exp of each row), for generated backward kernels, or as a result of its own
    attention_saving      the same below autograd                                          running/calls.py

`key` names a kernel that this process has loaded; everything that the shape of O depends on is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusecomp.codegen.logsumexp import saved
from fusecomp.errors import KernelError
from fusecomp.ir.region import AttentionRegion
from fusecomp.running.backward import gradients

Result = TypeVar("Result")
Launch = Callable[..., None]
"""launch(out, tensors, sizes): fills `out`; tensors in the order of region.operands, sizes of region.sizes. A kernel
that has a backward, or whose region has an lse, takes `lse` too, and fills it with the log-sum-exp of each row, [batch
axes, M] in float32 (codegen/logsumexp.py)."""
Gradients = Callable[..., None]
"""launch(grads, out, grad_out, lse, tensors, sizes): fills grads[i], the gradient of tensors[i], unless it is None.
Where the region has an lse, its gradient comes after it: launch(grads, out, grad_out, lse, grad_lse, ...)."""


@dataclass(frozen=True)
class Kernel:
    """A region and what runs it."""

    region: AttentionRegion
    launch: Launch
    backward: Gradients | None = None

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """The dimensions of the log-sum-exp after [batch axes, M]."""
        return saved(self.region)


KERNELS: dict[str, Kernel] = {}
"""Key -> kernel, for this process."""
_retired: dict[str, Kernel] = {}
"""Kernels from before a reset: functions compiled then still run."""


def register(key: str, kernel: Kernel) -> str:
    """Make a kernel callable under `key`. The same key always means the same kernel."""
    KERNELS.setdefault(key, kernel)
    return key


def retire() -> None:
    """Forget the kernels for new compilations."""
    _retired.update(KERNELS)
    KERNELS.clear()


def kernel_of(key: str) -> Kernel:
    found = KERNELS.get(key) or _retired.get(key)
    if found is None:
        raise KernelError(
            f"attention kernel {key} is not loaded in this process; compile the model here with backend='fusecomp'"
        )
    return found


def empty_ordered(shape: Sequence[int], order: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor of `shape` whose axes lie in memory in the given order, outermost first.

    No view, since autograd refuses to write in place into a view that an operator made.
    """
    return torch.empty_permuted(list(shape), list(order), dtype=dtype, device=like.device)


def at_home(compiled: Callable[..., Result]) -> Callable[..., Result]:
    """compiled(module, match, ...) while the device of the match is the current one: tiles are planned for that, and
    kernels launched there, to be verified."""

    @wraps(compiled)
    def run(module: Any, match: Any, *args: Any) -> Result:
        device: torch.device = match.device
        if device.type != "cuda" or not 0 <= (device.index or 0) < torch.cuda.device_count():
            return compiled(module, match, *args)
        with torch.cuda.device(device):
            return compiled(module, match, *args)

    return run


def on_device_of(x: Tensor, launch: Callable[..., Result], *args: Any) -> Result:
    """launch(*args) on the device that holds `x`. Most often it is the current one, and to enter it takes time."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return launch(*args)
    with torch.cuda.device(x.device):
        return launch(*args)


def run(launch: Launch, out: Tensor, *args: Any) -> None:
    """Fill O."""
    if out.numel():
        on_device_of(out, launch, out, *args)


# ----------------------------------------------------------------------------------------------------------------
# Forward

COMMON = "Tensor[] tensors, SymInt[] sizes, SymInt[] shape, SymInt[] order"
LIBRARY = torch.library.Library("fusecomp", "DEF")
"""Defined here rather than by `custom_op`, whose checks at every call take longer than a short kernel."""


def operator(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """One operator: its schema, what runs it on any device, what it does to fake tensors."""
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusecomp::{name}", fake, lib=LIBRARY)


def attend(
    tensors: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int], order: Sequence[int],
    dtype: torch.dtype, key: str,
) -> Tensor:  # fmt: skip
    """O of one region: `shape` in the order of region.out_axes, memory in `order`."""
    out = empty_ordered(shape, order, tensors[0], dtype)
    run(kernel_of(key).launch, out, tensors, sizes)
    return out


def attend_fake(
    tensors: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int], order: Sequence[int],
    dtype: torch.dtype, key: str,
) -> Tensor:  # fmt: skip
    return empty_ordered(shape, order, tensors[0], dtype)


def attend_with_lse(
    tensors: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int], order: Sequence[int],
    rows: Sequence[int], dtype: torch.dtype, key: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(O, log-sum-exp of each row of scores, of shape `rows` in float32)."""
    out = empty_ordered(shape, order, tensors[0], dtype)
    lse = torch.empty(rows, dtype=torch.float32, device=out.device)
    run(kernel_of(key).launch, out, tensors, sizes, lse)
    return out, lse


def attend_with_lse_fake(
    tensors: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int], order: Sequence[int],
    rows: Sequence[int], dtype: torch.dtype, key: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = empty_ordered(shape, order, tensors[0], dtype)
    return out, torch.empty(rows, dtype=torch.float32, device=out.device)


operator("attention", f"({COMMON}, ScalarType dtype, str key) -> Tensor", attend, attend_fake)
operator("attention_recomputed", f"({COMMON}, ScalarType dtype, str key) -> Tensor", attend, attend_fake)
for name in ("attention_and_lse", "attention_saving"):
    schema = f"({COMMON}, SymInt[] rows, ScalarType dtype, str key) -> (Tensor, Tensor)"
    operator(name, schema, attend_with_lse, attend_with_lse_fake)

# ----------------------------------------------------------------------------------------------------------------
# Backward


def operands(region: AttentionRegion, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The region's own, without the table of tiles that a forward kernel may take after them."""
    return tensors[: len(region.operands)]


def contiguous_like(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def recompute(
    grad: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], wanted: Sequence[int], key: str,
    grad_lse: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of O with respect to tensors[i] for i in `wanted`, each in its tensor's dtype."""
    region = kernel_of(key).region
    return gradients(region, grad, operands(region, tensors), sizes, wanted, grad_lse)


def recompute_fake(
    grad: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], wanted: Sequence[int], key: str
) -> list[Tensor]:
    return [contiguous_like(tensors[i]) for i in wanted]


def differentiate(
    grad: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, tensors: Sequence[Tensor],
    sizes: Sequence[int], wanted: Sequence[int], key: str,
) -> list[Tensor]:  # fmt: skip
    """The same by the generated backward kernels, if there are some. A gradient that is None is 0."""
    kernel = kernel_of(key)
    region, given = kernel.region, torch.zeros_like(out) if grad is None else grad
    if grad_lse is not None and kernel.saved:
        grad_lse = grad_lse[..., 0]  # of a sum of two, each has the gradient of the sum
    if kernel.backward is None:
        return recompute(given, tensors, sizes, wanted, key, grad_lse)
    rows = lse.shape[: lse.dim() - len(kernel.saved)]
    more = [lse.new_zeros(rows) if grad_lse is None else grad_lse.contiguous()] if region.lse else []
    grads = [contiguous_like(t) if i in wanted else None for i, t in enumerate(tensors)]
    on_device_of(out, kernel.backward, grads, out, given, lse, *more, operands(region, tensors), sizes)
    return [g for g in grads if g is not None]


def differentiate_fake(
    grad: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, tensors: Sequence[Tensor],
    sizes: Sequence[int], wanted: Sequence[int], key: str,
) -> list[Tensor]:  # fmt: skip
    return [contiguous_like(tensors[i]) for i in wanted]


WANTED = "Tensor[] tensors, SymInt[] sizes, int[] wanted, str key"
operator("attention_backward", f"(Tensor grad, {WANTED}) -> Tensor[]", recompute, recompute_fake)
operator(
    "attention_gradients", f"(Tensor? grad, Tensor? grad_lse, Tensor out, Tensor lse, {WANTED}) -> Tensor[]",
    differentiate, differentiate_fake,
)  # fmt: skip


def learned(tensors: Sequence[Tensor]) -> list[int]:
    return [i for i, t in enumerate(tensors) if t.requires_grad and t.is_floating_point()]


def spread(found: Sequence[Tensor], wanted: Sequence[int], count: int) -> list[Tensor | None]:
    """Gradients in the places of their tensors."""
    by_place = dict(zip(wanted, found, strict=True))
    return [by_place.get(i) for i in range(count)]
