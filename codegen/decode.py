"""Few queries, many keys: the keys of a query tile are split over programs, and their results combined.

    share s:   m_s, l_s, a_s = max S, sum exp(S - m_s), sum exp(S - m_s) V      over its keys
    O        = sum_s a_s exp(m_s - m) / sum_s l_s exp(m_s - m)                  m = max_s m_s
"""

from __future__ import annotations

from dataclasses import replace

from fusecomp.codegen.address import sum_text
from fusecomp.codegen.descriptors import prepared
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.launcher import call, no_keys, outer_sizes, units, unpacked
from fusecomp.codegen.memory import output_row
from fusecomp.codegen.printer import triton_dtype, triton_text
from fusecomp.codegen.program import columns, decoded, stored_rows
from fusecomp.ir.region import AttentionRegion

Lines = list[str]


def without_skipping(region: AttentionRegion) -> AttentionRegion:
    """The region with its fill taken literally: no share can know that a row is hidden from all the others too."""
    if region.filled_score is None:
        return region
    return replace(region, score=region.filled_score, keep=(), filled_score=None)


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


def part(frame: Frame) -> Lines:
    """Where a row's share lies: [outer, q_idx, member, split]."""
    size = triton_text(frame.q_idx.size, frame.names)
    row = f"(outer * {size} + q_idx)"
    row = f"({row} * PACK + {frame.member.name})" if frame.member else row
    return [f"part = {row} * splits + split", f"inside = {stored_rows(frame)}"]


def store_parts(frame: Frame) -> Lines:
    """a_s of each row, [BLOCK_M, Dv]."""
    return [
        f"tl.store(part_acc_ptr + part * {width(frame)} + {c.d}[None, :], {c.name('acc')}, mask=inside)"
        for c in frame.dv_chunks
    ]


def one_row(frame: Frame) -> Lines:
    """program = (outer * M + q_idx) * PACK + member: one row of the output."""
    size = triton_text(frame.q_idx.size, frame.names)
    lines = ["program = tl.program_id(0)"]
    row = "program"
    if frame.member:
        lines += [f"{frame.member.name} = program % PACK", "row = program // PACK"]
        row = "row"
    return [*lines, f"q_idx = {row} % {size}", f"outer = tl.cast({row} // {size}, tl.int64)", *decoded(frame)]


def zero_accs(frame: Frame) -> Lines:
    return [f"{c.name('acc')} = tl.zeros([{c.size}], tl.float32)" for c in frame.dv_chunks]


def load_parts(frame: Frame) -> Lines:
    """acc = acc exp(m - m') + sum_s a_s exp(m_s - m')."""
    lines: Lines = []
    for c in frame.dv_chunks:
        acc, part = c.name("acc"), c.name("part_acc")
        pointer = f"part_acc_ptr + part[:, None] * {width(frame)} + {c.d}[None, :]"
        lines.append(f"{part} = tl.load({pointer}, mask=share[:, None] < splits, other=0.0)  # [SPLITS, {c.size}]")
        lines.append(f"{acc} = {acc} * rescale + tl.sum({part} * weight[:, None], axis=0)")
    return lines


def combine_columns(frame: Frame) -> Lines:
    return [line for line in columns(frame) if line.startswith("dv")]


def store_combined(frame: Frame) -> Lines:
    """O = acc / row_sum, rounded."""
    lines = [] if frame.region.empty_row == "nan" else ["row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)"]
    pointer, columns = output_row(frame)
    lines.append(f"out_base = {pointer}")
    for c in frame.dv_chunks:
        place = sum_text(columns, frame.names.having({frame.region.dv: c.d}), wide=False)
        value = f"({c.name('acc')} / row_sum).to({triton_dtype(frame.region.out_dtype)})"
        mask = f", mask={c.d} < {c.limit}" if c.limit else ""
        lines.append(f"tl.store(out_base + {place}, {value}{mask})")
    return lines


def exponents(frame: Frame) -> tuple[str, str]:
    """m_s - m' and m - m' in base 2."""
    pairs = "part_max - pivot", "row_max - pivot"
    return (f"({pairs[0]}) * LOG2E", f"({pairs[1]}) * LOG2E") if frame.exponent.natural else pairs


def decode_launch(frame: Frame, kernels: dict[str, list[str]]) -> Lines:
    """Enough shares to fill the device about twice, each at least one tile of keys."""
    n, m = (triton_text(v.size, frame.names) for v in (frame.kv_idx, frame.q_idx))
    rows = " * ".join([*outer_sizes(frame), m, *(["PACK.value"] if frame.member else [])])
    scratch = "dtype=torch.float32, device=out.device"
    return [
        *unpacked(frame.region),
        *no_keys(frame),
        *prepared(frame),
        f"units = {units(frame)}",
        f"splits = split_count(units, triton.cdiv({n}, BLOCK_N.value), out.device)",
        f"rows = {rows}",
        f"part_acc = torch.empty(rows * splits * {width(frame)}, {scratch})",
        f"part_max = torch.empty(rows * splits, {scratch})",
        "part_sum = torch.empty_like(part_max)",
        *call("attention", "units * splits", kernels["attention"], frame),
        *call("combine", "rows", kernels["combine"], frame, warps=4 if width(frame) > 64 else 2),
    ]


SPLIT_COUNT = '''\
def split_count(units, tiles, device):
    """Shares of the keys: a power of two that fills the device about twice, no more than there are tiles."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    wanted = max(1, min(2 * cores // max(1, units), tiles, 128))
    return 1 << (wanted.bit_length() - 1)
'''

