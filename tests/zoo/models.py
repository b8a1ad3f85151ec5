"""The models, most used first, and how each is built: a tiny configuration, random weights, eager attention."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers
from zoo import media, words
from zoo.inputs import Inputs, inputs_of
from zoo.recipe import Recipe
from zoo.tiny import config, model_class

RECIPES: dict[str, Recipe] = {**words.RECIPES, **media.RECIPES}
"""What a model needs beyond a shrunk configuration of its own name."""

MODELS = tuple(
    """
    llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox gpt_neo codegen opt bloom falcon
    falcon_alibi falcon_rope_mqa bert roberta distilbert albert electra deberta deberta-v2 t5 mt5 umt5 bart mbart
    pegasus marian whisper wav2vec2 hubert clip siglip blip vit deit beit swin dinov2 sam detr segformer xlnet
    longformer big_bird led m2m_100 esm olmo olmo2 cohere granite starcoder2 gpt_oss deepseek_v2 deepseek_v3 mixtral
    qwen2_moe qwen3_moe jamba nemotron glm smollm3 llama4_text mllama_text_model qwen2_vl_text qwen2_vl_vision
    musicgen_decoder speecht5 clap_text_model flava layoutlm layoutlmv3 perceiver time_series_transformer vits
    moonshine ernie gpt_bigcode gpt2_layerscale bert_decoder xlm-roberta camembert mpnet modernbert convbert
    mobilebert nomic_bert megatron-bert roberta-prelayernorm data2vec-text xlm flaubert openai-gpt blenderbot-small
    plbart mvp bigbird_pegasus switch_transformers nllb-moe speech_to_text wavlm unispeech unispeech-sat sew
    wav2vec2-conformer data2vec-audio videomae yolos vit_mae vit_msn ijepa dinov2_with_registers data2vec-vision
    siglip_vision_model clip_vision_model clip_text_model chinese_clip altclip xclip visual_bert pvt_v2 levit
    mobilevit donut-swin trocr lilt roc_bert xmod bert-generation olmoe phimoe arcee bitnet
    granitemoe jetmoe lfm2 qwen3_next
""".split()
)

VIEWS = "wav2vec2 hubert wavlm data2vec-audio unispeech unispeech-sat sew wav2vec2-conformer speecht5"
TRAINED_WITHOUT = dict.fromkeys(VIEWS.split(), ("attention_mask",))
"""Inputs left out in training: these models write `hidden_states[~mask] = 0` into a view, which Dynamo refuses under
gradients, whatever the backend."""


def build(name: str, dropout: bool) -> tuple[torch.nn.Module, Inputs]:
    """A model and the arguments of its forward. Without `dropout`, its rates are 0."""
    torch.manual_seed(0)
    recipe = RECIPES.get(name, Recipe())
    chosen = config(recipe.type or name, recipe.over, dropout)
    cls = named(recipe.cls) if recipe.cls else model_class(chosen)
    model = cls._from_config(chosen, attn_implementation="eager")
    inputs = recipe.inputs(model) if recipe.inputs else inputs_of(model)
    return model, inputs | (recipe.more(model) if recipe.more else {})


def named(cls: str) -> Any:
    """A class of transformers, or of one of its modules: "models.qwen2_vl.modeling_qwen2_vl:Name"."""
    module, _, name = cls.rpartition(":")
    return getattr(importlib.import_module(f"transformers.{module}") if module else transformers, name)
