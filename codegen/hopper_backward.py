"""What the two backward kernels for Hopper's tensor cores share: what they express, blocks of tensors, their functions.

(frame, ...) -> text or lines; the portable fillers' `tl` is `gl` here.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from fusecomp.codegen import backward_keys, hopper
from fusecomp.codegen.backward_frame import GradientFrame, roles
from fusecomp.codegen.backward_launcher import parameters
from fusecomp.codegen.backward_tile import logit, times
from fusecomp.codegen.copied import pair_loads
from fusecomp.codegen.derivative import ONE
from fusecomp.codegen.function import quoted
from fusecomp.codegen.hopper_backward_skeletons import HELPERS, KEY_GRADIENTS, LAYOUTS, QUERY_GRADIENT, QUERY_LAYOUT
from fusecomp.codegen.hopper_functions import APART, BARRIERS, TANH
from fusecomp.codegen.hopper_launch import LAUNCH_HELPERS
from fusecomp.codegen.hopper_text import FIRST_BARRIER, block_at, in_gluon
from fusecomp.codegen.launcher import unspecialised, wrapped
from fusecomp.codegen.logsumexp import saved
from fusecomp.codegen.memory import output_index
from fusecomp.codegen.printer import triton_dtype
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.source import names_read, tidy
from fusecomp.codegen.tile import indented
from fusecomp.ir.algebra import apply, depends_on_score
from fusecomp.ir.poly import poly
from fusecomp.ir.ranges import reach
from fusecomp.ir.region import AttentionRegion, extent
from fusecomp.planning.backward import BackwardPlan
from fusecomp.planning.tile import TilePlan

Lines = list[str]
Holes = dict[str, str | Lines]
STAY = 128
"""Rows of the tile that stays: 64 of each group of warps."""
WALKED = {64: (128, 128, 2), 128: (64, 64, 2)}
"""Head size -> queries that a tile of keys walks at a time, keys that one of queries does, and how many such tiles of
each tensor shared memory holds. Longer ones take more registers than there are."""
BENT = {**WALKED, 64: (64, 128, 2)}
"""The same where the derivative of S varies, which takes registers too."""
SHORT = {64: (64, 64, 2), 128: (64, 64, 2)}
"""The same where rows of tiles are short: their ends are cut more closely. Packed documents take 0.346 ms, not 0.407, a
window of 256 keys 0.297, not 0.351 (B 4, H 16, N 4096, D 64; probes_h200.json)."""
FEW = 512
"""Keys of a window that are."""
ONCE = {64: 3, 128: 2}
"""Head size -> how many groups multiply where a tile of keys, which walks 64 queries at a time, adds to their dQ."""
NAMES = frozenset({
    "left", "d_left", "slot", "tile", "product", "copied", "copied_in", "multiplied", "barrier", "given",
    "instruction", "described", "in_rows", "padded", "row_values", "key_sums", "query_sums",
    "copy_keys", "copy_queries", "right", "layout", "columns", "zero", "step", "whole", "live", "stored", "row_block",
    "do_block", "inside", "tiles", "program", "group", "count", "tanh", "programs", "buffer",
    "added", "share", "before", "place", "column", "sums", "half", "dq_sums", "k_left", "v_left", "all_gradients",
})  # fmt: skip
"""What the skeletons call their own variables."""
DESCRIPTORS = ("q_desc", "do_desc", "k_desc", "v_desc", "row_desc", "dq_desc", "dk_desc", "dv_desc")
REGISTERS = [240, 24]
"""Of a thread of the second group that multiplies, and of the warp that copies."""
SHARED = (
    "q_smem", "do_smem", "k_smem", "v_smem", "row_smem", "ds_smem",
    "q_ready", "do_ready", "k_ready", "v_ready", "ds_ready",
)  # fmt: skip


def expresses(region: AttentionRegion, learned: Set[str]) -> bool:
    """Whether these kernels have the gradients of what is `learned`: Q, K and V alone, where the forward kernel for
    Hopper has the values, saves one number of each row, and reads none for each pair."""
    others = learned - {a.operand for a in roles(region)}
    plain = not others and not saved(region) and not pair_loads(region)
    return plain and hopper.expresses(region) and extent(region.dv) in WALKED


def specialised(region: AttentionRegion, plan: TilePlan, deterministic: bool = True) -> BackwardPlan:
    """These kernels' tiles, whose cost nothing predicts yet; `plan` is that of the forward kernel for Hopper."""
    walked = SHORT if plan.visits != "bounds" or windowed(region) else BENT if bent(region, plan) else WALKED
    queries, keys, stages = walked[extent(region.dv)]
    if not deterministic:
        plan = replace(plan, block_m=64, block_n=STAY, stages=stages, consumers=ONCE[extent(region.dv)], resident=1)
        return BackwardPlan(plan, plan, once=True)
    plan = replace(plan, stages=stages, consumers=2, resident=1)
    return BackwardPlan(replace(plan, block_m=STAY, block_n=keys), replace(plan, block_m=queries, block_n=STAY))


def windowed(region: AttentionRegion) -> bool:
    """Whether each query sees no more than `FEW` keys."""
    found = reach(region.keep, region.q_idx.name, region.kv_idx.name)
    widths = (poly(apply("sub", above.edge, below.edge)) for above in found.upper for below in found.lower)
    return any(set(w) <= {()} and w.get((), 0) <= FEW for w in widths)


def bent(region: AttentionRegion, plan: TilePlan) -> bool:
    """Whether the derivative of S varies."""
    return any(depends_on_score(rest) for rest, _ in GradientFrame(region, plan).derivative.values())


def header(frame: GradientFrame) -> Lines:
    """Constants and layouts of the kernel that walks queries."""
    stages = frame.plan.stages
    barriers = f"gl.constexpr({FIRST_BARRIER}), gl.constexpr({FIRST_BARRIER + stages})"
    sizes = {"block_m": str(frame.plan.block_m), "size": str(extent(frame.region.dv)), "barriers": barriers}
    ring = f"STAGES = gl.constexpr({stages})  # tiles in shared memory of each tensor that is walked"
    return [ring, *fill(LAYOUTS, sizes).splitlines()]


def query_layout(frame: GradientFrame) -> Lines:
    """Layouts of the kernel that walks keys."""
    return fill(QUERY_LAYOUT, {"block_n": str(frame.plan.block_n)}).splitlines()


def helpers(kernels: Sequence[str]) -> list[str]:
    """The kernels between the functions that they call and those of the launcher."""
    functions = [text for name, text in (("tanh", TANH), ("apart", APART)) if any(f"{name}(" in k for k in kernels)]
    return [BARRIERS, HELPERS, *functions, *kernels, LAUNCH_HELPERS]


# ----------------------------------------------------------------------------------------------------------------
# Blocks


def blocks(frame: GradientFrame, kernel: str) -> dict[str, list[int]]:
    """The shape in which each tensor is copied."""
    region, size = frame.region, extent(frame.region.dv)
    p = region.products[0]
    q, k = (64, frame.plan.block_n) if kernel == "query_gradient" else (frame.plan.block_m, 64)
    rows = {
        "q": (p.q.index, frame.q_idx, q),
        "k": (p.k.index, frame.kv_idx, k),
        "v": (region.v.index, frame.kv_idx, k),
        "do": (output_index(frame), frame.q_idx, q),
        "dq": (p.q.index, frame.q_idx, 64),
        "dk": (p.k.index, frame.kv_idx, 64),
        "dv": (region.v.index, frame.kv_idx, 64),
    }
    found = {name: [n if e == row else 1 for e in index[:-1]] + [size] for name, (index, row, n) in rows.items()}
    return {**found, "row": [2, 1, frame.plan.block_m]}


def copies(frame: GradientFrame, kernel: str, names: Sequence[str]) -> Holes:
    """Where each block lies, and how its memory is seen."""
    p = frame.region.products[0]
    found: Holes = {}
    q, k = ("q_start", "k_start + group * 64") if kernel == "key_gradients" else ("q_start + group * 64", "k_start")
    k_index, v_index = (frame.key_access(a) if kernel == "key_gradients" else a.index for a in (p.k, frame.region.v))
    where = {"q": (p.q.index, frame.q_idx, q), "do": (output_index(frame), frame.q_idx, q),
             "k": (k_index, frame.kv_idx, k), "v": (v_index, frame.kv_idx, k)}  # fmt: skip
    for name in names:
        if name == "row":
            head = f"({backward_keys.outer(frame)}).to(tl.int32)" if frame.region.batch else "0"
            found["row_at"] = f"[0, {head}, q_start]"
        else:
            source = name if name in where else name.removeprefix("d")
            found[f"{name}_at"] = block_at(frame, *where[source])
        found[f"{name}_block"] = f"{name}_desc.dtype, {blocks(frame, kernel)[name]}, {name}_desc.layout"
    return found


# ----------------------------------------------------------------------------------------------------------------
# Functions


def held(frame: GradientFrame) -> tuple[Lines, Holes]:
    """(K and V as left factors in registers, their names), where there is room. The last wait keeps them: without it
    ptxas 12.8 may write over them, though the next tile reads them too."""
    once = frame.plan.consumers == ONCE[64] and extent(frame.region.dv) == 64
    room = once and not bent(frame.region, frame.plan)
    lines = [f"{x}_left = {x}_tile.load(gl.DotOperandLayout(0, KEYS_DOWN, 2))" for x in "kv"] if room else []
    names = {f"{x}_left": f"{x}_left" if room else f"{x}_tile" for x in "kv"}
    return lines, {**names, "kept": ", k_left, v_left" * room}


def score_gradients(frame: GradientFrame, rows: str) -> Holes:
    """dscore = P dS/dscore (dP - delta): two factors become one before dP has come, which takes fewer registers."""
    rest, _ = frame.derivative[0]
    slope = [] if rest == ONE else [f"p = p{times(frame, rest)}"]
    return {"slope": slope, "gradients": [f"{frame.d_name(0)} = p * (d_p - delta{rows})"]}


def by_runs(frame: GradientFrame, run: Lines, read: Lines) -> Lines:
    """What a tile that the mask cuts is masked by: places alone where it shows runs, else what it reads."""
    s = logit(frame)
    return ["if in_runs:", *indented(run), "else:", *indented([*read, f"{s} = apart({s})"])]


def function(frame: GradientFrame, skeleton: str, holes: Holes) -> tuple[str, list[str]]:
    """(text, what it is given): what it reads."""
    text = tidy(fill(skeleton, {**holes, "given": "given"}))
    read = names_read(text)
    given = [*(x for x in (*DESCRIPTORS, *SHARED) if x in read), *_region_parameters(frame, read)]
    opened = ["(", *indented(wrapped(given, 4)), ")"]
    return text.replace("    given = given\n", "    " + "\n    ".join(opened) + " = given\n", 1), given


def _region_parameters(frame: GradientFrame, read: frozenset[str]) -> list[str]:
    return [p for p in parameters(frame, read) if not p.startswith("BLOCK_")]


def kernel_of(
    frame: GradientFrame, name: str, functions: list[str], given: dict[str, list[str]], **holes: str | Lines
) -> tuple[str, list[str]]:
    """The functions and the kernel that hands them what it takes."""
    taken = frozenset(x for names in given.values() for x in names)
    params = [*(x for x in DESCRIPTORS if x in taken), *_region_parameters(frame, taken)]
    walked = frame.plan.block_n if name == "query_gradient" else frame.plan.block_m
    more: Holes = {} if name == "query_gradient" else {"memory": [], "ready": [], "more": ""}
    kernel = tidy(fill(QUERY_GRADIENT if name == "query_gradient" else KEY_GRADIENTS, {
        "sizes": quoted(unspecialised(frame, params)), "name": name,
        "parameters": wrapped(params, 4), "dtype": triton_dtype(frame.region.out_dtype), "rows": str(walked),
        "size": str(extent(frame.region.dv)), "warps": "[4, 1]", "registers": str(REGISTERS), **more, **holes,
        "given": [line for x, names in given.items() for line in (f"{x} = (", *indented(wrapped(names, 4)), ")")],
    }))  # fmt: skip
    return in_gluon("\n\n\n".join(t.strip() for t in [*functions, kernel])), params
