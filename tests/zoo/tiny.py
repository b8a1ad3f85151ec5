"""Any Hugging Face configuration made tiny, field by field; weights are random and nothing is downloaded."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

B, S, VOCAB = 2, 20, 128
"""Batch and length (other than the 4 heads and the head size 16), and the vocabulary."""
IMG, PATCH = 32, 8

SIZES: dict[int | float, str] = {
    64: """hidden_size d_model n_embd embed_dim hidden_dim encoder_hidden_size embedding_size word_embed_proj_dim
        attention_hidden_size dim d_embed conv_hidden_size output_hidden_size projection_dim text_embed_dim
        vision_embed_dim out_hidden_size lm_hidden_size d_embedding embedding_dim mlp_dim emb_dim
        post_embed_proj_dim""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers depth encoder_num_layers decoder_num_layers num_text_layers num_vision_layers num_blocks
        num_key_value_heads num_kv_heads n_head_kv num_query_groups encoder_num_key_value_heads
        decoder_num_key_value_heads num_experts_per_tok moe_top_k moe_topk num_experts_per_token top_k_experts
        experts_per_token eos_token_id""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        num_decoder_attention_heads num_encoder_attention_heads encoder_num_attention_heads
        decoder_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts n_experts
        num_routed_experts linear_num_value_heads linear_num_key_heads""",
    128: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner encoder_intermediate_size
        dim_feedforward ffn_hidden_size expert_intermediate_size linear_hidden_size feed_forward_dim vocab_size
        max_position_embeddings n_positions n_ctx max_target_positions max_seq_len max_sequence_length seq_length
        max_len""",
    32: """moe_intermediate_size shared_expert_intermediate_size expert_dim moe_shared_expert_intermediate_size
        q_lora_rank image_size input_image_size""",
    16: """head_dim d_kv attention_head_size kv_channels attention_head_dim d_head kv_lora_rank qk_nope_head_dim
        v_head_dim num_mel_bins max_source_positions linear_key_head_dim linear_value_head_dim""",
    8: "qk_rope_head_dim sliding_window attention_chunk_size local_attention window_attention patch_size",
    1: """n_shared_experts n_group topk_group num_shared_experts moe_num_shared_experts first_k_dense_replace
        bos_token_id decoder_start_token_id""",
    0: "pad_token_id num_nextn_predict_layers num_mtp_layers",
    0.125: "initializer_range init_std",
}  # fmt: skip
"""Field -> its tiny value. Weights of deviation 0.125 = 64 ** -0.5 keep the variance: attention then weighs in the
result, and scores differ from key to key."""
RULES = {name: value for value, names in SIZES.items() for name in names.split()}

OPTIONAL = set("""q_lora_rank sliding_window n_inner num_kv_heads head_dim pad_token_id bos_token_id eos_token_id
    decoder_start_token_id embedding_size projection_dim patch_size image_size moe_intermediate_size
    attention_chunk_size num_experts num_local_experts n_routed_experts num_experts_per_tok
    attention_head_dim""".split())  # fmt: skip
"""Fields that stay None where that is their default: a number would be another architecture."""


def config(model_type: str, over: dict[str, Any], dropout: bool) -> Any:
    """The configuration of a model type, shrunk, with the fields of `over`; without `dropout`, its rates are 0."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**fields(cls, over, dropout))


def fields(cls: type, over: dict[str, Any], dropout: bool) -> dict[str, Any]:
    """The arguments of a tiny configuration of class `cls`."""
    parts = getattr(cls, "sub_configs", {}) or {}
    given: dict[str, Any] = {name: x for name, x in over.items() if name not in parts}
    for field in dataclasses.fields(cls):
        name, default = field.name, field.default
        if name in given:
            continue
        if name in parts:
            given |= part(cls, name, over.get(name, {}), dropout)
        elif not dropout and "drop" in name and isinstance(default, float):
            given[name] = 0.0
        elif name in RULES and not kept(name, default):
            given[name] = RULES[name]
    return given


def kept(name: str, default: Any) -> bool:
    """Whether a field stays as it is: None that means something, a switch, a list, a negative sentinel."""
    if default is None:
        return name in OPTIONAL
    return isinstance(default, bool | list | tuple) or (isinstance(default, int) and default < 0)


def part(cls: type, name: str, over: Any, dropout: bool) -> dict[str, Any]:
    """One sub-configuration; nothing where it is optional and not asked for."""
    over = dict(over) if over else over
    if over is None:
        return {name: None}
    chosen = over.pop("model_type", None)
    found = CONFIG_MAPPING[chosen] if chosen else part_class(cls, name)
    return {} if found is None else {name: found(**fields(found, over, dropout))}


def part_class(cls: type, name: str) -> Any:
    """The class of a sub-configuration."""
    spec = (getattr(cls, "sub_configs_defaults", {}) or {}).get(name)
    if spec is None:
        found = cls.sub_configs.get(name)  # type: ignore[attr-defined]
        return None if found is None or found.__name__ == "AutoConfig" else found
    if isinstance(spec, type) or spec.optional:
        return spec if isinstance(spec, type) else None
    return CONFIG_MAPPING[spec.model_type] if spec.model_type else spec.config_class


def model_class(config: Any) -> Any:
    """The bare model of a configuration, or the one with a language head."""
    for table in (modeling_auto.MODEL_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in table:
            found = table[type(config)]
            return found[0] if isinstance(found, list | tuple) else found
    raise KeyError(f"no model class for {type(config).__name__}")
