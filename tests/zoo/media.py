"""Models of sound, images and series that need more than a smaller configuration."""

from __future__ import annotations

from typing import Any

import torch
from zoo.inputs import Inputs, ids, images, padding
from zoo.recipe import Recipe
from zoo.tiny import IMG, B

WAVE: dict[str, Any] = {
    "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}  # fmt: skip
SWIN: dict[str, Any] = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
PYRAMID: dict[str, Any] = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
    "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
}  # fmt: skip


def wave(model: Any) -> Inputs:
    """Two waves, the second shorter."""
    mask = torch.ones(B, 800, dtype=torch.long)
    mask[-1, 600:] = 0
    return {"input_values": torch.randn(B, 800), "attention_mask": mask}


def speech(model: Any) -> Inputs:
    return {"input_values": torch.randn(B, 800), "decoder_input_ids": ids(12)}


def patches(model: Any) -> Inputs:
    """Two images as Qwen takes them: rows of flattened patches, and the grid of each."""
    p, t = model.config.patch_size, model.config.temporal_patch_size
    side = IMG // p
    return {"hidden_states": torch.randn(2 * side**2, 3 * t * p * p), "grid_thw": torch.tensor([[1, side, side]] * 2)}


def series(model: Any) -> Inputs:
    c = model.config
    past = c.context_length + max(c.lags_sequence)
    return {
        "past_values": torch.rand(B, past),
        "past_time_features": torch.rand(B, past, c.num_time_features),
        "past_observed_mask": torch.ones(B, past),
        "future_values": torch.rand(B, c.prediction_length),
        "future_time_features": torch.rand(B, c.prediction_length, c.num_time_features),
    }


def video(model: Any) -> Inputs:
    return {"pixel_values": torch.randn(B, model.config.num_frames, 3, IMG, IMG)}


RECIPES = {
    **{name: Recipe(over=WAVE, inputs=wave) for name in ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat")},
    "data2vec-audio": Recipe(over={**WAVE, "conv_pos_kernel_size": 5, "num_conv_pos_embeddings": 2}, inputs=wave),
    "sew": Recipe(over={**WAVE, "squeeze_factor": 2}, inputs=wave),
    "wav2vec2-conformer": Recipe(
        over={**WAVE, "position_embeddings_type": "relative", "conv_depthwise_kernel_size": 3}, inputs=wave,
    ),
    "speecht5": Recipe(
        over={**WAVE, "encoder_layers": 2, "decoder_layers": 2}, cls="SpeechT5ForSpeechToText", inputs=speech,
    ),
    "speech_to_text": Recipe(
        over={"input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64},
        inputs=lambda model: {"input_features": torch.randn(B, 40, 16), "decoder_input_ids": ids(12)},
    ),
    "whisper": Recipe(over={"suppress_tokens": [], "begin_suppress_tokens": []}),
    "moonshine": Recipe(
        over={"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
        inputs=lambda model: {"input_values": torch.randn(B, 4000), "decoder_input_ids": ids(12)},
    ),
    "vits": Recipe(
        over={"num_attention_heads": 2, "upsample_initial_channel": 16, "upsample_rates": [8, 8],
              "upsample_kernel_sizes": [16, 16], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
              "flow_size": 64, "spectrogram_bins": 20, "posterior_encoder_num_wavenet_layers": 2,
              "prior_encoder_num_wavenet_layers": 2, "prior_encoder_num_flows": 2, "depth_separable_num_layers": 1,
              "duration_predictor_num_flows": 2},
    ),
    "swin": Recipe(over=SWIN),
    "donut-swin": Recipe(over=SWIN),
    "beit": Recipe(over={"use_relative_position_bias": True, "use_mask_token": True}),
    "data2vec-vision": Recipe(over={"use_relative_position_bias": True}),
    "segformer": Recipe(over={**PYRAMID, "strides": [2, 2]}),
    "pvt_v2": Recipe(over={**PYRAMID, "strides": [4, 2]}),
    "mobilevit": Recipe(
        over={"image_size": 64, "hidden_sizes": [32, 40, 48], "neck_hidden_sizes": [8, 16, 16, 24, 32, 40, 64],
              "patch_size": 2, "num_attention_heads": 4, "mlp_ratio": 2.0},
    ),
    "levit": Recipe(
        over={"image_size": 64, "patch_size": 16, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4],
              "depths": [1, 1, 1], "key_dim": [8, 8, 8],
              "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]]},
    ),
    "sam": Recipe(
        over={"vision_config": {"output_channels": 32, "window_size": 2, "global_attn_indexes": [1],
                                "num_pos_feats": 16},
              "prompt_encoder_config": {"hidden_size": 32, "mask_input_channels": 4},
              "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "iou_head_hidden_dim": 32}},
        inputs=lambda model: {"pixel_values": images()},
    ),
    "detr": Recipe(
        over={"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 8,
              "backbone_config": {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32],
                                  "depths": [1, 1], "out_features": ["stage2"]}},
        inputs=lambda model: {"pixel_values": images(64)},
    ),
    "yolos": Recipe(over={"image_size": [IMG, IMG], "num_detection_tokens": 4}),
    "vit_mae": Recipe(
        over={"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 32},
    ),
    "videomae": Recipe(over={"num_frames": 4}, inputs=video),
    "xclip": Recipe(
        over={"vision_config": {"mit_hidden_size": 64, "mit_intermediate_size": 64, "mit_num_attention_heads": 4},
              "prompt_num_attention_heads": 4},
        inputs=lambda model: {"input_ids": ids(), "attention_mask": padding(), "pixel_values": torch.randn(
            B, model.config.vision_config.num_frames, 3, IMG, IMG)},
    ),
    "trocr": Recipe(
        cls="TrOCRForCausalLM",
        more=lambda model: {"encoder_hidden_states": torch.randn(B, 6, model.config.cross_attention_hidden_size or 64)},
    ),
    "qwen2_vl_vision": Recipe(
        over={"embed_dim": 64, "spatial_merge_size": 2}, inputs=patches,
        cls="models.qwen2_vl.modeling_qwen2_vl:Qwen2VisionTransformerPretrainedModel",
    ),
    "perceiver": Recipe(
        over={"num_latents": 8, "d_latents": 64, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 2,
              "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
        inputs=lambda model: {"inputs": torch.randn(B, 20, 32), "attention_mask": padding()},
    ),
    "time_series_transformer": Recipe(
        over={"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3], "num_time_features": 2,
              "input_size": 1},
        inputs=series,
    ),
}  # fmt: skip
