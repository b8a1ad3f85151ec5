"""Every decision of one kernel, taken before a line of it is written. The fillers of `blocks` only read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fusecomp.codegen.base2 import Exponent, exponent, may_be_minus_inf
from fusecomp.codegen.cheaper import cheaper
from fusecomp.codegen.copied import copied, fits
from fusecomp.codegen.printer import Names
from fusecomp.codegen.values import RUN, Values, address_values, element_values
from fusecomp.ir.algebra import apply, substitute
from fusecomp.ir.expr import Apply, Const, Expr, Load, Score, Var, parts, transform, variables
from fusecomp.ir.poly import is_natural
from fusecomp.ir.ranges import Bound, Reach, reach
from fusecomp.ir.region import Access, AttentionRegion, extent
from fusecomp.planning.tile import TilePlan


@dataclass(frozen=True)
class Chunk:
    """A power of two of the head size: d in [first, first + size), cut off at `limit` where there is one."""

    product: str
    """"" for the first product, else its number."""
    part: str
    """"" where a product has one chunk, else "_0", "_1"."""
    d: str
    """Name of the indices: d, d_0, d1 ..."""
    first: int
    size: int
    limit: int | None

    def name(self, stem: str) -> str:
        """q_tile, q_tile_0, q1_tile_0 ..."""
        head, _, tail = stem.partition("_")
        return f"{head}{self.product}{'_' * bool(tail)}{tail}{self.part}"


@dataclass(frozen=True)
class Frame:
    """A region under a plan. With `plan.pack` > 1 the last batch axis is `group * pack + member`, and the member
    varies along the rows of a tile."""

    region: AttentionRegion
    plan: TilePlan
    every_key: bool = False
    """Whether this pass visits all keys, whatever the mask says."""

    @property
    def q_idx(self) -> Var:
        return self.region.q_idx

    @property
    def kv_idx(self) -> Var:
        return self.region.kv_idx

    @property
    def d_vars(self) -> tuple[Var, ...]:
        return (*(p.d for p in self.region.products), self.region.dv)

    @cached_property
    def batch(self) -> tuple[Var, ...]:
        """The axes that one program has a single value of, outermost first."""
        if self.plan.pack == 1:
            return self.region.batch
        return (*self.region.batch[:-1], self.group)

    @cached_property
    def group(self) -> Var:
        last = self.region.batch[-1]
        return Var(f"{last.name}_group", apply("floordiv", last.size, Const(self.plan.pack)))

    @cached_property
    def member(self) -> Var | None:
        """Which of the packed heads a row is; None without packing."""
        return Var(f"{self.region.batch[-1].name}_member", Const(self.plan.pack)) if self.plan.pack > 1 else None

    @cached_property
    def row_axes(self) -> tuple[Var, ...]:
        """The indices that vary along the rows of a tile."""
        return (self.q_idx, self.member) if self.member else (self.q_idx,)

    @cached_property
    def moving(self) -> frozenset[str]:
        """Names of the indices that vary inside a tile."""
        return frozenset(v.name for v in (*self.row_axes, self.kv_idx, *self.d_vars))

    @cached_property
    def batch_names(self) -> frozenset[str]:
        return frozenset(v.name for v in self.batch)

    def packed(self, e: Expr) -> Expr:
        """`e` in the axes of the frame: h = group * pack + member, h // (c pack) = group // c."""
        if self.member is None:
            return e
        head, pack = self.region.batch[-1], self.plan.pack

        def shared(x: Expr) -> Expr | None:
            match x:
                case Apply("floordiv", (Var(name, _), Const(int(c)))) if name == head.name and c % pack == 0:
                    return apply("floordiv", self.group, Const(c // pack))
            return None

        together = apply("add", apply("mul", self.group, Const(pack)), self.member)
        return substitute(transform(e, shared, apply), {head: together})

    def access(self, a: Access) -> tuple[Expr, ...]:
        return tuple(map(self.packed, a.index))

    @property
    def hardware(self) -> bool:
        """Whether the device's own functions are exact enough: their error is less than the rounding of P."""
        return self.plan.consumers > 0 and self.region.pv_dtype == "bfloat16"

    @cached_property
    def score(self) -> Expr:
        return self.packed(cheaper(merged(self.region.score), self.hardware))

    @cached_property
    def summed(self) -> bool:
        """Whether the second product is accumulated into the first: S uses them only as their sum."""
        return merged(self.region.score) != self.region.score

    @cached_property
    def exponent(self) -> Exponent:
        return exponent(self.score, self.moving, self.region.exact)

    @cached_property
    def filled(self) -> Exponent | None:
        """The same for the second pass over rows that see no key; None where no row needs it."""
        e = self.region.filled_score
        if e is None:
            return None
        return exponent(self.packed(cheaper(merged(e, self.summed))), self.moving, self.region.exact)

    @cached_property
    def weight(self) -> Expr | None:
        return None if self.region.weight == Const(1.0) else self.packed(self.region.weight)

    @cached_property
    def sink(self) -> Expr | None:
        """The sink, but for one that is told by the largest score."""
        return self.packed(self.region.sink) if self.region.sink is not None and self.region.beside is None else None

    @cached_property
    def reach(self) -> Reach:
        """Bounds that are one number for a tile; those that vary along its rows otherwise than with q_idx are loose."""
        packed = tuple(map(self.packed, self.region.keep))
        found = reach(packed, self.q_idx.name, self.kv_idx.name)
        varies = {v.name for v in self.row_axes[1:]}
        lost = [x.term for x in (*found.lower, *found.upper) if variables(x.edge) & varies]

        def kept(bounds: tuple[Bound, ...]) -> tuple[Bound, ...]:
            return tuple(x for x in bounds if x.term not in lost)

        return replace(found, lower=kept(found.lower), upper=kept(found.upper), loose=(*found.loose, *lost))

    @property
    def tabled(self) -> bool:
        """Whether the tiles of keys come from a table, made of the mask's data."""
        return self.plan.visits != "bounds" and not self.every_key

    @property
    def ranged(self) -> bool:
        """Whether it has a range of tiles for each row, not a list."""
        return self.tabled and self.plan.visits == "ranges"

    @property
    def listed(self) -> bool:
        """Whether it has a list of tiles for each row."""
        return self.tabled and not self.ranged

    @cached_property
    def needs_pivot(self) -> bool:
        """Whether a row's maximum may still be -inf after its first tile: not where key 0 is in every row's first tile,
        and the score is a number there."""
        if self.reach.loose or self.reach.lower or self.plan.skeleton == "decode":
            return True
        if not all(x.slope >= 0 and is_natural(apply("sub", x.edge, Const(1))) for x in self.reach.upper):
            return True
        return any(may_be_minus_inf(x) for x in parts(self.exponent.score))

    @cached_property
    def element(self) -> Values:
        """What the score, the mask, the weight and the sink read."""
        optional = (self.weight, self.sink, self.filled.score if self.filled else None)
        masks = [*(x.edge for x in (*self.reach.lower, *self.reach.upper)), *map(self.packed, self.region.keep)]
        chosen = [self.exponent.score, *masks, *(e for e in optional if e is not None)]
        return element_values(chosen, self.kv_idx.name)

    @cached_property
    def copied(self) -> tuple[tuple[str, Load], ...]:
        """Those of its loads that come in blocks, copied by a warp of its own."""
        found = copied(self.region) if fits(self.region, self.plan) else ()
        return tuple((name, x) for name, x in self.element.tiles if x in found)

    @cached_property
    def addressed(self) -> Values:
        """What the addresses of Q, K and V read."""
        accesses = [*(a for p in self.region.products for a in (p.q, p.k)), self.region.v]
        return address_values([e for a in accesses for e in self.access(a)], self.kv_idx.name, self.element)

    @cached_property
    def names(self) -> Names:
        """Before the loop over keys; `q_idx` is [BLOCK_M, 1]."""
        fixed = (*self.element.hoisted, *self.addressed.hoisted)
        return Names({x: name for name, x in fixed})

    @cached_property
    def tile_names(self) -> Names:
        """Inside the loop; `kv_idx` is [1, BLOCK_N], loads are [BLOCK_M, BLOCK_N] or broadcast to it."""
        floats: dict[Expr, str] = {self.q_idx: "q_pos", self.kv_idx: "kv_pos"}
        found: dict[Expr, str] = {x: name for name, x in (*self.element.tiles, *self.element.drawn)}
        scores: dict[Expr, str] = {Score(t): score_name(t) for t in range(len(self.region.products))}
        return Names({**self.names.values, **found, **scores, **RUN}, floats, hardware=self.hardware)

    def d_chunks(self, product: int) -> tuple[Chunk, ...]:
        size = extent(self.region.products[product].d)
        return _chunks(self.plan.d_chunks[product], size, "d", str(product or ""))

    @cached_property
    def dv_chunks(self) -> tuple[Chunk, ...]:
        return _chunks(self.plan.dv_chunks, extent(self.region.dv), "dv", "")

    @property
    def k_end(self) -> str:
        """Name of the end of the keys that a tile visits."""
        bounded = self.reach.upper or self.plan.skeleton != "prefill"
        plain = self.every_key or not (self.ranged if self.tabled else bounded)
        return str(self.kv_idx.size) if plain else "k_end"

    @cached_property
    def ends_in_the_mask(self) -> bool:
        """Whether a key that the mask keeps is before k_end: its bounds are tested row by row, and one ends at N."""
        visits_all = self.every_key or self.tabled or self.plan.skeleton != "prefill"
        if visits_all or any(not x.slope for x in self.reach.upper):
            return False
        return any(is_natural(apply("sub", self.kv_idx.size, x.edge)) for x in self.reach.upper)

    @property
    def k_begin(self) -> str:
        begins = self.plan.skeleton == "decode" or (self.ranged if self.tabled else self.reach.lower)
        return "k_begin" if begins else "0"

    @property
    def looks_ahead(self) -> bool:
        """Whether a tile looks up where the keys of the next one lie: a decoding program has few of them, and waits."""
        return bool(self.addressed.tiles) and self.plan.decodes

    @property
    def stages(self) -> int:
        """Of the compiler's pipeline. A load whose address is loaded itself waits a stage for it: as many buffers of K
        and V as the plan means take nearly twice the stages. In decoding the neighbours fill the wait."""
        looked_up = self.addressed.tiles and not self.looks_ahead
        return 2 * self.plan.stages - 1 if looked_up else self.plan.stages

    def factor(self, e: Exponent) -> str:
        """Name of the constant that `e.scale` is printed as."""
        return "SCALE" if e.scale == self.exponent.scale else "FILLED_SCALE"

    def past_end(self, x: Load) -> str:  # noqa: ARG002
        """What a tensor is taken to hold past the end of the keys or queries, where a score is masked anyway."""
        return "0"

    @property
    def heavy_last(self) -> bool:
        """Whether later query tiles visit more keys."""
        return any(x.slope > 0 for x in self.reach.upper)

    @property
    def rows_per_tile_name(self) -> str:
        return "BLOCK_M" if self.plan.pack == 1 else "Q_ROWS"

    @property
    def rows_per_tile(self) -> int:
        return self.plan.block_m // self.plan.pack


def score_name(term: int) -> str:
    return f"score{term or ''}"


def _chunks(sizes: tuple[int, ...], d: int, stem: str, product: str) -> tuple[Chunk, ...]:
    found = []
    for i, size in enumerate(sizes):
        part, first = f"_{i}" if len(sizes) > 1 else "", sum(sizes[:i])
        found.append(Chunk(product, part, f"{stem}{product}{part}", first, size, d if first + size > d else None))
    return tuple(found)


def merged(e: Expr, force: bool = True) -> Expr:
    """score0 + score1 as one score, where `e` uses them in no other way."""
    both = Apply("add", (Score(0), Score(1)))
    if not force or both not in set(parts(e)):
        return e
    whole = transform(e, lambda x: Var("_both", Const(1)) if x == both else None)
    alone = any(isinstance(x, Score) for x in parts(whole))
    return e if alone else transform(e, lambda x: Score(0) if x == both else None)
