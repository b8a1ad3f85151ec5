"""The host side of a generated file: parameters, grid and scratch. (frame, ...) -> lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from fusecomp.codegen.descriptors import prepared
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.printer import atom, triton_text
from fusecomp.codegen.program import factor
from fusecomp.ir.expr import Const
from fusecomp.ir.region import AttentionRegion

Lines = list[str]
SCHEDULED = ("requests", "units", "programs")
"""What the host counts for `schedule`."""
SHARED = ("splits",)
"""What it counts for the sum of a gradient whose programs are many."""
CONSTANTS = ("BLOCK_M", "BLOCK_N", "WHOLE", "TILES")
"""What is known when a kernel is compiled, of a file whose kernels differ in it."""


def parameters(frame: Frame, read: Iterable[str]) -> list[str]:
    """What a kernel takes, of what it reads: pointers, strides, sizes, in the order of the operands."""
    names = set(read)
    ranks = ranks_of(frame)
    pointers = [f"{t}_ptr" for t in (*ranks, "tiles", "states")]
    strides = [f"{t}_stride_{i}" for t, rank in ranks.items() for i in range(rank)]
    scratch = ["lse_ptr", "part_acc_ptr", "part_max_ptr", "part_sum_ptr", "maxima_ptr"]
    return [p for p in (*pointers, *scratch, *strides, *SCHEDULED, *frame.region.sizes) if p in names]


def unspecialised(frame: Frame, params: list[str]) -> list[str]:
    """Lengths: a new value must not compile a new kernel."""
    return [p for p in params if p in (*frame.region.sizes, *SCHEDULED, *SHARED)]


def arguments(params: Sequence[str], ranks: Mapping[str, int]) -> list[str]:
    """q_ptr -> q, M -> M; strides of q together: *q.stride(), of four axes the last three *q.stride()[1:]."""
    given: list[str] = []
    for tensor, group in groupby(params, lambda p: p.partition("_stride_")[0] if "_stride_" in p else ""):
        if tensor:
            given += _strides(tensor, [int(p.rpartition("_")[2]) for p in group], ranks[tensor])
        else:
            given += [p.removesuffix("_ptr") for p in group]
    return given


def _strides(tensor: str, axes: list[int], rank: int) -> list[str]:
    first, end = axes[0], axes[-1] + 1
    if len(axes) == 1 or axes != list(range(first, end)):
        return [f"{tensor}.stride({i})" for i in axes]
    some = f"[{first or ''}:{end if end < rank else ''}]" if len(axes) < rank else ""
    return [f"*{tensor}.stride(){some}"]


def ranks_of(frame: Frame) -> dict[str, int]:
    """How many axes each tensor has."""
    region = frame.region
    return {"out": len(region.out_axes), **{o.name: len(o.shape) for o in region.operands}}


def rounded_up(n: str, size: object) -> str:
    """How many tiles of that size n makes, on the host, where triton.cdiv takes longer than a grid of them."""
    return f"-(-{atom(n)} // {size})"


def declared(params: Sequence[str]) -> Lines:
    """Parameters as the kernel declares them."""
    return [f"{p}: tl.constexpr" if p in CONSTANTS else p for p in params]


def wrapped(items: Iterable[str], indent: int = 0, width: int = 100) -> Lines:
    """Comma-separated items, as many a line as fit."""
    lines: Lines = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 2 <= width - indent:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{item},")
    return lines


def unpacked(region: AttentionRegion, more: Sequence[str] = ()) -> Lines:
    """The tensors and lengths by name."""
    return by_name([*(o.name for o in region.operands), *more], region.sizes)


def by_name(tensors: Sequence[str], sizes: Sequence[str]) -> Lines:
    lists = (("tensors", tensors), ("sizes", sizes))
    return [f"{', '.join(names)}{',' * (len(names) == 1)} = {what}" for what, names in lists if names]


def launched_tiles(frame: Frame) -> str:
    """How many tiles the queries make, on the host."""
    return rounded_up(triton_text(frame.q_idx.size, frame.names), f"{frame.rows_per_tile_name}.value")


def units(frame: Frame) -> str:
    """Query tiles over the batch axes."""
    return " * ".join([*outer_sizes(frame), launched_tiles(frame)])


def outer_sizes(frame: Frame) -> list[str]:
    """The lengths of the batch axes."""
    return [factor(v.size, frame) for v in frame.batch]


def call(
    kernel: str, grid: str, params: list[str], frame: Frame, warps: int = 0, *more: str
) -> Lines:  # fmt: skip
    """kernel[grid](...) on the current stream, with `more` said of its launch."""
    schedule = [f"num_warps={warps or frame.plan.warps}", f"num_stages={frame.stages}", *more]
    given = wrapped([*arguments(params, ranks_of(frame)), *schedule], 8)
    return [f"{kernel}[({grid},)](", *("    " + line for line in given), ")"]


def held(frame: Frame) -> Lines:
    """Of the launch: registers that a thread may take."""
    return [f"maxnreg={frame.plan.registers}"] if frame.plan.registers else []


def prefill_launch(frame: Frame, kernel: str, params: list[str], saves_lse: bool = False) -> Lines:
    """A program for each query tile of each head."""
    named = unpacked(frame.region, ["tiles"] if frame.tabled else [])
    launched = call(kernel, units(frame), params, frame, 0, *held(frame))
    return [*named, *no_keys(frame, saves_lse), *prepared(frame), *launched]


def no_keys(frame: Frame, saves_lse: bool = False) -> Lines:
    """A softmax over nothing weighs nothing: O = 0."""
    size = triton_text(frame.kv_idx.size, frame.names)
    if isinstance(frame.kv_idx.size, Const):
        return []
    lse = ['    lse.fill_(float("-inf"))'] if saves_lse else []
    return [f"if {size} == 0:", *lse, "    out.zero_()", "    return"]
