"""The end of a generated file: the same mathematics in plain PyTorch, and a main() that compares the two."""

from __future__ import annotations

from dataclasses import dataclass

from fusecomp.codegen.frame import score_name
from fusecomp.codegen.launcher import unpacked
from fusecomp.codegen.logsumexp import sample_lse
from fusecomp.codegen.philox import IN_TORCH
from fusecomp.codegen.printer import Names, show, triton_text
from fusecomp.codegen.sample import KEYS, QUERIES, sample
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.wrap import wrapped_lines
from fusecomp.ir.algebra import apply, draws
from fusecomp.ir.expr import Const, Expr, Largest, Score, Var, parts, variables
from fusecomp.ir.primitives import TIMES
from fusecomp.ir.region import Access, AttentionRegion, extent

Lines = list[str]
INTERPRETED = "Without a GPU, set TRITON_INTERPRET=1."
ON_GPU = "Needs a GPU: the interpreter has no bfloat16."

REFERENCE = '''\
«random»
def reference(tensors, sizes):
    """The same attention, dense, in float32 PyTorch«results»."""
    «unpack»
    «indices»

    «products»
    «score»

    «softmax»
    «output»


'''
SELFCHECK = (
    REFERENCE
    + '''def main():
    """Compare the kernel with `reference` on random inputs. «where»"""
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = [«sizes»]
    tensors = [
        «tensors»
    ]
    «blocks»
    expected = reference(tensors, sizes)
    out = torch.empty(expected.shape, dtype=torch.«out_dtype»)
    «lse»
    «tiles»
    launch(out, «given», sizes«lse_argument»)
    torch.testing.assert_close(out.float(), expected, atol=«tolerance», rtol=«tolerance», equal_nan=True)
    print(f"agrees with PyTorch within «tolerance», at sizes {sizes}")


if __name__ == "__main__":
    main()
'''
)


@dataclass(frozen=True)
class Visits:
    """A table of tiles to visit, for a sample: what it takes, and the sides of a tile."""

    tensors: tuple[str, ...]
    sizes: tuple[str, ...]
    rows: int
    keys: int

    def blocks(self, region: AttentionRegion) -> Lines:
        """Masks with a full tile and an empty one."""
        plain = {"bool": ("True", "False")}
        lines = []
        for i, o in enumerate(region.operands):
            values = plain.get(o.dtype, ("0.0", 'float("-inf")') if o.dtype.startswith(("float", "bfloat")) else ())
            at = f"tensors[{i}][..., :{self.rows}, "
            if o.name in self.tensors and values:
                lines.append(f"{at}:{self.keys}], {at}{self.keys} : {2 * self.keys}] = {', '.join(values)}")
        return lines

    def listed(self, region: AttentionRegion) -> str:
        """tiles = list_visits(...)."""
        names = [o.name for o in region.operands]
        tensors = ", ".join(f"tensors[{names.index(t)}]" for t in self.tensors)
        sizes = ", ".join(f"sizes[{region.sizes.index(s)}]" for s in self.sizes)
        return f"tiles = list_visits([{tensors}], [{sizes}])"


def selfcheck(region: AttentionRegion, saves_lse: bool = False, visits: Visits | None = None) -> list[str]:
    """reference() and main(). `visits`: of a kernel that visits by a table."""
    found = sample(region, QUERIES + visits.rows, KEYS + 2 * visits.keys) if visits else sample(region)
    narrow = {region.out_dtype, region.pv_dtype, *(p.dtype for p in region.products)} - {"float32"}
    holes = {
        **dense(region),
        "results": "",
        "lse": [sample_lse(region, dict(found.sizes))] if saves_lse else [],
        "lse_argument": ", lse" if saves_lse else "",
        "blocks": visits.blocks(region) if visits else [],
        "tiles": [visits.listed(region)] if visits else [],
        "given": "[*tensors, tiles]" if visits else "tensors",
        "where": INTERPRETED if "bfloat16" not in narrow else ON_GPU,
        "sizes": ", ".join(str(found.sizes[name]) for name in region.sizes),
        "tensors": [f"{t}," for t in found.tensors],
        "out_dtype": region.out_dtype,
        "tolerance": "4e-2" if narrow else "1e-4",
    }
    return wrapped_lines(fill(SELFCHECK, holes)).rstrip().splitlines()


def dense(region: AttentionRegion) -> dict[str, Lines]:
    """The body of reference(), a part for each hole."""
    return {
        "random": [*IN_TORCH.splitlines(), "", ""] if draws(region.weight) else [],
        "unpack": unpacked(region),
        "indices": _indices(region),
        "products": _products(region),
        "score": _score(region),
        "softmax": _softmax(region),
        "output": _output(region),
    }


def _names(region: AttentionRegion) -> Names:
    """Head-size indices are numbered like their products."""
    scores: dict[Expr, str] = {Score(t): score_name(t) for t in range(len(region.products))}
    return Names({**scores, region.dv: "dv", **_d_names(region)}, torch=True)


def _d_names(region: AttentionRegion) -> dict[Expr, str]:
    return {p.d: f"d{t or ''}" for t, p in enumerate(region.products)}


def _indices(region: AttentionRegion) -> Lines:
    """Every index along a dimension of its own: [B, 1, 1, 1], [H, 1, 1], [M, 1], [N]; keys also as [N, 1]."""
    names = _names(region)
    axes = (*region.batch, region.q_idx, region.kv_idx)
    used = {name for e in region.expressions() for name in variables(e)}
    lines = []
    for place, v in enumerate(axes):
        view = f".view({', '.join(['-1', *['1'] * (len(axes) - 1 - place)])})" if place < len(axes) - 1 else ""
        if v.name in used or v is region.kv_idx:
            lines.append(f"{v.name} = torch.arange({triton_text(v.size, names)}){view}")
    lines.append(f"key = {region.kv_idx.name}.view(-1, 1)")
    heads = {**{name: extent(v) for v, name in _d_names(region).items() if isinstance(v, Var)}, "dv": extent(region.dv)}
    return [*lines, *(f"{name} = torch.arange({size})" for name, size in heads.items())]


def _read(region: AttentionRegion, a: Access, dtype: str, keys: bool, d: Var, name: str) -> str:
    """operand[index], rounded to the dtype of its product."""
    names = _names(region).having({d: name, **({region.kv_idx: "key"} if keys else {})})
    rounded = f".to(torch.{dtype})" if region.operand(a.operand).dtype != dtype else ""
    return f"{a.operand}[{', '.join(triton_text(e, names) for e in a.index)}]{rounded}.float()"


def _products(region: AttentionRegion) -> Lines:
    """score_t = Q_t K_t^T."""
    lines: Lines = []
    for t, p in enumerate(region.products):
        number, d = str(t or ""), f"d{t or ''}"
        lines.append(f"q_rows{number} = {_read(region, p.q, p.dtype, False, p.d, d)}  # [..., M, D]")
        lines.append(f"k_rows{number} = {_read(region, p.k, p.dtype, True, p.d, d)}  # [..., N, D]")
        lines.append(f"{score_name(t)} = q_rows{number} @ k_rows{number}.mT")
    return lines


def _score(region: AttentionRegion) -> Lines:
    """S, its fill where the query does not see the key."""
    names = _names(region)
    if region.filled_score is not None:
        return [f"s = {triton_text(region.filled_score, names)} + torch.zeros_like(score)"]
    lines = [f"s = {triton_text(region.score, names)} + torch.zeros_like(score)"]
    if region.keep:
        keep = region.keep[0]
        for term in region.keep[1:]:
            keep = apply("and", keep, term)
        lines.append(f's = torch.where({triton_text(keep, names)}, s, float("-inf"))')
    return [line.replace("s = score + torch.zeros_like(score)", "s = score") for line in lines]


def _softmax(region: AttentionRegion) -> Lines:
    """p = weight softmax(S), the sink in the normaliser."""
    names = _names(region)
    lines = ["p = torch.softmax(s, dim=-1)"]
    if region.subtracted:
        lines = ["p = torch.exp(s - torch.logsumexp(s, dim=-1, keepdim=True))"]
    if region.sink is not None:
        names = names.having({Largest(): "s.detach().amax(dim=-1, keepdim=True)"})
        sink = f"sink = {triton_text(region.sink, names)} + torch.zeros_like(s[..., :1])"
        lines = [sink, "p = torch.softmax(torch.cat([s, sink], dim=-1), dim=-1)[..., :-1]"]
    if region.empty_row == "guarded":
        lines.append("p = torch.nan_to_num(p)")
    elif region.empty_row == "zero":
        lines.append('p = torch.where(s.amax(dim=-1, keepdim=True) == float("-inf"), 0.0, p)')
    elif region.empty_row == "unsafe":
        lines.append('p = torch.where(s.amax(dim=-1, keepdim=True) == float("-inf"), float("nan"), p)')
    if region.weight != Const(1.0):
        body, level = show(region.weight, names)
        lines.append(f"p = p * {f'({body})' if level >= TIMES else body}")
    return lines


def _output(region: AttentionRegion) -> Lines:
    """O = P V, its axes in the order of the kernel's output."""
    order = [(*(v.name for v in region.batch), "q_idx", "dv").index(name) for name in _axis_names(region)]
    moved = "" if order == sorted(order) else f".permute({', '.join(map(str, order))})"
    value = _read(region, region.v, region.pv_dtype, True, region.dv, "dv")
    if any(region.kv_idx in set(parts(e)) for e in region.v.index):
        shape, product = "[..., N, Dv]", "p @ v_rows"
    else:  # one value for all keys
        shape, product = "[..., 1, Dv]", "p.sum(dim=-1, keepdim=True) * v_rows"
    return [f"v_rows = {value}  # {shape}", f"return ({product}){moved}" if moved else f"return {product}"]


def _axis_names(region: AttentionRegion) -> list[str]:
    known = {region.q_idx.name: "q_idx", region.dv.name: "dv"}
    return [known.get(name, name) for name in region.out_axes]
