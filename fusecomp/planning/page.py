"""The equations of the cost model as they are written, for reading: each with its comment, its unit and its value.

What is printed is the source of `resources`, `cost` and their like, not a copy: an assignment of an expression is an
equation, the comment behind it its meaning, a comment of its own line a paragraph; tables of (expression, unit) give
units, tables of numbers with a comment each are what was fitted.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import sympy

from fusecomp.planning.glossary import GLOSSARY

PACKAGE = "fusecomp.planning"
ROOTS = {"forward": "cost", "decode": "cost"}
"""Kernel -> the module that holds its last page; those before it are the pages that it imports."""


@dataclass(frozen=True)
class Equation:
    """name = text."""

    name: str
    text: str
    meaning: str = ""
    """Its comment."""
    unit: str = ""
    prose: str = ""
    """The paragraph before it."""
    value: float | None = None


@dataclass(frozen=True)
class Symbol:
    """What the equations are written in."""

    name: str
    meaning: str
    unit: str
    source: str
    value: float | None = None


@dataclass(frozen=True)
class Page:
    """The equations of one module."""

    title: str
    equations: tuple[Equation, ...]
    fitted: tuple[Symbol, ...]


def equations(kernel: str = "forward", known: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Pages and symbols of a kernel's cost, in words and numbers; `known`: a number for each symbol and result."""
    read = pages(kernel)
    valued = [replace(p, equations=tuple(_valued(p, m, known))) for p, m in zip(read, _modules(kernel), strict=True)]
    return {
        "pages": [{"title": p.title, "equations": [asdict(e) for e in p.equations]} for p in valued],
        "symbols": [asdict(s) for s in symbols(kernel, known)],
    }


def symbols(kernel: str, known: Mapping[str, float] | None = None) -> list[Symbol]:
    """Every symbol that the pages are written in and no page works out, with its meaning; those fitted are last."""
    read = pages(kernel)
    fitted = {s.name: s for p in read for s in p.fitted}
    told = {**{name: Symbol(name, *row) for name, row in GLOSSARY.items()}, **fitted}
    used = _used(kernel)
    found = [told[name] for name in [*GLOSSARY, *fitted] if name in used]
    return [replace(s, value=(known or {}).get(used[s.name], s.value)) for s in found]


def untold(kernel: str) -> set[str]:
    """Symbols that the pages use, and neither work out nor explain: none."""
    read = pages(kernel)
    worked_out = {e.name for p in read for e in p.equations}
    told = {*GLOSSARY, *(s.name for p in read for s in p.fitted)}
    return {name for name, symbol in _used(kernel).items() if name not in told and symbol not in worked_out}


@lru_cache(maxsize=8)
def pages(kernel: str) -> tuple[Page, ...]:
    """The pages of a kernel, first what others are written in; of those, what is used."""
    modules = _modules(kernel)
    wanted = _wanted(modules)
    return tuple(replace(_page(m), equations=tuple(_kept(_page(m), wanted[m]))) for m in modules)


def _kept(read: Page, wanted: set[str]) -> Iterator[Equation]:
    """The wanted equations; a paragraph goes with the first of them that follows it."""
    prose = ""
    for equation in read.equations:
        prose = equation.prose or prose
        if equation.name in wanted:
            yield replace(equation, prose=prose)
            prose = ""


def _wanted(modules: list[ModuleType]) -> dict[ModuleType, set[str]]:
    """What the last module says, with the tables of others that it takes whole, and what that is written in."""
    named = {m: {e.name: e for e in _page(m).equations} for m in modules}
    tables = [t for t in vars(modules[-1]).values() if _is_table(t)]
    whole = [next(m for m in modules if any(t is x for x in vars(m).values())) for t in tables]
    wanted: dict[ModuleType, set[str]] = {m: set() for m in modules}
    ahead = [(m, name) for m in {*whole, modules[-1]} for name in named[m]]
    while ahead:
        module, name = ahead.pop()
        if name not in wanted[module]:
            wanted[module].add(name)
            ahead += _mentioned(named[module][name], module, named)
    return wanted


def _is_table(value: Any) -> bool:
    """Whether it is {name: (expression, unit)}."""
    rows = list(value.values()) if isinstance(value, dict) else []
    return bool(rows) and all(isinstance(r, tuple) and isinstance(r[0], sympy.Basic) for r in rows)


def _mentioned(
    equation: Equation, module: ModuleType, named: Mapping[ModuleType, Mapping[str, Equation]]
) -> Iterator[tuple[ModuleType, str]]:
    """The equations that one is written in: by name, or by the symbol of their result."""
    for word in re.findall(r"[A-Za-z_]\w*", equation.text):
        value = getattr(module, word, None)
        result = isinstance(value, sympy.Symbol)
        name = str(value) if result else word
        homes = [m for m in named if name in named[m] and (result or getattr(m, name, None) is value)]
        if isinstance(value, sympy.Basic) and homes:
            yield (homes[-1] if result else module if module in homes else homes[0]), name


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
        if _page(module).equations:
            found.setdefault(name, module)

    visit(ROOTS[kernel])
    return list(found.values())


@lru_cache(maxsize=32)
def _page(module: ModuleType) -> Page:
    source = inspect.getsource(module)
    tree, lines = ast.parse(source), source.splitlines()
    made: dict[str, Equation] = {}
    fitted: list[Symbol] = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for name, text in _assigned(node):
                value = getattr(module, name, None)
                if isinstance(value, sympy.Basic) and not isinstance(value, sympy.Symbol):
                    prose = _prose(lines, node.lineno) if name == _first(node) else ""
                    made[name] = Equation(name, text, _comment(lines, node), prose=prose)
                elif isinstance(value, dict) and isinstance(node.value, ast.Dict):
                    fitted += _fitted(_docstring(after), value, node.value, lines)
                    _with_units(made, value, node.value)
    title = (ast.get_docstring(tree) or "").splitlines()
    return Page(title[0] if title else "", tuple(made.values()), tuple(fitted))


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[str, str]]:
    """(name, text) of each thing that a statement gives a name."""
    value = node.value
    assert value is not None
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name):
            yield target.id, ast.unparse(value)
        elif isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for own, part in zip(target.elts, parts, strict=True):
                if isinstance(own, ast.Name) and own.id != "_":
                    yield own.id, ast.unparse(part)


def _first(node: ast.Assign | ast.AnnAssign) -> str:
    return next(name for name, _ in _assigned(node))


def _comment(lines: list[str], node: ast.stmt) -> str:
    """The comments behind a statement's lines."""
    found = [re.search(r"\s#\s(.*)$", line) for line in lines[node.lineno - 1 : node.end_lineno]]
    return "; ".join(m[1] for m in found if m)


def _prose(lines: list[str], number: int) -> str:
    """The comment lines right above a line."""
    start = number - 1
    while start > 0 and lines[start - 1].startswith("# "):
        start -= 1
    return " ".join(line[2:].strip() for line in lines[start : number - 1])


def _docstring(node: ast.stmt | None) -> str:
    """The text of a string that stands by itself, on one line."""
    text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
    return " ".join(str(text).split())


def _fitted(source: str, table: dict[Any, Any], node: ast.Dict, lines: list[str]) -> Iterator[Symbol]:
    """Rows of "NAME": number,  # unit: meaning."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(table.get(key.value), int | float):
            said = re.search(r"\s#\s(.*)$", lines[value.lineno - 1])
            yield Symbol(str(key.value), said[1] if said else "", "", source, float(table[key.value]))


def _with_units(made: dict[str, Equation], table: dict[Any, Any], node: ast.Dict) -> None:
    """Rows of "name": (expression, unit): the unit of an equation, or an equation of its own."""
    for key, row in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(row, ast.Tuple) and isinstance(table.get(key.value), tuple):
            name, unit = str(key.value), str(table[key.value][1])
            held = ast.unparse(row.elts[0])
            if held in made:
                made[held] = replace(made[held], unit=unit)
            elif not held.isidentifier():
                made[name] = Equation(name, held, unit=unit)


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
