"""Models of text that need more than a smaller configuration."""

from __future__ import annotations

import torch
from zoo.inputs import ids, padding
from zoo.recipe import Recipe
from zoo.tiny import IMG, PATCH, B, S

ROPE = {"rope_type": "default", "rope_theta": 10000.0}

RECIPES = {
    "falcon": Recipe(over={"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": Recipe("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": False}),
    "falcon_rope_mqa": Recipe("falcon", {"alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    "gpt2_layerscale": Recipe("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt_neo": Recipe(over={"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "codegen": Recipe(over={"rotary_dim": 8}),
    "gemma2": Recipe(over={"query_pre_attn_scalar": 16}),
    "gemma3_text": Recipe(over={"query_pre_attn_scalar": 16}),
    "bert_decoder": Recipe(
        "bert", {"is_decoder": True, "add_cross_attention": True},
        more=lambda model: {"encoder_hidden_states": torch.randn(B, 10, 64), "encoder_attention_mask": padding(10)},
    ),
    "esm": Recipe(
        over={"mask_token_id": 3, "pad_token_id": 0, "token_dropout": False, "position_embedding_type": "rotary"},
    ),
    "deberta": Recipe(
        over={"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16,
              "type_vocab_size": 0},
    ),
    "deberta-v2": Recipe(
        over={"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "type_vocab_size": 0,
              "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False},
    ),
    "modernbert": Recipe(
        over={"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8,
              "global_attn_every_n_layers": 2},
    ),
    "convbert": Recipe(over={"embedding_size": 64}),
    "mobilebert": Recipe(over={"embedding_size": 32, "intra_bottleneck_size": 64, "true_hidden_size": 64}),
    "xmod": Recipe(over={"default_language": "en_XX", "languages": ["en_XX"]}),
    "roc_bert": Recipe(
        over={"pronunciation_vocab_size": 128, "shape_vocab_size": 128, "pronunciation_embed_dim": 32,
              "shape_embed_dim": 32},
    ),
    "xlnet": Recipe(over={"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128}),
    "longformer": Recipe(over={"attention_window": 8}),
    "led": Recipe(
        over={"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    ),
    "big_bird": Recipe(over={"block_size": 4, "num_random_blocks": 1, "attention_type": "original_full"}),
    "bigbird_pegasus": Recipe(over={"block_size": 4, "num_random_blocks": 1, "attention_type": "original_full"}),
    "deepseek_v2": Recipe(
        over={"num_key_value_heads": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_routed_experts": 4},
    ),
    "deepseek_v3": Recipe(over={"num_key_value_heads": 4}),
    "jamba": Recipe(
        over={"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
              "expert_layer_offset": 0, "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 8},
    ),
    "llama4_text": Recipe(
        over={"intermediate_size_mlp": 64, "no_rope_layers": [1, 0], "attention_chunk_size": 8, "moe_layers": [1]},
    ),
    "lfm2": Recipe(over={"layer_types": ["full_attention", "conv"]}),
    "qwen3_next": Recipe(over={"layer_types": ["full_attention", "linear_attention"]}),
    "opt": Recipe(over={"word_embed_proj_dim": 64}),
    "qwen2_vl_text": Recipe(over={"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}),
    "mllama_text_model": Recipe(
        over={"cross_attention_layers": [1]}, cls="MllamaTextModel",
        more=lambda model: {
            "cross_attention_states": torch.randn(B, 6, 64),
            "full_text_row_masked_out_mask": torch.ones(B, 1, S, 1),
            "cross_attention_mask": torch.zeros(B, 1, S, 6),
        },
    ),
    "musicgen_decoder": Recipe(
        over={"num_codebooks": 2}, cls="MusicgenForCausalLM", inputs=lambda model: {"input_ids": ids(batch=B * 2)},
    ),
    "clap_text_model": Recipe(cls="ClapTextModel"),
    "layoutlm": Recipe(over={"max_2d_position_embeddings": 128}),
    "layoutlmv3": Recipe(
        over={"coordinate_size": 10, "shape_size": 12, "input_size": IMG, "patch_size": PATCH,
              "max_2d_position_embeddings": 128},
    ),
    "lilt": Recipe(over={"hidden_size": 96, "max_2d_position_embeddings": 128}),
    "visual_bert": Recipe(
        over={"visual_embedding_dim": 32},
        inputs=lambda model: {
            "input_ids": ids(),
            "attention_mask": padding(),
            "visual_embeds": torch.randn(B, 5, 32),
            "visual_attention_mask": torch.ones(B, 5, dtype=torch.long),
        },
    ),
}  # fmt: skip
