"""The equations of a module as they are written: its source, not a copy.

An assignment of an expression is an equation, the comment behind it its meaning, a comment of its own line a paragraph;
tables of (expression, unit) give units, tables of numbers with a comment each are what was fitted.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import sympy


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


@lru_cache(maxsize=32)
def read(module: ModuleType) -> Page:
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
            yield target.id, _text(value)
        elif isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for own, part in zip(target.elts, parts, strict=True):
                if isinstance(own, ast.Name) and own.id != "_":
                    yield own.id, _text(part)


def _text(node: ast.expr) -> str:
    """An expression as mathematics has it: without the module's name, cases as "a if b else c"."""
    return ast.unparse(_Plain().visit(copy.deepcopy(node)))


class _Plain(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """sympy.sqrt -> sqrt."""
        return ast.Name(node.attr) if isinstance(node.value, ast.Name) and node.value.id == "sympy" else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Piecewise((a, b), (c, True)) -> a if b else c; Integer(1) -> 1."""
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Name("Integer"), [number]):
                return number
            case ast.Call(ast.Name("Piecewise"), [*cases, ast.Tuple([last, _])]):
                for case in reversed(cases):
                    if isinstance(case, ast.Tuple):
                        last = ast.IfExp(case.elts[1], case.elts[0], last)
                return last
        return node


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
            held = _text(row.elts[0])
            if held in made:
                made[held] = replace(made[held], unit=unit)
            elif not held.isidentifier():
                made[name] = Equation(name, held, unit=unit)
