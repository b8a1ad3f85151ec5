"""What a forward kernel saves for its backward: lse = log sum exp(S) of each query, the sink included.

Float32 [batch axes, M], contiguous, in natural units; -inf where a query saw no key, NaN where a score was NaN.
"""

from __future__ import annotations

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import stored_rows
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import substitute
from fusecomp.ir.expr import Const, Expr, Size
from fusecomp.ir.region import AttentionRegion

Lines = list[str]


def require_lse(frame: Frame) -> None:
    """Raise KernelError where the kernel does not hold the sum of a row when it ends."""
    if frame.plan.skeleton != "prefill":
        raise KernelError(f"a {frame.plan.skeleton} kernel saves no log-sum-exp; plan a prefill kernel to train with")
    if frame.filled is not None:
        raise KernelError("rows that see no key average over all of them: no log-sum-exp describes them exactly")


def store_lse(frame: Frame) -> Lines:
    """lse = row_max + log(row_sum), from the unit of the row maximum."""
    natural = frame.exponent.natural
    value = "row_max + tl.log(row_sum)" if natural else "(row_max + tl.log2(row_sum)) / LOG2E"
    head = f"(outer * PACK + {frame.member.name})" if frame.member else "outer"
    return [
        f"lse_rows = {head} * {triton_text(frame.q_idx.size, frame.names)} + q_start + q_row",
        f"tl.store(lse_ptr + lse_rows, ({value})[:, None], mask={stored_rows(frame)})",
    ]


def sample_lse(region: AttentionRegion, sizes: dict[str, int]) -> str:
    """Memory for the lse of a file's sample."""
    known: dict[Expr, Expr] = {Size(name): Const(n) for name, n in sizes.items()}
    shape = ", ".join(str(substitute(v.size, known)) for v in (*region.batch, region.q_idx))
    return f"lse = torch.empty([{shape}], dtype=torch.float32)"
