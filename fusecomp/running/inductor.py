"""In the programs that Inductor writes, an operator is called as the Python function that it is.

    buf0 = torch.ops.fusecomp.attention_fixed.default([q, k, v], '...')         what it writes for any operator
    buf0 = torch.ops.fusecomp.attend_fixed([q, k, v], '...')                    what it writes for those here

Below autograd PyTorch's dispatcher has nothing to decide here, and takes as long as the rest of a replayed call to turn
its arguments into its own and back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import torch

from fusecomp.running.calls import attend_fixed, attend_with_lse_fixed, differentiate_fixed
from fusecomp.running.operator import attend, attend_with_lse, differentiate
from fusecomp.running.visits import visit, visit_fixed

log = logging.getLogger(__name__)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": attend,
    "tile_visits": visit,
    "attention_saving": attend_with_lse,
    "attention_gradients": differentiate,
    "attention_fixed": attend_fixed,
    "attention_saving_fixed": attend_with_lse_fixed,
    "attention_gradients_fixed": differentiate_fixed,
    "tile_visits_fixed": visit_fixed,
}
for function in FUNCTIONS.values():
    setattr(torch.ops.fusecomp, function.__name__, function)


@cache
def call_functions() -> None:
    """Let Inductor write so from now on, unless its insides are not what they were."""
    try:
        from torch._inductor.lowering import lowerings, make_fallback

        for name, function in FUNCTIONS.items():
            operator = getattr(torch.ops.fusecomp, name).default
            make_fallback(operator, warn=False)
            lowerings[operator] = called(lowerings[operator], f"torch.ops.fusecomp.{function.__name__}")
    except (ImportError, AttributeError, TypeError):
        log.debug("Inductor calls operators by its own rules", exc_info=True)


def called(lowering: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The lowering of an operator, which its program calls by that name."""

    @wraps(lowering)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.ir import FallbackKernel
        from torch._inductor.virtualized import V

        results = lowering(*args, **kwargs)
        first = results[0] if isinstance(results, list | tuple) else results
        with suppress(AttributeError):
            buffer = first.data.data  # the call, or one of its results
            calls = [x for x in (buffer, *buffer.inputs) if isinstance(x, FallbackKernel)]
            if calls and not V.graph.cpp_wrapper:
                calls[0].python_kernel_name = name
        return results

    return renamed
