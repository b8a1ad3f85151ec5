"""What the host does for tensors that learn beside Q, K and V: memory for sums, and their total. (frame, ...) -> lines.

    queries    [batch axes, M]                   a sum over the keys, or a sink's part
    keys       [batch axes, N]                   a sum over the queries
    pairs      [parts, its own axes, M, N]       written in place where the tensor has all axes

Each element of the tensor is the sum of those of its places, in a fixed order.
"""

from __future__ import annotations

from fusecomp.codegen.backward_frame import GradientFrame, Leaf
from fusecomp.codegen.backward_pairs import direct, kept_axes, whole
from fusecomp.codegen.printer import Names, triton_text
from fusecomp.codegen.program import factor
from fusecomp.ir.expr import Const, Expr, Var, variables

Lines = list[str]
FLOATS = "dtype=torch.float32, device=grad_out.device"


def axes(frame: GradientFrame, leaf: Leaf) -> tuple[Var, ...]:
    """Of its sums, without the parts."""
    region = frame.region
    if frame.along(leaf) == "pairs":
        return (*kept_axes(region, leaf), region.q_idx, region.kv_idx)
    return (*region.batch, region.kv_idx if frame.along(leaf) == "keys" else region.q_idx)


def memory(frame: GradientFrame, leaf: Leaf, parts: str = "") -> Lines:
    """load0_sums = torch.empty(...), or the gradient itself where one part is all of it."""
    sizes = ", ".join([*([parts] if parts else []), *(factor(v.size, frame) for v in axes(frame, leaf))])
    made, name = f"{leaf.name}_sums = torch.empty({sizes}, {FLOATS})", leaf.load.tensor
    if not (parts and like_its_sums(frame, leaf)):
        return [made]
    alone = f"if {parts} == 1 and grad_{name}.is_contiguous():"
    return [alone, f"    {leaf.name}_sums = grad_{name}", "else:", f"    {made}"]


def like_its_sums(frame: GradientFrame, leaf: Leaf) -> bool:
    """Whether one part of the sums has the elements of the tensor, in their order."""
    alone = sum(x.load.tensor == leaf.load.tensor for x in frame.leaves) == 1
    order = [e for e in leaf.load.index if isinstance(e, Var)]
    return alone and whole(frame, leaf) and frame.along(leaf) == "pairs" and order == list(axes(frame, leaf))


def totals(frame: GradientFrame, operand: str) -> Lines:
    """The gradient of one tensor from the sums of its leaves."""
    leaves = [leaf for leaf in frame.leaves if leaf.load.tensor == operand]
    if direct(frame, leaves[0]):
        return []
    plain = [_reshaped(frame, leaf) for leaf in leaves if whole(frame, leaf)]
    scattered = [leaf for leaf in leaves if not whole(frame, leaf)]
    if not scattered:
        total = f"grad_{operand}.copy_({' + '.join(plain)})"
        if like_its_sums(frame, leaves[0]):
            return [f"if {leaves[0].name}_sums is not grad_{operand}:", f"    {total}"]
        return [total]
    start = " + ".join(plain) or f"torch.zeros({operand}.shape, {FLOATS})"
    return [
        f"total = {start}",
        *(line for leaf in scattered for line in _scattered(frame, leaf)),
        f"grad_{operand}.copy_(total)",
    ]


def _summed(frame: GradientFrame, leaf: Leaf) -> str:
    """The sums over the axes that the tensor does not vary with, those left in the order of `axes`."""
    first = int(frame.along(leaf) == "pairs")
    gone = [i + first for i, v in enumerate(axes(frame, leaf)) if v.name not in variables(leaf.load)]
    dims = (*range(first), *gone)
    return f"{leaf.name}_sums.sum({dims})" if dims else f"{leaf.name}_sums"


def _own(frame: GradientFrame, leaf: Leaf) -> list[Var]:
    return [v for v in axes(frame, leaf) if v.name in variables(leaf.load)]


def _reshaped(frame: GradientFrame, leaf: Leaf) -> str:
    """The sums with the dimensions of the tensor."""
    own, body = _own(frame, leaf), _summed(frame, leaf)
    order = [own.index(e) for e in leaf.load.index if isinstance(e, Var)]
    if order != sorted(order):
        body += f".permute({', '.join(map(str, order))})"
    return f"{body}.reshape({leaf.load.tensor}.shape)"


def _scattered(frame: GradientFrame, leaf: Leaf) -> Lines:
    """total[index] += sums; an index outside of the tensor stands where the sum is 0."""
    own, operand = _own(frame, leaf), leaf.load.tensor
    device, names = "device=grad_out.device", Names({}, torch=True)
    lines = []
    for i, v in enumerate(own):
        view = f".view({', '.join(['-1', *['1'] * (len(own) - 1 - i)])})" if i < len(own) - 1 else ""
        lines.append(f"{v.name} = torch.arange({triton_text(v.size, names)}, {device}){view}")
    places = ", ".join(_place(e, operand, dim, names) for dim, e in enumerate(leaf.load.index))
    return [
        *lines,
        f"places = ({places},)",
        f"total.index_put_(places, {_summed(frame, leaf)}, accumulate=True)  # in a fixed order",
    ]


def _place(e: Expr, operand: str, dim: int, names: Names) -> str:
    body = triton_text(e, names)
    if isinstance(e, Const):
        return f"torch.tensor({body}, device=grad_out.device)"
    return body if isinstance(e, Var) else f"({body}).clamp(0, {operand}.shape[{dim}] - 1).long()"
