"""Long lines, broken as a formatter does: at the commas of the widest bracket, else before the loosest operator."""

from __future__ import annotations

import re
from collections.abc import Iterator

WIDTH = 110
OPERATORS = (" + ", " - ", " | ", " & ", " * ", " / ")
STATEMENT = r" *(assert|del|for|if|return|while|with|yield)\b"


def wrapped_lines(text: str) -> str:
    """`text` with its long code lines broken."""
    return "\n".join(part for line in text.split("\n") for part in _wrap(line))


def _wrap(line: str) -> list[str]:
    code, _, comment = line.partition("  # ")
    if line.lstrip().startswith("#") or (len(code) <= WIDTH and len(line) <= WIDTH + 10):
        return [line]
    first, *rest = _broken(code) or [code]
    return [f"{first}  # {comment}" if comment else first, *rest]


def _broken(line: str) -> list[str] | None:
    """The line in several, or None where it has no place to break."""
    indent = line[: len(line) - len(line.lstrip())]
    inner = indent + "    "
    found = _widest_bracket(line)
    if found and found[1] - found[0] > len(line) // 2:
        opened, closed = found
        items = list(_split(line[opened + 1 : closed], ", "))
        if len(items) > 1:
            body = [part for item in items for part in _wrap_item(f"{inner}{item},")]
            return [line[: opened + 1], *body, indent + line[closed:]]
        if terms := _terms(items[0]):
            return [line[: opened + 1], *(inner + term for term in terms), indent + line[closed:]]
    head, equals, value = line.partition(" = ")
    items = list(_split(line.strip(), ", "))
    if len(items) > 1 and not equals and not re.match(STATEMENT, line):  # arguments of a call that begins above
        return [part for item in items for part in _wrap_item(f"{indent}{item},")]
    terms = _terms(value) if equals else None
    return [f"{head} = (", *(inner + term for term in terms), f"{indent})"] if terms else None


def _wrap_item(item: str) -> list[str]:
    """An argument; where it is too long, its terms, a line each."""
    if len(item) <= WIDTH:
        return [item]
    indent = item[: len(item) - len(item.lstrip())]
    if broken := _broken(item):
        return broken
    whole = item.strip().removesuffix(",")
    terms = _terms(whole) or [whole]
    return [*(indent + term for term in terms[:-1]), f"{indent}{terms[-1]},"]


def _widest_bracket(line: str) -> tuple[int, int] | None:
    """(open, close) of the outermost brackets that hold most."""
    found: list[tuple[int, int]] = []
    stack: list[int] = []
    for i, character in enumerate(line):
        if character in "([{":
            stack.append(i)
        elif character in ")]}" and stack:
            opened = stack.pop()
            found += [(opened, i)] if not stack else []
    return max(found, key=lambda span: span[1] - span[0], default=None)


def _terms(text: str) -> list[str] | None:
    """The text before each of its loosest operators."""
    for operator in OPERATORS[:2], OPERATORS[2:3], OPERATORS[3:4], OPERATORS[4:]:
        pieces = [text]
        for sign in operator:
            pieces = [part for piece in pieces for part in _kept(piece, sign)]
        if len(pieces) > 1:
            return pieces
    return None


def _kept(text: str, sign: str) -> list[str]:
    first, *rest = _split(text, sign)
    return [first, *(f"{sign.strip()} {part}" for part in rest)]


def _split(text: str, separator: str) -> Iterator[str]:
    """The pieces between separators outside brackets and strings."""
    depth, begin, i = 0, 0, 0
    while i < len(text):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0 and text.startswith(separator, i):
            yield text[begin:i]
            i += len(separator)
            begin = i
        else:
            i += 1
    yield text[begin:].removesuffix(",") if separator == ", " else text[begin:]
