"""The equations of the cost of one kernel, for reading: those that its last page is written in, with their values."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import sympy

from fusecomp.planning.glossary import GLOSSARY
from fusecomp.planning.written import Equation, Page, Symbol, read

PACKAGE = "fusecomp.planning"
ROOTS = {
    "forward": "cost", "decode": "cost_decode", "hopper forward": "cost_hopper", "query gradient": "cost_backward",
}  # fmt: skip
ROOTS["key gradients"] = ROOTS["query gradient"]
"""Kernel -> the module that holds its last page; those before it are the pages that it imports."""


def equations(kernel: str = "forward", known: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Pages and symbols of a kernel's cost, in words and numbers; `known`: a number for each symbol and result."""
    shown = pages(kernel)
    valued = [replace(p, equations=tuple(_valued(p, m, known))) for p, m in zip(shown, _modules(kernel), strict=True)]
    return {
        "pages": [{"title": p.title, "equations": [asdict(e) for e in p.equations]} for p in valued],
        "symbols": [asdict(s) for s in symbols(kernel, known)],
    }


def symbols(kernel: str, known: Mapping[str, float] | None = None) -> list[Symbol]:
    """Every symbol that the pages are written in and no page works out, with its meaning; those fitted are last."""
    shown = pages(kernel)
    fitted = {s.name: s for p in shown for s in p.fitted}
    told = {**{name: Symbol(name, *row) for name, row in GLOSSARY.items()}, **fitted}
    used = _used(kernel)
    worked_out = {e.name for p in shown for e in p.equations}
    found = [told[name] for name in [*GLOSSARY, *fitted] if name in used and used[name] not in worked_out]
    return [replace(s, value=(known or {}).get(used[s.name], s.value)) for s in found]


def untold(kernel: str) -> set[str]:
    """Symbols that the pages use, and neither work out nor explain: none."""
    shown = pages(kernel)
    worked_out = {e.name for p in shown for e in p.equations}
    told = {*GLOSSARY, *(s.name for p in shown for s in p.fitted)}
    return {name for name, symbol in _used(kernel).items() if name not in told and symbol not in worked_out}


@lru_cache(maxsize=8)
def pages(kernel: str) -> tuple[Page, ...]:
    """The pages of a kernel, first what others are written in; of those, what is used."""
    modules = _modules(kernel)
    wanted = _wanted(modules)
    return tuple(replace(read(m), equations=tuple(_kept(read(m), wanted[m]))) for m in modules)


def _kept(page: Page, wanted: set[str]) -> Iterator[Equation]:
    """The wanted equations; a paragraph goes with the first of them that follows it."""
    prose = ""
    for equation in page.equations:
        prose = equation.prose or prose
        if equation.name in wanted:
            yield replace(equation, prose=prose)
            prose = ""


def _wanted(modules: list[ModuleType]) -> dict[ModuleType, set[str]]:
    """What the last module says, with the tables of others that it takes whole, and what that is written in."""
    named = {m: {e.name: e for e in read(m).equations} for m in modules}
    tables = [t for t in vars(modules[-1]).values() if _is_table(t)]
    whole = [next(m for m in modules if any(t is x for x in vars(m).values())) for t in tables]
    wanted: dict[ModuleType, set[str]] = {m: set() for m in modules}
    ahead = [(m, name) for m in {*whole, modules[-1]} for name in named[m]]
    while ahead:
        module, name = ahead.pop()
        if name not in wanted[module]:
            wanted[module].add(name)
            ahead += _mentioned(named[module][name], module, modules[-1], named)
    return wanted


def _is_table(value: Any) -> bool:
    """Whether it is {name: (expression, unit)}."""
    rows = list(value.values()) if isinstance(value, dict) else []
    return bool(rows) and all(isinstance(r, tuple) and isinstance(r[0], sympy.Basic) for r in rows)


def _mentioned(
    equation: Equation, module: ModuleType, root: ModuleType, named: Mapping[ModuleType, Mapping[str, Equation]]
) -> Iterator[tuple[ModuleType, str]]:
    """The equations that one is written in: by name, or by the symbol of their result, as the root has it."""
    for word in re.findall(r"[A-Za-z_]\w*", equation.text):
        value = getattr(module, word, None)
        if isinstance(value, sympy.Symbol):
            name, value = str(value), getattr(root, str(value), None)
            homes = [root] if name in named[root] else [m for m in named if name in named[m] and _holds(m, name, value)]
        else:
            name, homes = word, [m for m in (module, *named) if word in named[m] and _holds(m, word, value)]
        if homes:
            yield homes[0], name


def _holds(module: ModuleType, name: str, value: Any) -> bool:
    return value is not None and getattr(module, name, None) is value


def _modules(kernel: str) -> list[ModuleType]:
    """The root and what it imports, below first, of those that hold equations."""
    found: dict[str, ModuleType] = {}

    def visit(name: str) -> None:
        module = importlib.import_module(f"{PACKAGE}.{name}")
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
                below = str(node.module).removeprefix(f"{PACKAGE}.")
                if below not in found and below != name:
                    visit(below)
        if read(module).equations:
            found.setdefault(name, module)

    visit(ROOTS[kernel])
    return list(found.values())


def _used(kernel: str) -> dict[str, str]:
    """Symbols by the names that the text of the equations gives them -> their own names."""
    used: dict[str, str] = {}
    for page, module in zip(pages(kernel), _modules(kernel), strict=True):
        for word in {w for e in page.equations for w in re.findall(r"[A-Za-z_]\w*", e.text)}:
            if isinstance(symbol := getattr(module, word, None), sympy.Symbol):
                used[word] = str(symbol)
    return used


def _valued(page: Page, module: ModuleType, known: Mapping[str, float] | None) -> Iterator[Equation]:
    """The page's equations, with the value of each."""
    if known is None:
        yield from page.equations
        return
    held = [(e, _expression(module, e.name)) for e in page.equations]
    names = sorted({str(s) for _, x in held for s in x.free_symbols})
    with sympy.evaluate(False):
        run = sympy.lambdify(names, [x for _, x in held], modules="math", cse=True)
    values = run(*(known[name] for name in names))
    for (equation, _), value in zip(held, values, strict=True):
        yield replace(equation, value=float(value))


def _expression(module: ModuleType, name: str) -> Any:
    """The expression of a name, or of a row of a table."""
    if isinstance(value := getattr(module, name, None), sympy.Basic):
        return value
    tables = (t for t in vars(module).values() if isinstance(t, dict) and isinstance(t.get(name), tuple))
    return next(tables)[name][0]
