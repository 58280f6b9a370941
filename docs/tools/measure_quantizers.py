"""Directories by the quantizers' own packers: measure_quantizers.py DIR SOURCES [KIND ...]

It quantizes the linear weights of a Hugging Face directory with the code of the library that
publishes the form, and writes a directory as the library does: ``awq`` (autoawq), ``gptq``
(auto-gptq, with act-order and a Hessian of random inputs) and ``fp8`` (transformers). Then it loads
the directory here. It compares each weight with what the library's own code dequantizes it to, and
48 greedy tokens of the kept codes with those of the dequantized weights.

The libraries' packages want a GPU, so only their modules are used. SOURCES holds the unpacked
packages, ``awq/`` and ``auto_gptq/``:

  pip download --no-deps autoawq==0.2.9 auto-gptq==0.7.1

It needs torch, transformers, and 4 GB of memory; GPTQ of 135M parameters takes some ten minutes.
"""

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

GROUP = 64
PROMPTS = ["The capital of France is", "def fib(n):\n", "Once upon a time", "2 + 2 =", "Water is"]

Tensors = dict[str, object]


def main() -> None:
    """One line per kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("sources", type=Path)
    parser.add_argument("kinds", nargs="*", default=list(QUANTIZERS), choices=list(QUANTIZERS))
    args = parser.parse_args()
    stand_in_packages(args.sources)
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as directory:
            quantized, dequantized = Path(directory, kind), Path(directory, "dequantized")
            write(args.model, quantized, dequantized, *QUANTIZERS[kind])
            print(kind, compared(quantized, dequantized), flush=True)


def stand_in_packages(sources: Path) -> None:
    """Packages whose modules can be imported without what the whole package imports."""
    import torch

    torch.cuda.synchronize = lambda *_: None  # GPTQ waits for a GPU that there may not be
    inner = ("", "modules", "modules.linear", "utils", "quantization", "nn_modules")
    for package in ("awq", "auto_gptq"):
        for name in (*inner, "nn_modules.qlinear"):
            full = ".".join(filter(None, (package, name)))
            module = types.ModuleType(full)
            module.__path__ = [str(sources / full.replace(".", "/"))]
            sys.modules[full] = module
    utils = types.ModuleType("awq.utils.utils")
    utils.get_best_device = lambda: "cpu"
    sys.modules["awq.utils.utils"] = utils


def write(
    model: Path, quantized: Path, dequantized: Path, quantize: Callable, settings: dict[str, object]
) -> None:
    """The directory as the library writes it, and one with the weights that it means."""
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    linear = [name for name, w in weights.items() if w.dim() == 2 and "proj" in name]
    packed: Tensors = {}
    meant: Tensors = {}
    for name in linear:
        parts, weight = quantize(weights[name].float())
        packed |= {name.removesuffix("weight") + part: x.contiguous() for part, x in parts.items()}
        meant[name] = weight.contiguous().float()
    rest = {name: weight for name, weight in weights.items() if name not in meant}
    for directory, tensors in ((quantized, packed), (dequantized, meant)):
        directory.mkdir()
        for file in model.glob("*.json"):
            shutil.copy(file, directory)
        save_file({**rest, **tensors}, directory / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = settings
    (quantized / "config.json").write_text(json.dumps(config))


def awq(weight):
    """autoawq's groups with zero points, in its ``gemm`` layout."""
    import torch

    packer = importlib.import_module("awq.modules.linear.gemm").WQLinear_GEMM
    dequantize = importlib.import_module("awq.utils.packing_utils").dequantize_gemm
    groups = weight.reshape(-1, GROUP)
    lowest = groups.amin(1, keepdim=True)
    scales = (groups.amax(1, keepdim=True) - lowest).clamp(min=1e-5) / 15
    zeros = (-torch.round(lowest / scales)).clamp_(0, 15)
    codes = torch.clamp(torch.round(groups / scales) + zeros, 0, 15)
    rounded = ((codes - zeros) * scales).view_as(weight)
    by_group = [x.view(len(weight), -1).t().contiguous() for x in (scales, zeros)]
    packed = packer.from_linear(
        linear_layer(rounded.half()), 4, GROUP, False, by_group[0].half(), by_group[1]
    )
    meant = dequantize(packed.qweight, packed.qzeros, packed.scales.float(), 4, GROUP).t()
    return {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}, meant


def gptq(weight):
    """auto-gptq's own GPTQ with act-order; its product with the identity is the weight."""
    import torch

    solver = importlib.import_module("auto_gptq.quantization.gptq").GPTQ
    packer = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    outputs, inputs = weight.shape
    layer = linear_layer(weight)
    run = solver(layer)
    run.quantizer.configure(4, perchannel=True, sym=True)
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(inputs, generator=generator) * 2 + 0.1
    run.add_batch(torch.randn(512, inputs, generator=generator) * size, None)
    scales, zeros, order = run.fasterquant(group_size=GROUP, actorder=True)[:3]
    packed = packer(4, GROUP, inputs, outputs, False, weight_dtype=torch.float16)
    packed.pack(layer.half(), scales.half().float(), zeros.clone(), order)
    parts = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    packed.autogptq_cuda_available = False
    packed.scales = packed.scales.float()
    with torch.no_grad():
        return parts, packed(torch.eye(inputs)).t()


def fp8(weight):
    """transformers' blocks of 64 × 64."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = FineGrainedFP8Config(weight_block_size=(GROUP, GROUP))
    quantizer = types.SimpleNamespace(quantization_config=config, pre_quantized=False)
    found = Fp8Quantize(quantizer).convert({"weight": weight})
    parts = {name: x[0] if isinstance(x, list) else x for name, x in found.items()}
    scales = parts["weight_scale_inv"].float()
    for axis, size in enumerate(weight.shape):
        scales = scales.repeat_interleave(GROUP, axis).narrow(axis, 0, size)
    return parts, parts["weight"].float() * scales


def linear_layer(weight):
    """torch's layer with this weight."""
    import torch

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return layer


def compared(quantized: Path, dequantized: Path) -> str:
    """What loading both gives."""
    import jax
    import jax.numpy as jnp

    import specjax as sj
    from specjax.models.loading import load_params

    _, ours = load_params(quantized, jnp.dtype("float32"), quantize="none")
    _, theirs = load_params(dequantized, jnp.dtype("float32"))
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    equal = sum(bool((a == b).all()) for a, b in pairs)
    rows = 0
    texts = [
        sj.generate(sj.load(path), PROMPTS, max_new_tokens=48) for path in (quantized, dequantized)
    ]
    for kept, wide in zip(texts[0].tokens, texts[1].tokens, strict=True):
        rows += list(kept) == list(wide)
    return f"{equal} of {len(pairs)} params equal; {rows} of {len(PROMPTS)} greedy rows equal"


QUANTIZERS = {
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "modules_to_not_convert": None,
        },
    ),
    "gptq": (
        gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": True,
            "sym": True,
            "damp_percent": 0.01,
            "static_groups": False,
            "true_sequential": True,
        },
    ),
    "fp8": (
        fp8,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [GROUP, GROUP],
            "modules_to_not_convert": None,
        },
    ),
}

if __name__ == "__main__":
    main()
