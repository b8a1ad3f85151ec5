"""Few queries, many keys: the keys of a query tile are split over programs, and their results combined.

    share s    m_s, l_s, a_s = max S, sum exp(S - m_s), sum exp(S - m_s) V      over its keys
    O        = sum_s a_s exp(m_s - m) / sum_s l_s exp(m_s - m)                  m = max_s m_s

No share can know that a row is hidden from all the others too. Where such a row is the mean of its fills, or the like,
`combine` leaves m, and a kernel after it computes the rows whose m says that they saw no key.
"""

from __future__ import annotations

from fusecomp.codegen.address import sum_text
from fusecomp.codegen.descriptors import prepared
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.launcher import call, held, no_keys, rounded_up, unpacked
from fusecomp.codegen.memory import output_row
from fusecomp.codegen.printer import triton_dtype, triton_text
from fusecomp.codegen.program import emptied
from fusecomp.codegen.schedule import count, decoded
from fusecomp.ir.region import extent

Lines = list[str]
COLUMNS, WIDE, FEW = 32, 128, 4
"""Columns of a program of `combine` at most: where shares are many, units are few, and should still fill the device."""
HELD = 32
"""Numbers of the shares' that a thread of `combine` holds."""


def first_share(lines: Lines) -> Lines:
    """The sink belongs to the first share alone."""
    return [
        *lines,
        'row_max = tl.where(split == 0, row_max, float("-inf"))',
        "row_sum = tl.where(split == 0, row_sum, 0.0)",
    ]


def width(frame: Frame) -> int:
    """Columns of a row of the scratch memory."""
    return sum(frame.plan.dv_chunks)


def store_parts(frame: Frame) -> Lines:
    """a_s of each row, [BLOCK_M, Dv]."""
    return [
        f"tl.store(part_acc_ptr + part * {width(frame)} + {c.d}[None, :], {c.name('acc')}, mask=inside)"
        for c in frame.dv_chunks
    ]


def row_of_output(frame: Frame) -> Lines:
    """Which row of the output a program of `combine` makes: row = q_row * PACK + member of its query tile."""
    if frame.member is None:
        return [*decoded(frame), "q_idx = q_start + row"]
    return [*decoded(frame), f"{frame.member.name} = row % PACK", "q_idx = q_start + row // PACK"]


def store_combined(frame: Frame) -> Lines:
    """O = acc / row_sum, rounded."""
    lines = emptied(frame, ["acc"], "row_sum")
    pointer, places = output_row(frame)
    value = f"(acc / row_sum).to({triton_dtype(frame.region.out_dtype)})"
    place = sum_text(places, frame.names.having({frame.region.dv: "dv"}), wide=False)
    size = extent(frame.region.dv)
    mask = f", mask=dv < {size}" if size % combined_columns(frame) else ""
    return [*lines, f"tl.store({pointer} + {place}, {value}{mask})"]


def keep_max(frame: Frame) -> Lines:
    """m, where a row that saw no key is computed afterwards."""
    return ["tl.store(maxima_ptr + unit * BLOCK_M + row, tl.max(row_max, axis=0))"] if frame.filled else []


def combined_columns(frame: Frame) -> int:
    """Columns of the output that a program of `combine` makes: a divisor of the scratch memory's."""
    return min(WIDE if frame.plan.splits <= FEW else COLUMNS, *frame.plan.dv_chunks)


def combining_warps(frame: Frame) -> int:
    """Warps of a program of `combine`."""
    return max(1, frame.plan.splits * combined_columns(frame) // (HELD * 32))


NEXT = ["tl.extra.cuda.gdc_launch_dependents()  # `combine` may be made ready meanwhile"]
PREVIOUS = ["tl.extra.cuda.gdc_wait()  # until every share is written"]


def overlap(frame: Frame, lines: Lines) -> Lines:
    """What kernels say whose launches overlap (CUDA's programmatic dependent launch)."""
    return lines if frame.plan.overlap else []


def early(frame: Frame) -> Lines:
    """Of the launch: it may start before the kernel ahead of it has ended."""
    return overlap(frame, ["launch_pdl=True"])


def decode_launch(frame: Frame, kernels: dict[str, list[str]], saves_lse: bool = False) -> Lines:
    """Programs enough to fill the device, and one more for each request."""
    n, m = (triton_text(v.size, frame.names) for v in (frame.kv_idx, frame.q_idx))
    rows = f"min({m}, {frame.rows_per_tile_name}.value)" + (" * PACK.value" if frame.member else "")
    keys = "(BLOCK_N.value * SHARE.value)" if frame.plan.share else "BLOCK_N.value"
    most = f"requests * units * {rounded_up(n, keys)}"
    filling = "programs = RESIDENT.value * multiprocessors(out.device)"
    grid = [f"grid = {most}"] if frame.plan.share else [filling, f"grid = min(programs + requests * units, {most})"]
    scratch = "dtype=torch.float32, device=out.device"
    columns, warps = width(frame) // combined_columns(frame), combining_warps(frame)
    maxima = [f"maxima = torch.empty(requests * units * BLOCK_M.value, {scratch})"] if frame.filled else []
    after = call("rescue", "requests * units", kernels["rescue"], frame) if frame.filled else []
    return [
        *unpacked(frame.region),
        *no_keys(frame, saves_lse),
        *prepared(frame),
        f"requests = {count(frame, 'request')}",
        f"units = {count(frame, 'free')}",
        *grid,
        f"part_acc = torch.empty(grid * BLOCK_M.value * {width(frame)}, {scratch})",
        f"part_max = torch.empty(grid * BLOCK_M.value, {scratch})",
        "part_sum = torch.empty_like(part_max)",
        *maxima,
        *call("attention", "grid", kernels["attention"], frame, 0, *held(frame)),
        *call("combine", f"requests * units, {rows}, {columns}", kernels["combine"], frame, warps, *early(frame)),
        *after,
    ]


MULTIPROCESSORS = '''\
def multiprocessors(device):
    """How many the device has; the interpreter has none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
'''
