"""Hostile files and options, each of which must be refused with a one-line error.

A case is a function of an empty directory. It writes its file there and reads it as the programs
do. It fails if the file is accepted, if anything but a SpecjaxError is raised, or if it hangs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from infer.run import commands
from infer.unpickle import write_safetensors
from specjax._util.errors import OptionError
from specjax.lm import load
from specjax.models.hf.layout import INDEX, WEIGHTS
from specjax.models.hf.read import load_config
from specjax.registry import compose, method
from specjax.rewards import combine
from specjax.text.tokenizer import Tokenizer
from support import variants
from support.checkpoints import shard
from train.config import LMConfig, SDSATConfig, from_toml
from train.data.corpus import load_corpus
from train.data.encoding import Plain, TextEncoder
from train.data.reading import Document
from train.data.tokenizer import load_tokenizer

Case = Callable[[Path], Any]
DEEP = 100_000
HUGE, LONG = 10**30, "9" * 5000
NAN, INF = math.nan, math.inf


# --- config.json ------------------------------------------------------------------------------

BASES = {family: variants.config(name) for family, name in variants.FIRST.items()} | {
    "llama": variants.BASE,
    "mistral": variants.config("mistral"),
}
NO_SIZES = (0, -1, 1.5, "8", True, [8], {}, 2**63, HUGE)
NO_NUMBERS = (0, -1, NAN, INF, -INF, "1", True, [1.0], {}, 10**400, 1e300, 1e-300)
NO_IDS = ("x", -1, 61, 2**40, 1.5, True, [1, -1], [True], [[1]], {}, ["x"], [61], NAN)
NO_FLAGS = ("false", 2, [], {}, 0.5, NAN)
NO_TEXTS = ([], {}, 5, True, "no such thing", ["silu"], "\ud800")
KEYS = {  # family → keys and what none of them may be
    "llama": {
        (
            "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
            "intermediate_size max_position_embeddings head_dim"
        ): NO_SIZES,
        "rms_norm_eps rope_theta": NO_NUMBERS,
        "eos_token_id bos_token_id pad_token_id adaptive_ids": NO_IDS,
        "tie_word_embeddings attention_bias mlp_bias": NO_FLAGS,
        "hidden_act model_type": NO_TEXTS,
        "rope_scaling": ([1], "x", 5, True),
        "original_max_position_embeddings": NO_SIZES,
        "architectures": ("LlamaForCausalLM", [5], [["x"]], {}, True, ["x" * 10**5], ["a\nb"]),
        "is_encoder_decoder": (True, "x", 1),
        "num_hidden_layers": (10**7, 2**31 - 1),
        "hidden_size num_attention_heads": (2**31,),
    },
    "mistral": {"sliding_window": NO_SIZES},
    "qwen2": {
        "use_sliding_window": NO_FLAGS,
        "max_window_layers": ("x", -1, 1.5, [], {}, True, HUGE),
        "layer_types": (["x", "y"], [1, 2], "ab", 5, {}, [[], []], ["full_attention"]),
    },
    "gpt2": {
        "n_embd n_layer n_head n_positions n_inner": NO_SIZES,
        "layer_norm_epsilon": NO_NUMBERS,
        "activation_function": NO_TEXTS,
        "scale_attn_weights": NO_FLAGS,
    },
    "gpt_neox": {
        "rotary_pct": (*NO_NUMBERS, 2, 0.01),
        "rotary_emb_base layer_norm_eps": NO_NUMBERS,
        "use_parallel_residual": NO_FLAGS,
        "rope_scaling": ([], "x", {"partial_rotary_factor": "x"}),
    },
    "opt": {
        "ffn_dim word_embed_proj_dim": NO_SIZES,
        "do_layer_norm_before enable_bias _remove_final_layer_norm": NO_FLAGS,
    },
    "bloom": {"n_layer n_head seq_length": NO_SIZES},
    "gemma2": {
        "attn_logit_softcapping final_logit_softcapping": NO_NUMBERS,
        "query_pre_attn_scalar sliding_window": NO_SIZES,
    },
    "gemma3_text": {
        "sliding_window_pattern": NO_SIZES,
        "rope_local_base_freq": NO_NUMBERS,
        "rope_parameters": (
            [1],
            {"full_attention": []},
            {"full_attention": {"rope_theta": -1}, "sliding_attention": {}},
        ),
    },
}
KEYS["gemma2"]["layer_types"] = KEYS["qwen2"]["layer_types"]
ROPES = {
    "linear": {"factor": (*NO_NUMBERS, None), "rope_theta": NO_NUMBERS},
    "dynamic": {"factor": NO_NUMBERS},
    "llama3": {
        "factor low_freq_factor high_freq_factor": NO_NUMBERS,
        "original_max_position_embeddings": NO_SIZES,
        "low_freq_factor": (4.0, 5),
    },
    "yarn": {
        "factor beta_fast beta_slow attention_factor": NO_NUMBERS,
        "mscale mscale_all_dim": (-1, NAN, INF, "1", True, []),
        "original_max_position_embeddings": NO_SIZES,
        "truncate finetuned": NO_FLAGS,
        "beta_slow": (64,),
    },
    "default": {"rope_type type": (["linear"], {}, 5, True), "rope_type": ("x",)},
}


def config(family: str, **changes: Any) -> Case:
    """A config.json with some values changed."""
    return lambda home: read_changed(home, json.dumps(BASES[family] | changes))


def read_changed(home: Path, text: str | bytes) -> Any:
    (home / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(home)


def configs() -> Iterator[tuple[str, Case]]:
    for family, keys in KEYS.items():
        for names, values in keys.items():
            for name in names.split():
                for value in values:
                    yield f"{family} {name} {short(value)}", config(family, **{name: value})
    for kind, keys in ROPES.items():
        good = {"rope_type": kind, "factor": 2.0} | (
            {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
        )
        for names, values in keys.items():
            for name in names.split():
                for value in values:
                    scaling = good | {name: value}
                    yield (
                        f"rope {kind} {name} {short(value)}",
                        config("llama", rope_scaling=scaling),
                    )
    yield "rope_parameters negative", config("llama", rope_parameters={"rope_theta": -1})
    yield "an odd head", config("llama", head_dim=7)
    yield "yarn base one", config("llama", rope_theta=1, rope_scaling=good | {"rope_type": "yarn"})


def short(value: Any) -> str:
    return ascii(value)[:40]


# --- invalid JSON -----------------------------------------------------------------------------

TEXTS = {
    "empty": b"",
    "deep list": b"[" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "deep value": b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "long integer": b'{"vocab_size": ' + LONG.encode() + b"}",
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "NUL": b"\0" * 100,
    "a number": b"5",
    "NaN": b"NaN",
    "null": b"null",
    "a string": b'"x"',
    "half": b'{"vocab_size": 6',
}


def put(name: str, content: bytes) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        path = directory / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    return write


def make_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def make_directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def make_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def make_unreadable(path: Path) -> None:
    """Makes the file 1 TiB long (sparse, so it takes no space): too large to read."""
    with path.open("ab") as file:
        file.truncate(1 << 40)


NO_FILES = {
    "fifo": make_fifo,
    "loop": make_loop,
    "directory": make_directory,
    "device": make_device,
    "huge": make_unreadable,
}
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
TEXT_FILES = (*JSON_FILES, "chat_template.jinja")


class Models:
    """A saved model, made once; cases break copies of it."""

    saved: Path

    @classmethod
    def copy(cls, home: Path) -> Path:
        shutil.copytree(cls.saved, home / "model")
        return home / "model"


def model(change: Callable[[Path], Any], **options: Any) -> Case:
    """A model directory with something broken, loaded."""

    def case(home: Path) -> Any:
        directory = Models.copy(home)
        change(directory)
        return load(directory, **options)

    return case


GENERATION = {
    "temperature": (-1, NAN, INF, "hot", [], {}, True),
    "top_k": (-2, 1.5, "x", [], {}, True, HUGE),
    "top_p": (-1, 1.5, NAN, "x", [], {}, True),
    "do_sample": NO_FLAGS,
}


def texts() -> Iterator[tuple[str, Case]]:
    for name in (*JSON_FILES, INDEX):
        for said, content in TEXTS.items():
            if name == INDEX:
                yield f"{name} {said}", model(lambda d, c=content: (shard(d), put(INDEX, c)(d)))
            else:
                yield f"{name} {said}", model(put(name, content))
    for key in ("eos_token_id",):
        for value in NO_IDS:
            value = 500 if value == 61 else [500] if value == [61] else value
            content = json.dumps({key: value}).encode()
            if value != {}:
                yield (
                    f"generation_config {key} {short(value)}",
                    model(put("generation_config.json", content)),
                )
    for names, values in GENERATION.items():
        for key in names.split():
            for value in values:
                content = json.dumps({"do_sample": True} | {key: value}).encode()
                yield (
                    f"generation_config {key} {short(value)}",
                    model(put("generation_config.json", content)),
                )
    for key in ("bos_token", "eos_token", "chat_template"):
        for value in (5, [5], True, {"content": 5}, ["x"], [{"name": "default"}], {"a": "b"}):
            if not (key == "chat_template" and value == {"content": 5}):
                content = json.dumps({key: value}).encode()
                yield (
                    f"tokenizer_config {key} {short(value)}",
                    model(put("tokenizer_config.json", content)),
                )
    content = json.dumps({"chat_template": [{"name": ["x"], "template": 5}]}).encode()
    yield "chat_template of lists", model(put("tokenizer_config.json", content))
    yield "chat_template not UTF-8", model(put("chat_template.jinja", b"\xff"))


# --- safetensors ------------------------------------------------------------------------------


def safetensors(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    """A safetensors file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EMBED = "model.embed_tokens.weight"
HEADERS = {
    "size beyond the file": safetensors(b"{}", size=1 << 40),
    "size of 2^63": safetensors(b"{}", size=1 << 63),
    "size of 2^64": safetensors(b"{}", size=(1 << 64) - 1),
    "no JSON": safetensors(b"{{{{"),
    "deep": safetensors(b"[" * DEEP),
    "deep value": safetensors(b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "a list": safetensors([]),
    "not UTF-8": safetensors(b'{"\xff": 1}'),
    "a negative shape": safetensors({"a": entry([-2])}, b"\0" * 8),
    "a huge shape": safetensors({"a": entry([2**62, 2**62])}, b"\0" * 8),
    "offsets beyond": safetensors({"a": entry([2], [0, 1 << 40])}, b"\0" * 8),
    "offsets backwards": safetensors({"a": entry([2], [8, 0])}, b"\0" * 8),
    "overlapping": safetensors({"a": entry(), "b": entry()}, b"\0" * 8),
    "a hole": safetensors({"a": entry(), "b": entry([2], [16, 24])}, b"\0" * 24),
    "an unknown dtype": safetensors({"a": entry(dtype="X9")}, b"\0" * 8),
    "a dtype of numbers": safetensors({"a": entry(dtype=5)}, b"\0" * 8),
    "an empty model": safetensors({}),
    "another tensor": safetensors({"a": entry()}, b"\0" * 8),
    "an embedding alone": safetensors({EMBED: entry()}, b"\0" * 8),
    "a line break in a name": safetensors({"a\nb\u2028c": entry()}, b"\0" * 8),
    "a long name": safetensors({"a" * 100_000: entry()}, b"\0" * 8),
    "metadata of numbers": safetensors({"__metadata__": {"a": 1}}),
    "seven bytes": b"\0" * 7,
}
MAPS = {
    "a list": [],
    "numbers": {EMBED: 5},
    "outside": {EMBED: "../a.safetensors"},
    "absolute": {EMBED: "/etc/passwd"},
    "a surrogate": {EMBED: "\ud800.safetensors"},
    "a long name": {EMBED: "a" * 5000},
    "a line break": {EMBED: "a\nb.safetensors"},
    "a config": {EMBED: "config.json"},
    "empty": {},
}


def set_dtype(directory: Path, dtype: type) -> None:
    tensors = load_file(directory / WEIGHTS)
    save_file({name: x.astype(dtype) for name, x in tensors.items()}, directory / WEIGHTS)


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def weights() -> Iterator[tuple[str, Case]]:
    for said, content in HEADERS.items():
        yield f"safetensors {said}", model(put(WEIGHTS, content))
    for said, held in MAPS.items():
        content = json.dumps({"weight_map": held}).encode()
        yield f"index {said}", model(lambda d, c=content: (shard(d), put(INDEX, c)(d)))
    for dtype in (np.float64, np.int32, np.bool_, np.complex64):
        yield f"stored {dtype.__name__}", model(lambda d, t=dtype: set_dtype(d, t))
    for key in ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"):
        for value in (1, 1000, 10**7, 2**31 - 4):
            yield f"files against {key} {value}", model(edit(**{key: value}))
    yield "heads against the files", model(edit(num_attention_heads=2, num_key_value_heads=2))


# --- tokenizers -------------------------------------------------------------------------------


def template(ids: list[int], known: bool = True) -> dict[str, Any]:
    special = {"A": {"id": "A", "ids": ids, "tokens": ["A"] * len(ids)}} if known else {}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "A", "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": special,
    }


def unigram(vocab: list[Any], unk: int | None) -> dict[str, Any]:
    return {"type": "Unigram", "unk_id": unk, "vocab": vocab, "byte_fallback": False}


TOKENIZERS: dict[str, tuple[tuple[str, ...], Any]] = {  # (path of keys, bad value)
    "a long prefix": (("model", "continuing_subword_prefix"), "é" * 50),
    "an id of 2^40": (("model", "vocab", "zz"), 2**40),
    "an id of 2^32-1": (("model", "vocab", "zz"), 2**32 - 1),
    "an id of 3e9": (("model", "vocab", "zz"), 3 * 10**9),
    "a negative id": (("model", "vocab", "zz"), -1),
    "unknown merges": (("model", "merges"), [["q§", "z§"]]),
    "no vocabulary": (("model", "vocab"), {}),
    "a frame of no token": (("post_processor",), template([], known=False)),
    "a frame of 2^32-1": (("post_processor",), template([2**32 - 1])),
    "a frame beyond": (("post_processor",), template([10**6])),
    "a broken pattern": (
        ("pre_tokenizer",),
        {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    ),
    "a broken charsmap": (
        ("normalizer",),
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    ),
    "nothing replaced": (
        ("normalizer",),
        {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    ),
    "pieces of length 0": (("pre_tokenizer",), {"type": "FixedLength", "length": 0}),
    "no unigrams": (("model",), unigram([], None)),
    "an unknown unigram": (("model",), unigram([["a", 0.0]], 99)),
    "no unknown unigram": (("model",), unigram([["a", 0.0]], None)),
    "no unknown word": (
        ("model",),
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"},
    ),
    "a model of no type": (("model",), {"type": "X"}),
    "a dropout of 5": (("model", "dropout"), 5.0),
    "a decoder of numbers": (("decoder",), 5),
}


# A pattern that tries 2^n ways to match n letters: Rust panics when it has tried too many.
BACKTRACKING = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {"Regex": "(a|a)+$"},
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


def changed_tokenizer(where: tuple[str, ...], value: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "tokenizer.json"
        whole = json.loads(path.read_text())
        part = whole
        for name in where[:-1]:
            part = part[name]
        part[where[-1]] = value
        path.write_text(json.dumps(whole))

    return change


def for_training(change: Callable[[Path], None]) -> Case:
    def case(home: Path) -> Any:
        directory = Models.copy(home)
        change(directory)
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        return tokenizer.encode("a b").ids

    return case


def tokenizers() -> Iterator[tuple[str, Case]]:
    for said, (where, value) in TOKENIZERS.items():
        change = changed_tokenizer(where, value)
        yield f"tokenizer {said}", model(change)
        if not any(word in said for word in ("frame of 2", "frame beyond", "id of")):
            yield f"tokenizer to train with {said}", for_training(change)

    def sentencepiece(directory: Path) -> None:
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer.model").write_bytes(b"\x0a\xff\xff\xff\xff\xff")

    yield "tokenizer.model of garbage", model(sentencepiece)

    def vocab(directory: Path) -> None:
        (directory / "tokenizer.json").unlink()
        (directory / "vocab.json").write_text("[1]")

    yield "vocab.json of a list", model(vocab)

    change = changed_tokenizer(("pre_tokenizer",), BACKTRACKING)
    text = "a" * 40 + "b"

    def encoded(home: Path) -> Any:
        change(Models.copy(home))
        return Tokenizer.from_directory(home / "model").encode(text)

    def encoded_for_training(home: Path) -> Any:
        change(Models.copy(home))
        tokenizer = load_tokenizer(home / "model" / "tokenizer.json")
        encoder = TextEncoder(tokenizer.to_str(), Plain())
        return list(encoder([Document("name", text)]))

    yield "tokenizer that backtracks", encoded
    yield "tokenizer to train with that backtracks", encoded_for_training


# --- pickles and classifiers ------------------------------------------------------------------


def pickles() -> Iterator[tuple[str, Case]]:
    def odd(make: Callable[[Any, Any], Any]) -> Callable[[Path], Path]:
        def change(directory: Path) -> Path:
            import torch

            tensors = {
                name: torch.from_numpy(x) for name, x in load_file(directory / WEIGHTS).items()
            }
            (directory / WEIGHTS).unlink()
            torch.save(make(torch, tensors), directory / "pytorch_model.bin")
            return directory

        return change

    def replaced(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda torch, held: held | {EMBED: make(torch, held[EMBED])}

    kinds = {
        "sparse": replaced(lambda torch, x: x.to_sparse()),
        "sparse rows": replaced(lambda torch, x: x.to_sparse_csr()),
        "meta": replaced(lambda torch, x: x.to("meta")),
        "quantized": replaced(lambda torch, x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        "integers": replaced(lambda torch, x: x.to(torch.int32)),
        "complex": replaced(lambda torch, x: x.to(torch.complex64)),
        "conjugate": replaced(lambda torch, x: x.to(torch.complex64).conj()),
        "nested": replaced(lambda torch, x: {"a": x}),
        "nested tensors": replaced(lambda torch, x: torch.nested.nested_tensor([x, x[:1]])),
        "integer keys": lambda torch, held: held | {5: held[EMBED]},
        "only integer keys": lambda torch, held: dict(enumerate(held.values())),
        "tuple keys": lambda torch, held: held | {(1, 2): held[EMBED]},
        "a list": lambda torch, held: list(held.values()),
        "expanded": lambda torch, held: held | {EMBED: torch.zeros(1).expand(1 << 20, 1 << 20)},
        "an odd name": lambda torch, held: held | {"a\nb\ud800": held[EMBED]},
    }
    for said, make in kinds.items():
        yield f"pickle {said}", model(odd(make), pickles=True)
        if said not in ("integers", "complex", "conjugate"):  # safetensors can hold these

            def convert(home: Path, make: Any = make) -> Any:
                directory = odd(make)(Models.copy(home))
                return write_safetensors(directory, home / "out")

            yield f"converted {said}", convert
    for said, content in TEXTS.items():

        def garbage(directory: Path, content: bytes = content) -> None:
            (directory / WEIGHTS).unlink()
            put("pytorch_model.bin", content)(directory)

        yield f"pickle {said}", model(garbage, pickles=True)


def classifiers() -> Iterator[tuple[str, Case]]:
    from transformers import BertConfig, BertForSequenceClassification

    small = {
        "vocab_size": 500,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }

    def case(change: Callable[[Path], Any]) -> Case:
        def act(home: Path) -> Any:
            directory = Models.copy(home)
            BertForSequenceClassification(BertConfig(**small)).save_pretrained(directory)
            change(directory)
            reward = combine(f"classifier:{directory}").parts[0]
            reward.check(Tokenizer.from_directory(Models.saved), [{}])

        return act

    def change(key: str, value: Any) -> Callable[[Path], None]:
        return edit(**{key: value})

    def labels(count: int) -> Callable[[Path], None]:
        names = {str(i): f"L{i}" for i in range(count)}
        return edit(id2label=names, label2id={v: int(k) for k, v in names.items()})

    def drop(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        kept = {name: x for name, x in tensors.items() if not name.startswith("classifier")}
        save_file(kept, directory / WEIGHTS, metadata={"format": "pt"})

    yield "classifier of other labels", case(labels(5))
    yield "classifier of no label", case(labels(0))
    yield "classifier without its head", case(drop)
    yield "classifier hidden_size", case(change("hidden_size", 32))
    yield "classifier negative layers", case(change("num_hidden_layers", -1))
    yield "classifier of texts", case(change("hidden_size", "x"))
    yield "classifier model_type", case(change("model_type", "no_such"))
    yield "classifier model_type list", case(change("model_type", ["bert"]))
    yield "classifier too few words", case(change("vocab_size", 5))
    yield "classifier broken config", case(put("config.json", b"[" * DEEP))
    yield "classifier broken weights", case(put(WEIGHTS, b"x" * 50))
    yield "classifier broken tokenizer", case(put("tokenizer.json", b"{}"))
    yield (
        "classifier that is none",
        case(lambda d: shutil.copytree(Models.saved, d, dirs_exist_ok=True)),
    )


# --- training configs -------------------------------------------------------------------------

SETTINGS = {  # key → values that must be refused
    (
        "model.hidden_size model.num_layers model.num_heads model.intermediate_size "
        "model.max_position data.seq_len optim.total_steps optim.batch_size optim.accumulate "
        "run.log_every run.eval_every run.checkpoint_every run.keep"
    ): ("0", "-1", "1.5", "true", '"x"', "[1]", "{}", "nan", str(2**63), LONG, "0x" + "f" * 5000),
    (
        "model.num_kv_heads optim.warmup_steps run.seed run.eval_batches tokenizer.vocab_size "
        "run.patience run.sample_tokens"
    ): (
        "-1",
        "1.5",
        "true",
        "nan",
        str(2**63),
        LONG,
        str(-(2**70)),
    ),
    "tokenizer.vocab_size": ("3", "0", "260", str(2**31), str(10**9)),
    "model.num_layers": (str(10**7), str(10**5)),
    "run.seed": (str(2**32),),
    "optim.clip_norm": ("-1", "nan", "inf", '"x"', "1e300"),  # 0: not clipped
    (
        "model.rope_theta optim.learning_rate optim.muon_learning_rate "
        "distill.temperature optim.epsilon"
    ): ("0", "-1", "nan", "inf", "-inf", "true", '"x"', "1e400", "9" * 400, "1e300"),
    "optim.beta1 optim.beta2 optim.muon_momentum optim.decay_fraction distill.alpha": (
        *("-0.1", "1.5", "nan", "inf"),
    ),
    "optim.num_epochs": ("-1", "nan", "inf", "true", '"x"', "1e400"),
    "optim.optimizer optim.schedule run.export_dtype run.keep_best": ('"x"', "5", "[]", "true"),
    "data.corpora data.files data.eval": ("5", '"x"', "[5]", '["a", 5]', "{}"),
    "run.dir model.init_from": ("5", "[]", "true", '"a\\u0000b"'),
    "run.tensorboard model.tie_embeddings": ("1", '"true"', "[]"),
    "model data optim run": ("5", "[]"),
    "no.such optim.nothing model.a.b": ("1",),
    "optim.total_steps.x": ("1",),
}
TUNED = {
    "sdsat.window sdsat.decode_tokens model.lora_rank mesh.fsdp": ("0", "-1", str(2**63), "1e9"),
    "mesh.model": ("0", "-1", str(2**63), "1e9"),
    "sdsat.ids": ("[-1]", "[true]", "[1.5]", f"[{2**63}]", '["x"]', "5"),
    "sdsat.mix sdsat.fim_rate sdsat.start_rate": ("-1", "2", "nan", '"x"'),
    "sdsat.window": (str(10**6),),
    "mesh.memory_gib sdsat.weight": ("-1", "nan", "inf", "1e300"),
    "mesh.devices sdsat.probe_length sdsat.decode_prompts": ("-1", str(2**40)),
}
TOMLS = {
    "deep": b"a = " + b"[" * DEEP,
    "deep keys": b".".join([b"a"] * DEEP) + b" = 1",
    "not UTF-8": b"a = '\xff'",
    "long integer": b"[run]\nseed = " + LONG.encode(),
    "NUL": b"\0" * 10,
    "half": b"[run",
    "twice": b"[run]\nseed = 1\nseed = 2",
    "a value for a section": b"run = 5",
    "a list of sections": b"[[run]]\nseed = 1",
    "rows beyond int32": b"[data]\nseq_len = 2000000\n[optim]\nbatch_size = 60000",
}


def toml(cls: type, content: bytes, *overrides: str) -> Case:
    def case(home: Path) -> Any:
        path = home / "config.toml"
        path.write_bytes(content)
        return from_toml(cls, path, overrides)

    return case


def trainings() -> Iterator[tuple[str, Case]]:
    for cls, settings in ((LMConfig, SETTINGS), (SDSATConfig, TUNED)):
        for names, values in settings.items():
            for name in names.split():
                for value in values:
                    yield f"train {name}={value[:20]}", toml(cls, b"", f"{name}={value}")
    for said, content in TOMLS.items():
        yield f"toml {said}", toml(LMConfig, content)
    for said in (
        "",
        "=",
        "a",
        "a=1",
        ".=1",
        "a.=1",
        ".a=1",
        "run.seed",
        "run.seed=[[[[" + "[" * DEEP,
    ):
        yield f"train --set {said[:20]}", toml(LMConfig, b"", said)

    def jsonl(content: bytes) -> Case:
        def case(home: Path) -> Any:
            (home / "a.jsonl").write_bytes(content)
            return load_corpus((), (str(home / "a.jsonl"),))

        return case

    for said, content in TEXTS.items():
        yield f"corpus {said}", jsonl(content)
    yield "corpus of surrogates", jsonl(b'{"text": "\\ud800' + b"a" * 300 + b'"}')
    yield "corpus not UTF-8", jsonl(b'{"text": "\xff' + b"a" * 300 + b'"}')


# --- arguments and options --------------------------------------------------------------------

ARGUMENTS = (
    "--num-samples 1000000000",
    "--num-samples 2147483647",
    "--num-samples -1",
    "--num-samples 1e3",
    "--batch-size -1",
    "--batch-size 99999999999",
    f"--batch-size {LONG}",
    "--batch-size 1000000000",
    "--max-new-tokens 0",
    f"--max-new-tokens {10**12}",
    "--seed -1",
    f"--seed {2**64}",
    f"--seed {LONG}",
    "--temperature nan",
    "--temperature inf",
    "--temperature 1e400",
    "--temperature -0.1",
    "--top-p nan",
    "--top-p 0",
    "--top-k -1",
    f"--top-k {2**40}",
    "--memory nan",
    "--memory -1",
    "--memory 1e300",
    "--mesh data=0",
    f"--mesh data={LONG}",
    "--mesh data=-1",
    "--mesh x=1",
    "--mesh data=²",
    "--set gamma",
    "--set =3",
)
OPTIONS = (
    ("speculative", "gamma", ("0", "-1", "65", LONG, "1e400", "nan", "²", "", "1.5")),
    ("specinfer", "branching", ("0", "x", "1,,2", "-1", LONG)),
    ("specinfer", "replacement", ("maybe", "1", "")),
    ("mentored", "max_kl", ("nan", "-1", "x")),
    ("mtad", "tau", ("nan", "1", "-1", "inf", "x")),
    ("scd", "alpha", ("nan", "0", "2", "inf")),
    ("bild", "stop", ("maybe", "")),
)
REWARDS = (
    "regex:" + "(" * 10_000,
    "regex:" + "(" * 5000 + ")" * 5000,
    "regex:x{99999999999}",
    "regex:(?P<a",
    "regex:[",
    f"length:{LONG}",
    "length:0",
    "length:99999999999",
    "length:5-2",
    "length:-1",
    "length:²",
    "classifier:",
    "classifier:/dev/zero",
    "classifier:a\0b",
    "support.no_module:f",
    "support.breaks:f",
    "support.hostile:DEEP",
    "os.:getcwd",
    ".os:getcwd",
    "..:x",
    "json:x",
    "nothing",
    "",
)


def arguments() -> Iterator[tuple[str, Case]]:
    for line in ARGUMENTS:
        yield f"run {line[:40]}", lambda home, line=line: parse(*line.split())
    for name, option, values in OPTIONS:
        for value in values:
            yield (
                f"{name} {option}={short(value)}",
                lambda home, m=name, o=option, v=value: method(m).resolve({o: v}),
            )
    for text in REWARDS:
        yield f"reward {text[:30]!r} {len(text)}", lambda home, text=text: combine(text)
    yield "a rule of 5000 letters", lambda home: compose("chain", "a" * 5000, "warped").resolve({})
    yield "a method of two lines", lambda home: method("a\nb\u2028c\x85")


def parse(*argv: str) -> Any:
    """The arguments of ``infer.run``; a mistake ends in argparse's exit."""
    try:
        return commands.parser().parse_args(argv)
    except SystemExit as stop:
        assert stop.code == 2
        raise OptionError("as argparse said") from None


WORDS = {
    "an empty word": [""],
    "a space": [" "],
    "a long word": ["a" * 33],
    "half a pair": ["\ud800"],
    "exact half a pair": ["=\udcff"],
    "an exact nothing": ["="],
    "many words": [f"w{i}" for i in range(100_000)],
}


def lexicals() -> Iterator[tuple[str, Case]]:
    for said, words in WORDS.items():
        for name in ("lexical", "forbidden"):

            def case(home: Path, name: str = name, words: list[str] = words) -> Any:
                reward = combine(name).parts[0]
                reward.check(Tokenizer.from_directory(Models.saved), [{name: words}])

            yield f"{name} {said}", case


# --- paths where a file is expected and something else is found --------------------------------


def places() -> Iterator[tuple[str, Case]]:
    """Each file that is read, replaced by something else, such as a FIFO, which blocks readers."""
    for said, make in NO_FILES.items():
        for name in (*TEXT_FILES, WEIGHTS):
            yield f"{said} for {name}", model(lambda d, n=name, make=make: make(d / n))
        yield f"{said} for {INDEX}", model(lambda d, make=make: (shard(d), make(d / INDEX)))
        yield (
            f"{said} for a shard",
            model(lambda d, make=make: (shard(d), make(d / "a.safetensors"))),
        )

        def pickle(directory: Path, make: Any = make) -> None:
            (directory / WEIGHTS).unlink()
            make(directory / "pytorch_model.bin")

        yield f"{said} for a pickle", model(pickle, pickles=True)

        def training(home: Path, make: Any = make) -> Any:
            make(home / "config.toml")
            return from_toml(LMConfig, home / "config.toml")

        def tokenizer(home: Path, make: Any = make) -> Any:
            make(home / "tokenizer.json")
            return load_tokenizer(home / "tokenizer.json")

        def corpus(home: Path, make: Any = make) -> Any:
            make(home / "a.jsonl")
            return load_corpus((), (str(home / "a.jsonl"),))

        yield f"{said} for a config", training
        yield f"{said} for a tokenizer", tokenizer
        yield f"{said} for a corpus", corpus


# Groups whose cases take microseconds, and those that read whole models.
QUICK = (configs, trainings, arguments)
WHOLE = (texts, weights, tokenizers, lexicals, places)
TORCH = (pickles, classifiers)
