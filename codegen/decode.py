"""Few queries, many keys: the keys of a query tile are split over programs, and their results combined.

    share s:   m_s, l_s, a_s = max S, sum exp(S - m_s), sum exp(S - m_s) V      over its keys
    O        = sum_s a_s exp(m_s - m) / sum_s l_s exp(m_s - m)                  m = max_s m_s
"""

from __future__ import annotations

from dataclasses import replace

from fusecomp.codegen.frame import Frame
from fusecomp.codegen.launcher import call, units, unpacked
from fusecomp.codegen.memory import output_address, row_base, row_offsets
from fusecomp.codegen.printer import triton_dtype, triton_text
from fusecomp.codegen.program import columns
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


def store_parts(frame: Frame) -> Lines:
    """a_s of each row, [BLOCK_M, Dv]."""
    return [
        f"tl.store(part_acc_ptr + part[:, None] * {width(frame)} + {c.d}[None, :], {c.name('acc')}, "
        "mask=part_row[:, None] < ROWS)"
        for c in frame.dv_chunks
    ]


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


def combined_rows(frame: Frame) -> Lines:
    """The query and, where heads are packed, the head of one row."""
    pack = frame.member is not None
    head = [f"{frame.member.name} = row % PACK"] if frame.member else []
    return [f"q_row = {'row // PACK' if pack else 'row'}", "q_idx = q_start + q_row", *head]


def combine_columns(frame: Frame) -> Lines:
    return [line for line in columns(frame) if line.startswith("dv")]


def store_combined(frame: Frame) -> Lines:
    """O = acc / row_sum, rounded."""
    size = triton_text(frame.q_idx.size, frame.names)
    lines = [] if frame.region.empty_row == "nan" else ["row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)"]
    a = output_address(frame)
    lines.append(f"out_base = {' + '.join(['out_ptr', *row_base(frame, a)])}")
    for c in frame.dv_chunks:
        mask = f"({c.d} < {c.limit}) & (q_idx < {size})" if c.limit else f"({c.d} < {width(frame)}) & (q_idx < {size})"
        pointer = " + ".join(["out_base", *row_offsets(frame, a, {frame.region.dv: c.d})])
        value = f"({c.name('acc')} / row_sum).to({triton_dtype(frame.region.out_dtype)})"
        lines.append(f"tl.store({pointer}, {value}, mask={mask})")
    return lines


def exponents(frame: Frame) -> tuple[str, str]:
    """m_s - m' and m - m' in base 2."""
    pairs = "part_max - pivot", "row_max - pivot"
    return (f"({pairs[0]}) * LOG2E", f"({pairs[1]}) * LOG2E") if frame.exponent.natural else pairs


def decode_launch(frame: Frame, kernels: dict[str, list[str]]) -> Lines:
    """Enough shares to fill the device about twice, each at least one tile of keys."""
    n = triton_text(frame.kv_idx.size, frame.names)
    scratch = {"acc": f"units * ROWS.value * splits * {width(frame)}", "max": "units * ROWS.value * splits"}
    return [
        *unpacked(frame.region),
        f"units = {units(frame)}",
        f"splits = split_count(units, triton.cdiv({n}, BLOCK_N.value), out.device)",
        *(f"part_{x} = torch.empty({scratch[x]}, dtype=torch.float32, device=out.device)" for x in ("acc", "max")),
        "part_sum = torch.empty_like(part_max)",
        *call("attention", "units * splits", kernels["attention"], frame),
        *call("combine", "units * ROWS.value", kernels["combine"], frame, warps=4 if width(frame) > 64 else 2),
    ]


SPLIT_COUNT = '''\
def split_count(units, tiles, device):
    """Shares of the keys: a power of two that fills the device about twice, no more than there are tiles."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    wanted = max(1, min(2 * cores // max(1, units), tiles, 128))
    return 1 << (wanted.bit_length() - 1)
'''

