"""What fusecomp adds to the time that a model takes to compile: a tiny Llama of many equal layers, both caches cold.

    python examples/bench/compile_time.py [OUT.json] [--device cuda] [--layers 32] [--attention eager] [--train]

One JSON row: seconds of the whole first call, of fusecomp's own (its import, which PyTorch's own is not counted with;
reading the graph, planning, generating, compiling and verifying kernels), of Inductor's, and fusecomp's share of
Inductor's; attentions found and fused, kernels generated. With `--caches DIR` fusecomp's and Triton's are kept there: a
second run is what a second process takes.
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


def measure(layers: int, device: str, attention: str, train: bool, clock: str) -> dict[str, Any]:
    """Compile and run once; what it cost."""
    import torch
    import triton  # noqa: F401 - Inductor has it too
    from torch._inductor import compile_fx

    now = CLOCKS[clock]
    start = now()
    import fusecomp
    from fusecomp import backend
    from fusecomp.running import operator

    imported = now() - start
    torch.manual_seed(0)
    model = llama(layers, attention).to(device).train(train)
    ids = torch.randint(0, 512, (2, 128), device=device)
    own, inductor = Stopwatch(now, backend, "compile_graph"), Stopwatch(now, compile_fx, "compile_fx")
    with torch.set_grad_enabled(train):
        model(ids)  # CUDA and cuBLAS start up here
        compiled = torch.compile(model, backend="fusecomp")
        start = now()
        logits = compiled(ids).logits
        if train:
            logits.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        whole = now() - start
    return {
        "layers": layers, "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "attention": attention, "train": train, "clock": clock, "torch": torch.__version__, "whole_s": round(whole, 2),
        "import_s": round(imported, 2), "fusecomp_s": round(own.seconds, 2), "inductor_s": round(inductor.seconds, 2),
        "share_of_inductor": round(own.seconds / inductor.seconds, 4),
        "share_of_the_rest": round(own.seconds / (whole - own.seconds), 4),
        **fusecomp.counters(), "kernels": len(operator.KERNELS),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--caches", type=Path, help="a folder for fusecomp's and Triton's; else an empty one")
    chosen = parser.parse_args()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    with tempfile.TemporaryDirectory() as empty:
        folder = str(chosen.caches or empty)
        os.environ |= {"FUSECOMP_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        row = measure(chosen.layers, chosen.device, chosen.attention, chosen.train, chosen.clock)
    print(json.dumps(row, indent=1))
    if chosen.out:
        chosen.out.write_text(json.dumps([row], indent=1) + "\n")


if __name__ == "__main__":
    main()
