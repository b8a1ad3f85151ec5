"""Inputs of a model, read off the signature of its forward."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from zoo.tiny import IMG, VOCAB, B, S

Inputs = dict[str, Any]
WITH_IMAGES = {"clip", "siglip", "blip", "chinese_clip", "altclip", "flava", "xclip", "layoutlmv3"}
"""Models of text and images that run without an image too."""


def ids(length: int = S, batch: int = B) -> Tensor:
    return torch.randint(5, VOCAB - 5, (batch, length))


def padding(length: int = S, batch: int = B) -> Tensor:
    """The attention mask of a batch whose last sequence is 3 shorter."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - 3 :] = 0
    return mask


def images(size: int = IMG, channels: int = 3) -> Tensor:
    return torch.randn(B, channels, size, size)


def inputs_of(model: Any) -> Inputs:
    """What the model's forward asks for."""
    wanted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", None)
    found: Inputs = {}
    if "input_ids" in wanted:
        found["input_ids"] = ids()
        found |= {"attention_mask": padding()} if "attention_mask" in wanted else {}
    if "decoder_input_ids" in wanted:
        found["decoder_input_ids"] = ids(12)
    if "bbox" in wanted:
        at = torch.arange(S) * 2
        found["bbox"] = torch.stack([at, at, at + 5, at + 7], -1)[None].repeat(B, 1, 1)
    if "pixel_values" in wanted and wants_image(model, wanted):
        found["pixel_values"] = images(side(model.config), first(model.config, "num_channels", default=3))
    if main == "input_features":
        mels, frames = model.config.num_mel_bins, 2 * model.config.max_source_positions
        found["input_features"] = torch.randn(B, mels, frames)
    if not found:
        found["inputs_embeds"] = torch.randn(B, S, first(model.config, "hidden_size", "d_model"))
    return found


def wants_image(model: Any, wanted: Any) -> bool:
    required = wanted["pixel_values"].default is inspect.Parameter.empty
    main = getattr(model, "main_input_name", None) == "pixel_values"
    return main or required or "input_ids" not in wanted or model.config.model_type in WITH_IMAGES


def side(config: Any) -> int:
    """The side of the images that a model takes."""
    size = first(config, "image_size", default=IMG)
    return size[0] if isinstance(size, list | tuple) else size


def first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of the fields that the configuration, or a part of it, has."""
    parts = (config, *(getattr(config, p, None) for p in ("vision_config", "text_config", "encoder")))
    values = (getattr(c, n, None) for c in parts if c is not None for n in names)
    return next((v for v in values if v is not None), default)
