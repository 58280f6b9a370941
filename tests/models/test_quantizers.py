"""Weights that other libraries quantized: what they mean, how they are kept, what is refused."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from infer import convert
from infer.run.plan import make_plan
from specjax._util.errors import ModelWarning
from specjax.models import fuse, init_params, load_pretrained, save_pretrained
from specjax.models.hf.files import OpenWeights, open_tensors
from specjax.models.hf.layout import WEIGHTS
from specjax.models.hf.quantizers import parse
from specjax.models.hf.quantizers.grouping import group_parts
from specjax.models.hf.read import load_config
from specjax.models.layers import linear
from specjax.models.placement import cut_single_groups, param_specs
from specjax.models.quantization import parse_scheme, quantize_params
from specjax.models.quantized import Grouped, PerOutput, is_quantized
from support import stack_variants, variants
from support.checkpoints import edit_config, same
from support.quantizers import FORMS, load_tensors, mxfp4, quantize_directory, save_tensors
from support.variant_models import whole

EXACT_SCALES = ("gptq", "awq", "mxfp4", "ct-packed")  # with 16 bits: products have no rounding


@pytest.fixture
def directory(tmp_path):
    config = variants.config("tinyllama") | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    cfg = sj.models.from_hf(config)
    save_pretrained(tmp_path / "model", cfg, init_params(cfg, jax.random.key(0)))
    return tmp_path / "model"


def module_tensors(tensors):
    return {f"m.{part}": np.ascontiguousarray(tensor) for part, tensor in tensors.items()}


def parts_of(tmp_path, form, weight):
    """A file with one weight, as the loader sees it; its quantizer, and the weight it means."""
    write, settings = FORMS[form]
    tensors, dense = write(weight)
    path = tmp_path / WEIGHTS
    save_tensors(path, module_tensors(tensors))
    files = dict.fromkeys(open_tensors(path).keys(), path)
    quantizer = parse(settings)
    _, grouped = group_parts(OpenWeights.open(files), quantizer)
    return grouped["m.weight"], quantizer, dense


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_what_its_format_says(tmp_path, form):
    for seed in range(20):
        random = np.random.default_rng(seed)
        shape = ((48, 64), (24, 96))[seed % 2]
        weight = random.standard_normal(shape).astype(np.float32)
        weight *= 10.0 ** random.uniform(-2, 1, (shape[0], 1))
        parts, quantizer, dense = parts_of(tmp_path, form, weight)
        made = quantizer.read(parts, shape)
        assert is_quantized(made) and made.shape == shape
        bits = 4 if quantizer.bits == 4 else 8
        assert jnp.dtype(made.codes.dtype).name.startswith(("int", "float")) and bits == (
            4 if "4" in made.codes.dtype.name.removesuffix("_e4m3fn") else 8
        )
        got = np.asarray(made.dense(jnp.float32))
        if form.startswith(EXACT_SCALES):
            np.testing.assert_array_equal(got, dense)
        else:
            np.testing.assert_allclose(got, dense, atol=1e-6 * np.abs(dense).max())
        # Looking rows up, products, and outputs that are joined or rearranged see the same weight.
        rows = np.array([[0, 3], [shape[0] - 1, 1]])
        np.testing.assert_array_equal(made.take(rows), got[rows])
        if seed == 0:
            check_products(made, got)


def check_products(made, dense):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, dense.shape[1])), jnp.float32)
    scale = np.abs(dense).max() * dense.shape[1] ** 0.5
    np.testing.assert_allclose(linear(x, made), x @ dense.T, atol=1e-5 * scale)
    flipped = made.by_output(lambda x: x[::-1])
    np.testing.assert_array_equal(flipped.dense(jnp.float32), dense[::-1])


@pytest.mark.parametrize("form", ["awq", "gptq-act-order", "fp8-blocks", "mxfp4"])
@pytest.mark.parametrize("rows", [3, 40])
def test_a_product_on_accelerators_is_the_dense_weights(tmp_path, monkeypatch, form, rows):
    weight = np.random.default_rng(0).standard_normal((24, 128)).astype(np.float32)
    parts, quantizer, dense = parts_of(tmp_path, form, weight)
    made = quantizer.read(parts, weight.shape)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, 128)), jnp.float32)
    np.testing.assert_allclose(linear(x, made), np.asarray(x) @ dense.T, rtol=1e-4, atol=1e-3)


def dequantized(params):
    return jax.tree.map(
        lambda x: x.dense(jnp.float32) if is_quantized(x) else x, params, is_leaf=is_quantized
    )


def stored_dense(directory, dense):
    """Params of the directory with the weights that its codes mean."""
    save_tensors(directory / WEIGHTS, dense)
    edit_config(directory, quantization_config=...)
    return load_pretrained(directory, fused=True)[1]


ORDINARY = ("gptq-act-order", "fp8-uneven-blocks")


@pytest.mark.parametrize(
    "form",
    [form if form in ORDINARY else pytest.param(form, marks=pytest.mark.slow) for form in FORMS],
)
def test_a_directory_decodes_as_the_weights_that_it_means(directory, form):
    dense = quantize_directory(directory, form)
    cfg, params = load_pretrained(directory, fused=True)
    layer = params["layers"]["0"]
    for module in (layer["attention"]["qkv"], layer["mlp"]["gate_up"], layer["mlp"]["down"]):
        assert is_quantized(module["weight"])
    want = stored_dense(directory, dense)
    for got, expected in zip(
        jax.tree.leaves(dequantized(params)), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=2e-6 * np.abs(expected).max())
    small, plain = (decoded(cfg, tree) for tree in (params, want))
    assert same(small, plain)


def decoded(cfg, params):
    model = sj.LM(cfg, params, None, (), cfg.vocab_size, "params")
    return sj.generate(model, [[5, 6, 7, 8], [9, 10]], max_new_tokens=16).tokens


def test_a_model_that_was_quantized_drafts_for_itself_and_counts_its_bytes(directory):
    quantize_directory(directory, "awq")
    _, params = load_pretrained(directory, fused=True)
    held = sum(x.size // 2 if x.dtype == jnp.int4 else x.nbytes for x in jax.tree.leaves(params))
    planned = make_plan({"target": str(directory)}, "float32", 2**20, None, {"target": None})
    assert planned["target"]["quantize"] == "awq, 4 bits, groups of 32"
    assert planned["weight_bytes"] == held
    again = quantize_params(load_config(directory), params, parse_scheme("int8"), jnp.float32)
    assert isinstance(again["layers"]["0"]["mlp"]["down"]["weight"], PerOutput)


def test_weights_of_several_forms_are_joined(directory):
    """One of q, k, v is not quantized: the others keep their codes."""
    quantize_directory(directory, "gptq")
    tensors = load_tensors(directory / WEIGHTS)
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    name = "model.layers.0.self_attn.q_proj"
    stored = {key: x for key, x in tensors.items() if not key.startswith(f"{name}.")}
    save_tensors(directory / WEIGHTS, stored | {f"{name}.weight": weight})
    cfg, params = load_pretrained(directory, fused=True)
    joined = params["layers"]["0"]["attention"]["qkv"]["weight"]
    np.testing.assert_array_equal(joined.dense(jnp.float32)[:64], weight)
    assert is_quantized(joined.parts[1])
    assert same(decoded(cfg, params), decoded(cfg, dequantized(params)))


def test_groups_of_several_sizes_are_dequantized(directory):
    """What g_idx may say, and our groups cannot: one line says that the weight is an array."""
    dense = quantize_directory(directory, "gptq")
    tensors = load_tensors(directory / WEIGHTS)
    module = "model.layers.1.mlp.down_proj"
    groups = np.zeros(96, np.int32)
    groups[40:] = 1
    scales = tensors[f"{module}.scales"].astype(np.float32)
    codes = dense[f"{module}.weight"] / scales[np.arange(96) // 32].T
    tensors[f"{module}.g_idx"] = groups
    save_tensors(directory / WEIGHTS, tensors)
    with pytest.warns(ModelWarning, match=f"1 quantized weights, such as {module}.weight, have"):
        _, params = load_pretrained(directory, fused=True)
    got = params["layers"]["1"]["mlp"]["down"]["weight"]
    np.testing.assert_allclose(got, codes * scales[groups].T, rtol=1e-5)


def test_a_head_and_a_table_may_be_quantized(directory):
    """lm_head in 4 bits, and the embedding: products and rows come from their codes."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    tensors = load_tensors(directory / WEIGHTS)
    write, settings = FORMS["ct-packed"]
    for name in names:
        parts, dense = write(tensors.pop(name))
        module = name.removesuffix("weight")
        tensors |= {f"{module}{part}": x for part, x in parts.items()}
        expected = dense
    save_tensors(directory / WEIGHTS, tensors)
    edit_config(directory, quantization_config=settings)
    cfg, params = load_pretrained(directory, fused=True)
    assert isinstance(params["head"], Grouped) and isinstance(params["embed"], Grouped)
    np.testing.assert_array_equal(params["embed"].dense(jnp.float32), expected)
    assert same(decoded(cfg, params), decoded(cfg, dequantized(params)))


def test_devices_share_what_they_can(directory):
    quantize_directory(directory, "gptq-act-order")
    cfg, params = load_pretrained(directory, fused=True)
    with pytest.raises(sj.ModelError, match=r"act-order .* cannot be split over model=2"):
        param_specs(cfg, params, 2)
    layer = params["layers"]["0"]
    split = param_specs(cfg, {"layers": {"0": without_order(layer)}}, 1)["layers"]["0"]
    weight = split["mlp"]["down"]["weight"]
    assert weight.offsets == weight.scales == weight.codes


def test_devices_share_a_weight_with_one_group(directory):
    """A scale per output alone: each device gets a copy of it."""
    quantize_directory(directory, "ct-int-zero-points")
    cfg, params = load_pretrained(directory, fused=True)
    with pytest.raises(sj.ModelError, match=r"1 groups of 64 inputs .heads. cannot be split"):
        param_specs(cfg, params, 2)
    cut = cut_single_groups(cfg, params, 2)
    weight = cut["layers"]["0"]["mlp"]["down"]["weight"]
    assert weight.groups == 2 and param_specs(cfg, cut, 2)
    assert cut["layers"]["0"]["mlp"]["gate_up"]["weight"].groups == 1  # its outputs are split
    assert same(dequantized(cut), dequantized(params))


def without_order(layer):
    def change(x):
        return dataclasses.replace(x, order=None) if is_quantized(x) else x

    return jax.tree.map(change, layer, is_leaf=is_quantized)


def test_weights_are_dequantized_where_that_is_asked_for(directory, tmp_path, capsys):
    dense = quantize_directory(directory, "awq")
    with pytest.raises(sj.ModelError, match=r"are quantized \(awq, 4 bits, groups of 32\); take"):
        load_pretrained(directory)
    cfg, plain = load_pretrained(directory, quantize="none")
    out = plain["layers"]["1"]["attention"]["out"]["weight"]
    np.testing.assert_array_equal(out, dense["model.layers.1.self_attn.o_proj.weight"])

    # Another scheme quantizes what the codes mean, and so does converting.
    small = tmp_path / "small"
    assert convert.main([str(directory), "--quantize", "int8", "--out", str(small)]) == 0
    _, converted = load_pretrained(small, fused=True)
    _, again = load_pretrained(directory, fused=True, quantize="int8")
    assert same(converted, again)
    assert same(again, quantize_params(cfg, fuse(plain), parse_scheme("int8"), jnp.float32))
    with pytest.raises(sj.ModelError, match=r"are quantized \(int8\)"):
        load_pretrained(small, fused=True, quantize="none")
    save_pretrained(tmp_path / "plain", cfg, plain)
    assert same(load_pretrained(tmp_path / "plain")[1], plain)
    assert capsys.readouterr().err == ""


def changed(tensor, change):
    """An edit of the first tensor whose name ends so; ``change`` returns None to drop it."""

    def edit(directory):
        tensors = load_tensors(directory / WEIGHTS)
        name = next(name for name in tensors if name.endswith(tensor))
        new = change(tensors.pop(name))
        save_tensors(directory / WEIGHTS, tensors | ({} if new is None else {name: new}))

    return edit


def setting(**changes):
    def edit(directory):
        settings = json.loads((directory / "config.json").read_text())["quantization_config"]
        edit_config(directory, quantization_config=settings | changes)

    return edit


def weights_setting(**changes):
    """An edit of how compressed-tensors says that weights are quantized."""

    def edit(directory):
        settings = json.loads((directory / "config.json").read_text())["quantization_config"]
        settings["config_groups"]["group_0"]["weights"] |= changes
        edit_config(directory, quantization_config=settings)

    return edit


def drop(tensor):
    return None


def cut(tensor):
    return tensor[:-1]


def endless(tensor):
    return np.full_like(tensor, np.inf)


def wide(tensor):
    return tensor.astype(np.float32)


REFUSED = {
    "no scales": ("gptq", changed(".scales", drop), "but its scales is missing"),
    "no zeros": ("awq", changed(".qzeros", drop), "but its qzeros is missing"),
    "no codes": ("awq", changed(".qweight", drop), "belongs to no part|weight is missing"),
    "no block scales": ("fp8-blocks", changed("weight_scale_inv", drop), "weight_scale is missing"),
    "no mx scales": ("mxfp4", changed("_scales", drop), "weight_scales is missing"),
    "no zero points": (
        "ct-packed-zero-points",
        changed("zero_point", drop),
        "zero_point is missing",
    ),
    "short codes": ("gptq", changed(".qweight", cut), "does not fit; expected"),
    "short scales": ("awq", changed(".scales", cut), "does not fit; expected"),
    "short blocks": ("fp8-blocks", changed("scale_inv", cut), "does not fit; expected"),
    "short words": ("ct-packed", changed("weight_packed", cut), "does not fit; expected"),
    "short pairs": ("mxfp4", changed("_blocks", cut), "does not fit; expected"),
    "codes as floats": ("gptq", changed(".qweight", wide), "stored as F32; supported: I32"),
    "endless scales": ("awq", changed(".scales", endless), "entries that are not finite"),
    "no number": ("mxfp4", changed("_scales", lambda x: x | 255), "exponent is 255"),
    "groups": ("gptq", changed("g_idx", lambda x: x + 9), "g_idx names group 11, there are 3"),
    "other shape": ("ct-packed", changed("weight_shape", lambda x: x + 1), "config.json says"),
    "a bias": ("gptq", changed("bias", lambda x: x + 1), "bias belongs to no part"),
    "bits": ("gptq", setting(bits=3), "bits 3 is not read, only 4 and 8"),
    "awq bits": ("awq", setting(bits=8), "bits 8 is not read, only 4"),
    "group size": ("gptq", setting(group_size=0), "group_size is 0, expected -1, or a whole"),
    "marlin": ("gptq", setting(checkpoint_format="marlin"), "only gptq and gptq_v2"),
    "dynamic": ("gptq", setting(dynamic={"+:x": {"bits": 8}}), "dynamic .* is not read"),
    "gemv": ("awq", setting(version="gemv"), "version gemv is not read, only gemm"),
    "blocks": ("fp8-blocks", setting(weight_block_size=[128]), "expected two whole numbers"),
    "format": ("ct-packed", setting(format="marlin-24"), "format marlin-24 is not read"),
    "status": ("ct-packed", setting(quantization_status="applied"), "quantization_status applied"),
    "sparse": (
        "ct-packed",
        setting(sparsity_config={"format": "sparse-bitmask"}),
        "sparsity_config.format sparse-bitmask is not read, only dense",
    ),
    "sparsity": ("ct-packed", setting(sparsity_config="dense"), "sparsity_config is 'dense'"),
    "ct bits": ("ct-packed", weights_setting(num_bits=3), "num_bits 3 is not read, only 4 and 8"),
    "ct groups": ("ct-packed", weights_setting(group_size=0), "group_size is 0"),
    "strategy": ("ct-packed", weights_setting(strategy="token"), "strategy token is not read"),
    "no groups": ("ct-packed", setting(config_groups={}), "config_groups without weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_line(directory, case):
    form, edit, says = REFUSED[case]
    quantize_directory(directory, form)
    edit(directory)
    with pytest.raises(sj.ModelError, match=says) as caught:
        load_pretrained(directory, fused=True)
    assert "\n" not in str(caught.value)


def test_checkpoints_of_2024_load_as_compressed_ones():
    """Their status is frozen, and their sparsity names the share of zeros alone."""
    _, settings = FORMS["ct-packed"]
    sparsity = {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}
    old = {"quantization_status": "frozen", "sparsity_config": sparsity}
    assert parse(settings | old) == parse(settings)


OTHERS = ("bitsandbytes", "hqq", "aqlm", "quanto", "torchao", "modelopt", "bitnet", 7, None)


@pytest.mark.parametrize("method", OTHERS)
def test_other_libraries_are_refused_by_name(directory, method):
    edit_config(directory, quantization_config={"quant_method": method})
    with pytest.raises(sj.ModelError, match=f"quant_method {method!r} is not supported; read are"):
        load_config(directory)


LIBRARY = {  # format: the weights' arguments of compressed-tensors
    "pack-quantized": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "int-quantized": {"num_bits": 8, "strategy": "channel", "symmetric": True},
    "float-quantized": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [32, 32],
    },
    "mxfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    },
    "nvfp4-pack-quantized": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
}


@pytest.mark.torch
@pytest.mark.parametrize("form", LIBRARY)
def test_compressed_tensors_writes_and_means_the_same(tmp_path, form):
    """What the library itself writes and dequantizes, where it is installed."""
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import save_file

    args = QuantizationArgs(**LIBRARY[form])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)
    for seed in range(20):
        torch.manual_seed(seed)
        weight = torch.randn(64, 128)
        stored = {"weight": weight} | library_scales(weight, args, calculate_qparams)
        tensors = compressor.compress(stored, scheme)
        names = {f"m.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        save_file(names, tmp_path / WEIGHTS)
        files = dict.fromkeys(names, tmp_path / WEIGHTS)
        weights = args.model_dump(mode="json")
        settings = {"quant_method": "compressed-tensors", "format": form}
        quantizer = parse(settings | {"config_groups": {"group_0": {"weights": weights}}})
        parts = group_parts(OpenWeights.open(files), quantizer)[1]["m.weight"]
        made = quantizer.read(parts, (64, 128))
        want = compressor.decompress(tensors, scheme)["weight"].float().numpy()
        # The library dequantizes FP4 in bfloat16.
        close = 2**-8 if "fp4" in form else 1e-6
        np.testing.assert_allclose(made.dense(jnp.float32), want, rtol=close, atol=1e-6)


def library_scales(weight, args, calculate_qparams):
    """Scales, and zero points where there are some, by the library's own formula."""
    import torch

    rows, columns = args.block_structure or (1, args.group_size or weight.shape[1])
    parts = weight.reshape(64 // rows, rows, weight.shape[1] // columns, columns)
    lowest = parts.amin((1, 3))
    highest = parts.amax((1, 3))
    found = {}
    if args.strategy == "tensor_group":
        found["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
    scale, zero = calculate_qparams(
        lowest, highest, args, global_scale=found.get("weight_global_scale")
    )
    found["weight_scale"] = scale
    if not args.symmetric:
        found["weight_zero_point"] = zero.to(torch.int8)
    return found


@pytest.mark.parametrize("kept", [True, False])
def test_experts_of_gpt_oss_load_as_it_is_published(tmp_path, kept):
    """Blocks of all experts in one tensor, whose name has no "weight"; gate and up alternate."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    config = stack_variants.config("gpt_oss") | sizes
    config.pop("layer_types", None)
    cfg = sj.models.from_hf(config)
    save_pretrained(tmp_path / "plain", cfg, init_params(cfg, jax.random.key(0)))
    tensors = load_tensors(tmp_path / "plain" / WEIGHTS)
    write, settings = mxfp4("")
    quantized = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        each = [write(expert.T) for expert in tensors[name].astype(np.float32)]
        tensors[name] = np.stack([dense.T for _, dense in each])
        for part in ("blocks", "scales"):
            quantized[f"{name}_{part}"] = np.stack([stored[part] for stored, _ in each])
    save_tensors(tmp_path / "plain" / WEIGHTS, tensors)
    shutil.copytree(tmp_path / "plain", tmp_path / "packed")
    left = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in quantized}
    save_tensors(tmp_path / "packed" / WEIGHTS, left | quantized)
    edit_config(tmp_path / "packed", quantization_config=settings)

    _, want = load_pretrained(tmp_path / "plain", fused=True)
    _, got = load_pretrained(tmp_path / "packed", fused=True, quantize=None if kept else "none")
    experts = got["layers"]["0"]["mlp"]["experts"]
    assert all(is_quantized(experts[name]["weight"]) == kept for name in ("gate", "up", "down"))
    logits = [np.asarray(whole(cfg, p, variants.tokens(), "dense")) for p in (want, got)]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5 * np.abs(logits[0]).max())
