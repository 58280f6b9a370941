"""Writers of quantized checkpoints, from the formats' own formulas, one loop per code.

Each writer takes a weight ``[O, I]`` and gives its stored tensors, by part, and the weight that
they stand for, in float32.
"""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from specjax.models.hf.layout import WEIGHTS
from specjax.models.hf.tensor_file import SafetensorsFile

FP8 = ml_dtypes.float8_e4m3fn
FP4_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each nibble of a word


def words_of(codes, bits, columns=None):
    """Unsigned codes ``[R, N]`` as 32-bit words ``[R, N · bits / 32]``; N may not fill the last."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word))).astype(np.uint64)
    words = np.zeros((len(codes), padded.shape[1] // per_word), np.uint64)
    for column in range(padded.shape[1]):
        word, place = divmod(column, per_word)
        if columns:
            place = columns.index(place)
        words[:, word] |= padded[:, column] << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def affine(weight, bits, groups, symmetric, scale_dtype=np.float16):
    """Unsigned codes ``[O, I]``, scales and zero points ``[O, G]``, and the weight they mean.

    ``groups`` is the group of each input.
    """
    most = 2**bits - 1
    count = groups.max() + 1
    scales = np.zeros((len(weight), count), scale_dtype)
    zeros = np.full((len(weight), count), 2 ** (bits - 1))
    codes = np.zeros(weight.shape, int)
    dense = np.zeros(weight.shape, np.float32)
    for group in range(count):
        part = weight[:, groups == group]
        if symmetric:
            scale = np.abs(part).max(1) / (2 ** (bits - 1) - 1)
        else:
            scale = (part.max(1) - part.min(1)) / most
        scales[:, group] = scale
        scale = scales[:, group].astype(np.float32)
        if not symmetric:
            zeros[:, group] = np.clip(np.rint(-part.min(1) / scale), 0, most)
        zero = zeros[:, group][:, None]
        part_codes = np.clip(np.rint(part / scale[:, None]) + zero, 0, most)
        codes[:, groups == group] = part_codes
        dense[:, groups == group] = (part_codes - zero) * scale[:, None]
    return codes, scales, zeros, dense


def gptq(bits=4, group=32, symmetric=True, act_order=False, version=1):
    def write(weight):
        inputs = weight.shape[1]
        groups = np.arange(inputs) // group
        if act_order:  # the same for weights with the same inputs
            groups = np.random.default_rng(inputs).permutation(groups)
        codes, scales, zeros, dense = affine(weight, bits, groups, symmetric)
        stored_zeros = (zeros - (version == 1)) % 2**bits
        tensors = {
            "qweight": words_of(codes, bits).T,
            "qzeros": words_of(stored_zeros.T, bits),
            "scales": scales.T,
            "g_idx": groups.astype(np.int32),
            "bias": np.zeros(len(weight), np.float16),
        }
        return tensors, dense

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    form = "gptq" if version == 1 else "gptq_v2"
    return write, settings | {"desc_act": act_order, "checkpoint_format": form}


def awq(group=32):
    def write(weight):
        groups = np.arange(weight.shape[1]) // group
        codes, scales, zeros, dense = affine(weight, 4, groups, False)
        tensors = {
            "qweight": words_of(codes.T, 4, AWQ_COLUMNS),
            "qzeros": words_of(zeros.T, 4, AWQ_COLUMNS),
            "scales": scales.T,
        }
        return tensors, dense

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return write, settings | {"version": "gemm", "modules_to_not_convert": ["lm_head"]}


def fp8(block=None, name="weight_scale_inv", method="fp8", scale_dtype=np.float32):
    """Scales per block, or one for the whole weight."""

    def write(weight):
        rows, columns = block or weight.shape
        counts = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales = np.zeros(counts, scale_dtype)
        codes = np.zeros(weight.shape, FP8)
        dense = np.zeros(weight.shape, np.float32)
        for i in range(counts[0]):
            for j in range(counts[1]):
                place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = np.abs(weight[place]).max() / 448
                scale = scales[i, j].astype(np.float32)
                codes[place] = (weight[place] / scale).astype(FP8)
                dense[place] = codes[place].astype(np.float32) * scale
        return {"weight": codes, name: scales if block else scales.reshape(())}, dense

    settings = {"quant_method": method, "activation_scheme": "dynamic"}
    return write, settings | ({"weight_block_size": list(block)} if block else {})


def mx_groups(weight):
    """FP4 codes (4 bits each) ``[O, I]``, E8M0 exponents ``[O, G]``, and the weight they mean."""
    parts = weight.reshape(len(weight), -1, 32)
    exponents = np.floor(np.log2(np.abs(parts).max(-1))) - 2
    scaled = parts / 2.0 ** exponents[..., None]
    nearest = np.abs(np.abs(scaled)[..., None] - np.array(FP4_VALUES)).argmin(-1)
    codes = (nearest | (scaled < 0) * 8).reshape(weight.shape).astype(np.uint8)
    values = np.array([*FP4_VALUES, *(-value for value in FP4_VALUES)], np.float32)
    dense = values[codes] * np.repeat(2.0**exponents, 32, axis=1).astype(np.float32)
    return codes, (exponents + 127).astype(np.uint8), dense.astype(np.float32)


def mxfp4(prefix="weight_"):
    def write(weight):
        codes, exponents, dense = mx_groups(weight)
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        blocks = pairs.reshape(len(weight), -1, 16)
        return {f"{prefix}blocks": blocks, f"{prefix}scales": exponents}, dense

    return write, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def compressed(form, **weights):
    """The settings of compressed-tensors with one group of weights."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def ct_packed(bits=4, group=32, symmetric=True):
    def write(weight):
        inputs = weight.shape[1]
        groups = np.arange(inputs) // (group or inputs)
        codes, scales, zeros, dense = affine(weight, bits, groups, symmetric, ml_dtypes.bfloat16)
        tensors = {
            "weight_packed": words_of(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_of(zeros.T, bits).T
        return tensors, dense

    strategy = "group" if group else "channel"
    settings = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group}
    return write, compressed("pack-quantized", **settings, symmetric=symmetric)


def ct_int(strategy="channel", symmetric=True):
    def write(weight):
        groups = np.zeros(weight.shape[1], int)
        codes, scales, zeros, dense = affine(weight, 8, groups, symmetric, np.float32)
        tensors = {"weight": (codes - 128).astype(np.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).astype(np.int8)
        return tensors, dense

    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": symmetric}
    return write, compressed("int-quantized", **weights)


def ct_float(strategy, block=None):
    def write(weight):
        shape = {"channel": (1, weight.shape[1]), "tensor": None, "block": block}[strategy]
        tensors, dense = fp8(shape, "weight_scale")[0](weight)
        if strategy == "tensor":
            tensors["weight_scale"] = tensors["weight_scale"].reshape(1)
        return tensors | {"input_scale": np.ones(1, np.float32)}, dense

    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    if block:
        weights["block_structure"] = list(block)
    return write, compressed("float-quantized", **weights)


def ct_mxfp4():
    def write(weight):
        codes, exponents, dense = mx_groups(weight)
        return {
            "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
            "weight_scale": exponents,
        }, dense

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return write, compressed("mxfp4-pack-quantized", **weights)


def ct_nvfp4():
    def write(weight):
        parts = weight.reshape(len(weight), -1, 16)
        whole = np.float32(448 * 6 / np.abs(weight).max())
        scales = (np.abs(parts).max(-1) / 6 * whole).astype(FP8)
        scale = scales.astype(np.float32) / whole
        scaled = parts / scale[..., None]
        nearest = np.abs(np.abs(scaled)[..., None] - np.array(FP4_VALUES)).argmin(-1)
        codes = (nearest | (scaled < 0) * 8).reshape(weight.shape).astype(np.uint8)
        values = np.array([*FP4_VALUES, *(-value for value in FP4_VALUES)], np.float32)
        tensors = {
            "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
            "weight_scale": scales,
            "weight_global_scale": whole.reshape(1),
        }
        return tensors, values[codes] * np.repeat(scale, 16, axis=1)

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return write, compressed("nvfp4-pack-quantized", **weights)


# Every form that is read: its writer and its settings.
FORMS = {
    "gptq": gptq(),
    "gptq-zero-points": gptq(symmetric=False),
    "gptq-v2": gptq(symmetric=False, version=2),
    "gptq-act-order": gptq(symmetric=False, act_order=True),
    "gptq-8-bits": gptq(bits=8, symmetric=False),
    "awq": awq(),
    "fp8-blocks": fp8((16, 32)),
    "fp8-uneven-blocks": fp8((40, 24)),
    "fp8-whole": fp8(),
    "fp8-weight-scale": fp8(name="weight_scale"),
    "mxfp4": mxfp4(),
    "ct-packed": ct_packed(),
    "ct-packed-zero-points": ct_packed(symmetric=False),
    "ct-packed-channel": ct_packed(group=None),
    "ct-packed-8-bits": ct_packed(bits=8),
    "ct-int": ct_int(),
    "ct-int-zero-points": ct_int(symmetric=False),
    "ct-float-tensor": ct_float("tensor"),
    "ct-float-channel": ct_float("channel"),
    "ct-float-block": ct_float("block", (32, 16)),
    "ct-mxfp4": ct_mxfp4(),
    "ct-nvfp4": ct_nvfp4(),
}


def is_linear(name):
    return name.endswith("proj.weight")


def quantize_directory(directory, form):
    """Quantizes the linear weights of a directory in place; returns all weights, dequantized."""
    write, settings = FORMS[form] if isinstance(form, str) else form
    plain = load_file(directory / WEIGHTS)
    stored = {}
    dense = {}
    for name, weight in plain.items():
        if not is_linear(name):
            stored[name] = dense[name] = weight
            continue
        tensors, dense[name] = write(weight)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
    save_tensors(directory / WEIGHTS, stored)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config))
    return dense


NAMES = {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def save_tensors(path, tensors):
    """A safetensors file by hand: the library writes no 8-bit floats out of NumPy arrays."""
    header = {}
    data = []
    start = 0
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor).tobytes()
        kind = NAMES.get(tensor.dtype.name) or f"{tensor.dtype.kind}{8 * tensor.itemsize}".upper()
        offsets = [start, start + len(raw)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        data.append(raw)
        start += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def load_tensors(path):
    """All tensors of such a file."""
    file = SafetensorsFile(path)
    return {name: file.get_tensor(name) for name in list(file.keys())}
