"""K and V through tensor descriptors: from Hopper on, a unit of its own copies whole tiles to shared memory (TMA).

    k_desc = the keys [0, k_end) of one head, [k_end, D] with strides [row, 1]; what lies outside reads as zeros
    k_tile = k_desc.load([k_start, 0]).T

It takes what lies in rows, operand[..., kv_idx, ..., d] with d dense, at addresses and strides of whole 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusecomp.codegen.address import stride
from fusecomp.codegen.frame import Chunk, Frame
from fusecomp.codegen.memory import key_address
from fusecomp.codegen.narrow import converted
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Var, text
from fusecomp.ir.poly import Poly, plus, poly
from fusecomp.ir.region import Access, AttentionRegion
from fusecomp.planning.tile import TilePlan

Lines = list[str]
ARCHITECTURES = ("sm_90", "sm_100")
STEP = 16
"""Bytes."""
BYTES = {"bool": 1, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def choose(
    region: AttentionRegion, plan: TilePlan, arch: str, strides: Sequence[Sequence[int]] | None = None
) -> TilePlan:
    """The plan with its K and V read through descriptors, where `arch` ("sm_90") has the unit and all of it fits.

    `strides`: plain integers for each operand, in the region's order. An operand that fits in no descriptor as it
    lies would be copied at every launch, so it is read through pointers."""
    able = arch in ARCHITECTURES and plan.skeleton == "prefill" and _as_held(region) and describable(region, plan)
    if not able or (strides is not None and not all(_in_steps(region, strides))):
        return plan
    return replace(plan, loads="descriptor")


def describable(region: AttentionRegion, plan: TilePlan) -> bool:
    """Whether every K and V lies in rows; a copy of one then fits, whatever its strides."""
    frame = Frame(region, plan)
    try:
        return all(_in_rows(frame, x) for x in key_operands(frame))
    except KernelError:
        return False


def _as_held(region: AttentionRegion) -> bool:
    """Whether the products take 16-bit K and V from shared memory as they are."""
    pairs = [*((p.k, p.dtype) for p in region.products), (region.v, region.pv_dtype)]
    return all(region.operand(a.operand).dtype == dtype and BYTES.get(dtype) == 2 for a, dtype in pairs)


def in_steps(dtype: str, strides: Sequence[int]) -> bool:
    """Dense columns of what products take, and rows that begin at whole 16 bytes."""
    *outer, last = strides
    return dtype in BYTES and last == 1 and not any(s * BYTES[dtype] % STEP for s in outer)


def _in_steps(region: AttentionRegion, strides: Sequence[Sequence[int]]) -> Iterator[bool]:
    """For each K and V, whether its strides are those of a descriptor."""
    read = {*(p.k.operand for p in region.products), region.v.operand}
    for operand, own in [(o, s) for o, s in zip(region.operands, strides, strict=True) if o.name in read]:
        yield in_steps(operand.dtype, own)


@dataclass(frozen=True)
class KeyOperand:
    """K of a product, or V: "k", "k1", "v"."""

    stem: str
    access: Access
    d: Var
    chunks: tuple[Chunk, ...]
    dtype: str
    """What its product rounds it to."""


def key_operands(frame: Frame) -> list[KeyOperand]:
    """Every K, then V."""
    r = frame.region
    keys = [KeyOperand(f"k{t or ''}", p.k, p.d, frame.d_chunks(t), p.dtype) for t, p in enumerate(r.products)]
    return [*keys, KeyOperand("v", r.v, r.dv, frame.dv_chunks, r.pv_dtype)]


def _in_rows(frame: Frame, x: KeyOperand) -> bool:
    """Whether keys are rows, and a program's columns begin at a whole step."""
    operand = frame.region.operand(x.access.operand)
    size, last = BYTES.get(operand.dtype, 0), len(operand.shape) - 1
    base = key_address(frame, x.access, x.d).base
    columns = [c for monomial, c in base.items() if stride(operand.name, last) in monomial]
    length = operand.shape[last]
    whole = isinstance(length, Const) and all(int(c) * size % STEP == 0 for c in (length.value, *columns))
    return size > 0 and whole and _row_dimension(frame, x) is not None


def _row_dimension(frame: Frame, x: KeyOperand) -> int | None:
    """The i for which an element lies at  kv_idx * stride_i + d * stride_last  from its base."""
    name, found = x.access.operand, key_address(frame, x.access, x.d)
    last = len(x.access.index) - 1

    def offsets(v: Var, dim: int) -> Poly:
        return poly(apply("mul", v, stride(name, dim)))

    rows = (i for i in range(last) if found.offsets == plus(offsets(frame.kv_idx, i), offsets(x.d, last), 1))
    return next(rows, None) if not found.rows else None


# ----------------------------------------------------------------------------------------------------------------
# Lines


def descriptors(frame: Frame) -> Lines:
    """k_desc and v_desc: the keys up to the end of what the tile visits."""
    if frame.plan.loads == "pointer":
        return []
    lines = [f"# Rows from {frame.k_end} on, and columns past the head size, read as zeros"]
    for x in key_operands(frame):
        if not _in_rows(frame, x):
            raise KernelError(f"{x.access} does not lie in rows of whole {STEP} bytes: read it through pointers")
        row = f"{x.access.operand}_stride_{_row_dimension(frame, x)}"
        where = f"{x.stem}_base, [{frame.k_end}, {text(x.d.size)}], [{row}, 1]"
        made = [(c, f"tl.make_tensor_descriptor({where}, [BLOCK_N, {c.size}])") for c in x.chunks]
        lines += [f"{_name(frame, x, c)} = {value}" for c, value in made]
    return lines


def _name(frame: Frame, x: KeyOperand, c: Chunk) -> str:
    return f"{x.stem}_{'every' if frame.every_key else 'desc'}{c.part}"


def described_keys(frame: Frame) -> Lines:
    """k_tile [D, BLOCK_N] of each product and chunk."""
    return [line for x in key_operands(frame)[:-1] for line in _tiles(frame, x)]


def described_values(frame: Frame) -> Lines:
    """v_tile [BLOCK_N, Dv] of each chunk."""
    return _tiles(frame, key_operands(frame)[-1])


def _tiles(frame: Frame, x: KeyOperand) -> Lines:
    cast = converted(frame, x.access.operand, x.dtype)
    turned, shape = ("", "[BLOCK_N, {}]") if x.stem == "v" else (".T", "[{}, BLOCK_N]")
    loads = [(c, f"{_name(frame, x, c)}.load([k_start, {c.first}]){turned}{cast}") for c in x.chunks]
    return [f"{x.stem}_tile{c.part} = {load}  # {shape.format(c.size)}" for c, load in loads]


def prepared(frame: Frame) -> Lines:
    """The launcher's part: operands that lie in rows, and where descriptors are kept."""
    if frame.plan.loads == "pointer":
        return []
    names = dict.fromkeys(x.access.operand for x in key_operands(frame))
    return [f"{', '.join(names)} = {', '.join(f'in_rows({name})' for name in names)}", "triton.set_allocator(scratch)"]


IN_ROWS = '''\
def in_rows(x):
    """x, copied unless a tensor descriptor can say where it lies: dense columns, the rest in whole 16 bytes."""
    *outer, last = x.stride()
    step, columns = 16 // x.element_size(), x.shape[-1]
    if last == 1 and x.data_ptr() % 16 == 0 and not any(«outside» for s in outer):
        return x
    return x.new_empty(*x.shape[:-1], columns + -columns % step)[..., :columns].copy_(x)
'''
"""A descriptor that the host makes of a whole tensor has no stride of 0; one that a program makes of a head's rows may
lie in a tensor whose heads are repeated."""

HELPERS = f'''{IN_ROWS.replace("«outside»", "s % step")}

def scratch(size, alignment, stream):
    """Memory in which a launch keeps its descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
'''
