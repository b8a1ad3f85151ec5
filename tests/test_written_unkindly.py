"""What a program is written out as, beside the program, on inputs that random ones are not like: far from 0, in
clusters, some much longer than others. A kernel is verified against the graph as it was written out, not as it came."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from corpus.score import FLOOR, relative_error, run
from torch import Tensor
from torch.fx import GraphModule

from fusecomp.graph.capture import capture, may_hold_attention, placeholder_values
from fusecomp.graph.learning import mark
from fusecomp.patterns.written import write_out

QUICK = ("assigned", "normalised", "online", "similar", "totals", "written")
SLOW = (
    "by_hand", "calls", "dense", "dynamic", "extended", "families", "families_more", "functions", "idioms", "learned",
    "logsums", "looped", "masked", "masks_made", "packed", "papers", "papers_more", "paged", "paged_fetched",
    "paged_latent", "paged_masked", "paged_more", "paged_near", "paged_near_served",
    "paged_near_writes", "paged_served", "paged_shared", "paged_written", "pieces", "rarely_said", "spelled", "spoken",
    "variants_more",
)  # fmt: skip
REFUSED = ("autocast_bfloat16",)
"""By PyTorch, whose autocast has no product of float64 and bfloat16."""
TIMES, LEAST = 8, 2 * FLOOR["float32"]
"""As much as eager errs, and what is always allowed."""


def along(x: Tensor, period: int) -> Tensor:
    """0 .. period - 1, again and again, along the last axis but one, which queries and keys have."""
    return (torch.arange(x.shape[-2]) % period)[:, None].to(x.dtype)


UNKIND: dict[str, Callable[[Tensor], Tensor]] = {
    "far from 0": lambda x: x + 30,
    "in clusters": lambda x: x + 50 * along(x, 2),
    "of different lengths": lambda x: x * 10 ** (along(x, 5) - 2),
}


def written(gm: GraphModule, _: Any) -> Callable[..., Any]:
    if not may_hold_attention(gm):
        return gm.forward
    values = placeholder_values(gm)
    captured = capture(gm, values)
    mark(captured, values)
    write_out(captured)
    captured.recompile()
    return captured


def drawn(case: Any, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Its inputs, those changed that may be queries, keys or values."""
    args = case.make_args(torch.float32)
    args = [change(x) if x.dtype == torch.float32 and x.dim() > 2 and x.isfinite().all() else x for x in args]
    return [x.to(dtype) if x.dtype == torch.float32 else x for x in args]


def programs(*names: str) -> list[Any]:
    found = [(name, case) for name in names for case in import_module(f"corpus.{name}").CASES]
    return [pytest.param(case, id=f"{name}-{case.name}") for name, case in found if case.name not in REFUSED]


def held(case: Any, how: str) -> None:
    """Eager's exponentials may overflow where no maximum is taken off; what it then gives binds nobody."""
    args = partial(drawn, case, UNKIND[how])
    torch._dynamo.reset()
    fast = torch.compile(case.fn, backend=written)
    got = run(fast, args(torch.float32), (), torch.float32)
    eager, exact = (run(case.fn, args(dtype), (), dtype) for dtype in (torch.float32, torch.float64))
    for name in exact:
        ours, theirs, x = (tensors[name].double() for tensors in (got, eager, exact))
        known = x.isfinite() & theirs.isfinite()
        assert ours[known].isfinite().all(), name
        error, own = (relative_error(y[known], x[known]) for y in (ours, theirs))
        assert error <= max(TIMES * own, LEAST), name


@pytest.mark.parametrize("how", UNKIND)
@pytest.mark.parametrize("case", programs(*QUICK))
def test_what_is_written_out_is_the_program(case: Any, how: str) -> None:
    held(case, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", UNKIND)
@pytest.mark.parametrize("case", programs(*SLOW))
def test_every_other_program(case: Any, how: str) -> None:
    held(case, how)
