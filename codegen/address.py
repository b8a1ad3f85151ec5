"""Where an element lies: operand[index] as pointer arithmetic.

    address = sum_i  index_i * stride_i
            = base     what only the batch axes decide: int64, once per program
            + start    where the tile begins along q_idx or kv_idx: int64, once per tile
            + offsets  inside the tile: int32, once per program
            + rows     what is not linear in the tile's indices, such as table[b, kv_idx // 16]: int64, once per tile
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from fusecomp.codegen.printer import Names, triton_text
from fusecomp.ir.algebra import apply, substitute
from fusecomp.ir.expr import Const, Expr, Load, Size, Var, parts, variables
from fusecomp.ir.poly import Monomial, Poly, from_poly, poly


def stride(operand: str, dim: int) -> Size:
    """The run-time stride of one dimension. Its name sorts last, so that products read `b * q_stride_0`."""
    return Size(f"~{operand}_stride_{dim}")


@dataclass(frozen=True)
class Address:
    """The four parts as expressions; the sum of `base`, `start`, `offsets` and `rows` is the address."""

    base: Poly
    start: Poly
    """Over the indices themselves; their tile starts are put in when it is printed."""
    offsets: Poly
    rows: Poly


def address(
    operand: str, index: tuple[Expr, ...], vectors: frozenset[str], starting: frozenset[str],
    each: Set[Expr] = frozenset(), key: Expr | None = None,
) -> Address:  # fmt: skip
    """Sort the monomials of sum_i index_i stride_i. `vectors` names the indices that vary inside the tile, `starting`
    those of them whose tile does not begin at 0. Other values differ for `each` key; `key` is where a tile begins."""
    total: Expr = Const(0)
    for dim, e in enumerate(index):
        total = apply("add", total, apply("mul", e, stride(operand, dim)))
    found = Address({}, {}, {}, {})
    for monomial, c in poly(total).items():
        moving = [f for f in monomial if variables(f) & vectors]
        held = {x for f in monomial for x in parts(f)}
        if held & each:
            found.rows[monomial] = c
        elif not moving:
            (found.start if key in held else found.base)[monomial] = c
        elif len(moving) == 1 and isinstance(moving[0], Var):
            found.offsets[monomial] = c
            if moving[0].name in starting:
                found.start[monomial] = c
        elif any(variables(f) & starting for f in moving):
            found.rows[monomial] = c
        else:
            found.offsets[monomial] = c
    return found


def sum_text(p: Poly, names: Names, wide: bool, batch: frozenset[str] = frozenset()) -> str:
    """A sum of monomials as Triton text. `wide`: no product may be computed in int32, so the stride of a monomial
    without an int64 factor (a batch index) is widened."""
    strides = [f for m in p for f in m if isinstance(f, Size) and f.name.startswith("~")]
    plain = names.having({f: f.name[1:] for f in strides})
    if not wide:
        return triton_text(from_poly(p), plain)
    widened = names.having({f: f"tl.cast({f.name[1:]}, tl.int64)" for f in strides})
    terms = [triton_text(from_poly({m: c}), plain if _is_wide(m, batch) else widened) for m, c in p.items()]
    return " + ".join(terms).replace("+ -", "- ")


def _is_wide(monomial: Monomial, batch: frozenset[str]) -> bool:
    return any(variables(f) & batch and not any(isinstance(x, Load) for x in parts(f)) for f in monomial)


def at_tile(p: Poly, places: Mapping[Expr, Expr]) -> Poly:
    """The polynomial with the tile's indices replaced, say kv_idx by the key its tile begins at."""
    return poly(substitute(from_poly(p), dict(places)))
