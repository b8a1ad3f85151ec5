"""Unmodified transformers models generate through pages the tokens that they generate through their own cache."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

hf = pytest.importorskip("transformers", minversion="5.24")

import fusecomp  # noqa: E402
from fusecomp import backend  # noqa: E402
from fusecomp.errors import OptionError, OutOfBlocks  # noqa: E402
from fusecomp.paged.huggingface import PagedCache  # noqa: E402
from fusecomp.pipeline import Compilation  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "attn_implementation": "eager",
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SIZES, sliding_window=16, attn_logit_softcapping=5.0, query_pre_attn_scalar=16)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SIZES, sliding_window=16, num_local_experts=4, num_experts_per_tok=2)
    ),
}


@pytest.fixture(autouse=True)
def fresh(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSECOMP_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "paged-huggingface"))
    torch._dynamo.reset()
    fusecomp.reset()
    torch.manual_seed(0)


def prompts() -> dict[str, Tensor]:
    """Three prompts of 16, 21 and 10 tokens, padded on the left."""
    ids = torch.randint(1, 128, (3, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(21) >= torch.tensor([[5], [0], [11]])
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def model_of(name: str) -> Any:
    return MODELS[name]().eval()


def paged(model: Any, num_blocks: int = 64) -> PagedCache:
    return PagedCache(model.config, num_blocks=num_blocks, max_len=96)


def generate(model: Any, cache: Any, tokens: int = 30, **given: Any) -> Tensor:
    given = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": tokens, **given}
    return model.generate(**prompts(), cache=cache, **given)


def own(model: Any) -> Any:
    return hf.DynamicCache(config=model.config)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_generates_the_tokens_of_its_own_cache(name: str, beams: int) -> None:
    model = model_of(name)
    cache = paged(model)
    expected = generate(model, own(model), num_beams=beams)
    assert torch.equal(generate(model, cache, num_beams=beams), expected)
    used = cache.pages.usage()
    assert (used.blocks == used.named == 12) if beams == 1 else used.saved > 0  # 3 rows of 50 tokens
    cache.reset()
    assert cache.pages.usage().blocks == 0
    assert torch.equal(generate(model, cache, num_beams=beams), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_forward_reads_the_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    expected = generate(model, own(model))
    heard: list[Compilation] = []
    monkeypatch.setattr(backend, "_listeners", [heard])
    model.forward = torch.compile(
        model.forward, backend="fusecomp", options={"inner": "eager", "strict": True}, fullgraph=True
    )
    cache = paged(model)
    cache.early_initialization(3, 2, 16, torch.float32, torch.device("cpu"))
    cache.reserve(3, 60)
    assert torch.equal(generate(model, cache), expected)
    fused = [e for c in heard for e in c.entries if e.status == "fused"]
    assert (len(heard), len(fused)) == (2, 4)  # the prompt and the decoding step, of two layers each
    for entry in fused:
        assert "[b, kv_idx // 16]" in str(entry.region.products[0].k), str(entry.region)
        assert "[b, kv_idx // 16]" in str(entry.region.v), str(entry.region)


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_forward_stops_once_for_its_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    expected = generate(model, own(model))
    heard: list[Compilation] = []
    monkeypatch.setattr(backend, "_listeners", [heard])
    model.forward = torch.compile(model.forward, backend="fusecomp", options={"inner": "eager", "strict": True})
    cache = paged(model)
    assert torch.equal(generate(model, cache), expected)
    used = cache.pages.usage()
    assert used.named == 3 * 6  # all that a row of 96 tokens may need
    fused = [e for e in heard[-1].entries if e.status == "fused"]
    assert len(fused) == 2  # both layers of a decoding step, in one graph
    assert all("[b, kv_idx // 16]" in str(e.region.products[0].k) for e in fused)


def test_blocks_are_taken_ahead_as_far_as_there_are_some() -> None:
    model = model_of("llama")
    expected = generate(model, own(model), 16)
    model.forward = torch.compile(model.forward, backend="fusecomp", options={"inner": "eager", "strict": True})
    cache = paged(model, num_blocks=14)
    assert torch.equal(generate(model, cache, 16), expected)
    assert cache.pages.usage().named == 3 * 3
    cache.reset()
    with pytest.raises(OutOfBlocks):
        generate(model, cache, 60)


def test_layers_of_other_sizes_get_pages_of_their_own() -> None:
    cache = paged(model_of("llama"))
    for layer, (heads, d) in enumerate(((2, 16), (1, 24))):
        new = torch.randn(3, heads, 5, d)
        k, v = cache.update(new, new + 1, layer)
        torch.testing.assert_close(k, new, rtol=0, atol=0)
        torch.testing.assert_close(v, new + 1, rtol=0, atol=0)
    new = torch.randn(3, 2, 1, 16)
    assert cache.update(new, new, 0)[0].shape == (3, 2, 6, 16)


@pytest.mark.parametrize("initialised", [False, True])
def test_a_whole_graph_is_told_to_take_its_blocks_before(initialised: bool) -> None:
    model = model_of("llama")
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    cache = paged(model)
    if initialised:
        cache.early_initialization(3, 2, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(Exception, match=r"cache\.reserve\(batch, tokens\) before the compiled model"):
        generate(model, cache, 16)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_of_windows_alone_gives_blocks_back(compiled: bool) -> None:
    model = hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=16)).eval()
    expected = generate(model, own(model), 60)
    cache = PagedCache(model.config, num_blocks=3 * 4, max_len=96)
    if compiled:
        model.forward = torch.compile(model.forward, backend="fusecomp", options={"inner": "eager", "strict": True})
    assert torch.equal(generate(model, cache, 60), expected)
    assert cache.length == 80
    assert cache.pages.usage().blocks < 3 * 5


def test_rows_may_be_repeated_chosen_and_cut() -> None:
    model = model_of("llama")
    ids = torch.randint(1, 128, (2, 19))
    caches = [own(model), paged(model)]
    with torch.no_grad():
        found = []
        for cache in caches:
            model(ids, cache=cache)
            cache.batch_repeat_interleave(2)
            outs = [model(torch.tensor([[3, 5], [4, 6], [5, 7], [6, 8]]), cache=cache).logits]
            cache.crop(-1)
            cache.reorder_cache(torch.tensor([3, 0, 0, 2]))
            outs.append(model(torch.tensor([[9], [10], [11], [12]]), cache=cache).logits)
            cache.batch_select_indices(torch.tensor([2, 0]))
            outs.append(model(torch.tensor([[1, 2, 3], [4, 5, 6]]), cache=cache).logits)
            found.append(outs)
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert caches[1].pages.usage().named == 4
    caches[1].crop(0)
    assert caches[1].get_seq_length() == caches[0].get_seq_length() == 24


def test_assisted_generation_rolls_rejected_drafts_back() -> None:
    model, assistant = model_of("llama"), model_of("llama")
    one = {k: v[1:2] for k, v in prompts().items()}
    given = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**one, **given)
    cache = paged(model)
    assert torch.equal(model.generate(**one, **given, cache=cache, assistant_model=assistant), expected)
    assert cache.pages.usage().waste < 0.5


def test_a_full_cache_is_an_error_that_changes_nothing() -> None:
    model = model_of("llama")
    cache = paged(model, num_blocks=7)
    with pytest.raises(OutOfBlocks, match=r"reserve: sequence \d .* needs 1 block, 0 free of 7: free or swap out"):
        generate(model, cache, 60)
    used = cache.pages.usage()
    assert (cache.length, used.blocks, used.tokens) == (32, 6, 96)
    cache.reset()
    assert cache.pages.allocator.free == 7


def test_a_reservation_that_fails_gives_back_what_was_reserved() -> None:
    model = model_of("llama")
    expected = generate(model, own(model))
    cache = paged(model, num_blocks=15)
    cache.early_initialization(3, 2, 16, torch.float32, torch.device("cpu"))
    cache.reserve(3, 60)
    with pytest.raises(OutOfBlocks):
        cache.reserve(3, 96)
    other = cache.rows.pages(torch.device("cpu")).add()
    cache.rows.pages(torch.device("cpu")).append(other, 32)
    assert torch.equal(generate(model, cache), expected)
    assert not {*cache.pages.table(other)} & {b for seq in cache.rows.seqs for b in cache.pages.table(seq)}


def test_what_it_cannot_hold_is_told() -> None:
    model = model_of("llama")
    cache = paged(model)
    with pytest.raises(OptionError, match=r"there are no pages yet: call cache.early_initialization"):
        cache.reserve(3, 20)
    generate(model, cache, 2)
    with torch.no_grad(), pytest.raises(OptionError, match="the cache holds 3 sequences, the batch 1: reset it"):
        model(torch.tensor([[1]]), cache=cache)
    with pytest.raises(ValueError, match="crop takes the number of tokens to remove as a negative number, not 4"):
        cache.crop(4)
    config = hf.LlamaConfig(**SIZES, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(OptionError, match="layers of the kind linear_attention keep no pages"):
        PagedCache(config, num_blocks=4, max_len=32)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", None)
    monkeypatch.delitem(sys.modules, "fusecomp.paged.huggingface")
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5\.24'"):
        importlib.import_module("fusecomp.paged.huggingface")
