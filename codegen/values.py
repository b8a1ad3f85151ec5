"""What a kernel loads or computes once: values that no key changes are hoisted before the loop over keys.

    hoisted   the largest parts of an expression that vary with neither kv_idx nor the score, where they cost something
    tiles     loads that vary with kv_idx, one statement each in every visit of a tile
    drawn     what dropouts keep, likewise
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fusecomp.ir.expr import Apply, Const, Expr, Load, Score, parts, variables

OPERAND = re.compile(r"[qkv]\d*")
"""Q, K and V, whose own tiles are q_tile, k_tile, v_tile."""

FIRST, LAST = Load("run_first", (), "int32"), Load("run_last", (), "int32")
RUN: dict[Expr, str] = {FIRST: "run_first", LAST: "run_last"}
"""Of the keys that a query sees, or the queries that see a key, where a table knows of no gap between them
(codegen/table_ranges.py)."""


@dataclass(frozen=True)
class Values:
    """Names for parts of expressions, each list in an order in which they can be computed."""

    hoisted: tuple[tuple[str, Expr], ...]
    tiles: tuple[tuple[str, Load], ...]
    drawn: tuple[tuple[str, Apply], ...] = ()


def element_values(exprs: Iterable[Expr], kv_idx: str) -> Values:
    """Names for what the score, the mask and the weight load, or compute once."""
    return _named([x for e in exprs for x in _worth_naming(e, kv_idx)], kv_idx, "tile")


def address_values(indices: Iterable[Expr], kv_idx: str, known: Values) -> Values:
    """Names for what the addresses of Q, K and V load, beside those already `known`."""
    names = {x for _, x in known.hoisted}
    loads = [x for e in indices for x in _loads(e) if x not in names]
    return _named(loads, kv_idx, "rows")


def _named(found: Iterable[Expr], kv_idx: str, varying: str) -> Values:
    hoisted: dict[Expr, str] = {}
    tiles: dict[Expr, str] = {}
    for x in _parts_first(found):
        changes = _changes(x, kv_idx)
        into = tiles if changes else hoisted
        into[x] = _fresh(_stem(x, varying if changes else "value"), {*hoisted.values(), *tiles.values()})
    loads = tuple((name, x) for x, name in tiles.items() if isinstance(x, Load))
    drawn = tuple((name, x) for x, name in tiles.items() if isinstance(x, Apply))
    return Values(tuple((name, x) for x, name in hoisted.items()), loads, drawn)


def _parts_first(found: Iterable[Expr]) -> list[Expr]:
    """Each once, before the first that it is a part of."""
    ordered: list[Expr] = []
    for x in dict.fromkeys(found):
        place = next((i for i, y in enumerate(ordered) if x in parts(y)), len(ordered))
        ordered.insert(place, x)
    return ordered


def _stem(x: Expr, ending: str) -> str:
    """bias_tile, slopes_value; v_element beside v_tile, which is the operand's; per_h for something computed from h."""
    if is_dropout(x):
        return "kept_tile"
    if isinstance(x, Load):
        return f"{x.tensor}_{'element' if OPERAND.fullmatch(x.tensor) else ending}"
    return "_".join(["per", *sorted(variables(x))])


def is_dropout(e: Expr) -> bool:
    """random(seed, batch, row, key) >= least."""
    match e:
        case Apply("ge", (Apply("random"), Const())):
            return True
    return False


def _fresh(stem: str, taken: set[str]) -> str:
    numbered = (f"{stem}_{n}" for n in range(1, 1000))
    return stem if stem not in taken else next(name for name in numbered if name not in taken)


def _changes(e: Expr, kv_idx: str) -> bool:
    return kv_idx in variables(e) or any(isinstance(x, Score) for x in parts(e))


def _worth_naming(e: Expr, kv_idx: str) -> Iterator[Expr]:
    """Loads, innermost first, and the largest fixed parts that use a special function."""
    if not _changes(e, kv_idx):
        yield from _loads(e)
        if isinstance(e, Apply) and any(isinstance(x, Apply) and x.primitive.sfu for x in parts(e)):
            yield e
        return
    for x in e.args:
        yield from _worth_naming(x, kv_idx)
    if isinstance(e, Load) or is_dropout(e):
        yield e


def _loads(e: Expr) -> Iterator[Expr]:
    for x in e.args:
        yield from _loads(x)
    if isinstance(e, Load):
        yield e
