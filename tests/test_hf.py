"""Hugging Face directories: strict loading, sharded files, round trips, every refusal by name."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax as sj
import variants
from specjax.models import from_hf, init_params, load_pretrained, save_pretrained, to_hf
from specjax.models.hf import INDEX, WEIGHTS


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model: (directory, config, params)."""
    directory = tmp_path_factory.mktemp("model")
    cfg = from_hf(variants.config("tinyllama"))
    params = init_params(cfg, jax.random.key(0))
    save_pretrained(directory, cfg, params)
    return directory, cfg, params


@pytest.fixture
def copy(saved, tmp_path):
    """A copy to break."""
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy"


def same(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_round_trip_is_exact_and_leaves_no_scratch(saved):
    directory, cfg, params = saved
    found, loaded = load_pretrained(directory)
    assert found == cfg and same(params, loaded)
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", WEIGHTS]


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_config_round_trip(name):
    cfg = from_hf(variants.config(name))
    assert from_hf(json.loads(json.dumps(to_hf(cfg, "float32")))) == cfg


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files(saved, tmp_path, dtype):
    _, cfg, params = saved
    save_pretrained(tmp_path, cfg, params, dtype=dtype)
    want = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params)
    assert same(want, load_pretrained(tmp_path)[1])
    assert load_pretrained(tmp_path, jnp.bfloat16)[1]["embed"].dtype == jnp.bfloat16


def shard(directory):
    """Splits the weights into two files with an index, as large checkpoints come."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_sharded_files(saved, copy):
    shard(copy)
    assert same(saved[2], load_pretrained(copy)[1])


@pytest.mark.torch
@pytest.mark.parametrize("name", ["llama-3.1", "tied", "biases", "mistral", "yarn"])
def test_transformers_loads_what_we_save(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from test_models import build, whole

    cfg, params, _ = build(name)
    save_pretrained(tmp_path, cfg, params)
    made = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = made(torch.from_numpy(variants.tokens().astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(whole(cfg, params, variants.tokens(), "dense"), theirs, atol=1e-4)


# --- refusals: each names the culprit --------------------------------------------------------


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_weights(directory, change):
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def drop_shard(directory):
    shard(directory)
    (directory / "b.safetensors").unlink()


def misplace_tensor(directory):
    weight_map = shard(directory)
    name = min(weight_map)
    weight_map[name] = "b.safetensors" if weight_map[name][0] == "a" else "a.safetensors"
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def pickle_only(directory):
    (directory / WEIGHTS).unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def truncate(directory):
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[:-7])


Q = "model.layers.0.self_attn.q_proj.weight"
BROKEN = {
    "no directory": (shutil.rmtree, "no such model directory"),
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), "expected a JSON object"),
    "model type": (lambda d: edit_config(d, model_type="mamba"), "mamba"),
    "activation": (lambda d: edit_config(d, hidden_act="relu"), "relu"),
    "rope kind": (
        lambda d: edit_config(d, rope_scaling={"rope_type": "longrope", "factor": 2}), "longrope"),
    "rope setting": (
        lambda d: edit_config(d, rope_scaling={"rope_type": "linear", "factor": 2, "odd": 1}),
        "odd"),
    "rope factor": (lambda d: edit_config(d, rope_scaling={"rope_type": "linear"}), "factor"),
    "quantised": (lambda d: edit_config(d, quantization_config={}), "quantization_config"),
    "missing key": (lambda d: edit_config(d, hidden_size=...), "hidden_size"),
    "heads": (lambda d: edit_config(d, num_key_value_heads=3), "num_kv_heads=3"),
    "missing tensor": (lambda d: edit_weights(d, lambda t: t.pop(Q)), Q),
    "extra tensor": (lambda d: edit_weights(d, lambda t: t.update(odd=np.zeros(2))), "odd"),
    "wrong shape": (lambda d: edit_weights(d, lambda t: t.update({Q: t[Q][:-1]})), Q),
    "truncated": (truncate, WEIGHTS),
    "garbage": (lambda d: (d / WEIGHTS).write_bytes(b"no weights at all"), WEIGHTS),
    "missing shard": (drop_shard, "b.safetensors"),
    "misplaced tensor": (misplace_tensor, "lacks tensor"),
    "broken index": (lambda d: (d / INDEX).write_text("{}"), "weight_map"),
    "pickle only": (pickle_only, "pytorch_model.bin"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_by_name(copy, name):
    change, says = BROKEN[name]
    change(copy)
    with pytest.raises(sj.ModelError) as error:
        load_pretrained(copy)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_tied_checkpoints_may_repeat_the_head(tmp_path):
    cfg = from_hf(variants.config("tied"))
    params = init_params(cfg, jax.random.key(0))
    save_pretrained(tmp_path, cfg, params)
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert same(params, load_pretrained(tmp_path)[1])
