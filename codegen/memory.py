"""Loads and stores: which elements a program reads, as pointer arithmetic. (frame, ...) -> lines."""

from __future__ import annotations

from collections.abc import Iterable

from fusecomp.codegen.address import Address, address, at_tile, sum_text
from fusecomp.codegen.frame import Chunk, Frame
from fusecomp.codegen.narrow import WIDENED, converted, widens
from fusecomp.codegen.pages import KEY, looked_up, paged_address
from fusecomp.codegen.printer import HALF, Names, triton_text
from fusecomp.errors import KernelError
from fusecomp.ir.expr import Expr, Load, Var, parts, variables
from fusecomp.ir.poly import Poly
from fusecomp.ir.region import Access

Lines = list[str]


def fixed_loads(frame: Frame) -> Lines:
    """Values that no key changes: name = tensor[index], name = f(h)."""
    lines = []
    for name, e in (*frame.element.hoisted, *frame.addressed.hoisted):
        others = Names({x: n for x, n in frame.names.values.items() if x != e})
        if isinstance(e, Load):
            a = _row_address(frame, e.tensor, e.index)
            pointer = " + ".join([f"{e.tensor}_ptr", *row_base(frame, a), *row_offsets(frame, a, {})])
            lines.append(f"{name} = tl.load({pointer}){widened(e.dtype)}")
        else:
            lines.append(f"{name} = {triton_text(e, others)}")
    return lines


def widened(dtype: str) -> str:
    """Half precision is computed with in float32."""
    return ".to(tl.float32)" if dtype in HALF else ""


def _row_address(frame: Frame, operand: str, index: tuple[Expr, ...]) -> Address:
    return address(operand, index, frame.moving, frozenset({frame.q_idx.name}))


def row_base(frame: Frame, a: Address) -> Lines:
    """What the batch axes and q_start decide."""
    start = at_tile(a.start, {frame.q_idx: Var("q_start", frame.q_idx.size)})
    return _sum(frame, {**a.base, **start})


def row_offsets(frame: Frame, a: Address, columns: dict[Expr, str], whole: bool = False) -> Lines:
    """The place inside a query tile. `whole`: a tile has all its rows, be they the same."""
    places = frame.names.having({frame.q_idx: "q_row", **columns})
    same = whole and not varies(a, frame.q_idx)
    return [
        *(["0 * q_row"] if same else []),
        *([sum_text(a.offsets, places, wide=False)] if a.offsets else []),
        *([sum_text(a.rows, frame.names.having(columns), wide=True)] if a.rows else []),
    ]


def varies(a: Address, v: Var) -> bool:
    """Whether an address differs along an index of the tile."""
    return any(v.name in variables(f) for m in (*a.offsets, *a.rows) for f in m)


def _sum(frame: Frame, p: Poly) -> Lines:
    """A scalar sum in int64, nothing where it is empty."""
    return [sum_text(p, frame.names, True, frame.batch_names | {"key"})] if p else []


def _only(frame: Frame, a: Access, *allowed: Var) -> tuple[Expr, ...]:
    """The index of an operand that may vary with the `allowed` indices, and the batch axes, only."""
    index = frame.access(a)
    wrong = {name for e in index for name in variables(e)} & frame.moving - {v.name for v in allowed}
    if wrong:
        raise KernelError(f"{a} varies with {', '.join(sorted(wrong))}; no kernel reads an operand so")
    return index


# ----------------------------------------------------------------------------------------------------------------
# Q, K, V, O


def query_tiles(frame: Frame, whole: bool = False) -> Lines:
    """q_tile [BLOCK_M, D] of each product and chunk; [1, D] where queries are the same, unless it is to be whole, as
    that of one product of several is."""
    lines, whole = [], whole or len(frame.region.products) > 1
    for t, product in enumerate(frame.region.products):
        a = _row_address(frame, product.q.operand, _only(frame, product.q, *frame.row_axes, product.d))
        base = f"q{t or ''}_base"
        lines.append(f"{base} = {' + '.join([f'{product.q.operand}_ptr', *row_base(frame, a)])}")
        for c in frame.d_chunks(t):
            pointer = " + ".join([base, *row_offsets(frame, a, {product.d: f"{c.d}[None, :]"}, whole)])
            mask = f", mask={c.d}[None, :] < {c.limit}, other=0.0" if c.limit else ""
            cast = converted(frame, product.q.operand, product.dtype)
            lines.append(f"{c.name('q_tile')} = tl.load({pointer}{mask}){cast}  # [BLOCK_M, {c.size}]")
    return lines


def tile_pointers(frame: Frame) -> Lines:
    """Where K, V and the loads of the score begin, and the places inside their tiles."""
    lines: Lines = []
    for t, product in enumerate(frame.region.products):
        lines += _operand_pointers(frame, f"k{t or ''}", product.k, product.d, frame.d_chunks(t), keys_first=False)
    lines += _operand_pointers(frame, "v", frame.region.v, frame.region.dv, frame.dv_chunks, keys_first=True)
    return [*lines, *(WIDENED if widens(frame) else []), *element_pointers(frame)]


def element_pointers(frame: Frame) -> Lines:
    """Where the loads of the score and the mask begin, and the places inside their tiles."""
    lines: Lines = []
    for name, x in _read_by_element(frame):
        a = _element_address(frame, x)
        lines.append(f"{name}_base = {' + '.join([f'{x.tensor}_ptr', *_element_base(frame, a)])}")
        places = frame.names.having({frame.q_idx: "q_row", frame.kv_idx: "n[None, :]"})
        lines += [f"{name}_offsets = {sum_text(a.offsets, places, wide=False)}"] if a.offsets else []
    return lines


def _operand_pointers(
    frame: Frame, stem: str, a: Access, d: Var, chunks: tuple[Chunk, ...], keys_first: bool
) -> Lines:
    found = key_address(frame, a, d)
    lines = [f"{stem}_base = {' + '.join([f'{a.operand}_ptr', *_sum(frame, found.base)])}"]
    keys, columns = ("n[:, None]", "[None, :]") if keys_first else ("n[None, :]", "[:, None]")
    for c in chunks:
        places = frame.names.having({frame.kv_idx: keys, d: f"{c.d}{columns}"})
        same = "" if found.rows or varies(found, frame.kv_idx) else f"0 * {keys} + "
        lines.append(f"{stem}_offsets{c.part} = {same}{sum_text(found.offsets, places, wide=False)}")
    return lines


def key_address(frame: Frame, a: Access, d: Var) -> Address:
    """Where K and V lie, as a function of kv_idx and d."""
    found = paged_address(frame, a.operand, _only(frame, a, frame.kv_idx, d))
    if any(d.name in variables(f) for monomial in found.rows for f in monomial):
        raise KernelError(f"{a} mixes {frame.kv_idx.name} and {d.name} in one coordinate: no kernel reads so")
    return found


def key_names(frame: Frame) -> Names:
    """Of the keys of a tile and of what is looked up for them."""
    return frame.names.having({frame.kv_idx: "kv", **{x: x.tensor for x in looked_up(frame).values()}})


def tile_start(frame: Frame, a: Address, names: Names) -> Lines:
    """Where a tile of keys begins: nothing, or a number."""
    found = at_tile(a.start, {frame.kv_idx: KEY})
    return [sum_text(found, names, True, frame.batch_names | {KEY.name})] if found else []


def row_loads(frame: Frame, edge: bool) -> Lines:
    """What the addresses of K and V look up for a tile of keys: table_rows [BLOCK_N]."""
    return _looked_up(frame, "", key_names(frame), ", mask=live, other=0" if edge else "")


def first_rows(frame: Frame, begin: str = "full_begin") -> Lines:
    """The same for the first tile of a loop that looks up where the keys of the next tile lie."""
    if not frame.looks_ahead:
        return []
    why = "# Where keys lie is looked up a tile ahead"
    return [why, *_next_tile(begin, lines := _next_rows(frame)), *lines]


def next_rows(frame: Frame) -> Lines:
    """The rows that were looked up before, and those of the tile after this one."""
    taken = [f"{name} = next_{name}" for name, _ in frame.addressed.tiles]
    return [*taken, *_next_tile("k_start + BLOCK_N", lines := _next_rows(frame)), *lines]


def _next_rows(frame: Frame) -> Lines:
    found: dict[Expr, str] = {x: f"next_{x.tensor}" for x in looked_up(frame).values()}
    names = key_names(frame).having({frame.kv_idx: "next_kv", KEY: "next_key", **found})
    return _looked_up(frame, "next_", names, ", mask=next_key < full_end, other=0")


def _next_tile(start: str, lines: Lines) -> Lines:
    """Where the tile after this one begins, and its keys where they are read."""
    keys = [f"next_kv = {start} + n"] if any("next_kv" in line for line in lines) else []
    return [f"next_key = tl.cast({start}, tl.int64)", *keys]


def _looked_up(frame: Frame, prefix: str, names: Names, mask: str) -> Lines:
    lines = []
    for name, x in frame.addressed.tiles:
        a = paged_address(frame, x.tensor, x.index)
        own = names.having({frame.kv_idx: "n"})
        pointer = [
            f"{x.tensor}_ptr",
            *_sum(frame, a.base),
            *tile_start(frame, a, names),
            *([sum_text(a.offsets, own, wide=False)] if a.offsets else []),
            *([sum_text(a.rows, names, wide=True)] if a.rows else []),
        ]
        lines.append(f"{prefix}{name} = tl.load({' + '.join(pointer)}{mask})")
    return lines


def key_loads(frame: Frame, edge: bool) -> Lines:
    """k_tile [D, BLOCK_N] of each product and chunk."""
    lines: Lines = []
    for t, product in enumerate(frame.region.products):
        cast = converted(frame, product.k.operand, product.dtype)
        lines += _loads(frame, f"k{t or ''}", product.k, product.d, frame.d_chunks(t), cast, edge, keys_first=False)
    return lines


def value_loads(frame: Frame, edge: bool) -> Lines:
    """v_tile [BLOCK_N, Dv] of each chunk."""
    cast = converted(frame, frame.region.v.operand, frame.region.pv_dtype)
    lines = _loads(frame, "v", frame.region.v, frame.region.dv, frame.dv_chunks, cast, edge, keys_first=True)
    names = [c.name("v_tile") for c in frame.dv_chunks if widens(frame)]
    return [*lines, *(f"{name} = tl.where(widened, {name}, 0.0)" for name in names)]


def _loads(
    frame: Frame, stem: str, a: Access, d: Var, chunks: tuple[Chunk, ...], cast: str, edge: bool, keys_first: bool
) -> Lines:
    found = key_address(frame, a, d)
    keys, columns = ("[:, None]", "[None, :]") if keys_first else ("[None, :]", "[:, None]")
    lines = []
    if found.rows:
        lines.append(f"{stem}_rows = {sum_text(found.rows, key_names(frame), wide=True)}")
    for c in chunks:
        tests = [f"live{keys}"] * edge + [f"({c.d}{columns} < {c.limit})"] * bool(c.limit)
        mask = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
        rows = [f"{stem}_rows{keys}"] if found.rows else []
        start = tile_start(frame, found, key_names(frame))
        pointer = " + ".join([f"{stem}_base", *start, *rows, f"{stem}_offsets{c.part}"])
        shape = f"[BLOCK_N, {c.size}]" if keys_first else f"[{c.size}, BLOCK_N]"
        lines.append(f"{stem}_tile{c.part} = tl.load({pointer}{mask}){cast}  # {shape}")
    return lines


def output_index(frame: Frame) -> tuple[Expr, ...]:
    axes = {v.name: v for v in (*frame.region.batch, frame.q_idx, frame.region.dv)}
    return tuple(frame.packed(axes[name]) for name in frame.region.out_axes)


def output_address(frame: Frame) -> Address:
    """Where the rows of a tile go, through the strides of `out`."""
    return _row_address(frame, "out", output_index(frame))


def output_row(frame: Frame) -> tuple[str, Poly]:
    """Where a single row goes: a pointer, and the part that varies along the row."""
    a = address("out", output_index(frame), frozenset({frame.region.dv.name}), frozenset())
    return " + ".join(["out_ptr", *_sum(frame, a.base)]), a.offsets


# ----------------------------------------------------------------------------------------------------------------
# What the score reads


def _read_by_element(frame: Frame) -> list[tuple[str, Load]]:
    return [(name, x) for name, x in frame.element.tiles if (name, x) not in frame.copied]


def _element_address(frame: Frame, x: Load) -> Address:
    return address(x.tensor, x.index, frame.moving, frozenset({frame.q_idx.name, frame.kv_idx.name}))


def _element_base(frame: Frame, a: Address) -> Lines:
    """What is known before the loop over keys: the batch axes' part, and q_start's."""
    mine = {m: c for m, c in a.start.items() if any(frame.q_idx.name in variables(f) for f in m)}
    return _sum(frame, {**a.base, **at_tile(mine, {frame.q_idx: Var("q_start", frame.q_idx.size)})})


def element_loads(frame: Frame, edge: bool, exprs: Iterable[Expr]) -> Lines:
    """bias_tile = bias[b, h, q_idx, kv_idx] over the tile, for the loads that `exprs` hold."""
    wanted = {x for e in exprs for x in parts(e)}
    lines = []
    for name, x in _read_by_element(frame):
        if x in wanted:
            a = _element_address(frame, x)
            keys = {m: c for m, c in a.start.items() if any(frame.kv_idx.name in variables(f) for f in m)}
            start = _sum(frame, at_tile(keys, {frame.kv_idx: Var("key", frame.kv_idx.size)}))
            rows = [sum_text(a.rows, frame.tile_names, wide=True)] if a.rows else []
            pointer = " + ".join([f"{name}_base", *start, *([f"{name}_offsets"] if a.offsets else []), *rows])
            mask = f", mask=live[None, :], other={frame.past_end(x)}" if edge else ""
            lines.append(f"{name} = tl.load({pointer}{mask}){widened(x.dtype)}")
    return lines
