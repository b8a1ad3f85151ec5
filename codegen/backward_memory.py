"""Loads and stores around a tile of keys: K, V, dK, dV once; Q, dO and biases a tile of queries at a time."""

from __future__ import annotations

from fusecomp.codegen.address import Address, address, at_tile, sum_text
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_pieces import own_keys
from fusecomp.codegen.backward_tile import rounded, scaled_by
from fusecomp.codegen.frame import Chunk
from fusecomp.codegen.memory import output_index, varies, widened
from fusecomp.codegen.narrow import converted
from fusecomp.codegen.printer import Names, triton_text
from fusecomp.errors import KernelError
from fusecomp.ir.expr import Expr, Load, Var, variables
from fusecomp.ir.poly import Poly
from fusecomp.ir.region import Access

Lines = list[str]


def _sum(frame: GradientFrame, p: Poly, more: tuple[str, ...] = ()) -> Lines:
    """A scalar sum in int64."""
    axes = frozenset(v.name for v in (*frame.key_axes, *frame.region.batch)) - {v.name for v in frame.members}
    return [sum_text(p, frame.names, True, axes | set(more))] if p else []


def _key_address(frame: GradientFrame, operand: str, a: Access) -> tuple[Address, Lines]:
    """Where an operand lies, and the tests of the keys that it has, where others lie elsewhere."""
    index, tests = own_keys(frame.key_access(a), frame.kv_idx)
    found = address(operand, index, frame.moving, frozenset({frame.kv_idx.name}))
    return found, [f"({triton_text(t, _key_names(frame))})" for t in tests]


def _key_names(frame: GradientFrame) -> Names:
    """Of the keys that run down a tile of K or V."""
    return frame.names.having({frame.kv_idx: "(k_start + k_row)"}) if frame.queries_down else frame.names


def _at_keys(frame: GradientFrame, a: Address, stem: str) -> Lines:
    start = at_tile(a.start, {frame.kv_idx: Var("k_start", frame.kv_idx.size)})
    return [stem, *_sum(frame, {**a.base, **start})]


def _key_offsets(frame: GradientFrame, a: Address, d: Var, c: Chunk) -> str:
    offsets = sum_text(a.offsets, frame.names.having({frame.kv_idx: "k_row", d: f"{c.d}[None, :]"}), wide=False)
    return " + ".join([*([sum_text(a.rows, _key_names(frame), wide=True)] if a.rows else []), offsets])


def key_tiles(frame: GradientFrame) -> Lines:
    """k_tile [BLOCK_N, D] and v_tile [BLOCK_N, Dv] of each chunk."""
    lines: Lines = []
    for t, p in enumerate(frame.region.products):
        lines += _loaded(frame, f"k{t or ''}", p.k, p.d, frame.d_chunks(t), "k_tile", p.dtype)
    v = frame.region.v
    return [*lines, *_loaded(frame, "v", v, frame.region.dv, frame.dv_chunks, "v_tile", frame.region.pv_dtype)]


def _loaded(
    frame: GradientFrame, stem: str, a: Access, d: Var, chunks: tuple[Chunk, ...], tile: str, dtype: str
) -> Lines:
    found, own = _key_address(frame, a.operand, a)
    lines = [f"{stem}_base = {' + '.join(_at_keys(frame, found, f'{a.operand}_ptr'))}"]
    for c in chunks:
        tests = [*own, *([f"({c.d}[None, :] < {c.limit})"] if c.limit else [])]
        live = f", mask={_all(tests)}, other=0.0" if tests else ""
        body = f"tl.load({stem}_base + {_key_offsets(frame, found, d, c)}{live}){converted(frame, a.operand, dtype)}"
        lines.append(f"{c.name(tile)} = {body}  # [BLOCK_N, {c.size}]")
    return lines


def store(frame: GradientFrame) -> Lines:
    """dK_t = factor dk_acc and dV = dv_acc, rounded."""
    lines: Lines = []
    for t, p in enumerate(frame.region.products):
        lines += _stored(frame, f"dk{t or ''}", p.k, p.d, frame.d_chunks(t), "dk_acc", frame.factor_of(t))
    return [*lines, *_stored(frame, "dv", frame.region.v, frame.region.dv, frame.dv_chunks, "dv_acc", 1.0)]


def _stored(
    frame: GradientFrame, stem: str, a: Access, d: Var, chunks: tuple[Chunk, ...], acc: str, factor: float
) -> Lines:
    found, own = _key_address(frame, f"grad_{a.operand}", a)
    size = triton_text(frame.kv_idx.size, frame.names)
    lines = [f"{stem}_base = {' + '.join(_at_keys(frame, found, f'grad_{a.operand}_ptr'))}"]
    for c in chunks:
        tests = [f"(n < {size} - k_start)", *own, *([f"({c.d}[None, :] < {c.limit})"] if c.limit else [])]
        value = scaled_by(c.name(acc), factor)
        value = rounded(f"({value})" if " " in value else value, frame.region.operand(a.operand).dtype)
        lines.append(f"tl.store({stem}_base + {_key_offsets(frame, found, d, c)}, {value}, mask={_all(tests)})")
    return lines


def _all(tests: Lines) -> str:
    """Tests in brackets, joined."""
    return " & ".join(tests) if len(tests) > 1 else tests[0][1:-1]


def query_pointers(frame: GradientFrame) -> Lines:
    """Where a head's Q and dO begin, and the places inside their tiles."""
    lines: Lines = []
    for stem, _, found, d, chunks in _moving(frame):
        lines.append(f"{stem}_base = {' + '.join([f'{_operand(frame, stem)}_ptr', *_sum(frame, found.base)])}")
        for c in chunks:
            places = frame.names.having({frame.q_idx: "m[:, None]", d: f"{c.d}[None, :]"})
            same = "" if varies(found, frame.q_idx) else "0 * m[:, None] + "
            lines.append(f"{stem}_offsets{c.part} = {same}{sum_text(found.offsets, places, wide=False)}")
    return lines


def _operand(frame: GradientFrame, stem: str) -> str:
    if stem == "do":
        return "grad_out"
    return frame.region.products[int(stem[1:] or 0)].q.operand


def _moving(frame: GradientFrame) -> list[tuple[str, str, Address, Var, tuple[Chunk, ...]]]:
    """(stem, dtype of its product, address, column, chunks) of Q and dO."""
    region = frame.region
    found = [
        (f"q{t or ''}", p.dtype, _query_address(frame, p.q.operand, p.q.index), p.d, frame.d_chunks(t))
        for t, p in enumerate(region.products)
    ]
    out = _query_address(frame, "grad_out", output_index(frame))
    return [*found, ("do", region.pv_dtype, out, region.dv, frame.dv_chunks)]


def _query_address(frame: GradientFrame, operand: str, index: tuple[Expr, ...]) -> Address:
    found = address(operand, index, frame.moving, frozenset({frame.q_idx.name}))
    if found.rows:
        raise KernelError(f"no backward kernel: {operand} does not run along the queries in equal steps")
    return found


def query_loads(frame: GradientFrame, edge: bool, wanted: str) -> Lines:
    """q_tile [BLOCK_M, D] or do_tile [BLOCK_M, Dv] of each chunk."""
    lines: Lines = []
    for stem, dtype, found, _, chunks in _moving(frame):
        if (stem == "do") != (wanted == "do"):
            continue
        start = at_tile(found.start, {frame.q_idx: Var("query", frame.q_idx.size)})
        held = frame.region.out_dtype if stem == "do" else frame.region.operand(_operand(frame, stem)).dtype
        for c in chunks:
            tests = ["live[:, None]"] * edge + [f"({c.d}[None, :] < {c.limit})"] * bool(c.limit)
            live = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
            pointer = " + ".join([f"{stem}_base", *_sum(frame, start, ("query",)), f"{stem}_offsets{c.part}"])
            body = rounded(f"tl.load({pointer}{live})", dtype, held)
            lines.append(f"{c.name(f'{wanted}_tile')} = {body}  # [BLOCK_M, {c.size}]")
    return lines


# ----------------------------------------------------------------------------------------------------------------
# What the score reads


def fixed_values(frame: GradientFrame, inside: bool) -> Lines:
    """Values that no query changes; `inside` the loop over heads, or before it."""
    lines: Lines = []
    for name, e in (*frame.element.hoisted, *frame.element.tiles):
        names = variables(e)
        if frame.q_idx.name not in names and bool(names & frame.summed_axes) == inside:
            lines.append(_value(frame, name, e, edge=False))
    return lines


def query_values(frame: GradientFrame, edge: bool) -> Lines:
    """Values that vary with the query: loads of a bias, or of one number a query."""
    named = (*frame.element.hoisted, *frame.element.tiles)
    return [_value(frame, name, e, edge) for name, e in named if frame.q_idx.name in variables(e)]


def _value(frame: GradientFrame, name: str, e: Expr, edge: bool) -> str:
    names = Names({x: n for x, n in frame.tile_names.values.items() if x != e}, frame.tile_names.floats)
    if not isinstance(e, Load):
        return f"{name} = {triton_text(e, names)}"
    both = frozenset({frame.q_idx.name, frame.kv_idx.name})
    a = address(e.tensor, e.index, frame.moving, both)
    starts: dict[Expr, Expr] = {v: Var(n, v.size) for v, n in ((frame.q_idx, "query"), (frame.kv_idx, "k_start"))}
    rows, columns = ("m[:, None]", "k_column") if frame.queries_down else ("m[None, :]", "k_row")
    places = names.having({frame.q_idx: rows, frame.kv_idx: columns})
    pointer = [
        f"{e.tensor}_ptr",
        *_sum(frame, {**a.base, **at_tile(a.start, starts)}, ("query",)),
        *([sum_text(a.offsets, places, wide=False)] if a.offsets else []),
        *([sum_text(a.rows, names, wide=True)] if a.rows else []),
    ]
    live = f", mask=live{rows[1:]}, other={frame.past_end(e)}" if edge and frame.q_idx.name in variables(e) else ""
    return f"{name} = tl.load({' + '.join(pointer)}{live}){widened(e.dtype)}"
