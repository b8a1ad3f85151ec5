"""Every decision of a backward kernel, taken before a line of it is written.

    P  = exp(S - lse)        dV = sum over rows of  (weight P) dO
    dP = weight dO V^T       dS = P (dP - delta),   delta = rowsum(dO O) - dlse
    dQ_t, dK_t               dscore_t = dS * dS/dscore_t, times K_t and Q_t
    dx                       dS * dS/dx, summed where x is read more than once, for x that S reads and that learns

Each derivative is `factor` * `rest`: the factor multiplies the finished sum, the rest each element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fusecomp.codegen.base2 import Exponent, exponent, scaled
from fusecomp.codegen.cheaper import cheaper
from fusecomp.codegen.derivative import ONE, derivative, factored
from fusecomp.codegen.frame import Frame, merged
from fusecomp.codegen.printer import Names
from fusecomp.codegen.values import Values, element_values
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply, depends_on_score, substitute
from fusecomp.ir.expr import Apply, Const, Expr, Load, Score, Var, dtype_kind, kind, parts, transform, variables
from fusecomp.ir.ranges import Reach, reach
from fusecomp.ir.region import Access, AttentionRegion
from fusecomp.planning.backward import queries_down

INNER = 100
"""Score(INNER + i) stands for the i-th part that S and its derivative share."""


@dataclass(frozen=True)
class Leaf:
    """One place at which a tensor that learns is read: x = load. Its gradient is a sum of

    score     dS (dS/dx)
    weight    P dO V^T dW/dx
    sink      -exp(sink - lse) delta dsink/dx
    """

    name: str
    """Of its sums: that of the tensor, numbered where it is read at several places."""
    load: Load
    source: str
    """"score", "weight" or "sink"."""
    rest: Expr
    factor: float


@dataclass(frozen=True)
class GradientFrame(Frame):
    """A region under the plan of one of its backward kernels; query heads are never packed."""

    learned: frozenset[str] = frozenset()
    """The tensors that gradients are wanted of, beside Q, K and V."""
    beside: GradientFrame | None = None
    """Of a pass over the rows that see no key: the frame of the pass over the others."""
    fixed: tuple[tuple[str, int], ...] = ()
    """Lengths that never change."""

    @cached_property
    def rescue(self) -> GradientFrame | None:
        """The pass over rows that see no key: the filled scores, of every key, without a mask."""
        filled = self.region.filled_score
        if filled is None:
            return None
        region = replace(self.region, score=filled, keep=(), filled_score=None)
        return GradientFrame(region, self.plan, True, self.learned, self, self.fixed)

    @cached_property
    def raw(self) -> Expr:
        """S as it was written."""
        return merged(self.region.score)

    @cached_property
    def terms(self) -> tuple[int, ...]:
        """The products that S uses apart."""
        return (0,) if self.summed else tuple(range(len(self.region.products)))

    @property
    def differentiated(self) -> tuple[Score | Load, ...]:
        """What S is differentiated by."""
        return (*map(Score, self.terms), *self._learned_loads(self.raw))

    def _learned_loads(self, e: Expr | None) -> list[Load]:
        found = [x for x in parts(e) if isinstance(x, Load) and x.tensor in self.learned] if e is not None else []
        return sorted((x for x in found if dtype_kind(x.dtype) == "float"), key=str)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """What learns beside Q, K and V, in the order of the operands."""
        sources = {"score": self.raw, "weight": self.weight, "sink": self.sink}
        found = [(x, source, e) for source, e in sources.items() for x in self._learned_loads(e)]
        order = [o.name for o in self.region.operands]
        leaves: list[Leaf] = []
        for x, source, e in sorted(found, key=lambda f: order.index(f[0].tensor)):
            assert e is not None
            before = sum(leaf.load.tensor == x.tensor for leaf in leaves)
            rest, factor = factored(derivative(e, x))
            rest = self.shared(rest) if source == "score" else rest
            leaves.append(Leaf(f"{x.tensor}_{before}" if before else x.tensor, x, source, rest, factor))
        if self.beside is not None:
            theirs = {(leaf.load, leaf.source): leaf.factor for leaf in self.beside.leaves}
            leaves = [self._into(leaf, theirs.get((leaf.load, leaf.source), 1.0)) for leaf in leaves]
        return tuple(leaves)

    def along(self, leaf: Leaf) -> str:
        """What a leaf varies with: "pairs" of query and key, "keys", or "queries", of which there may be one in all."""
        names = variables(leaf.load)
        if self.kv_idx.name not in names:
            return "queries"
        return "pairs" if self.q_idx.name in names else "keys"

    def summed_along(self, what: str) -> list[Leaf]:
        """The leaves of S and of the weight that vary so."""
        return [leaf for leaf in self.leaves if leaf.source != "sink" and self.along(leaf) == what]

    @cached_property
    def inner(self) -> tuple[tuple[str, Expr], ...]:
        """Costly parts of S that its derivative needs too, innermost first: tanh_score = tanh(score * 0.125 / 30)."""
        wanted = {x for y in self.differentiated for x in parts(derivative(self.raw, y))}
        found = [x for x in parts(self.raw) if x in wanted and _costly(x)]
        found.sort(key=lambda x: len(list(parts(x))))
        names: list[str] = []
        for x in found:
            stem = f"{x.op}_score"  # type: ignore[attr-defined]
            names.append(stem if stem not in names else f"{stem}_{len(names)}")
        return tuple(zip(names, found, strict=True))

    def shared(self, e: Expr, below: int | None = None) -> Expr:
        """`e` with its inner parts (the first `below` of them) by name, the rest in few instructions."""
        places = {x: Score(INNER + i) for i, (_, x) in enumerate(self.inner[:below])}
        return cheaper(transform(e, places.get), self.hardware)

    @cached_property
    def exponent(self) -> Exponent:
        found = exponent(self.shared(self.raw), self.moving, self.region.exact)
        natural = self.beside is not None or exponent(self.score, self.moving, self.region.exact).natural
        return Exponent(self.shared(self.raw), 1.0, True) if natural else found

    @cached_property
    def derivative(self) -> dict[int, tuple[Expr, float]]:
        """(rest, factor) of dS/dscore_t."""
        found = {}
        for t in self.terms:
            rest, factor = factored(derivative(self.raw, Score(t)))
            found[t] = self.shared(rest), factor
        if self.beside is not None:
            theirs = self.beside.derivative
            found = {t: (self._times(rest, c / theirs[t][1]), theirs[t][1]) for t, (rest, c) in found.items()}
        return found

    def _into(self, leaf: Leaf, factor: float) -> Leaf:
        """The leaf with the factor that its sum, which another pass has begun, is multiplied by."""
        return replace(leaf, rest=self._times(leaf.rest, leaf.factor / factor), factor=factor)

    def _times(self, e: Expr, c: float) -> Expr:
        return e if c == 1.0 else scaled(e, c, self.moving)

    @cached_property
    def names_d_logit(self) -> bool:
        """Whether the gradient of S is used more than once."""
        return len(self.terms) > 1 or any(leaf.source == "score" for leaf in self.leaves)

    def d_name(self, product: int) -> str:
        """The gradient of one product's scores."""
        t = 0 if self.summed else product
        return "d_logit" if self.names_d_logit and self.derivative[t][0] == ONE else f"d_score{t or ''}"

    def factor_of(self, product: int) -> float:
        return self.derivative[0 if self.summed else product][1]

    @cached_property
    def element(self) -> Values:
        """What S, its derivative, the mask, the weight and the sink read, in both passes."""
        if self.beside is not None:
            return self.beside.element
        second = self.rescue.elements if self.rescue is not None else []
        return element_values([*self.elements, *second], self.kv_idx.name)

    @property
    def elements(self) -> list[Expr]:
        """What one pass computes."""
        bounds = [x.edge for found in (self.reach, self.rows_reach) for x in (*found.lower, *found.upper)]
        inner = [self.shared(x, i) for i, (_, x) in enumerate(self.inner)]
        rests = [rest for rest, _ in self.derivative.values()]
        leaves = [leaf.rest for leaf in self.leaves]
        factors = [e for e in (self.weight, self.sink) if e is not None]
        return [self.exponent.score, *inner, *rests, *leaves, *bounds, *self.region.keep, *factors]

    def past_end(self, x: Load) -> str:
        """1 for what is divided by: P = 0 there, but 0 / 0 is no number."""
        divisions = (y for e in self.elements for y in parts(e) if isinstance(y, Apply) and y.op == "div")
        return "1.0" if any(x in set(parts(y.operands[1])) for y in divisions) and kind(x) == "float" else "0"

    @cached_property
    def tile_names(self) -> Names:
        inner: dict[Expr, str] = {Score(INNER + i): name for i, (name, _) in enumerate(self.inner)}
        return super().tile_names.having(inner)

    @cached_property
    def may_be_empty(self) -> bool:
        """Whether some row may see no key."""
        filled = self.rescue is not None or self.beside is not None
        return not filled and not self.region.grounded and replace_skeleton(self).needs_pivot

    @cached_property
    def may_be_hidden(self) -> bool:
        """Whether O may be NaN in such a row: it adds nothing to any gradient all the same."""
        return self.may_be_empty and self.region.empty_row in ("nan", "unsafe")

    # ------------------------------------------------------------------------------------------------------------
    # Keys: the axes that dK and dV have, and those they sum over

    @cached_property
    def rows_reach(self) -> Reach:
        """Bounds on q_idx, affine in kv_idx."""
        return reach(self.region.keep, self.kv_idx.name, self.q_idx.name)

    @cached_property
    def shares(self) -> dict[Var, int]:
        """axis -> values of it that read the same keys: 1, the heads of a group, or 0 for all of them."""
        accesses = [*(p.k for p in self.region.products), self.region.v]
        found = {v: {_share(a, v) for a in accesses} for v in self.region.batch}
        for v, shares in found.items():
            if len(shares) > 1:
                raise KernelError(f"no backward kernel: K and V are shared differently along {v.name}")
        return {v: shares.pop() for v, shares in found.items()}

    @cached_property
    def key_axes(self) -> tuple[Var, ...]:
        """The axes that one program of the key gradients has a single value of."""
        return tuple(_grouped(v, n) for v, n in self.shares.items() if n)

    @cached_property
    def members(self) -> tuple[Var, ...]:
        """The axes that such a program sums over."""
        found = [v if not n else Var(f"{v.name}_member", Const(n)) for v, n in self.shares.items()]
        return tuple(v for v, n in zip(found, self.shares.values(), strict=True) if n != 1)

    @cached_property
    def summed_axes(self) -> frozenset[str]:
        """The region's axes that vary inside a program of the key gradients."""
        return frozenset(v.name for v, n in self.shares.items() if n != 1)

    @cached_property
    def queries_down(self) -> bool:
        """Whether a tile of scores is [BLOCK_M, BLOCK_N] there too: what is read for each query and key lies so."""
        return queries_down((self.beside or self).region)

    def key_access(self, a: Access) -> tuple[Expr, ...]:
        """The index of K or V in the axes of a program: h // 3 = h_group."""
        first: dict[Expr, Expr] = {v: apply("mul", _grouped(v, n), Const(n)) for v, n in self.shares.items() if n > 1}
        return tuple(substitute(e, first) for e in a.index)


def replace_skeleton(frame: Frame) -> Frame:
    """The frame of the forward kernel."""
    return Frame(frame.region, replace(frame.plan, skeleton="prefill"))


def _costly(e: Expr) -> bool:
    return isinstance(e, Apply) and bool(e.primitive.sfu) and e.op != "div" and depends_on_score(e)


def _grouped(v: Var, n: int) -> Var:
    return v if n == 1 else Var(f"{v.name}_group", apply("floordiv", v.size, Const(n)))


def _share(a: Access, v: Var) -> int:
    """How many values of an axis read the same element, 0 for all."""
    groups = {
        int(x.operands[1].value) if _is_group(x, v) else 1  # type: ignore[attr-defined]
        for e in a.index
        for x in _outermost(e, v)
    }
    return 0 if not groups else groups.pop() if len(groups) == 1 else 1


def _is_group(e: Expr, v: Var) -> bool:
    match e:
        case Apply("floordiv", (x, Const(int()))):
            return x == v
    return False


def _outermost(e: Expr, v: Var) -> list[Expr]:
    """v itself, or v // group, wherever it stands."""
    if e == v or _is_group(e, v):
        return [e]
    return [x for y in e.args for x in _outermost(y, v)]


def roles(region: AttentionRegion) -> tuple[Access, ...]:
    """Q and K of each product, and V."""
    return (*(a for p in region.products for a in (p.q, p.k)), region.v)
