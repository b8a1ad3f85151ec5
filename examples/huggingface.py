"""Six Hugging Face models, unchanged: every attention of every layer runs fused, and the outputs stay.

    python examples/huggingface.py [NAME ...]

The models are tiny, with random weights, so that nothing is downloaded; the attention code is the library's own
(`attn_implementation="eager"`). Needs `pip install transformers`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import fusecomp

CUDA = torch.cuda.is_available()
B, N, VOCAB = 2, 50, 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "attn_implementation": "eager",
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}

Inputs = dict[str, Tensor]


def tokens() -> Inputs:
    """Two sequences of 50 tokens."""
    return {"input_ids": torch.randint(3, VOCAB, (B, N), generator=torch.Generator().manual_seed(0))}


def padded() -> Inputs:
    """The same, the second sequence 37 tokens long."""
    mask = torch.ones(B, N, dtype=torch.int64)
    mask[1, 37:] = 0
    return {**tokens(), "attention_mask": mask}


def llama() -> tuple[nn.Module, Inputs, int]:
    """Causal, two query heads to a key head."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), tokens(), 2


def gpt2() -> tuple[nn.Module, Inputs, int]:
    """Causal, one fused projection."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "attn_implementation": "eager"}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)), tokens(), 2


def bert() -> tuple[nn.Module, Inputs, int]:
    """Padding in both directions."""
    return hf.BertModel(hf.BertConfig(**SIZES)), padded(), 2


def gemma2() -> tuple[nn.Module, Inputs, int]:
    """Capped scores; every other layer sees a window of 16."""
    config = hf.Gemma2Config(**GROUPED, sliding_window=16, attn_logit_softcapping=5.0, query_pre_attn_scalar=16)
    return hf.Gemma2ForCausalLM(config), tokens(), 2


def t5() -> tuple[nn.Module, Inputs, int]:
    """A learned bias of relative position: encoder, decoder and cross attention."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
    config = hf.T5Config(**sizes, decoder_start_token_id=0, attn_implementation="eager")
    decoder = torch.randint(3, VOCAB, (B, 21), generator=torch.Generator().manual_seed(1))
    return hf.T5ForConditionalGeneration(config), {**padded(), "decoder_input_ids": decoder}, 6


def gpt_oss() -> tuple[nn.Module, Inputs, int]:
    """A learned sink per head; every other layer sees a window of 16; mixture of experts."""
    config = hf.GptOssConfig(**GROUPED, sliding_window=16, num_local_experts=4, num_experts_per_tok=2)
    return hf.GptOssForCausalLM(config), tokens(), 2


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs, int]]] = {
    "llama": llama, "gpt2": gpt2, "bert": bert, "gemma2": gemma2, "t5": t5, "gpt_oss": gpt_oss,
}  # fmt: skip


def run(name: str) -> None:
    """Compile one model, hold it against eager, show what was fused."""
    torch.manual_seed(0)
    model, inputs, attentions = MODELS[name]()
    device = "cuda" if CUDA else "cpu"
    model, inputs = model.to(device).eval(), {k: v.to(device) for k, v in inputs.items()}
    torch.compiler.reset()
    fusecomp.reset()
    compiled = torch.compile(model, backend="fusecomp", options={} if CUDA else {"inner": "aot_eager"})
    with torch.no_grad():
        eager, fused = model(**inputs, use_cache=False)[0], compiled(**inputs, use_cache=False)[0]
    torch.testing.assert_close(fused, eager, rtol=1e-3, atol=1e-3)
    count, difference = fusecomp.counters()["fused"], (fused - eager).abs().max().item()
    print(f"{name}: {count} of {attentions} attentions fused; largest difference {difference:.1e}")
    assert count == attentions, str(fusecomp.explain(model, **inputs, use_cache=False))


def main(names: list[str] | None = None) -> None:
    """Every model, or those named; then the whole report of the first."""
    names = names or list(MODELS)
    if unknown := [name for name in names if name not in MODELS]:
        sys.exit(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    for name in names:
        run(name)
    model, inputs, _ = MODELS[names[0]]()
    with torch.no_grad():
        print(fusecomp.explain(model.eval(), **inputs, use_cache=False))


if __name__ == "__main__":
    main(sys.argv[1:])
