"""The families besides Llama: logits, trees, greedy decoding, round trips, methods."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel

import specjax as sj
from specjax.models import from_hf, init_params, load_pretrained, logits_of, save_pretrained, to_hf
from specjax.models.attention import dense
from specjax.text.tokenizer import Tokenizer
from support import variants
from support.checkpoints import edit_config, edit_weights, same, shard
from support.variant_models import build, close, golden, pair
from train.engine.losses import OutputHead

PROMPTS = variants.tokens()[:, : variants.GREEDY_PROMPT].tolist()


@pytest.fixture(params=variants.FAMILIES)
def name(request):
    return request.param


@pytest.fixture(params=variants.FIRST)
def family(request):
    return request.param


def test_round_trip(name, tmp_path):
    cfg, params, _ = build(name)
    assert from_hf(json.loads(json.dumps(to_hf(cfg, "float32")))) == cfg
    save_pretrained(tmp_path, cfg, params)
    read, loaded = load_pretrained(tmp_path)
    assert read == cfg and same(params, loaded)


def greedy(name, method, **options):
    """Greedy tokens [rows, tokens], and the share of drafted tokens that were accepted."""
    target, draft = pair(name)
    out = sj.generate(
        target,
        PROMPTS,
        method=method,
        draft=draft if method in METHODS else None,
        options=options,
        sampling=sj.Sampling(0.0),
        max_new_tokens=variants.GREEDY_TOKENS,
    )
    return np.stack(out.tokens), out.stats["accepted"].sum() / max(1, out.stats["tested"].sum())


def test_greedy_decoding(name):
    np.testing.assert_array_equal(greedy(name, "autoregressive")[0], golden(name)["greedy"])


@pytest.mark.slow
def test_target_and_draft_of_different_families():
    """The vocabularies are padded differently; ids beyond the tokenizer are never emitted."""
    tokenizer = Tokenizer(tokenizers.Tokenizer(WordLevel({f"t{i}": i for i in range(50)}, "t0")))
    cfg, params, _ = build("gpt2")
    padded = dataclasses.replace(from_hf(variants.config("bloom")), vocab_size=64)
    target = sj.from_params(dataclasses.replace(cfg, eos_ids=()), params, tokenizer)
    draft = sj.from_params(padded, init_params(padded, jax.random.key(0)), tokenizer)
    settings = {"max_new_tokens": 24, "sampling": sj.Sampling(0.0)}
    prompts = [[i % 50 for i in row] for row in PROMPTS]
    plain = sj.generate(target, prompts, **settings)
    drafted = sj.generate(target, prompts, method="specinfer", draft=draft, **settings)
    np.testing.assert_array_equal(np.stack(plain.tokens), np.stack(drafted.tokens))
    drawn = sj.generate(
        target,
        prompts,
        method="speculative",
        draft=draft,
        max_new_tokens=24,
        sampling=sj.Sampling(3.0),
        num_samples=8,
    )
    assert max(tokens.max() for tokens in plain.tokens + drawn.tokens) < 50


METHODS = {"speculative": {"gamma": 3}, "specinfer": {"branching": (2, 2, 1)}}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_drafting_changes_nothing(family, method):
    name = variants.FIRST[family]
    tokens, accepted = greedy(name, method, **METHODS[method])
    np.testing.assert_array_equal(tokens, golden(name)["greedy"])
    assert accepted > 0


@pytest.mark.slow
def test_one_beam_is_greedy_decoding(family):
    name = variants.FIRST[family]
    np.testing.assert_array_equal(greedy(name, "beam", beams=1)[0], golden(name)["greedy"])


@pytest.mark.torch
def test_transformers_loads_what_we_save(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    cfg, params, _ = build(name)
    save_pretrained(tmp_path, cfg, params)
    made, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values())
    with torch.inference_mode():
        theirs = made.eval()(torch.from_numpy(variants.tokens().astype(np.int64))).logits.numpy()
    close(theirs, golden(name)["logits"])


@pytest.mark.torch
def test_we_load_what_transformers_saves(name, tmp_path):
    pytest.importorskip("torch")
    from golden import make

    make.model(name).save_pretrained(tmp_path, max_shard_size="20KB")
    cfg, params, _ = build(name)
    read, loaded = load_pretrained(tmp_path)
    assert same(params, loaded)
    assert dataclasses.replace(read, bos_id=1, eos_ids=(2,), pad_id=cfg.pad_id) == cfg


# --- checkpoints as they are found, and broken ones ------------------------------------------


def saved(name, directory):
    save_pretrained(directory, *build(name)[:2])
    return directory


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("gpt2", ["h.0.attn.bias", "h.1.attn.masked_bias"]),
        ("bloom", []),
        ("opt-350m", []),
        ("pythia", ["layers.0.attention.bias", "layers.1.attention.rotary_emb.inv_freq"]),
    ],
)
def test_old_and_bare_checkpoints(name, buffers, tmp_path):
    """Published checkpoints may lack the base model's prefix, or hold masks and frequencies."""
    base = {"opt-350m": "model.", "pythia": "gpt_neox."}.get(name, "transformer.")

    def age(tensors):
        for key in list(tensors):
            tensors[key.removeprefix(base)] = tensors.pop(key)
        tensors.update({key: np.zeros(1, np.float32) for key in buffers})
        if "embed_out.weight" in tensors:
            tensors["lm_head.weight"] = tensors.pop("embed_out.weight")

    edit_weights(saved(name, tmp_path), age)
    assert same(build(name)[1], load_pretrained(tmp_path)[1])


def without_shard(directory):
    shard(directory)
    (directory / "a.safetensors").unlink()


def edited(**changes):
    return lambda directory: edit_config(directory, **changes)


def fused_short(tensors):
    tensors["transformer.h.0.attn.c_attn.weight"] = np.zeros((32, 95), np.float32)


ROPES = {
    "full_attention": {"rope_type": "default"},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
}
BROKEN = {
    "missing shard": ("gpt2", without_shard, "a.safetensors"),
    "missing tensor": (
        "bloom",
        lambda d: edit_weights(d, lambda t: t.pop("transformer.word_embeddings_layernorm.bias")),
        "transformer.word_embeddings_layernorm.bias",
    ),
    "extra tensor": (
        "opt",
        lambda d: edit_weights(d, lambda t: t.update(odd=np.zeros(1))),
        "tensor odd",
    ),
    "fused tensor's shape": ("gpt2", lambda d: edit_weights(d, fused_short), "[32, 95]"),
    "vision model": ("gemma3", edited(model_type="gemma3"), "'gemma3'"),
    "activation": ("pythia", edited(hidden_act="quick_gelu"), "quick_gelu"),
    "relu for SwiGLU": ("qwen2", edited(hidden_act="relu"), "relu"),
    "rope kind": ("qwen3", edited(rope_scaling={"type": "longrope", "factor": 2.0}), "longrope"),
    "rope of sliding layers": ("gemma3", edited(rope_parameters=ROPES), "'linear'"),
    "layer type": (
        "qwen2-window",
        edited(layer_types=["linear_attention", "full_attention"]),
        "linear_attention",
    ),
    "layer types": ("gemma2", edited(layer_types=["full_attention"]), "layer_types"),
    "quantized": ("opt", edited(quantization_config={"bits": 4}), "quantization_config"),
    "scale by layer": (
        "gpt2",
        edited(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx",
    ),
    "cross-attention": ("gpt2", edited(add_cross_attention=True), "add_cross_attention"),
    "norms without scale": (
        "opt",
        edited(layer_norm_elementwise_affine=False),
        "layer_norm_elementwise_affine",
    ),
    "residual of the norm": (
        "bloom",
        edited(apply_residual_connection_post_layernorm=True),
        "apply_residual_connection_post_layernorm",
    ),
    "bidirectional": (
        "gemma2",
        edited(use_bidirectional_attention=True),
        "use_bidirectional_attention",
    ),
    "capped scores": ("gemma3", edited(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    "window": ("gemma3", edited(sliding_window=None), "sliding_window"),
    "cap": ("gemma2", edited(final_logit_softcapping=-1), "final_logit_softcapping"),
    "heads": ("pythia", edited(num_attention_heads=3), "num_attention_heads=3"),
    "odd rotary part": ("pythia", edited(rotary_pct=0.2), "rotary_dim=3"),
    "rotary part": ("pythia", edited(rotary_pct="all"), "rotary_pct"),
    "missing key": ("opt", edited(ffn_dim=...), "ffn_dim"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused_by_name(case, tmp_path):
    name, change, says = BROKEN[case]
    change(saved(name, tmp_path))
    with pytest.raises(sj.ModelError) as error:
        load_pretrained(tmp_path)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 32, 40])
def test_alibi_slopes(heads):
    """Slopes as in the paper: powers of 2^(-8/n). Head counts that are no power of two also
    take every other slope of the next power of two.
    """
    slopes = dense.alibi_slopes(heads)
    power = 2 ** (heads.bit_length() - 1)
    np.testing.assert_allclose(slopes[:power], [2 ** (-8 * i / power) for i in range(1, power + 1)])
    rest = [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
    np.testing.assert_allclose(slopes[power:], rest)


def test_losses_cap_logits_as_the_model_does():
    cfg, params, _ = build("gemma2")
    hidden = jax.random.normal(jax.random.key(0), (1, 3, cfg.hidden_size))
    capped = OutputHead.of(cfg, params).logits(hidden[0])
    np.testing.assert_allclose(capped, logits_of(cfg, params, hidden)[0], atol=1e-5)
    assert np.abs(capped).max() < cfg.logit_softcap


SMALL = {
    "vocab_size": 2147483647,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "gemma3"}, "text_config"),
        ({"model_type": "gemma3", "text_config": {}}, "text_config"),
        ({"model_type": "gemma3", "text_config": {"model_type": []}}, "text_config"),
        ({"model_type": ["gemma3"]}, "model_type"),
        (SMALL | {"model_type": ["llama"], "draft_vocab_size": 8}, "model_type"),
        (SMALL | {"model_type": "llama", "draft_vocab_size": 2147483646}, "at most"),
    ],
)
def test_a_damaged_config_is_one_error(config, says):
    with pytest.raises(sj.ModelError, match=says):
        from_hf(config)
