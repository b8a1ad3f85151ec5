"""What a compiled graph calls at every step: operators without autograd, and with little to hand over.

    attention_fixed           fusecomp::attention of lengths that never change
    attention_saving          fusecomp::attention_and_lse below autograd, which `register_autograd` would go through
                              whether anything learns or not
    attention_saving_fixed    both
    attention_gradients_fixed fusecomp::attention_gradients of lengths that never change

Those of fixed lengths do the same again and again, which `replay` makes short.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fusecomp.running.operator import (
    LIBRARY,
    attend,
    attend_fake,
    attend_with_lse,
    attend_with_lse_fake,
    differentiate,
    differentiate_fake,
    kernel_of,
    learned,
    operator,
    spread,
)
from fusecomp.running.replay import Replayed

CALLS = 1024
"""Calls of fixed lengths that are kept."""


def fixed(*args: Any) -> str | None:
    """All that a call takes beside tensors as one string; None where some length is known only when it is made.

    PyTorch hands a string to an operator sooner than four lists of numbers.
    """
    numbers = [n for x in args if isinstance(x, list | tuple) for n in x]
    if not all(type(n) is int for n in numbers):
        return None
    return json.dumps([str(x) if isinstance(x, torch.dtype) else x for x in args])


@cache
def as_given(call: str) -> tuple[Any, ...]:
    """What `fixed` was given."""
    return tuple(_dtype_or_itself(x) for x in json.loads(call))


def _dtype_or_itself(x: Any) -> Any:
    return getattr(torch, x.removeprefix("torch.")) if str(x).startswith("torch.") else x


@lru_cache(CALLS)
def replayed(attention: Callable[..., Any], call: str) -> Replayed:
    """attention(tensors, *as_given(call)) as a function of the tensors."""
    return Replayed(lambda tensors: attention(tensors, *as_given(call)))


def attend_fixed(tensors: list[Tensor], call: str) -> Tensor:
    return replayed(attend, call)(tensors)  # type: ignore[no-any-return]


def attend_fixed_fake(tensors: Sequence[Tensor], call: str) -> Tensor:
    return attend_fake(tensors, *as_given(call))


def attend_with_lse_fixed(tensors: list[Tensor], call: str) -> tuple[Tensor, Tensor]:
    return replayed(attend_with_lse, call)(tensors)  # type: ignore[no-any-return]


def attend_with_lse_fixed_fake(tensors: Sequence[Tensor], call: str) -> tuple[Tensor, Tensor]:
    return attend_with_lse_fake(tensors, *as_given(call))


def differentiate_alone(tensors: list[Tensor], *more: Any) -> list[Tensor]:
    """Gradients where the log-sum-exp has none."""
    grad, out, lse, *others = tensors
    return differentiate(grad, None, out, lse, others, *more)


def differentiate_fixed(
    grad: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, tensors: Sequence[Tensor], call: str
) -> list[Tensor]:  # fmt: skip
    given = as_given(call)
    if grad is None or grad_lse is not None or kernel_of(given[-1]).backward is None:
        return differentiate(grad, grad_lse, out, lse, tensors, *given)
    return replayed(differentiate_alone, call)([grad, out, lse, *tensors])  # type: ignore[no-any-return]


def differentiate_fixed_fake(
    grad: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, tensors: Sequence[Tensor], call: str
) -> list[Tensor]:  # fmt: skip
    return differentiate_fake(grad, grad_lse, out, lse, tensors, *as_given(call))


operator("attention_fixed", "(Tensor[] tensors, str call) -> Tensor", attend_fixed, attend_fixed_fake)
operator(
    "attention_saving_fixed", "(Tensor[] tensors, str call) -> (Tensor, Tensor)",
    attend_with_lse_fixed, attend_with_lse_fixed_fake,
)  # fmt: skip
operator(
    "attention_gradients_fixed",
    "(Tensor? grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor[] tensors, str call) -> Tensor[]",
    differentiate_fixed, differentiate_fixed_fake,
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------
# Autograd


def saving(tensors: Sequence[Tensor], *more: Any) -> tuple[Tensor, Tensor]:
    """The call that a compiled graph keeps."""
    call = fixed(*more)
    if call is None:
        return torch.ops.fusecomp.attention_saving(tensors, *more)  # type: ignore[no-any-return]
    return torch.ops.fusecomp.attention_saving_fixed(tensors, call)  # type: ignore[no-any-return]


class _Saving(torch.autograd.Function):
    """O and the log-sum-exp, whose gradients generated kernels write."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        *more, count = args
        return saving(more[:count], *more[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *more, ctx.count = inputs
        tensors, (sizes, *_, key) = more[: ctx.count], more[ctx.count :]
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.key, ctx.wanted = sizes, key, learned(tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        given, more = (grad, grad_lse, out, lse, tensors), (ctx.sizes, ctx.wanted, ctx.key)
        call, own = fixed(*more), torch.ops.fusecomp
        found = own.attention_gradients(*given, *more) if call is None else own.attention_gradients_fixed(*given, call)
        return *spread(found, ctx.wanted, ctx.count), *[None] * 7


def attend_recording(tensors: Sequence[Tensor], *more: Any) -> tuple[Tensor, Tensor]:
    """attention_and_lse under autograd. What it leaves in a graph that is compiled has no autograd, which
    `register_autograd` would go through at every call."""
    if torch.is_grad_enabled() and learned(tensors):
        return _Saving.apply(*tensors, *more, len(tensors))  # type: ignore[no-any-return]
    return saving(tensors, *more)


LIBRARY.impl("attention_and_lse", attend_recording, "Autograd")
