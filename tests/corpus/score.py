"""Score a torch.compile backend on the attention corpora: is every value right, and what was fused?

    python tests/corpus/score.py --backend fusecomp --device cuda
    python tests/corpus/score.py --backend inductor --only softmax_over,k_permuted
    python tests/corpus/score.py --backend aot_eager --train --dtype all --dynamic true --sizes 1,2
    python tests/corpus/score.py --backend fusecomp --file other_corpus.py --json result.json --strict
    TRITON_INTERPRET=1 python tests/corpus/score.py --option inner=aot_eager    # the kernels themselves, on the CPU

A case is right when every output, every asked gradient and every argument after the call agree with eager in float64:

    max |compiled - float64|  <=  max(4 * max |eager - float64|, FLOOR[dtype])     relative to max |float64|

and NaN and infinities stand where eager has them, with eager's shapes and dtypes.
"""

import argparse
import importlib.util
import json
import signal
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch._dynamo
from torch._dynamo.utils import counters as dynamo_counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOOR = {
    name: times * torch.finfo(DTYPES[name]).eps for name, times in (("float32", 32), ("bfloat16", 2), ("float16", 4))
}
LEARNING = (*DTYPES.values(), torch.float64)
OWN_ERRORS = 4  # a fused kernel may err this many times as much as eager does


@dataclass
class Result:
    name: str
    dtype: str
    expect: str
    verdict: str  # "right" | "WRONG" | "ERROR"
    fused: int = 0
    declined: int = 0
    error: float = 0.0  # the largest relative error, and what it was allowed to be
    budget: float = 0.0
    detail: str = ""


# ---------------------------------------------------------------------------------------------------------------
# Running one function


def run(fn, args, grad, dtype):
    """Every tensor to compare, by name: outputs, gradients, and the arguments as the call left them."""
    grad = [i for i in grad if args[i].dtype in LEARNING]  # pages of a few bits learn nothing
    args = [a.detach().requires_grad_() if i in grad else a for i, a in enumerate(args)]
    with torch.set_grad_enabled(bool(grad)):
        outputs = [x for x in tree_leaves(fn(*args)) if isinstance(x, torch.Tensor)]
    tensors = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    if grad:
        roots = [x for x in outputs if x.requires_grad]
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(x.shape, generator=generator).to(dtype).to(x.device, x.dtype) for x in roots]
        leaves = [args[i] for i in grad]
        grads = torch.autograd.grad(roots, leaves, seeds, allow_unused=True, materialize_grads=True)
        tensors |= {f"gradient of argument {i}": g for i, g in zip(grad, grads, strict=True)}
    tensors |= {f"argument {i} after the call": a.detach() for i, a in enumerate(args) if a.is_floating_point()}
    return tensors


def run_eager(fn, make_args, grad, dtype):
    """`run` on arguments made afresh. PyTorch's memory-efficient kernel keeps no log-sum-exp where only a bias learns,
    and its backward then refuses; the sum of products written out stands in for that case alone."""
    try:
        return run(fn, make_args(), grad, dtype)
    except RuntimeError as refusal:
        if "LSE is not correctly aligned" not in str(refusal):
            raise
    with sdpa_kernel(SDPBackend.MATH):
        return run(fn, make_args(), grad, dtype)


def made_on(device, fn):
    """`fn`, whose tensors without a device of their own are made on `device`."""

    def there(*args):
        with torch.device(device):
            return fn(*args)

    return there


def in_float64(make_args):
    return tuple(a.double() if a.is_floating_point() else a for a in make_args())


@contextmanager
def time_limit(seconds):
    def stop(*_):
        raise TimeoutError(f"no result after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------------------------------------------------------
# Comparing


def specials(x):
    """0 where finite, else a code for NaN, +inf and -inf."""
    return x.isnan() * 1 + (x == float("inf")) * 2 + (x == float("-inf")) * 3


def relative_error(x, exact):
    """max |x - exact| / max |exact|, over the places where both are finite."""
    finite = x.isfinite() & exact.isfinite()
    if not finite.any():
        return 0.0
    size = exact[exact.isfinite()].abs().max().item()
    return (x - exact)[finite].abs().max().item() / (size or 1.0)


def judge(got, eager, exact, floor):
    """(what is wrong or "", relative error, budget) of one tensor."""
    if got.shape != eager.shape or got.dtype != eager.dtype:
        return f"{tuple(got.shape)} {got.dtype}, not {tuple(eager.shape)} {eager.dtype}", float("inf"), floor
    got, eager, exact = got.double(), eager.double(), exact.double()
    # Where half precision overflows in eager alone, both eager's value and the true one will do.
    misplaced = (specials(got) != specials(eager)) & (specials(got) != specials(exact))
    if misplaced.any():
        return f"{int(misplaced.sum())} NaN or infinity against a number", float("inf"), floor
    error, own = (relative_error(x, exact) for x in (got, eager))
    budget = max(OWN_ERRORS * own, floor)
    return ("" if error <= budget else "too far off"), error, budget


def compare(got, eager, exact, floor):
    """The worst (what is wrong, relative error, budget) over all tensors of one run."""
    if got.keys() != eager.keys():
        return f"{len(got)} tensors, not {len(eager)}", float("inf"), floor
    judged = [(name, *judge(got[name], eager[name], exact[name], floor)) for name in eager]
    name, wrong, error, budget = max(judged, key=lambda j: (bool(j[1]), j[2] / j[3]))
    return (f"{name}: {wrong}" if wrong else ""), error, budget


# ---------------------------------------------------------------------------------------------------------------
# Counting what was fused


def fusecomp_module():
    try:
        import fusecomp
    except ImportError:
        return None
    return fusecomp if hasattr(fusecomp, "counters") else None


def reset_counts():
    dynamo_counters.clear()
    module = fusecomp_module()
    if module is not None and hasattr(module, "reset"):
        module.reset()


def read_counts(backend):
    """(fused, declined) since the last reset."""
    if backend in ("eager", "aot_eager"):
        return 0, 0
    if backend == "inductor":
        return dynamo_counters["inductor"]["fuse_attention"], 0
    module = fusecomp_module()
    counts = module.counters() if module is not None else {}
    return int(counts.get("fused", 0)), int(counts.get("declined", 0))


# ---------------------------------------------------------------------------------------------------------------
# Scoring


def score(case, dtype_name, options):
    """Run one case in one dtype: eager in float64, eager, compiled. A program that makes tensors on the CPU, so that
    eager itself refuses it beside inputs on a GPU, makes them on the GPU instead."""
    result = scored(case, dtype_name, options)
    if options.device != "cpu" and result.verdict == "ERROR" and result.detail.startswith("eager: "):
        return scored(case, dtype_name, options, partial(made_on, options.device))
    return result


def scored(case, dtype_name, options, where=lambda fn: fn):
    dtype, floor = DTYPES[dtype_name], FLOOR[dtype_name]
    grad = case.grad if options.train else ()
    result = Result(case.name, dtype_name, case.expect, "ERROR")
    torch._dynamo.reset()
    reset_counts()
    stage = options.backend
    try:
        with time_limit(options.timeout), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            extra = {"options": options.option} if options.option else {}
            compiled = where(torch.compile(case.fn, backend=options.backend, dynamic=options.dynamic, **extra))
            verdicts = []
            for size in options.sizes:
                stage = "eager"
                make_args = partial(case.make_args, dtype, options.device, size)
                exact = run_eager(where(case.fn), partial(in_float64, make_args), grad, dtype)
                eager = run_eager(where(case.fn), make_args, grad, dtype)
                stage = options.backend
                got = run(compiled, make_args(), grad, dtype)
                verdicts.append(compare(got, eager, exact, floor))
            wrong, result.error, result.budget = max(verdicts, key=lambda v: (bool(v[0]), v[1] / v[2]))
        result.verdict, result.detail = ("WRONG" if wrong else "right"), wrong
        if options.device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        result.verdict = "ERROR"
        result.detail = f"{stage}: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:160]}"
    result.fused, result.declined = read_counts(options.backend)
    return result


def show(result):
    miss = "not fused" if result.expect == "fuse" and not result.fused else ""
    extra = " but fused" if result.expect == "decline" and result.fused else ""
    notes = "; ".join(x for x in (miss + extra, result.detail) if x)
    print(
        f"{result.name:40s} {result.dtype:8s} {result.expect:7s} fused {result.fused}  {result.verdict}"
        f"  err {result.error:.1e} of {result.budget:.1e}  {notes}".rstrip(),
        flush=True,
    )


def summarise(results):
    verdicts = Counter(r.verdict for r in results)
    to_fuse = [r for r in results if r.expect == "fuse"]
    to_decline = [r for r in results if r.expect == "decline"]
    fused_decline = [r for r in to_decline if r.fused]
    return {
        "cases": len(results),
        "right": verdicts["right"],
        "wrong": verdicts["WRONG"],
        "errors": verdicts["ERROR"],
        "expect_fuse": len(to_fuse),
        "fused_of_fuse": sum(1 for r in to_fuse if r.fused),
        "fused_and_right_of_fuse": sum(1 for r in to_fuse if r.fused and r.verdict == "right"),
        "expect_decline": len(to_decline),
        "fused_of_decline": len(fused_decline),
        "wrongly_fused_of_decline": sum(1 for r in fused_decline if r.verdict != "right"),
    }


def load(path):
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # corpora import each other as `corpus`
    spec = importlib.util.spec_from_file_location(f"corpus_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.CASES


def parse(argv=None):
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="fusecomp", help="a torch.compile backend")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--dtype", default="first", choices=("first", "all", *DTYPES), help="first: each case's own first dtype"
    )
    parser.add_argument("--dynamic", default="auto", choices=("auto", "true", "false"))
    parser.add_argument(
        "--sizes", default="1", help="size scales, run through one compiled function in turn, such as 1,2"
    )
    parser.add_argument("--option", action="append", default=[], help="KEY=VALUE for torch.compile(options=...)")
    parser.add_argument("--train", action="store_true", help="gradients too, for the cases that name some")
    parser.add_argument("--only", default="", help="parts of case names, separated by commas")
    parser.add_argument("--file", action="append", default=[], help="a corpus; dense.py and paged.py unless given")
    parser.add_argument("--timeout", type=int, default=180, help="seconds for one case")
    parser.add_argument("--json", default="", help="write the results there")
    parser.add_argument(
        "--strict", action="store_true", help="exit 1 on WRONG, on ERROR, and on an unfused case to fuse"
    )
    options = parser.parse_args(argv)
    options.file = options.file or [here / "dense.py", here / "paged.py"]
    options.dynamic = {"auto": None, "true": True, "false": False}[options.dynamic]
    options.sizes = [float(s) for s in options.sizes.split(",")]
    options.option = dict(pair.split("=", 1) for pair in options.option)
    options.only = [part for part in options.only.split(",") if part]
    return options


def chosen(options):
    """(case, dtype name) pairs to run."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    for case in (case for path in options.file for case in load(path)):
        if options.only and not any(part in case.name for part in options.only):
            continue
        own = [names[dtype] for dtype in case.dtypes]
        wanted = {"first": own[:1], "all": own}.get(options.dtype, [options.dtype])
        yield from ((case, name) for name in wanted if name in own)


def main():
    options = parse()
    fusecomp_module()  # an import registers the backend, where an entry point does not
    results = []
    for case, dtype_name in chosen(options):
        results.append(score(case, dtype_name, options))
        show(results[-1])
    total = summarise(results)
    where = f"{options.backend} on {options.device}{', training' if options.train else ''}"
    print(
        "\n{where}: right {right}, wrong {wrong}, errors {errors} of {cases}; "
        "fused {fused_of_fuse} of {expect_fuse} to fuse ({fused_and_right_of_fuse} right); "
        "fused {fused_of_decline} of {expect_decline} to decline ({wrongly_fused_of_decline} wrongly)".format(
            where=where, **total
        )
    )
    if options.json:
        rows = [{k: None if v == float("inf") else v for k, v in asdict(r).items()} for r in results]
        report = {"backend": options.backend, "device": options.device, "summary": total, "results": rows}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    failed = total["wrong"] or total["errors"] or total["fused_of_fuse"] < total["expect_fuse"]
    return 1 if options.strict and failed else 0


if __name__ == "__main__":
    sys.exit(main())
