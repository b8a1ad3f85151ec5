"""How the tables of short programs are written: a function, its inputs, and what must become of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INF = float("inf")
MIN = torch.finfo(torch.float32).min
FULL = (torch.float32,)
BIG = (torch.float32, torch.bfloat16)
"""Dtypes that hold -1e9."""


class Draw:
    """A seeded source of inputs: `draw(*shape)` is a normal tensor, `draw.n(length)` a length at this size."""

    def __init__(self, dtype: torch.dtype, device: str, size_scale: float) -> None:
        self.dtype, self.device, self.size_scale = dtype, device, size_scale
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def n(self, length: int) -> int:
        return round(length * self.size_scale)

    def ints(self, *values: Any) -> Tensor:
        return torch.tensor(values, device=self.device)

    def keep(self, m: int = 13, n: int = 21) -> Tensor:
        """A random mask in which every query sees key 5."""
        found = self(self.n(m), self.n(n)) > -0.3
        found[:, 5] = True
        return found


def qkv(draw: Draw, m: int = 13, n: int = 21, heads: int = 3, kv: int = 0, d: int = 8, batch: int = 2) -> list[Tensor]:
    """q [batch, heads, m, d], k and v [batch, kv or heads, n, d]: no two lengths are equal unless asked for."""
    m, n = draw.n(m), draw.n(n)
    return [draw(batch, heads, m, d), draw(batch, kv or heads, n, d), draw(batch, kv or heads, n, d)]


def square(draw: Draw, n: int = 21, **more: int) -> list[Tensor]:
    return qkv(draw, n, n, **more)


def places(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Query positions [M, 1] and key positions [1, N]."""
    i, j = torch.arange(q.shape[-2], device=q.device), torch.arange(k.shape[-2], device=q.device)
    return i[:, None], j[None, :]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5


@dataclass(frozen=True)
class Case:
    """One program, in the form that `score` takes."""

    name: str
    fn: Callable[..., Any]
    make_args: Callable[..., tuple[Tensor, ...]]
    expect: str
    """"fuse", "decline" or "either"."""
    reason: str = ""
    """Part of what is said where it is declined."""
    count: int = 1
    """Attentions to fuse."""
    grad: tuple[int, ...] = (0, 1, 2)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    note: str = ""


class Table(list[Case]):
    """Cases in order; `@table.fuse(build)` and `@table.decline(build, reason)` enter the decorated function."""

    def __init__(self, draw: Callable[[torch.dtype, str, float], Any] = Draw) -> None:
        super().__init__()
        self.draw = draw

    def case(self, build: Callable[[Any], Sequence[Tensor]], expect: str = "fuse", **more: Any) -> Callable[..., Any]:
        return self._entry(build, expect, **more)

    def fuse(self, build: Callable[[Any], Sequence[Tensor]] = qkv, **more: Any) -> Callable[..., Any]:
        return self._entry(build, "fuse", **more)

    def decline(
        self, build: Callable[[Any], Sequence[Tensor]] = qkv, reason: str = "", **more: Any
    ) -> Callable[..., Any]:
        return self._entry(build, "decline", reason=reason, **more)

    def either(self, build: Callable[[Any], Sequence[Tensor]] = qkv, **more: Any) -> Callable[..., Any]:
        """What is right fused or declined."""
        return self._entry(build, "either", **more)

    def pair(
        self, build: Callable[[Any], Sequence[Tensor]] = qkv, twin: str = "decline", reason: str = "", **more: Any
    ) -> Callable[..., Any]:
        """A program to fuse and its negative twin, which `fn(*args, near=True)` is: the nearly identical program."""

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            def near(*args: Tensor) -> Any:
                return fn(*args, near=True)

            near.__name__ = f"{fn.__name__}_near"
            self._entry(build, "fuse", **more)(fn)
            self._entry(build, twin, reason=reason, **{**more, "count": 1, "note": ""})(near)
            return fn

        return register

    def _entry(self, build: Callable[[Any], Sequence[Tensor]], expect: str, **more: Any) -> Callable[..., Any]:
        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            def make_args(dtype: torch.dtype, device: str = "cpu", size_scale: float = 1) -> tuple[Tensor, ...]:
                return tuple(build(self.draw(dtype, device, size_scale)))

            self.append(Case(fn.__name__, fn, make_args, expect, **more))
            return fn

        return register
