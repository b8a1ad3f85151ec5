"""What a forward kernel saves for its backward: lse = log sum exp(S) of each query, the sink included.

Float32 [batch axes, M], contiguous, in natural units; -inf where a query saw no key, NaN where a score was NaN. Where
scores may hold a fill, such as finfo.min, [batch axes, M, 2]: the maximum, and log sum exp(S - maximum), which a sum of
the two would lose. A maximum up to `rescue_below` says that the row took part in every key.
"""

from __future__ import annotations

from fusecomp.codegen.base2 import Exponent, exponent
from fusecomp.codegen.frame import Frame, merged
from fusecomp.codegen.printer import atom, triton_text
from fusecomp.codegen.program import factor, stored_rows
from fusecomp.ir.algebra import substitute
from fusecomp.ir.expr import Const, Expr, Size
from fusecomp.ir.region import AttentionRegion

Lines = list[str]


def saved(region: AttentionRegion) -> tuple[int, ...]:
    """The dimensions of what is saved after [batch axes, M]."""
    moving = frozenset(v.name for v in (region.q_idx, region.kv_idx, region.dv, *(p.d for p in region.products)))
    natural = exponent(merged(region.score), moving, region.exact).natural
    return (2,) if region.filled_score is not None or natural else ()


def natural_max(e: Exponent, row_max: str = "row_max") -> str:
    """The row maximum in natural units."""
    return row_max if e.natural else f"{row_max} / LOG2E"


def store_lse(frame: Frame) -> Lines:
    """lse = row_max + log(row_sum), from the unit of the row maximum; or the two."""
    head = f"(outer * PACK + {frame.member.name})" if frame.member else "outer"
    lines = [f"lse_rows = {head} * {triton_text(frame.q_idx.size, frame.names)} + q_start + q_row"]
    stored = stored_rows(frame)
    if saved(frame.region):
        top = "lse_max" if frame.filled else "row_max"
        return [
            *lines,
            "log_sum = tl.log(tl.where(row_sum == 0.0, 1.0, row_sum))",
            f"tl.store(lse_ptr + 2 * lse_rows, {top}[:, None], mask={stored})",
            f"tl.store(lse_ptr + 2 * lse_rows + 1, log_sum[:, None], mask={stored})",
        ]
    value = "(row_max + tl.log2(row_sum)) / LOG2E"
    return [*lines, f"tl.store(lse_ptr + lse_rows, ({value})[:, None], mask={stored})"]


def combined_lse(frame: Frame) -> Lines:
    """The same for the row whose shares a program of `combine` has put together."""
    lines, most = [f"lse_row = {first_row(frame)} + q_idx"], "tl.max(row_max, axis=0)"
    total = "tl.sum(row_sum, axis=0)"
    if saved(frame.region):
        return [
            *lines,
            f"log_sum = tl.log(tl.where({total} == 0.0, 1.0, {total}))",
            f"tl.store(lse_ptr + 2 * lse_row, {natural_max(frame.exponent, most)})",
            "tl.store(lse_ptr + 2 * lse_row + 1, log_sum)",
        ]
    return [*lines, f"tl.store(lse_ptr + lse_row, ({most} + tl.log2({total})) / LOG2E)"]


def rescued_lse(frame: Frame) -> Lines:
    """The same for the rows that a kernel of their own makes, since they saw no key in any share."""
    assert frame.filled is not None
    return [
        f"lse_rows = {first_row(frame)} + q_start + q_row",
        f"tl.store(lse_ptr + 2 * lse_rows, ({natural_max(frame.filled)})[:, None], mask=unseen)",
        "tl.store(lse_ptr + 2 * lse_rows + 1, tl.log(row_sum)[:, None], mask=unseen)",
    ]


def first_row(frame: Frame) -> str:
    """Where lse holds the queries of one head, from the batch axes."""
    head = place(frame)
    head = f"{atom(head)} * PACK + {frame.member.name}" if frame.member else head
    return f"{atom(head)} * {factor(frame.q_idx.size, frame)}" if head else "0"


def place(frame: Frame) -> str:
    """Which of all a program is, from its batch axes."""
    head = ""
    for v in frame.batch:
        head = f"{atom(head)} * {factor(v.size, frame)} + {v.name}" if head else v.name
    return head


def sample_lse(region: AttentionRegion, sizes: dict[str, int]) -> str:
    """Memory for the lse of a file's sample."""
    known: dict[Expr, Expr] = {Size(name): Const(n) for name, n in sizes.items()}
    rows = [substitute(v.size, known) for v in (*region.batch, region.q_idx)]
    shape = ", ".join(map(str, (*rows, *saved(region))))
    return f"lse = torch.empty([{shape}], dtype=torch.float32)"
