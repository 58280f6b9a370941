"""The text part of checkpoints of images and text: names, nested configs, what is left out."""

import copy
import dataclasses
import json

import numpy as np
import pytest

import specjax as sj
from specjax.models import from_hf, load_pretrained, save_pretrained
from support import variants
from support.checkpoints import edit_weights, same
from support.variant_models import build, close, whole

HEAD = "lm_head.weight"
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}


def inner(name):
    """As transformers 5 saves it: the head stands outside of the text model."""
    return name if name == HEAD else name.replace("model.", "model.language_model.", 1)


def outer(name):
    """As the first checkpoints are: a whole text model under a prefix."""
    return f"language_model.{name}"


# model_type: the variant of its text part, the names of tensors, another part's, and more settings.
LAYOUTS = {
    "gemma3": ("gemma3", outer, "vision_tower.vision_model.embeddings.weight", {}),
    "gemma3, new": ("gemma3", inner, "model.multi_modal_projector.norm.weight", {}),
    "mistral3": ("ministral3", outer, "multi_modal_projector.linear_1.weight", {}),
    "qwen2_5_vl": ("qwen2", str, "visual.blocks.0.attn.qkv.weight", {"rope_scaling": MROPE}),
    "qwen3_vl": ("qwen3", inner, "model.visual.merger.weight", {"model_type": "qwen3_vl_text"}),
}


def write(directory, layout):
    """A checkpoint of a text variant as the text part of a larger one."""
    variant, rename, other, changes = LAYOUTS[layout]
    cfg, params, _ = build(variant)
    save_pretrained(directory, cfg, params)

    def wrap(tensors):
        renamed = {rename(name): tensors.pop(name) for name in list(tensors)}
        tensors.update(renamed | {other: np.zeros(3, np.float32)})

    edit_weights(directory, wrap)
    text = variants.config(variant) | changes
    config = {"model_type": layout.split(",")[0], "text_config": text, "vision_config": {}}
    if layout == "qwen2_5_vl":  # flat
        config = text | {"model_type": "qwen2_5_vl", "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(config))
    return cfg, params


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_part_loads(layout, tmp_path):
    cfg, params = write(tmp_path, layout)
    read, loaded = load_pretrained(tmp_path)
    assert dataclasses.replace(read, skipped_tensors=()) == cfg and same(params, loaded)


LINEAR = {"factor": 8.0, "rope_type": "linear"}
GEMMA = {"model_type": "gemma3_text", "rope_scaling": LINEAR, "sliding_window": 1024}
# The text parts of published configs, which leave out what is transformers' default.
PUBLISHED = {
    "gemma-3-4b": (
        "gemma3",
        GEMMA | {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    ),
    "gemma-3-27b": (
        "gemma3",
        GEMMA
        | {
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
        },
    ),
    "llava-1.5-7b": (
        "llava",
        {
            "model_type": "llama",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "vocab_size": 32064,
        },
    ),
    "nothing of Mistral": ("llava", {"model_type": "mistral"}),
    "nothing of Qwen 2": ("llava", {"model_type": "qwen2"}),
    "nothing of Gemma 3": ("gemma3", {"model_type": "gemma3_text"}),
    "no type": ("gemma3", {"hidden_size": 2560}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_that_a_config_leaves_out_are_as_in_transformers(name):
    from transformers import AutoConfig

    model_type, text = PUBLISHED[name]
    config = {"model_type": model_type, "text_config": text}
    ours = from_hf(copy.deepcopy(config))
    theirs = AutoConfig.for_model(**config).text_config
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "max_position": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
    }
    for field, name_there in names.items():
        assert getattr(ours, field) == getattr(theirs, name_there), field
    head_dim = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or head_dim)
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    if model_type == "gemma3":
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
        full = theirs.rope_parameters["full_attention"]
        assert (ours.rope.theta, ours.rope.factor) == (full["rope_theta"], full.get("factor", 1.0))


def test_other_unknown_tensors_are_refused(tmp_path):
    write(tmp_path, "gemma3")
    odd = {outer("model.odd"): np.zeros(1, np.float32)}
    edit_weights(tmp_path, lambda tensors: tensors.update(odd))
    with pytest.raises(sj.ModelError, match="odd") as error:
        load_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_a_directory_of_vision_alone_is_one_line(tmp_path):
    write(tmp_path, "gemma3")

    def drop_text(tensors):
        for name in [name for name in tensors if not name.startswith("vision_tower")]:
            del tensors[name]
        tensors.update({f"vision_tower.{i}": np.zeros(1, np.float32) for i in range(9)})

    edit_weights(tmp_path, drop_text)
    with pytest.raises(sj.ModelError, match="missing") as error:
        load_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path):
    cfg, params, _ = build("deepseek_v3")
    save_pretrained(tmp_path, cfg, params)
    extra = {f"model.layers.{cfg.num_layers}.eh_proj.weight": np.zeros((2, 2), np.float32)}
    edit_weights(tmp_path, lambda tensors: tensors.update(extra))
    assert same(params, load_pretrained(tmp_path)[1])


@pytest.mark.slow
@pytest.mark.torch
def test_gemma3_as_transformers_saves_it(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {key: value for key, value in variants.config("gemma3").items() if key != "model_type"}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    made = Gemma3ForConditionalGeneration(config).eval()
    made.save_pretrained(tmp_path)
    cfg, params = load_pretrained(tmp_path)
    tokens = variants.tokens()
    with torch.inference_mode():
        theirs = made(input_ids=torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    close(whole(cfg, params, tokens, "dense"), theirs)
