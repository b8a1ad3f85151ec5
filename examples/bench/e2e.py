"""Hugging Face models with random weights and plain attention: a step under Inductor and under fusecomp, on one GPU.

    python examples/bench/e2e.py [OUT.json] [--models llama,bert] [--backends inductor,sdpa,fusecomp] [--train]
                                 [--mode reduce-overhead]

`sdpa` is the same model written with scaled_dot_product_attention, under Inductor. `--mode` is torch.compile's:
reduce-overhead launches kernels from CUDA graphs, for steps that the host holds up.

Rows: milliseconds a step (median of 7), peak memory above what is held, seconds to the first result, attentions fused,
and the largest difference of the logits between the backends.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

import fusecomp


@dataclass(frozen=True)
class Model:
    """A model shape and the step that is timed: batch B, length N, and another in training if given."""

    config: str
    cls: str
    options: dict[str, Any]
    shape: tuple[int, int]
    padded: bool = False
    train_shape: tuple[int, int] | None = None

    def rows(self, train: bool) -> tuple[int, int]:
        return self.train_shape or self.shape if train else self.shape


MODELS = {
    "llama-1b 8 layers": Model(
        "LlamaConfig", "LlamaForCausalLM",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 32768}, (2, 4096),
    ),
    "gemma-2 6 layers": Model(
        "Gemma2Config", "Gemma2ForCausalLM",
        {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 32000, "sliding_window": 1024,
         "max_position_embeddings": 32768}, (2, 4096),
    ),
    "gpt-oss 4 layers": Model(
        "GptOssConfig", "GptOssForCausalLM",
        {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000, "num_local_experts": 4,
         "num_experts_per_tok": 2, "sliding_window": 128, "max_position_embeddings": 32768}, (2, 4096),
    ),
    "bert-large 12 layers": Model(
        "BertConfig", "BertForMaskedLM",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16,
         "vocab_size": 30522, "max_position_embeddings": 4096}, (8, 1024), padded=True,
        train_shape=(8, 512),
    ),
    "t5 6 + 6 layers": Model(
        "T5Config", "T5ForConditionalGeneration",
        {"decoder_start_token_id": 0, "pad_token_id": 0, "d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 6,
         "num_decoder_layers": 6, "num_heads": 16, "vocab_size": 32128}, (4, 1024),
    ),
}  # fmt: skip


def built(model: Model, train: bool, attention: str = "eager") -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model on the GPU in bfloat16, and the arguments of a step."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, model.config)(**model.options)
    with torch.device("cuda"):
        net = getattr(transformers, model.cls)._from_config(config, attn_implementation=attention)
    net = net.to(torch.bfloat16).train(train)
    ids = torch.randint(0, 30000, model.rows(train), device="cuda")
    kwargs: dict[str, Any] = {"input_ids": ids}
    if model.padded:
        mask = torch.ones_like(ids)
        mask[:, -(ids.shape[1] // 8) :] = 0
        kwargs["attention_mask"] = mask
    elif "T5" not in model.cls:
        kwargs["use_cache"] = False
    if train or "T5" in model.cls:
        kwargs["labels"] = ids
    return net, kwargs


def step_of(net: torch.nn.Module, call: Callable[..., Any], kwargs: dict[str, Any], train: bool) -> Callable[[], Any]:
    """One inference or training step."""

    def infer() -> Any:
        with torch.no_grad():
            return call(**kwargs).logits

    def learn() -> None:
        call(**kwargs).loss.backward()
        net.zero_grad(set_to_none=True)

    return learn if train else infer


def milliseconds(step: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def measure(name: str, backend: str, train: bool, mode: str | None) -> tuple[dict[str, Any], torch.Tensor | None]:
    """One row, and the logits of the last positions."""
    torch._dynamo.reset()
    fusecomp.reset()
    gc.collect()
    torch.cuda.empty_cache()
    net, kwargs = built(MODELS[name], train, "sdpa" if backend == "sdpa" else "eager")
    compiler = "inductor" if backend == "sdpa" else backend
    step = step_of(net, torch.compile(net, backend=compiler, dynamic=False, mode=mode), kwargs, train)
    began = time.time()
    out = step()
    torch.cuda.synchronize()
    first = time.time() - began
    logits = None if train else out[:, -8:].float().cpu()
    for _ in range(3):  # a mode may record the second and the third
        step()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    times = sorted(milliseconds(step) for _ in range(7))
    row = {
        "model": name, "shape": MODELS[name].rows(train), "mode": "train" if train else "infer", "backend": backend,
        "compiled": mode or "default",
        "ms": times[3], "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "above_held_gib": (torch.cuda.max_memory_allocated() - held) / 2**30, "first_s": first, **fusecomp.counters(),
    }  # fmt: skip
    return row, logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", default="")
    parser.add_argument("--models", default="")
    parser.add_argument("--backends", default="inductor,fusecomp")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--mode", help="of torch.compile")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing is timed")
        return
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        if chosen.models and not any(m in name for m in chosen.models.split(",")):
            continue
        logits = {}
        for backend in chosen.backends.split(","):
            row, logits[backend] = measure(name, backend, chosen.train, chosen.mode)
            if len(logits) == 2 and not chosen.train:
                a, b = logits.values()
                row["logits_differ"] = float((a - b).abs().max() / a.abs().max())  # type: ignore[operator, union-attr]
            rows.append(row)
            print({k: round(x, 3) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
        if chosen.out:
            head = {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "date": str(datetime.now(tz=UTC).date()),
                "command": "python examples/bench/e2e.py" + " --train" * chosen.train
                + (f" --mode {chosen.mode}" if chosen.mode else ""),
                "triton": triton.__version__,
            }
            Path(chosen.out).write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
