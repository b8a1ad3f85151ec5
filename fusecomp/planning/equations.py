"""A page of equations in sympy, compiled once, its shared parts computed once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import itemgetter
from typing import Any

from fusecomp.planning.straight import NUMBERS, function_of

Equation = tuple[Any, str]
"""An expression and its unit."""


class Page:
    """Equations by name. `functions`: what computes Max, ceiling and the like, of numbers or of arrays."""

    def __init__(self, equations: Mapping[str, Equation], functions: Mapping[str, Any] = NUMBERS) -> None:
        self.equations, self.functions = dict(equations), functions
        self.symbols = sorted({str(s) for e, _ in equations.values() for s in e.free_symbols})

    @cached_property
    def _run(self) -> Any:
        return function_of(self.symbols, [e for e, _ in self.equations.values()], self.functions)

    @cached_property
    def _inputs(self) -> Any:
        return itemgetter(*self.symbols)

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self.equations, self._run(*self._inputs(values)), strict=True))


class Model:
    """Pages in order: each is written in the symbols of its inputs and in the results of those before it."""

    def __init__(self, *pages: Mapping[str, Equation]) -> None:
        self.pages = [Page(equations) for equations in pages]

    def evaluate(self, values: Mapping[str, float]) -> dict[str, float]:
        """Every quantity at `values`, a number for each symbol's name."""
        known: dict[str, float] = {}
        for page in self.pages:
            known |= page({**values, **known})
        return known

    @property
    def units(self) -> dict[str, str]:
        """What each quantity is."""
        return {name: unit for page in self.pages for name, (_, unit) in page.equations.items()}
