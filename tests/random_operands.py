"""Random attention programs: in what type and how in memory the operands are, and what becomes of the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

Stage = Mapping[str, Callable[..., Any]]

LAYOUTS: Stage = {
    "as given": lambda x: x,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads outside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "rows inside": lambda x: x.mT.contiguous().mT,
    "gaps": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "every other row": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "backwards": lambda x: x.flip(2).flip(2),
    "one batch": lambda x: x[:1].expand(x.shape),
    "one row": lambda x: x[:, :, :1].expand(x.shape),
    "one of a stack": lambda x: torch.stack([x, 2 * x, x])[2],
    "part of a whole": lambda x: torch.cat([x, x], -1).chunk(2, -1)[1],
    "folded": lambda x: x.flatten(0, 1).contiguous().view(x.shape),
}
"""How an operand lies in memory."""
RESULTS: Stage = {
    "as it is": lambda o: o,
    "heads merged": lambda o: o.transpose(1, 2).flatten(2),
    "folded": lambda o: o.reshape(-1, o.shape[-1]),
    "a row": lambda o: o[:, :, -1:],
    "mean": lambda o: o.mean(1),
    "twice": lambda o: o + o.square(),
    "in place": lambda o: o.mul_(0.5).add_(1),
}
HALF, FULL = torch.bfloat16, torch.float32
Casts = Mapping[str, Mapping[str, torch.dtype]]
CASTS: Casts = {
    "none": {},
    "all in float32": {"q": FULL, "k": FULL, "v": FULL, "o": HALF},
    "product in float32": {"q": FULL, "k": FULL, "p": HALF, "v": HALF},
    "scores in float32": {"q": HALF, "k": HALF, "v": HALF, "s": FULL, "p": HALF},
    "scores rounded": {"s": HALF, "p": FULL, "v": FULL},
    "scores rounded and back": {"q": FULL, "k": FULL, "r": HALF, "s": FULL, "p": FULL, "v": FULL},
    "weights rounded": {"p": HALF, "v": HALF, "o": FULL},
    "values in float32": {"q": HALF, "k": HALF, "v": FULL, "p": FULL},
    "weights in float32": {"q": HALF, "k": HALF, "s": FULL, "p": FULL, "v": FULL, "o": HALF},
    "halves of two kinds": {"q": torch.float16, "k": torch.float16, "v": HALF, "p": HALF},
    "queries rounded": {"r q": HALF, "q": FULL, "k": FULL, "p": FULL, "v": FULL},
}
"""What is cast to what, of q, k, the scores (`r`: before `s`), the weights p, v and O."""
