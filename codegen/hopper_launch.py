"""The host's part of the forward kernel for Hopper: descriptors, and programs that stay. (frame, ...) -> lines."""

from __future__ import annotations

from fusecomp.codegen.descriptors import IN_ROWS
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.hopper import blocks, registers, shares
from fusecomp.codegen.hopper_pairs import shared_axes
from fusecomp.codegen.launcher import arguments, no_keys, outer_sizes, ranks_of, rounded_up, unpacked, wrapped
from fusecomp.codegen.printer import triton_text
from fusecomp.codegen.program import factor

Lines = list[str]
PAIR_TURN = 8
"""Heads: with 132 programs and D 64 to 128, K and V and pairs together are read least with 8 to 11."""

LAUNCH_HELPERS = f'''{IN_ROWS.replace("«outside»", "s % step or not s")}

def described(x, block, rows):
    """A tensor descriptor of x, copied in blocks of that shape. What lies after its first `rows` reads as zeros."""
    shape = [rows if n > 1 else size for n, size in zip(block[:-1], x.shape[:-1], strict=True)] + [x.shape[-1]]
    return TensorDescriptor(x, shape, list(x.stride()), block, BOXES[8 * x.element_size(), len(block)])
'''


def _sharing(frame: Frame) -> str:
    """How many heads take turns where tiles are alike: those that read the same blocks of pairs, yet few, as K and V
    differ. A tile reads 4 D B of K and V and 2 BLOCK_M B of pairs for each key, either shared by those beside it."""
    sizes = " * ".join(factor(v.size, frame) for v in shared_axes(frame))
    return f"max(1, min({sizes}, {PAIR_TURN}))" if sizes else "1"


def launch(frame: Frame, params: list[str], saves_lse: bool) -> Lines:
    """Programs that stay, one for each multiprocessor, and a counter of the tiles that are taken."""
    region, product = frame.region, frame.region.products[0]
    m, n = (triton_text(v.size, frame.names) for v in (frame.q_idx, frame.kv_idx))
    read = {x.tensor: f"{x.tensor}{'.view(torch.uint8)' * (x.dtype == 'bool')}" for _, x in frame.copied}
    names = dict.fromkeys((product.q.operand, product.k.operand, region.v.operand, *read))
    outer = " * ".join(outer_sizes(frame)) or "1"
    section = f"max(1, min({outer}, K_TURN.value // max({n}, 1)))" if frame.heavy_last else _sharing(frame)
    tensors = {"q": product.q.operand, "k": product.k.operand, "v": region.v.operand, "out": "written", **read}
    rows = {"q": m, "k": n, "v": n, "out": m, **dict.fromkeys(read, m)}
    described = [f"{t}_desc = described({tensors[t]}, {block}, {rows[t]})" for t, block in blocks(frame).items()]
    schedule = [f"num_warps={frame.plan.warps}", f"maxnreg={registers(frame.plan)[0]}"]
    programs = f"{'2 * ' * shares(frame.plan)}torch.cuda.get_device_properties(out.device).multi_processor_count"
    given = wrapped([*arguments(params, ranks_of(frame)), *schedule], 8)
    return [
        *unpacked(region, ["tiles"] if frame.tabled else []),
        *no_keys(frame, saves_lse),
        f"{', '.join(names)} = {', '.join(f'in_rows({name})' for name in names)}",
        "written = in_rows(out)",
        *described,
        f"all_tiles = {outer} * {rounded_up(m, 'BLOCK_M.value')}",
        f"section = {section}",
        "counter = torch.zeros(1, dtype=torch.int32, device=out.device)",
        f"programs = min(all_tiles, {programs})",
        "attention[(programs,)](",
        *("    " + line for line in given),
        ")",
        "if written is not out:",
        "    out.copy_(written)",
    ]
