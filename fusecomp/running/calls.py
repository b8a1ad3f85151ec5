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
from functools import cache, lru_cache, partial
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


def attend_fixed(tensors: Sequence[Tensor], call: str) -> Tensor:
    return replayed(attend, call)(tensors)  # type: ignore[no-any-return]


def attend_fixed_fake(tensors: Sequence[Tensor], call: str) -> Tensor:
    return attend_fake(tensors, *as_given(call))


def attend_with_lse_fixed(tensors: Sequence[Tensor], call: str) -> tuple[Tensor, Tensor]:
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
# Autograd. What it leaves in a graph that is compiled has no autograd, which `register_autograd` would go through at
# every call.


class _Learning(torch.autograd.Function):
    """results = forward(tensors). The gradients of those tensors that are `wanted` are backward(gradients of the
    results, what is saved): the results, unless they are not `kept`, and the tensors."""

    @staticmethod
    def forward(
        ctx: Any, forward: Any, backward: Any, kept: bool, wanted: Sequence[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = forward(tensors)
        ctx.save_for_backward(*(results if kept else ()), *tensors)
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.wanted, ctx.count = backward, wanted, len(tensors)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = grads, ctx.saved_tensors
        if all(g is None for g in grads):
            return (None,) * (4 + ctx.count)
        again = torch.is_grad_enabled()
        found = _Once.apply(ctx.gradients, len(grads), *grads, *given[1]) if again else ctx.gradients(*given)
        return None, None, None, None, *spread(found, ctx.wanted, ctx.count)


class _Once(torch.autograd.Function):
    """gradients(gradients of the results, what is saved), which have no gradients of their own."""

    @staticmethod
    def forward(_: Any, gradients: Any, count: int, *given: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(gradients(given[:count], given[count:]))

    @staticmethod
    def backward(*_: Any) -> Any:
        raise RuntimeError(
            "fused attention has no double backward: its gradients were differentiated again; compile that part with "
            "options={'lowering': 'off'}, or leave it to eager"
        )


def below(name: str, tensors: Sequence[Any], more: Sequence[Any]) -> Any:
    """The call of an operator without autograd that a compiled graph keeps."""
    call, own = fixed(*more), torch.ops.fusecomp
    return getattr(own, name)(*tensors, *more) if call is None else getattr(own, f"{name}_fixed")(*tensors, call)


def attend_recording(tensors: Sequence[Tensor], *more: Any) -> tuple[Tensor, Tensor]:
    """attention_and_lse under autograd."""
    if not torch.is_grad_enabled() or not (wanted := learned(tensors)):
        return below("attention_saving", [tensors], more)  # type: ignore[no-any-return]

    def forward(given: Sequence[Tensor]) -> Any:
        return below("attention_saving", [given], more)

    def backward(grads: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Any:
        out, lse, *given = saved
        return below("attention_gradients", [*grads, out, lse, given], (more[0], wanted, more[-1]))

    return _Learning.apply(forward, backward, True, wanted, *tensors)  # type: ignore[no-any-return]


def attend_recomputing(tensors: Sequence[Tensor], *more: Any) -> Tensor:
    """attention_recomputed under autograd."""
    if not torch.is_grad_enabled() or not (wanted := learned(tensors)):
        return below("attention", [tensors], more)  # type: ignore[no-any-return]

    def forward(given: Sequence[Tensor]) -> tuple[Tensor]:
        return (below("attention", [given], more),)

    def backward(grads: Sequence[Tensor], saved: Sequence[Tensor]) -> Any:
        return torch.ops.fusecomp.attention_backward(*grads, saved, more[0], wanted, more[-1])

    return _Learning.apply(forward, backward, False, wanted, *tensors)[0]  # type: ignore[no-any-return]


LIBRARY.impl("attention_and_lse", attend_recording, "Autograd")
LIBRARY.impl("attention_recomputed", attend_recomputing, "Autograd")

# ----------------------------------------------------------------------------------------------------------------
# Without a graph of AOTAutograd's: what a graph of attentions alone calls


def attend_learning(tensors: Sequence[Tensor], call: str) -> tuple[Tensor, Tensor]:
    """attention_and_lse of fixed lengths."""
    if not torch.is_grad_enabled() or not (wanted := learned(tensors)):
        return attend_with_lse_fixed(tensors, call)
    return _Learning.apply(*learning(call, tuple(wanted)), *tensors)  # type: ignore[no-any-return]


@lru_cache(CALLS)
def learning(call: str, wanted: tuple[int, ...]) -> tuple[Any, ...]:
    """What _Learning takes before the tensors."""
    sizes, *_, key = as_given(call)
    again = str(fixed(sizes, list(wanted), key))

    def backward(grads: tuple[Tensor | None, Tensor | None], saved: Sequence[Tensor]) -> Any:
        out, lse, *tensors = saved
        grads = (dense(grads[0]), grads[1])
        traced = type(out) is not Tensor or torch.compiler.is_compiling()  # as by compiled autograd
        call = torch.ops.fusecomp.attention_gradients_fixed if traced else differentiate_fixed
        return call(*grads, out, lse, tensors, again)

    return partial(attend_with_lse_fixed, call=call), backward, True, wanted


def dense(grad: Tensor | None) -> Tensor | None:
    """A gradient with memory for each number, as AOTAutograd hands it on: that of a sum is one number. What kernels
    would have to copy is not replayed."""
    return grad.contiguous() if grad is not None and 0 in grad.stride() else grad


def attend_recomputed(tensors: Sequence[Tensor], call: str) -> Tensor:
    """attention_recomputed of fixed lengths."""
    if torch.is_grad_enabled() and learned(tensors):
        return torch.ops.fusecomp.attention_recomputed(tensors, *as_given(call))  # type: ignore[no-any-return]
    return attend_fixed(tensors, call)
