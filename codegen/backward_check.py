"""The end of a backward file: the same mathematics in plain PyTorch, and a main() that compares autograd with it."""

from __future__ import annotations

from fusecomp.codegen.backward_frame import roles
from fusecomp.codegen.logsumexp import saved
from fusecomp.codegen.sample import sample
from fusecomp.codegen.selfcheck import INTERPRETED, ON_GPU, REFERENCE, dense
from fusecomp.codegen.skeletons import fill
from fusecomp.codegen.wrap import wrapped_lines
from fusecomp.ir.region import AttentionRegion

BACKWARD_SELFCHECK = (
    REFERENCE
    + '''def main():
    """Compare the kernels with autograd of `reference` on random inputs. «where»"""
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = [«sizes»]
    tensors = [
        «tensors»
    ]
    learned = [tensors[i].requires_grad_() for i in «places»]
    out, lse = reference(tensors, sizes)
    grad_out = torch.randn(out.shape).to(torch.«out_dtype»)
    «grad_lse»
    expected = torch.autograd.grad(«differentiated», learned, «given»)
    tensors = [t.detach() for t in tensors]
    grads = [torch.empty_like(t) if i in «places» else None for i, t in enumerate(tensors)]
    out, lse = out.detach().to(torch.«out_dtype»), lse.detach().contiguous()
    launch(grads, out, grad_out, lse, «grad_lse_argument»tensors, sizes)
    for i, grad in zip(«places», expected, strict=True):
        torch.testing.assert_close(grads[i].float(), grad.float(), atol=«tolerance», rtol=«tolerance»)
    print(f"agrees with PyTorch within «tolerance», at sizes {sizes}")


if __name__ == "__main__":
    main()
'''
)


def backward_selfcheck(region: AttentionRegion, learned: frozenset[str] = frozenset()) -> list[str]:
    """reference() and main()."""
    found = sample(region)
    names = [o.name for o in region.operands]
    narrow = {region.out_dtype, region.pv_dtype, *(p.dtype for p in region.products)} - {"float32"}
    parts = dense(region)
    *values, result = parts["output"]
    logits = "s" if region.sink is None else "torch.cat([s, sink], dim=-1)"
    lse = f"lse = torch.logsumexp({logits}, dim=-1)"
    if saved(region):
        most = f"most = {logits}.amax(dim=-1)"
        lse = f"{most}\nlse = torch.stack([most, torch.logsumexp({logits} - most[..., None], dim=-1)], dim=-1)"
    total = "lse.sum(-1)" if saved(region) else "lse"
    holes = {
        **parts,
        "results": ": (O, log sum exp(S))",
        "grad_lse": [f"grad_lse = torch.randn(lse.shape[:{len(region.batch) + 1}])"] if region.lse else [],
        "grad_lse_argument": "grad_lse, " if region.lse else "",
        "differentiated": f"[out, {total}]" if region.lse else "out",
        "given": "[grad_out.float(), grad_lse]" if region.lse else "grad_out.float()",
        "output": [*values, *lse.splitlines(), f"{result}, lse"],
        "where": INTERPRETED if "bfloat16" not in narrow else ON_GPU,
        "sizes": ", ".join(str(found.sizes[name]) for name in region.sizes),
        "tensors": [f"{t}," for t in found.tensors],
        "places": str(sorted(map(names.index, {*learned, *(a.operand for a in roles(region))}))),
        "out_dtype": region.out_dtype,
        "tolerance": "8e-2" if narrow else "1e-4",
    }
    return wrapped_lines(fill(BACKWARD_SELFCHECK, holes)).rstrip().splitlines()
