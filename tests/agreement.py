"""Eager and compiled side by side: values, gradients, what was written in place, and how many attentions fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusecomp

INF = float("inf")


def qkv(m: int = 13, n: int = 21, learn: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Q [2, 3, m, 8], K and V [2, 3, n, 8]."""
    return [torch.randn(2, 3, rows, 8, dtype=dtype, requires_grad=learn) for rows in (m, n, n)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, three keys ahead."""
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return ((q @ k.mT) * 0.3).masked_fill(j > i + 3, -INF).softmax(-1) @ v


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.3).softmax(-1) @ v


def compiled(fn: Any, dynamic: bool | None = None, fullgraph: bool = True, **options: Any) -> Callable[..., Any]:
    chosen = {"inner": "aot_eager", "strict": True, **options}
    return torch.compile(fn, backend="fusecomp", dynamic=dynamic, fullgraph=fullgraph, options=chosen)


def agree(
    fn: Any, args: Sequence[Any], fused: int = 1, train: bool = False, tolerance: float = 1e-4, **how: Any
) -> dict[str, int]:
    """Assert that compiled `fn` does to `args` what eager does, and fuses so many attentions. Returns the counters."""
    torch._dynamo.reset()
    fusecomp.reset()
    before, after = copies(args), copies(args)
    wanted, got = outcome(fn, before, train), outcome(compiled(fn, **how), after, train, of=fn)
    for w, g in zip(wanted, got, strict=True):
        compare(g, w, tolerance)
    for w, g in zip(tensors(before), tensors(after), strict=True):
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)
    counts = fusecomp.counters()
    assert counts["fused"] == fused, counts
    return counts


def compare(got: Any, wanted: Any, tolerance: float) -> None:
    if not isinstance(wanted, Tensor):
        assert got == wanted
        return
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert got.requires_grad == wanted.requires_grad


def outcome(run: Callable[..., Any], args: Sequence[Any], train: bool, of: Any = None) -> list[Any]:
    """The results, and in training the gradients of everything that learns."""
    torch.manual_seed(0)
    out = run(*args)
    results = pytree.tree_leaves(out)
    if not train:
        return results
    model = of or run
    learning = [x for x in tensors(args) if x.requires_grad]
    learning += list(model.parameters()) if isinstance(model, nn.Module) else []
    with torch.enable_grad():
        loss = sum((x.float() ** 2).sum() for x in results if isinstance(x, Tensor) and x.requires_grad)
    return [*results, *torch.autograd.grad(loss, learning, allow_unused=True)]


def tensors(args: Any) -> Iterator[Tensor]:
    return (x for x in pytree.tree_leaves(args) if isinstance(x, Tensor))


def copies(args: Sequence[Any]) -> list[Any]:
    """Fresh tensors of the same values; one given twice stays one."""
    made: dict[int, Tensor] = {}

    def fresh(x: Any) -> Any:
        if isinstance(x, Tensor) and id(x) not in made:
            made[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return made.get(id(x), x)

    return list(pytree.tree_map(fresh, list(args)))


def reasons(fn: Any, args: Sequence[Any], **options: Any) -> list[str]:
    """Why each attention that stayed stayed."""
    return [e.reason for e in fusecomp.explain(fn, *copies(args), options=options).entries if e.status != "fused"]
