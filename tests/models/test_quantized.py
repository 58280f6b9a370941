"""Weights in 8 and 4 bits: their codes, the products with them, their checkpoints."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import specjax as sj
from infer import convert
from infer.bench import commands as bench
from infer.quantizing import write_quantized
from infer.run import commands as run
from infer.run.plan import make_plan
from specjax.models import init_params, load_pretrained, save_pretrained
from specjax.models.families.head_config import HeadConfig
from specjax.models.hf.layout import WEIGHTS
from specjax.models.hf.read import load_config, stored_form
from specjax.models.layers import DEQUANTIZED_ENTRIES, linear
from specjax.models.placement import param_specs
from specjax.models.quantization import parse_scheme, quantize, quantize_params
from specjax.models.quantized import is_quantized
from support import variants
from support.checkpoints import edit_config, edit_weights, same
from support.variant_models import build, whole

SCHEMES = ("int8", "fp8", "int4:4")  # some variants are 20 or 12 wide
F32 = jnp.dtype("float32")


def reference(weight, scheme):
    """Codes and scales ``[O, G]`` by NumPy, from the definition; the dequantized weight."""
    kind, _, group = scheme.partition(":")
    most = {"int8": 127, "fp8": 448, "int4": 7}[kind]
    out, inputs = weight.shape
    parts = weight.reshape(out, -1, int(group or inputs))
    scales = np.abs(parts).max(-1) / np.float32(most)
    scales[scales == 0] = 1
    if kind == "int4":
        scales = scales.astype(ml_dtypes.bfloat16).astype(np.float32)
    codes = np.clip(parts / scales[..., None], -most, most)
    if kind == "fp8":
        codes = codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        codes = np.rint(codes)
    return codes.reshape(weight.shape), scales, (codes * scales[..., None]).reshape(weight.shape)


def weights(seed=0, shape=(24, 64)):
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    made[3] = 0  # an output whose weights are all zero
    made[4] *= 1e-6
    made[:, 5] *= 30
    return made


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4:16", "int4:32", "int4:64"])
def test_codes_are_the_references_and_close_to_the_weights(scheme):
    weight = weights()
    codes, scales, near = reference(weight, scheme)
    made = quantize(jnp.asarray(weight), parse_scheme(scheme), F32)
    turned = scheme.startswith("int4")
    got = np.asarray(made.codes, np.float32)
    np.testing.assert_array_equal(got.T if turned else got, codes)
    held = np.asarray(made.scales, np.float32)
    np.testing.assert_allclose(held.T if turned else held[:, None], scales, rtol=1e-6)
    np.testing.assert_allclose(made.dense(jnp.float32), near, rtol=1e-6)
    assert made.shape == weight.shape
    step = np.repeat(scales, weight.shape[1] // scales.shape[1], axis=1)
    # A scale is rounded to 8 bits. If down, it clips the largest entry of its group by 7 · 2⁻⁹
    # steps, less than half a step. fp8 has 3 mantissa bits and a smallest step.
    bound = np.maximum(np.abs(weight) / 16, step / 1024) if scheme == "fp8" else step / 2
    assert (np.abs(near - weight) <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4:16"])
@pytest.mark.parametrize("rows", [3, 40])
def test_a_product_on_accelerators_is_the_dense_weights(monkeypatch, scheme, rows):
    """Three rows scale each group's product; forty rows dequantize before the product."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    made = quantize(jnp.asarray(weights()), parse_scheme(scheme), F32)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, 64)), jnp.float32)
    want = np.asarray(x) @ np.asarray(made.dense(jnp.float32)).T
    np.testing.assert_allclose(linear(x, made), want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only CPUs dequantize by parts")
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_layers_in_a_row_hold_one_product_at_a_time(scheme):
    """Also where the outputs are no whole number of parts."""
    rows, inputs, outputs = 512, 576, 3700
    assert outputs // 2 > DEQUANTIZED_ENTRIES // inputs  # so there are two parts and a rest
    weight = jnp.asarray(weights(shape=(outputs, inputs)))
    quantized = [quantize(weight / n, parse_scheme(scheme), F32) for n in (24, 30, 36, 42)]
    x = jnp.asarray(weights(1, (rows, inputs)))

    def run(x, layers):
        for layer in layers:
            x = jnp.tanh(linear(x, layer)[:, -inputs:])
        return x

    wide = [layer.dense(jnp.float32) for layer in quantized]
    np.testing.assert_allclose(jax.jit(run)(x, quantized), run(x, wide), atol=2e-4)
    memory = jax.jit(run).lower(x, quantized).compile().memory_analysis()
    dequantized = 4 * DEQUANTIZED_ENTRIES
    assert memory.temp_size_in_bytes < 2 * rows * outputs * 4 + 3 * dequantized


@pytest.mark.parametrize(
    "name", [*variants.FIRST.values(), "opt-350m", "mistral", "biases", "tied"]
)
def test_every_family_computes_with_the_dequantized_weights(name):
    cfg, _, params = build(name)
    rows = np.arange(3, 15).reshape(2, 6)
    unquantized = whole(cfg, params, rows, "dense")
    for scheme in SCHEMES if name == "tied" else ("int8", "int4:4"):
        small = quantize_params(cfg, params, parse_scheme(scheme), F32)
        leaves = jax.tree.leaves(small, is_leaf=is_quantized)
        kept = [x for x in leaves if not is_quantized(x) and x.ndim > 1]
        assert len(kept) == ("positions" in params)  # only learned positions stay
        dense = dequantized(small)
        want = whole(cfg, dense, rows, "dense")
        scale = np.abs(want).max()
        np.testing.assert_allclose(whole(cfg, small, rows, "dense"), want, atol=1e-5 * scale)
        assert np.abs(want - unquantized).max() > 1e-3 * scale


def dequantized(params):
    return jax.tree.map(
        lambda x: x.dense(jnp.float32) if is_quantized(x) else x, params, is_leaf=is_quantized
    )


METHODS = ("speculative", "block", "specinfer")


@pytest.mark.parametrize("scheme", ["int4:16", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_target_drafts_for_itself(target, scheme):
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15]]
    plain = sj.generate(target, prompts, max_new_tokens=24)
    for method in METHODS if scheme == "int8" else METHODS[:1]:
        own = sj.generate(target, prompts, method=method, draft=f"self:{scheme}", max_new_tokens=24)
        assert same(plain.tokens, own.tokens)
        assert own.stats["accepted"].sum() > 0.5 * own.stats["tested"].sum()
    # q is the copy's distribution, not the target's, so some drafts are rejected.
    made = sj.quantize(target, scheme)
    assert not same(made.params, target.params) and made.dtype == target.dtype
    assert made.params["norm"]["weight"] is target.params["norm"]["weight"]


@pytest.fixture
def directory(tmp_path):
    save_pretrained(tmp_path / "model", *build("gemma3")[:2])
    return tmp_path / "model"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_loads_as_it_was_quantized(directory, tmp_path, scheme, dtype):
    out = tmp_path / "small"
    write_quantized(directory, out, scheme)
    dtype = jnp.dtype(dtype)
    cfg, want = load_pretrained(directory, dtype, fused=True, quantize=scheme)
    loaded, got = load_pretrained(out, dtype, fused=True)
    assert loaded == cfg and jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert str(stored_form(out)) == scheme and got["embed"].dtype == dtype


@pytest.mark.parametrize("own", [True, False])
def test_a_quantized_head_keeps_what_it_drafts_and_whose_embedding_it_reads(tmp_path, own):
    ids = np.array([1, 2, 5, 11])
    cfg = HeadConfig.of(build("codellama")[0], ids, layer_ids=(0, 1), own_embedding=own)
    save_pretrained(tmp_path / "head", cfg, init_params(cfg, jax.random.key(3)))
    write_quantized(tmp_path / "head", tmp_path / "small", "int8")
    cfg, want = load_pretrained(tmp_path / "head", fused=True, quantize="int8")
    loaded, got = load_pretrained(tmp_path / "small", fused=True)
    assert loaded == cfg and loaded.own_embedding == own
    np.testing.assert_array_equal(loaded.ids, ids)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_plan_counts_the_bytes_of_the_params(directory, tmp_path, scheme):
    _, params = load_pretrained(directory, fused=True, quantize=scheme)
    held = sum(x.size // 2 if x.dtype == jnp.int4 else x.nbytes for x in jax.tree.leaves(params))
    (directory / WEIGHTS).rename(tmp_path / WEIGHTS)  # the config is enough
    plan = make_plan({"target": str(directory)}, "float32", 2**20, None, {"target": scheme})
    assert plan["weight_bytes"] == held and plan["target"]["quantize"] == scheme


def edited(directory, **note):
    edit_config(directory, quantization_config=note)


BAD = {
    "hqq": (lambda d: edited(d, quant_method="hqq", bits=4), "quant_method 'hqq'"),
    "awq": (lambda d: edited(d, quant_method="awq"), "is missing"),
    "scheme": (lambda d: edited(d, quant_method="specjax", version=1, scheme="int3"), "'int3'"),
    "version": (lambda d: edited(d, quant_method="specjax", version=2, scheme="int8"), "version"),
    "groups": (
        lambda d: edited(d, quant_method="specjax", version=1, scheme="int4:64"),
        "groups of 64 do not divide",
    ),
    "missing": (
        lambda d: edit_weights(d, lambda t: t.pop("layers.0.attention.qkv.weight.scales")),
        "layers.0.attention.qkv.weight.scales is missing",
    ),
    "extra": (
        lambda d: edit_weights(d, lambda t: t.update(odd=np.zeros(1))),
        "tensor odd belongs to no part",
    ),
    "dtype": (
        lambda d: edit_weights(
            d, lambda t: t.update({"embed.codes": t["embed.codes"].astype(np.float32)})
        ),
        "stored as F32; supported: I8",
    ),
}


@pytest.mark.parametrize("broken", BAD)
def test_a_checkpoint_that_is_not_ours_is_one_line(directory, tmp_path, broken):
    change, says = BAD[broken]
    write_quantized(directory, tmp_path / "small", "int8")
    change(tmp_path / "small")
    with pytest.raises(sj.ModelError, match=says):
        load_pretrained(tmp_path / "small", fused=True)


def test_what_does_not_fit_is_one_line(directory, tmp_path, target, capsys):
    out = tmp_path / "small"
    argv = [str(directory), "--quantize", "int8", "--out", str(out)]
    assert convert.main(argv) == 0 and json.loads((out / "config.json").read_text())
    assert load_config(out) == load_config(directory)
    capsys.readouterr()
    assert convert.main(argv) == 2 and "give --overwrite" in capsys.readouterr().err
    assert convert.main([str(out), *argv[1:-1], str(tmp_path / "again")]) == 2
    assert "quantized already" in capsys.readouterr().err
    assert convert.main([*argv[:-1], str(directory)]) == 2
    assert "would replace the checkpoint itself" in capsys.readouterr().err
    for main, arguments, says in (
        (convert.main, argv[:-2], "give --out"),
        (run.main, ["--quantize", "int3"], "expected int8, fp8, int4 or int4:GROUP"),
        (bench.main, ["--draft", "self:x"], "x: expected int8"),
        (run.main, ["--draft", "self:int4,demo-draft"], "int4,demo-draft: expected int8"),
        (run.main, ["--target", "demo", "--quantize", "int4:128"], "groups of 128 do not divide"),
        (run.main, ["--draft", "self:int4:128", "--plan"], "groups of 128 do not divide"),
    ):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
        error = capsys.readouterr().err
        assert code == 2 and error.count("\n") == 1 and says in error, arguments
    for call, says in (
        (lambda: load_pretrained(out, fused=True, quantize="int4"), "are quantized .int8."),
        (lambda: load_pretrained(out), "to train or to convert"),
        (lambda: load_pretrained(directory, quantize="int8"), "quantize='int8' needs fused=True"),
        (lambda: sj.load("demo", quantize="int5"), "quantize='int5' is no scheme"),
        (lambda: sj.load("demo", quantize="int4:7"), "an even number"),
        (lambda: sj.quantize(target, "int4:64"), "do not divide a weight of 32 inputs"),
        (lambda: sj.generate(target, [[1]], method="speculative", draft="demo"), "self:int4"),
        (lambda: sj.generate(target, [[1]], method="speculative", draft="self:"), "no scheme"),
    ):
        with pytest.raises(sj.SpecjaxError, match=says):
            call()


def test_weights_that_are_not_finite_and_groups_that_devices_cannot_share_are_refused():
    cfg, _, params = build("biases")
    for odd in (jnp.inf, jnp.nan):
        broken = {"embed": params["embed"].at[3, 3].set(odd)}
        with pytest.raises(sj.ModelError, match="not finite"):
            quantize_params(cfg, broken, parse_scheme("int8"), F32)
    coded = quantize_params(cfg, params, parse_scheme("int4:16"), F32)
    with pytest.raises(sj.ModelError, match="3 groups of 16 inputs"):
        param_specs(cfg, coded, 2)
