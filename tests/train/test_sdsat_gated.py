"""train.sdsat with gated-lora: what is trained, deltas, resumption, bad input."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax._util.errors import ModelError
from specjax.models import ModelConfig, init_params, load_pretrained, save_pretrained
from specjax.models.adapters import KEY, fuse_adapters
from specjax.models.hf.delta import NOTE, TENSORS, fingerprint, load_delta, read_delta, save_delta
from support.gated import tuned
from support.training import ROOT, TINY_SDSAT, logged, overrides, save_checkpoint, small_tokenizer
from train.config import Tuned
from train.sdsat.__main__ import main
from train.sdsat.losses import SdsatObjective, sdsat_loss
from train.sdsat.trainable import gated_lora

IDS = (400,) * 3


def program(*argv):
    return main([TINY_SDSAT, *map(str, argv)])


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A random model's Hugging Face directory, of 400 ids."""
    tokenizer = small_tokenizer(tmp_path_factory.mktemp("tok"))
    return save_checkpoint(tmp_path_factory.mktemp("start"), tokenizer)


@pytest.fixture
def quick(start, monkeypatch):
    """Arguments of a run in a directory; more are appended as section.key=value."""
    monkeypatch.chdir(ROOT)

    def arguments(directory, *settings):
        fixed = (f"run.dir={directory}", f"model.init_from={start}", "model.train=gated-lora")
        return overrides(*fixed, "model.lora_rank=4", "sdsat.decode_prompts=0", *settings)

    return arguments


@pytest.fixture
def delta(start, tmp_path):
    """(delta of random adapters on ``start``, config of the base, adapters that are not fused)."""
    cfg, params = load_pretrained(start)
    adapters = tuned(params, IDS[:1], matrices=("q", "v", "down"))[KEY]
    save_delta(str(start), start, cfg_with_ids(cfg), adapters, "float32", "", tmp_path / "delta")
    return tmp_path / "delta", cfg, adapters


def cfg_with_ids(cfg):
    return ModelConfig(**{**vars(cfg), "adaptive_ids": IDS})


def test_a_run_trains_only_the_adapters_and_exports_a_delta(quick, tmp_path, start):
    some = 'model.lora_matrices=["q", "v", "up"]'
    text = tmp_path / "text.py"  # of equal rows, so that losses of different steps compare
    text.write_text("x = 1\n" * 5000)
    data = ("data.corpora=[]", f"data.files=['{text}']", "run.eval_batches=0")
    settings = (some, "sdsat.adaptive_targets=data", "optim.learning_rate=0.1", *data)
    assert program(*quick(tmp_path / "run", *settings)) == 0
    trained = [row for row in logged(tmp_path / "run") if "loss" in row]
    assert trained[-1]["adaptive_loss"] < trained[0]["adaptive_loss"] - 0.05
    export = tmp_path / "run" / "export"
    assert {path.name for path in export.iterdir()} == {NOTE, TENSORS, "card.json"}
    note = read_delta(export)
    assert (note.rank, note.adaptive_ids) == (4, IDS)
    assert note.base.startswith("../") and (export / note.base).samefile(start)
    assert set(note.matrices) == {"attention.q", "attention.v", "mlp.up"}
    base, gated = sj.load(start), sj.load(export)
    assert gated.config.adaptive_ids == IDS and gated.config.vocab_size == 400
    for a, b in zip(jax.tree.leaves(base.params), jax.tree.leaves(gated.params), strict=True):
        np.testing.assert_array_equal(a, b)
    plain = sj.generate(base, [[7, 8, 9]], max_new_tokens=12)
    out = sj.generate(gated, [[7, 8, 9]], max_new_tokens=12, method="sdsat")
    np.testing.assert_array_equal(out.tokens[0], plain.tokens[0])


def test_training_goes_on_from_a_delta(quick, delta, tmp_path, start):
    """At a rate of nearly zero the new export is the old one, whatever scales the updates."""
    directory, cfg, adapters = delta
    rank = read_delta(directory).rank
    settings = [f"model.init_from={directory}", f"model.lora_rank={rank}", "model.lora_alpha=24.0"]
    settings += ['model.lora_matrices=["q", "v", "down"]', "run.eval_batches=0"]
    settings += ["optim.learning_rate=1e-12", "sdsat.window=3"]
    assert program(*quick(tmp_path / "run", *settings)) == 0
    export = tmp_path / "run" / "export"
    note = read_delta(export)
    assert (export / note.base).samefile(start) and note.adaptive_ids == IDS
    exported = load_delta(export, note, start, cfg, jnp.dtype("float32"))
    for a, b in zip(jax.tree.leaves(exported), jax.tree.leaves(adapters), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["model.lora_rank=2"], "model.lora_rank=2, but model.init_from="),
        (["model.train=full"], "is a delta: set model.train to 'gated-lora'"),
        (["model.lora_matrices=[]"], "adapts others: set it to ['q', 'v', 'down']"),
        (["sdsat.distinct=true"], "has the adaptive ids [400]: leave sdsat.ids empty"),
        (["model.base=demo-draft"], "the weights in"),
    ],
)
def test_a_config_that_does_not_fit_the_delta_is_one_line(
    quick, delta, tmp_path, capsys, settings, says
):
    directory = delta[0]
    fits = [f"model.init_from={directory}", f"model.lora_rank={read_delta(directory).rank}"]
    fits += ['model.lora_matrices=["q", "v", "down"]', "sdsat.window=3"]
    assert program(*quick(tmp_path / "run", *fits, *settings)) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_base_for_a_model_that_is_no_delta_is_one_line(quick, tmp_path, capsys):
    assert program(*quick(tmp_path / "run", "model.base=demo")) == 2
    assert "is no delta; leave it out" in capsys.readouterr().err


def test_the_clean_loss_has_no_gradient_and_no_param_has_one():
    cfg = ModelConfig.llama(
        vocab_size=12,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        intermediate_size=12,
        adaptive_ids=(12,) * 2,
    )
    params = init_params(cfg, jax.random.key(0))
    params["layers"] = jax.tree.map(lambda x: 3 * x, params["layers"])
    params["embed"] = 9 * params["embed"]
    tuning = gated_lora((12,), Tuned(lora_rank=2, lora_alpha=2.0), seed=0)
    trainable, frozen = tuning.split(params)
    trainable["layers"] = jax.tree.map(lambda x: x + 0.1, trainable["layers"])
    batch = {  # four clean tokens, then the window that stands before the third one
        "tokens": [3, 1, 4, 1, 12, 12],
        "labels": [1, 4, 1, 5, 1, 5],
        "segments": [1] * 6,
        "positions": [0, 1, 2, 3, 2, 3],
        "windows": [0, 0, 0, 0, 1, 1],
        "starts": [0, 0, 0, 0, 2, 2],
        "index": [0, 0, 0, 0, 1, 2],
        "sources": [2, 3],
    }
    batch = {name: jnp.array([values]) for name, values in batch.items()} | {"ratio": 2.0}

    def grads(weight):
        loss = tuning.over_trained(sdsat_loss(cfg, SdsatObjective("isolated", 2, 1.0, weight)))
        return jax.jit(jax.grad(lambda t: loss(t, frozen, batch)[0]))(trainable)

    assert not any(leaf.any() for leaf in jax.tree.leaves(grads(0.0)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads(1.0)):
        assert leaf.any(), path
    merged = tuning.merge(trainable, frozen)
    assert all(merged[name] is params[name] for name in params)


def test_a_saved_delta_loads_bit_for_bit(delta, start):
    directory, cfg, adapters = delta
    read = load_delta(directory, read_delta(directory), start, cfg, jnp.float32)
    assert jax.tree.structure(read) == jax.tree.structure(adapters)
    jax.tree.map(np.testing.assert_array_equal, read, adapters)
    loaded, fused = sj.load(directory), fuse_adapters(cfg, adapters)
    jax.tree.map(np.testing.assert_array_equal, loaded.adapters, fused)


def test_the_base_may_be_quantized_and_the_adapters_are_not(delta, start):
    base, gated = sj.load(start, quantize="int8"), sj.load(delta[0], quantize="int8")
    jax.tree.map(np.testing.assert_array_equal, gated.adapters, sj.load(delta[0]).adapters)
    plain, out = (
        sj.generate(model, [[7, 8, 9]], max_new_tokens=12, method=method)
        for model, method in ((base, "autoregressive"), (gated, "sdsat"))
    )
    np.testing.assert_array_equal(out.tokens[0], plain.tokens[0])


def test_another_base_and_a_broken_delta_are_one_line(delta, start, tmp_path):
    directory, cfg, _ = delta
    note = json.loads((directory / NOTE).read_text())

    def refused(pattern, **changes):
        (directory / NOTE).write_text(json.dumps(note | changes))
        with pytest.raises(ModelError, match=pattern) as error:
            sj.load(directory)
        assert "\n" not in str(error.value)

    other = tmp_path / "other"
    _, params = load_pretrained(start)
    save_pretrained(other, cfg, params)
    assert fingerprint(other) == fingerprint(start)
    save_pretrained(other, cfg, init_params(cfg, jax.random.key(9)))
    (other / "tokenizer.json").write_bytes((start / "tokenizer.json").read_bytes())
    refused(r"made for .*other, but the weights in .*other are others", base=str(other))
    refused(r"/no/model: no such model directory", base="/no/model")
    refused(r"q\.down has shape \[3, 16\], delta.json says \[5, 16\]", rank=5)
    refused(r"rank is 0, expected a whole number", rank=0)
    refused(r"no matrix 'attention.w'", matrices=["attention.w"])
    refused(r"tensor layers.0.attention.v.down belongs to no part", matrices=["attention.q"])
    refused(r"adaptive_ids is 'x', expected a list", adaptive_ids="x")
    (directory / TENSORS).unlink()
    refused(rf"no {TENSORS} beside {NOTE}")


def test_bad_input_exits_2_with_one_line(quick, tmp_path, capsys):
    cases = [
        (('model.lora_matrices=["w"]',), "expected one of q, k, v, out, gate, up, down"),
        (("model.lora_matrices=q",), "expected a list of strings"),
        (("model.lora_rank=17",), "the smallest matrix has rank 16 at most"),
        (("model.lora_rank=0",), "model.lora_rank=0"),
        (("optim.optimizer=muon",), "only adamw"),
    ]
    for number, (settings, says) in enumerate(cases):
        assert program(*quick(tmp_path / f"run{number}", *settings)) == 2, settings
        out = capsys.readouterr()
        assert out.out == "" and "Traceback" not in out.err, settings
        assert says in out.err.strip().splitlines()[-1], (settings, out.err)
