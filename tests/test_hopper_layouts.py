"""Whether tensors lie as the kernel for Hopper wants them, which only a GPU asks."""

from __future__ import annotations

import pytest
import torch
from recognising import candidates
from torch import Tensor

from fusecomp.patterns.build import Match
from fusecomp.running.hopper import laid_out


def matched(fn: object, args: list[Tensor]) -> Match:
    [match] = [m for m in candidates(fn, *args) if isinstance(m, Match)]  # type: ignore[arg-type]
    return match


def beside(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    shown = table if table.dtype != torch.bool else torch.zeros_like(table, dtype=q.dtype).masked_fill(~table, -1e9)
    return (q @ k.mT * 0.125 + shown).softmax(-1) @ v


@pytest.mark.parametrize(
    ("table", "laid"),
    [
        (torch.ones(40, 48, dtype=torch.bool), True),
        (torch.ones(40, 43, dtype=torch.bool), False),
        (torch.ones(40, 48, dtype=torch.bfloat16), True),
        (torch.ones(40, 43, dtype=torch.bfloat16), False),  # would come in blocks: its rows do not begin at 16 bytes
    ],
    ids=["mask", "odd mask", "bias", "odd bias"],
)
def test_what_comes_in_blocks_lies_in_steps(table: Tensor, laid: bool) -> None:
    q, k, v = (torch.randn(1, 2, n, 64, dtype=torch.bfloat16) for n in (40, table.shape[1], table.shape[1]))
    assert laid_out(matched(beside, [q, k, v, table])) is laid
