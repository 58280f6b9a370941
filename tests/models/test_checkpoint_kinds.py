"""Directories as people have them: what can be read loads, the rest is named in one line."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax as sj
from infer import convert
from infer.run import commands as run
from specjax.models import from_hf, init_params, load_pretrained, save_pretrained
from specjax.models.families.head_config import HeadConfig
from specjax.models.families.head_layouts import LAYER_IDS
from specjax.models.hf.layout import INDEX, WEIGHTS
from specjax.models.placement import pad_vocabulary
from support import variants
from support.checkpoints import edit_config, edit_weights, same
from support.variant_models import build


@pytest.fixture
def directory(tmp_path):
    """A saved model to change."""
    cfg, params, _ = build("tinyllama")
    save_pretrained(tmp_path / "model", cfg, params)
    return tmp_path / "model"


def refused(directory):
    """The one line that loading raises."""
    with pytest.raises(sj.ModelError) as error:
        load_pretrained(directory)
    text = str(error.value)
    assert "\n" not in text and text.startswith(str(directory))
    return text


def test_padded_rows_of_a_table_are_not_saved(tmp_path):
    """Only on a mesh do tables have them."""
    cfg, params, _ = build("tinyllama")
    rows = cfg.vocab_size
    padded = params | {"embed": pad_vocabulary(cfg, {"embed": params["embed"]}, rows - 1)["embed"]}
    assert padded["embed"].shape[0] == 2 * (rows - 1)
    with pytest.raises(ValueError, match=rf"embed_tokens.weight has the shape \({2 * (rows - 1)},"):
        save_pretrained(tmp_path, cfg, padded)
    assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_layers_that_predict_further_tokens_are_left_out(name, tmp_path):
    """Published checkpoints have such a layer (MTP) behind the last one of the model."""
    cfg, params, _ = build(name)
    save_pretrained(tmp_path, cfg, params)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    further = f"model.layers.{cfg.num_layers}."
    tensors = {"eh_proj.weight": (4, 8), "enorm.weight": (4,)}
    added = {further + name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    edit_weights(tmp_path, lambda saved: saved.update(added))
    assert same(params, load_pretrained(tmp_path)[1])
    edit_weights(tmp_path, lambda saved: saved.update({"model.odd.weight": np.ones(4, np.float32)}))
    assert "model.odd.weight" in refused(tmp_path)


# --- tensor names with the prefix of what wrapped the model ----------------------------------

WRAPPED = {
    "DataParallel": lambda name: f"module.{name}",
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "compiled blocks": lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    "FSDP": lambda name: name.replace("self_attn.", "_fsdp_wrapped_module.self_attn."),
    "checkpointing": lambda name: name.replace("mlp.", "_checkpoint_wrapped_module.mlp."),
    "PEFT, merged": lambda name: f"base_model.model.{name}",
    "a part of another model": lambda name: f"language_model.{name}",
    "the same, newer": lambda name: name.replace("model.", "model.language_model."),
    "inside its model": lambda name: f"model.{name}",
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_names_with_a_wrappers_prefix_load(directory, wrapper):
    tensors = load_file(directory / WEIGHTS)
    renamed = {WRAPPED[wrapper](name): x for name, x in tensors.items()}
    assert set(renamed) != set(tensors)
    save_file(renamed, directory / WEIGHTS)
    assert same(build("tinyllama")[1], load_pretrained(directory)[1])


@pytest.mark.parametrize("wrapper", ["", "module.", "model."])
@pytest.mark.parametrize("name", ["phi", "gptj"])
def test_a_bias_on_the_logits_is_of_the_head(name, wrapper, tmp_path):
    cfg, params, _ = build(name)
    save_pretrained(tmp_path, cfg, params)
    tensors = {wrapper + key: x for key, x in load_file(tmp_path / WEIGHTS).items()}
    assert f"{wrapper}lm_head.bias" in tensors
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    assert same(load_pretrained(tmp_path)[1], params)


def test_a_window_of_0_beside_a_switch_that_is_off_is_none():
    config = variants.config("qwen2_moe") | {"sliding_window": 0}
    assert from_hf(config | {"use_sliding_window": False}).sliding_window is None
    with pytest.raises(sj.ModelError, match="sliding_window is 0"):
        from_hf(config)


def test_a_prefix_of_some_tensors_alone_is_refused_by_name(directory):
    edit_weights(directory, lambda t: t.update({"module.odd.weight": np.zeros(2, np.float32)}))
    assert "module.odd.weight belongs to no part" in refused(directory)
    edit_weights(directory, lambda t: t.update({"vision_tower.patch": t.pop("module.odd.weight")}))
    assert "vision_tower.patch" in refused(directory)


def test_one_tensor_under_two_names_is_refused(directory):
    name = "model.norm.weight"
    edit_weights(directory, lambda t: t.update({f"_orig_mod.{name}": t[name]}))
    assert "_orig_mod.model.norm.weight" in refused(directory)


def test_updates_that_are_not_merged_are_named(directory):
    def unmerged(tensors):
        for name in list(tensors):
            tensors[f"base_model.model.{name}"] = tensors.pop(name)
        q = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors[f"{q}.base_layer.weight"] = tensors.pop(f"{q}.weight")
        tensors[f"{q}.lora_A.default.weight"] = np.zeros((2, 32), np.float32)

    edit_weights(directory, unmerged)
    assert "LoRA updates that are not merged" in refused(directory)


# --- files -----------------------------------------------------------------------------------


def split(directory, count=3, total=None, stem="model"):
    """The weights in shards named as transformers names them, without an index."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = sorted(tensors)
    paths = []
    for i in range(count):
        path = directory / f"{stem}-{i + 1:05d}-of-{total or count:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::count]}, path)
        paths.append(path)
    return paths


def test_shards_load_without_their_index(directory):
    split(directory)
    assert same(build("tinyllama")[1], load_pretrained(directory)[1])


def test_shards_without_an_index_must_be_complete(directory):
    paths = split(directory)
    kept = paths[1].read_bytes()
    paths[1].unlink()
    assert f"{paths[1].name} is missing" in refused(directory) and INDEX in refused(directory)
    paths[1].write_bytes(kept)
    other = directory / "model-00001-of-00002.safetensors"
    other.write_bytes(kept)
    assert other.name in refused(directory)
    other.unlink()
    paths[2].write_bytes(kept)  # the same tensors twice
    assert "both hold tensor" in refused(directory)


@pytest.mark.torch
def test_pickled_shards_load_without_their_index(directory):
    torch = pytest.importorskip("torch")
    for path in split(directory, stem="pytorch_model"):
        tensors = {name: torch.from_numpy(x) for name, x in load_file(path).items()}
        torch.save(tensors, path.with_suffix(".bin"))
        path.unlink()
    assert same(build("tinyllama")[1], load_pretrained(directory, pickles=True)[1])
    assert "--pickles" in refused(directory)
    assert convert.main([str(directory)]) == 0
    assert same(build("tinyllama")[1], load_pretrained(directory)[1])


def test_weights_under_another_name_are_named(directory):
    (directory / WEIGHTS).rename(directory / "pytorch_model.safetensors")
    assert "pytorch_model.safetensors" in refused(directory)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4400216536\n"


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "generation_config.json"])
def test_a_git_lfs_pointer_is_named(directory, name):
    (directory / name).write_bytes(POINTER)
    load = load_pretrained if name == WEIGHTS else sj.load  # which asks for a tokenizer, too
    with pytest.raises(sj.ModelError) as error:
        load(directory)
    text = str(error.value)
    assert f"{directory / name}: a git-lfs pointer" in text and "git lfs pull" in text
    assert "\n" not in text


def test_a_tokenizer_that_is_a_pointer_is_named(directory, capsys):
    (directory / "tokenizer.json").write_bytes(POINTER)
    assert run.main(["--prompt", "a", "--target", str(directory)]) == 2
    err = capsys.readouterr().err
    assert "git lfs pull" in err and err.count("\n") == 1


def test_pointers_of_shards_and_pickles_are_named(directory):
    for path in split(directory):
        path.write_bytes(POINTER)
    assert "git lfs pull" in refused(directory)
    for path in directory.glob("*.safetensors"):
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(POINTER)
    with pytest.raises(sj.ModelError, match="git lfs pull"):
        load_pretrained(directory, pickles=True)


ADAPTER = {
    "peft_type": "LORA",
    "base_model_name_or_path": "meta-llama/Llama-2-7b-hf",
    "task_type": "CAUSAL_LM",
    "r": 8,
}


def adapter(directory, with_config=False):
    """What PEFT saves, perhaps with the base's config beside it."""
    (directory / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (directory / WEIGHTS).rename(directory / "adapter_model.safetensors")
    if not with_config:
        (directory / "config.json").unlink()


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_is_named_with_its_base(directory, with_config):
    adapter(directory, with_config)
    text = refused(directory)
    assert "LORA adapter of meta-llama/Llama-2-7b-hf" in text and "merge" in text


@pytest.mark.parametrize("content", ["{", "[]", '{"base_model_name_or_path": 5}'])
def test_a_broken_adapter_config_is_one_line(directory, content):
    adapter(directory)
    (directory / "adapter_config.json").write_text(content)
    assert "adapter" in refused(directory)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama-2-7b.Q4_K_M.gguf", "llama.cpp"),
        ("params.json", "Meta's own format"),
        ("model_index.json", "diffusers"),
    ],
)
def test_directories_of_other_libraries_are_named(directory, name, says):
    (directory / "config.json").unlink()
    (directory / name).write_text("{}")
    assert says in refused(directory)


def test_a_file_in_the_place_of_a_directory_is_named(directory):
    with pytest.raises(sj.ModelError, match=r"is a file: give the directory"):
        sj.load(directory / WEIGHTS)


# --- what config.json says that it is --------------------------------------------------------

OTHER_KINDS = {
    "DFlashDraftModel": "DFlash",
    "LlamaForCausalLMEagle": "EAGLE",
    "MedusaModel": "Medusa",
    "LlamaMTPModel": "drafter",
    "LlamaForSequenceClassification": "classifier",
    "LlamaForTokenClassification": "classifier",
    "LlamaForQuestionAnswering": "classifier",
    "Qwen2ForRewardModel": "reward",
    "LlavaForConditionalGeneration": "encoder-decoder, or of images or sound",
    "LlamaBiForMaskedLM": "masked",
    "OddForCausalLM": "unknown",
}


@pytest.mark.parametrize("architecture", OTHER_KINDS)
def test_models_of_another_kind_are_named(directory, architecture):
    edit_config(directory, architectures=[architecture])
    text = refused(directory)
    assert architecture in text and OTHER_KINDS[architecture] in text
    assert "LlamaForCausalLM" in text  # what it would have to be


@pytest.mark.parametrize(
    "architectures",
    [None, [], ..., ["LLaMAForCausalLM"], ["FSDPLlamaForCausalLM"], ["LlamaModel"]],
)
def test_ordinary_names_load(directory, architectures):
    edit_config(directory, architectures=architectures)
    assert same(build("tinyllama")[1], load_pretrained(directory)[1])


@pytest.mark.parametrize("architectures", ["LlamaForCausalLM", [5], {"a": 1}])
def test_names_of_a_wrong_type_are_one_line(directory, architectures):
    edit_config(directory, architectures=architectures)
    assert "architectures" in refused(directory)


@pytest.mark.parametrize("name", variants.FIRST.values())
def test_each_family_knows_its_names_in_transformers(name):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    config = variants.config(name)
    known = from_hf(config)
    assert from_hf(config | {"architectures": [CLASSES[config["model_type"]]]}) == known
    with pytest.raises(sj.ModelError, match="Foreign"):
        from_hf(config | {"architectures": ["Foreign"]})


def test_code_beside_a_checkpoint_is_not_run(directory):
    (directory / "modeling_odd.py").write_text("raise SystemExit('this ran')")
    auto_map = {"AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    edit_config(directory, model_type="odd", auto_map=auto_map)
    assert "code that a checkpoint brings is never run" in refused(directory)


def test_what_is_no_text_decoder_is_named(directory):
    edit_config(directory, is_encoder_decoder=True)
    assert "encoder-decoder" in refused(directory)
    edit_config(directory, is_encoder_decoder=False, model_type="idefics", text_config={})
    assert "'idefics'" in refused(directory) and "images" in refused(directory)
    edit_config(directory, model_type="medusa", text_config=..., architectures=["MedusaModel"])
    assert "Medusa" in refused(directory)


def head_directory(path, **changes):
    """A saved head over the whole vocabulary, in SafeAILab's layout: ``changes`` to its config."""
    cfg = HeadConfig.of(build("tinyllama")[0], None, layer_ids=(0, 1, 1), own_embedding=True)
    params = init_params(cfg, jax.random.key(0))
    save_pretrained(path, cfg, params)
    layer = json.loads((path / "config.json").read_text())["transformer_layer_config"]
    config = layer | {LAYER_IDS: [0, 1, 1]} | changes
    (path / "config.json").write_text(json.dumps(config))
    return cfg, params


def test_a_head_is_known_by_its_class_alone(tmp_path):
    cfg, params = head_directory(tmp_path, architectures=["LlamaForCausalLMEagle3"])
    loaded, read = load_pretrained(tmp_path)
    assert loaded == dataclasses.replace(cfg, verifier=None) and same(params, read)


def test_a_drafter_with_a_draft_vocabulary_is_no_head(tmp_path):
    head_directory(tmp_path, architectures=["LlamaForCausalLM"], draft_vocab_size=61)
    load_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["DFlashDraftModel"])
    assert "DFlash" in refused(tmp_path)
