"""Hugging Face directories: strict loading, sharded files, round trips, every refusal by name."""

import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax as sj
from infer.quantizing import write_quantized
from specjax.models import from_hf, init_params, load_pretrained, save_pretrained, to_hf
from specjax.models.families import FAMILIES
from specjax.models.hf import files, read, write
from specjax.models.hf.layout import INDEX, WEIGHTS
from support import tools, variants
from support.checkpoints import edit_config, edit_weights, same, shard
from support.variant_models import build, whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model: (directory, config, params)."""
    directory = tmp_path_factory.mktemp("model")
    cfg, params, _ = build("tinyllama")
    save_pretrained(directory, cfg, params)
    return directory, cfg, params


@pytest.fixture
def copy(saved, tmp_path):
    """A copy to break."""
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_round_trip_is_exact_and_leaves_no_scratch(saved):
    directory, cfg, params = saved
    read, loaded = load_pretrained(directory)
    assert read == cfg and same(params, loaded)
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", WEIGHTS]


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_config_round_trip(name):
    cfg = from_hf(variants.config(name))
    assert from_hf(json.loads(json.dumps(to_hf(cfg, "float32")))) == cfg


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files(saved, tmp_path, dtype):
    _, cfg, params = saved
    save_pretrained(tmp_path, cfg, params, dtype=dtype)
    want = jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), params)
    assert same(want, load_pretrained(tmp_path)[1])
    assert load_pretrained(tmp_path, jnp.bfloat16)[1]["embed"].dtype == jnp.bfloat16


def test_sharded_files(saved, copy):
    shard(copy)
    assert same(saved[2], load_pretrained(copy)[1])


def test_saving_over_a_sharded_directory_replaces_it(saved, copy):
    _, cfg, params = saved
    shard(copy)
    doubled = jax.tree.map(lambda x: 2 * x, params)
    save_pretrained(copy, cfg, doubled)
    assert same(doubled, load_pretrained(copy)[1])


def test_a_failed_save_leaves_nothing(saved, tmp_path, monkeypatch):
    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(write, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(tmp_path, *saved[1:])
    assert list(tmp_path.iterdir()) == []


def test_what_a_config_leaves_out_is_as_in_transformers():
    from transformers import AutoConfig

    config = variants.config("mistral")
    for left_out in ("sliding_window", "num_key_value_heads", "rms_norm_eps", "rope_theta"):
        del config[left_out]
    del config["max_position_embeddings"]
    config |= {"num_attention_heads": 16, "hidden_size": 64}
    for changed in (config, config | {"sliding_window": None, "head_dim": None}):
        ours, theirs = from_hf(changed), AutoConfig.for_model(**changed)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.sliding_window == theirs.sliding_window
        assert ours.head_dim == theirs.head_dim
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.max_position == theirs.max_position_embeddings
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.torch
@pytest.mark.parametrize("name", variants.VARIANTS)
def test_transformers_loads_what_we_save(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    cfg, params, _ = build(name)
    save_pretrained(tmp_path, cfg, params)
    made = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = made(torch.from_numpy(variants.tokens().astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(whole(cfg, params, variants.tokens(), "dense"), theirs, atol=1e-4)


# --- refusals: each names the culprit --------------------------------------------------------


def drop_shard(directory):
    shard(directory)
    (directory / "b.safetensors").unlink()


def misplace_tensor(directory):
    weight_map = shard(directory)
    name = min(weight_map)
    weight_map[name] = "b.safetensors" if weight_map[name][0] == "a" else "a.safetensors"
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def break_index(directory, text):
    shard(directory)
    (directory / INDEX).write_text(text)


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
        lambda d: edit_config(d, rope_scaling={"rope_type": "longrope", "factor": 2}),
        "longrope",
    ),
    "rope setting": (
        lambda d: edit_config(d, rope_scaling={"rope_type": "linear", "factor": 2, "odd": 1}),
        "odd",
    ),
    "rope factor": (lambda d: edit_config(d, rope_scaling={"rope_type": "linear"}), "factor"),
    "quantized": (lambda d: edit_config(d, quantization_config={}), "quantization_config"),
    "rope number": (
        lambda d: edit_config(d, rope_scaling={"rope_type": "linear", "factor": "2"}),
        "factor",
    ),
    "norm epsilon": (lambda d: edit_config(d, rms_norm_eps="x"), "rms_norm_eps"),
    "norm epsilon zero": (lambda d: edit_config(d, rms_norm_eps=0), "rms_norm_eps"),
    "rope base": (lambda d: edit_config(d, rope_theta=-1), "rope_theta"),
    "rope no object": (lambda d: edit_config(d, rope_scaling="linear"), "rope_scaling"),
    "partial rotary": (
        lambda d: edit_config(d, partial_rotary_factor=0.5),
        "partial_rotary_factor",
    ),
    "experts": (lambda d: edit_config(d, num_local_experts=8), "num_local_experts"),
    "size no number": (lambda d: edit_config(d, hidden_size="32"), "hidden_size"),
    "size zero": (lambda d: edit_config(d, num_attention_heads=0), "num_attention_heads"),
    "end no id": (lambda d: edit_config(d, eos_token_id="</s>"), "</s>"),
    "missing key": (lambda d: edit_config(d, hidden_size=...), "hidden_size"),
    "heads": (lambda d: edit_config(d, num_key_value_heads=3), "num_kv_heads=3"),
    "missing tensor": (lambda d: edit_weights(d, lambda t: t.pop(Q)), Q),
    "extra tensor": (lambda d: edit_weights(d, lambda t: t.update(odd=np.zeros(2))), "odd"),
    "wrong shape": (lambda d: edit_weights(d, lambda t: t.update({Q: t[Q][:-1]})), Q),
    "truncated": (truncate, WEIGHTS),
    "garbage": (lambda d: (d / WEIGHTS).write_bytes(b"no weights at all"), WEIGHTS),
    "missing shard": (drop_shard, "b.safetensors"),
    "misplaced tensor": (misplace_tensor, "lacks tensor"),
    "integer tensor": (
        lambda d: edit_weights(d, lambda t: t.update({Q: t[Q].astype(np.int8)})),
        "I8",
    ),
    "empty file": (lambda d: (d / WEIGHTS).write_bytes(b""), WEIGHTS),
    "broken index": (lambda d: break_index(d, "{"), "not valid JSON"),
    "index without map": (lambda d: break_index(d, "{}"), "weight_map"),
    "index with a list": (lambda d: break_index(d, '{"weight_map": ["a"]}'), "weight_map"),
    "binary config": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json"),
    "pickle only": (pickle_only, "pytorch_model.bin"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_by_name(copy, name):
    change, says = BROKEN[name]
    change(copy)
    with pytest.raises(sj.ModelError) as error:
        load_pretrained(copy)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_tied_checkpoints_may_repeat_the_head(tmp_path):
    cfg, params, _ = build("tied")
    save_pretrained(tmp_path, cfg, params)
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert same(params, load_pretrained(tmp_path)[1])


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def with_own_head(tmp_path):
    """A checkpoint whose config says that the head is the embedding, with another head beside."""
    cfg, params, _ = build("tied")
    save_pretrained(tmp_path, cfg, params)
    head = np.random.Generator(np.random.Philox(3)).standard_normal((61, 32), np.float32)
    edit_weights(tmp_path, lambda t: t.update({HEAD: head}))
    return tmp_path, head


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tables_of_half_precision_are_compared(tmp_path, dtype):
    cfg, params, _ = build("tied")
    save_pretrained(tmp_path, cfg, params, dtype=dtype)
    edit_weights(tmp_path, lambda t: t.update({HEAD: t[EMBEDDING]}))
    assert "head" not in load_pretrained(tmp_path)[1]
    edit_weights(tmp_path, lambda t: t.update({HEAD: np.roll(t[EMBEDDING], 1)}))
    assert "head" in load_pretrained(tmp_path)[1]


def test_a_head_that_differs_from_the_embedding_is_kept(with_own_head):
    directory, head = with_own_head
    cfg, params = load_pretrained(directory)
    assert not cfg.tie_embeddings
    np.testing.assert_array_equal(params["head"], head)
    edit_config(directory, tie_word_embeddings=False)
    assert same(params, load_pretrained(directory)[1])


def save_with_nearly_tied_head(directory):
    """A model whose head differs from its embedding in one entry, which the config denies."""
    cfg, params, _ = build("tied")
    save_pretrained(directory, cfg, params)

    def change(tensors):
        head = tensors[EMBEDDING].copy()
        head[-1, -1] += 1e-3
        tensors[HEAD] = head

    edit_weights(directory, change)


def test_one_entry_is_difference_enough_in_one_file_or_several(tmp_path):
    save_with_nearly_tied_head(tmp_path)
    assert "head" in load_pretrained(tmp_path)[1]
    shard(tmp_path)
    assert "head" in load_pretrained(tmp_path)[1]


@pytest.mark.torch
def test_one_entry_is_difference_enough_in_a_pickle(tmp_path):
    torch = pytest.importorskip("torch")
    save_with_nearly_tied_head(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = {name: torch.from_numpy(x) for name, x in load_file(file).items()}
    file.unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert "head" in load_pretrained(tmp_path, pickles=True)[1]
    tensors[HEAD] = tensors[EMBEDDING]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert "head" not in load_pretrained(tmp_path, pickles=True)[1]


def test_heads_are_compared_a_few_rows_at_a_time(with_own_head, monkeypatch):
    directory, _ = with_own_head
    edit_weights(directory, lambda t: t.update({HEAD: t[EMBEDDING]}))
    monkeypatch.setattr(read, "COMPARED_BYTES", 4 * 32 * 4)
    asked = []
    rows = files.OpenWeights.rows

    def record(self, name, shape, first, last):
        asked.append(last - first)
        return rows(self, name, shape, first, last)

    monkeypatch.setattr(files.OpenWeights, "rows", record)
    assert "head" not in load_pretrained(directory)[1]
    *compared, loaded = asked
    assert max(compared) == 4 and sum(compared) == 2 * 61
    assert loaded == 61


@pytest.mark.parametrize("shape", [(60, 32), (61, 31), (61,)])
def test_a_head_of_another_shape_is_refused_by_name(with_own_head, shape):
    directory, _ = with_own_head
    edit_weights(directory, lambda t: t.update({HEAD: np.zeros(shape, np.float32)}))
    with pytest.raises(sj.ModelError, match=r"lm_head.weight has shape .* says \[61, 32\]"):
        load_pretrained(directory)


def test_a_quantized_copy_keeps_such_a_head(with_own_head, tmp_path_factory):
    directory, _ = with_own_head
    (directory / "tokenizer.json").write_text("{}")
    out = tmp_path_factory.mktemp("out") / "small"
    write_quantized(directory, out, "int8")
    cfg, params = load_pretrained(out, fused=True)
    wanted, loaded = load_pretrained(directory, fused=True, quantize="int8")
    assert cfg == wanted and same(params, loaded) and "head" in params


def test_a_tied_table_may_be_stored_as_the_head_alone(tmp_path):
    cfg, params, _ = build("tied")
    save_pretrained(tmp_path, cfg, params)
    edit_weights(tmp_path, lambda t: t.update({HEAD: t.pop(EMBEDDING)}))
    assert same(params, load_pretrained(tmp_path)[1])


def test_training_sees_such_a_head(with_own_head):
    directory, _ = with_own_head
    assert read.load_config(directory).tie_embeddings
    assert read.complete_config(directory) == load_pretrained(directory)[0]
    (directory / WEIGHTS).unlink()  # a dry run needs no weights
    assert read.complete_config(directory) == read.load_config(directory)


def test_a_missing_head_names_the_switch(copy):
    edit_weights(copy, lambda t: t.pop(HEAD))
    with pytest.raises(sj.ModelError, match=r"lm_head.weight is missing.*tie_word_embeddings"):
        load_pretrained(copy)


TIED = ("tied", "qwen2", "neox-sequential", "gpt2", "opt", "opt-350m", "bloom", "gemma3")


@pytest.mark.torch
@pytest.mark.parametrize("name", TIED)
def test_transformers_keeps_such_a_head_as_well(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    cfg, params, _ = build(name)
    save_pretrained(tmp_path, cfg, params)
    names = FAMILIES[cfg.family].names
    table = names.stored(("embed",), cfg).name
    # Rolled by one id, so that its logits are of the usual size.
    edit_weights(tmp_path, lambda t: t.update({names.head: np.roll(t[table], 1, axis=0)}))
    made = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = made(torch.from_numpy(variants.tokens().astype(np.int64))).logits.numpy()
    loaded, params = load_pretrained(tmp_path)
    assert not loaded.tie_embeddings
    got = whole(loaded, params, variants.tokens(), "dense")
    np.testing.assert_allclose(got, theirs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_little_more_memory_than_what_is_kept(tmp_path):
    """Half of the model is its table, which is larger than anything else that is read at once.

    It is large beside what any load takes: a layer's weights as they were read, some 10 MB in all.
    """
    config = variants.config("tied") | {"vocab_size": 400_000, "hidden_size": 256}
    config |= {"num_hidden_layers": 48, "intermediate_size": 2048}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    cfg = from_hf(config)
    save_pretrained(tmp_path, cfg, init_params(cfg, jax.random.key(0)))
    measure = tools.load("measure_load_memory")
    for dtype, scheme in (("bfloat16", ""), ("float32", "int8")):
        _, second = measure.child(tmp_path, dtype, scheme)["ratios"]
        assert second < 1.15, (dtype, scheme)
