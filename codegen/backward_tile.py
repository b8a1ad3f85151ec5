"""One tile of a backward kernel: P again from the saved log-sum-exp, and the gradients of its scores.

(frame, ...) -> lines; the docstring is the equation. `rows` is how a vector over the queries meets the tile:
"[:, None]" where queries run down it, "[None, :]" where they run across.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusecomp.codegen.backward_frame import GradientFrame, Leaf
from fusecomp.codegen.derivative import ONE
from fusecomp.codegen.frame import score_name
from fusecomp.codegen.logsumexp import saved
from fusecomp.codegen.printer import literal, show, triton_dtype, triton_text
from fusecomp.codegen.tile import precision
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Expr, Score
from fusecomp.ir.primitives import TIMES

Lines = list[str]


def scores(frame: GradientFrame) -> Lines:
    """S of a tile from its products, the parts that the derivative needs too by name."""
    inner = [f"{name} = {triton_text(frame.shared(x, i), frame.tile_names)}" for i, (name, x) in enumerate(frame.inner)]
    e = frame.exponent.score
    return [*inner, *([] if e == Score(0) else [f"{logit(frame)} = {triton_text(e, frame.tile_names)}"])]


def logit(frame: GradientFrame) -> str:
    """Name of S in the kernel, in the unit of `frame.exponent`."""
    return "score" if frame.exponent.score == Score(0) else "logit"


def mask(frame: GradientFrame, tests: Sequence[Expr], names: dict[Expr, str]) -> Lines:
    """S = -inf where the query does not see the key."""
    if not tests:
        return []
    keep = tests[0]
    for term in tests[1:]:
        keep = apply("and", keep, term)
    s = logit(frame)
    return [f'{s} = tl.where({triton_text(keep, frame.tile_names.having(names))}, {s}, float("-inf"))']


def row_values(frame: GradientFrame, where: str, tests: str) -> Lines:
    """lse and delta of the queries."""
    return [*log_sums(frame, where, tests), *deltas(where, tests)]


def deltas(where: str, tests: str) -> Lines:
    zero = f", mask={tests}, other=0.0" if tests else ""
    return [f"delta = tl.load(delta_ptr + {where}{zero})"]


def log_sums(frame: GradientFrame, where: str, tests: str) -> Lines:
    """lse of the queries in the unit of the exponent; infinite where a row takes no part. Where the unit is natural it
    is the maximum, and log_sum is what lies above."""
    gone, zero = (f', mask={tests}, other=float("inf")', f", mask={tests}, other=0.0") if tests else ("", "")
    natural = frame.exponent.natural
    if not saved(frame.region) and frame.beside is None:
        return [f"lse = tl.load(lse_ptr + {where}{gone}) * LOG2E", *taking_part(frame)]
    at = f"2 * ({where})" if " " in where else f"2 * {where}"
    return [
        f"lse = tl.load(lse_ptr + {at}{gone})",
        f"log_sum = tl.load(lse_ptr + {at} + 1{zero}){' * LOG2E' * natural}",
        *taking_part(frame),
        *([] if natural else ["lse = (lse + log_sum) * LOG2E"]),
    ]


def taking_part(frame: GradientFrame) -> Lines:
    """lse = inf in rows that take no part in this pass: P = exp(S - lse) = 0."""
    if frame.beside is not None:
        return [f'lse = tl.where({unseen(frame)}, lse, float("inf"))']
    if frame.rescue is not None:
        return [f'lse = tl.where({unseen(frame)}, float("inf"), lse)  # a row that sees no key has its turn below']
    empty = 'lse = tl.where(lse == float("-inf"), float("inf"), lse)  # a row that saw no key takes no part'
    return [empty] if frame.may_be_empty else []


def seldom(begin: str, end: str, step: str) -> str:
    """A range whose values take no registers from the loops before it, as most programs skip it."""
    return f"tl.range({begin}, {end}, {step}, num_stages=1, disable_licm=True)"


def unseen(frame: GradientFrame) -> str:
    """Of a row: that it sees no key, or only keys near the fill."""
    return f"lse <= {literal(frame.region.rescue_below)}"


def probabilities(frame: GradientFrame, rows: str) -> Lines:
    """P = exp(S - lse)."""
    e = frame.exponent
    factor = " * SCALE" if e.scale != 1.0 else ""
    body = f"{logit(frame)}{factor} - lse{rows}"
    return [f"p = tl.exp2({f'({body}) * LOG2E - log_sum{rows}' if e.natural else body})"]


def weights(frame: GradientFrame) -> Lines:
    """weight, the factor behind the softmax."""
    return [] if frame.weight is None else [f"weight = {triton_text(frame.weight, frame.tile_names)}"]


def score_gradients(frame: GradientFrame, rows: str) -> Lines:
    """dS = P (dP - delta), and for each product dS times the part of dS/dscore that varies inside the tile."""
    lines = ["d_weight = p * d_p"] if any(leaf.source == "weight" for leaf in frame.leaves) else []
    if frame.weight is not None:
        lines.append("d_p = d_p * weight")
    ds = f"p * (d_p - delta{rows})"
    if frame.names_d_logit:
        lines.append(f"d_logit = {ds}")
        ds = "d_logit"
    found = {frame.d_name(t): ds + times(frame, rest) for t, (rest, _) in frame.derivative.items()}
    return [*lines, *(f"{name} = {body}" for name, body in found.items() if name != body)]


def leaf_gradient(frame: GradientFrame, leaf: Leaf) -> str:
    """What one element of a tile adds to the gradient of something that learns."""
    return ("d_weight" if leaf.source == "weight" else "d_logit") + times(frame, leaf.rest)


def times(frame: GradientFrame, e: Expr) -> str:
    """Multiplication by `e`, nothing where it is 1."""
    return "" if e == ONE else f" * {factor_text(frame, e)}"


def factor_text(frame: GradientFrame, e: Expr) -> str:
    """`e` as the right factor of a product."""
    body, level = show(e, frame.tile_names)
    return f"({body})" if level >= TIMES else body


def weighted(frame: GradientFrame) -> str:
    """weight P, rounded as it is for P V."""
    dtype = frame.region.pv_dtype
    if frame.weight is None:
        return rounded("p", dtype)
    return "p * weight" if dtype == "float32" else rounded("(p * weight)", dtype)


def rounded(body: str, dtype: str, held: str = "float32") -> str:
    """body.to(dtype) unless it has that dtype."""
    return body if dtype == held else f"{body}.to({triton_dtype(dtype)})"


def accumulated(frame: GradientFrame, acc: str, left: str, right: str, dtype: str) -> str:
    """acc += left right."""
    return f"{acc} = tl.dot({left}, {right}, {acc}{precision(frame, dtype)})"


def products_of(frame: GradientFrame, left: str, right: str, shape: str) -> Lines:
    """score_t = sum over chunks of left right, where {0} stands for a chunk's part of a name."""
    lines: Lines = []
    for t, product in enumerate(frame.region.products):
        into = score_name(0 if frame.summed else t)
        for i, c in enumerate(frame.d_chunks(t)):
            first = i == 0 and not (frame.summed and t)
            onto, comment = ("", f"  # {shape}") if first else (f", {into}", "")
            a, b = left.format(c.name("q_tile"), c.name("k_tile")), right.format(c.name("q_tile"), c.name("k_tile"))
            lines.append(f"{into} = tl.dot({a}, {b}{onto}{precision(frame, product.dtype)}){comment}")
    return lines


def value_products(frame: GradientFrame, left: str, right: str, shape: str) -> Lines:
    """dP = dO V^T, chunk by chunk; {0} is dO's tile, {1} is V's."""
    lines: Lines = []
    for i, c in enumerate(frame.dv_chunks):
        onto, comment = (", d_p", "") if i else ("", f"  # {shape}")
        a, b = (x.format(c.name("do_tile"), c.name("v_tile")) for x in (left, right))
        lines.append(f"d_p = tl.dot({a}, {b}{onto}{precision(frame, frame.region.pv_dtype)}){comment}")
    return lines


def scaled_by(body: str, factor: float) -> str:
    """body * factor."""
    return body if factor == 1.0 else f"{body} * {literal(factor)}"
