"""What fusecomp adds to the time that a program takes to compile, a tiny Llama of many equal layers or one attention of
`fusecomp bench`: both caches cold.

    python examples/bench/compile_time.py [OUT.json] [--device cuda] [--layers 32] [--attention eager] [--train]
    python examples/bench/compile_time.py [OUT.json] --variant causal [--head-size 128] [--train]

One JSON row, added to those of a record that is there: seconds of the whole first call, of fusecomp's own (its import,
which PyTorch's own is not counted with; reading the graph, planning, generating, compiling and verifying kernels), of
Inductor's (none where nothing is left for it), and fusecomp's share of Inductor's; attentions found and fused, kernels
generated. With `--caches DIR` fusecomp's and Triton's are kept there: a second run is what a second process takes.
`--clock cpu` counts the processor time of this process instead, for machines that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Stopwatch:
    """Adds up the seconds that a function of a module takes."""

    def __init__(self, clock: Callable[[], float], module: Any, name: str) -> None:
        self.clock, self.call, self.seconds = clock, getattr(module, name), 0.0
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = self.clock()
        try:
            return self.call(*args, **kwargs)
        finally:
            self.seconds += self.clock() - start


def llama(layers: int, attention: str) -> Any:
    """A Llama whose only size is its number of layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=512, attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def of_llama(chosen: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(logits of ids, ids)."""
    import torch

    model = llama(chosen.layers, chosen.attention).to(chosen.device).train(chosen.train)
    return lambda ids: model(ids).logits, (torch.randint(0, 512, (2, 128), device=chosen.device),)


def of_variant(chosen: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(attention, its inputs)."""
    import torch

    from fusecomp.bench.cases import VARIANTS, Case, Shape
    from fusecomp.bench.inputs import draw

    shape = Shape(4, 16, 4096, chosen.head_size) if chosen.device == "cuda" else Shape(1, 2, 256, chosen.head_size)
    case = Case(VARIANTS[chosen.variant], "backward" if chosen.train else "forward", shape)
    return case.variant.fn, draw(case, torch.device(chosen.device)).all


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Compile and run once; what it cost."""
    import torch
    import torch._dynamo
    from torch._inductor import compile_fx

    now, device, train = CLOCKS[chosen.clock], chosen.device, chosen.train
    warm = any(Path(os.environ["FUSECOMP_CACHE_DIR"]).glob("verdicts/*"))
    start = now()
    import fusecomp
    from fusecomp import backend
    from fusecomp.running import operator

    imported = now() - start
    torch.manual_seed(0)
    program, args = (of_variant if chosen.variant else of_llama)(chosen)
    own, inductor = Stopwatch(now, backend, "compile_graph"), Stopwatch(now, compile_fx, "compile_fx")
    with torch.set_grad_enabled(train):
        program(*args)  # CUDA and cuBLAS start up here
        compiled = torch.compile(program, backend="fusecomp")
        start = now()
        out = compiled(*args)
        if train:
            out.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        whole = now() - start
    what = {"variant": chosen.variant, "head_size": chosen.head_size} if chosen.variant else {
        "layers": chosen.layers, "attention": chosen.attention}  # fmt: skip
    return {
        **what, "train": train, "clock": chosen.clock, "caches": "warm" if warm else "cold", "whole_s": round(whole, 2),
        "import_s": round(imported, 2), "fusecomp_s": round(own.seconds, 2), "inductor_s": round(inductor.seconds, 2),
        "share_of_inductor": round(own.seconds / inductor.seconds, 4) if inductor.seconds else None,
        "share_of_the_rest": round(own.seconds / (whole - own.seconds), 4),
        **fusecomp.counters(), "kernels": len(operator.KERNELS),
    }  # fmt: skip


def about(device: str) -> dict[str, str]:
    """The device, the versions and the date."""
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(), "torch": torch.__version__,
        "triton": triton.__version__, "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip


def added(path: Path, machine: dict[str, str], row: dict[str, Any]) -> dict[str, Any]:
    """The record with one more row; a new one where it is of another machine or day."""
    found = json.loads(path.read_text()) if path.exists() else {}
    rows = found.pop("rows", [])
    return {**machine, "rows": [*(rows if found == machine else []), row]}


def command(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """What was asked for, without the folders of a machine."""
    asked = {n: v for n, v in vars(chosen).items() if n != "out" and v != parser.get_default(n)}
    values = {n: "" if v is True else " FOLDER" if n == "caches" else f" {v}" for n, v in asked.items()}
    options = [f"--{n.replace('_', '-')}{value}" for n, value in values.items()]
    return " ".join(["python examples/bench/compile_time.py", *options])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    parser.add_argument("--variant", help="of `fusecomp bench`, instead of a Llama")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--caches", type=Path, help="a folder for fusecomp's and Triton's; else an empty one")
    chosen = parser.parse_args()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    with tempfile.TemporaryDirectory() as empty:
        folder = str(chosen.caches or empty)
        os.environ |= {"FUSECOMP_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        row = {"command": command(chosen, parser), **measure(chosen)}
    print(json.dumps(row, indent=1))
    if chosen.out:
        chosen.out.write_text(json.dumps(added(chosen.out, about(chosen.device), row), indent=1) + "\n")


if __name__ == "__main__":
    main()
