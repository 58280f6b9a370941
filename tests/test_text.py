"""Tokenizers, incremental decoding, chat templates, loading by name."""

import dataclasses
import json
import shutil

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax as sj
from specjax.text import IncrementalDecoder, Tokenizer
from train.corpus import Document
from train.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    """A byte-level tokenizer, and one that marks spaces as SentencePiece does."""
    text = "def f(x):\n    return x + 1  # naïve café 日本 🙂 e\u0301\n" * 40
    path = tmp_path_factory.mktemp("tok") / "tokenizer.json"
    byte_level = train_tokenizer([Document("d", text)], 300, path)
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    pieces.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"])
    pieces.train_from_iterator([text], trainer)
    return byte_level, pieces


def pieces_of(tokenizer, ids, cuts):
    decoder, out, at = IncrementalDecoder(tokenizer), [], 0
    for cut in [*cuts, len(ids)]:
        step = max(at, min(cut, len(ids)))
        out.append(decoder.push(ids[at:step]))
        at = step
    return "".join(out) + decoder.flush()


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40) | st.sampled_from(["🙂🙂 e\u0301", "日本\n\t x"]), data=st.data())
def test_pieces_concatenate_to_the_whole(backends, text, data):
    for backend in backends:
        tokenizer = Tokenizer(backend)
        ids = tokenizer.encode(text)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
        assert pieces_of(tokenizer, ids, cuts) == tokenizer.decode(ids)
        assert pieces_of(tokenizer, ids, range(len(ids))) == tokenizer.decode(ids)


def test_an_incomplete_character_is_held_back(backends):
    tokenizer = Tokenizer(backends[0])
    ids = tokenizer.encode("a\U0001f40d")
    decoder = IncrementalDecoder(tokenizer)
    shown = [decoder.push([i]) for i in ids]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == "a\U0001f40d"


def test_difference_names_what_differs(backends):
    a, b = map(Tokenizer, backends)
    assert a.difference(a) is None
    assert "ids" in a.difference(b)
    moved = json.loads(backends[0].to_str())
    vocab = moved["model"]["vocab"]
    x, y = list(vocab)[-2:]
    vocab[x], vocab[y] = vocab[y], vocab[x]
    merges = moved["model"]["merges"]
    other = tokenizers.Tokenizer.from_str(json.dumps(moved | {"model": moved["model"] | {
        "merges": merges}}))  # fmt: skip
    assert "only in the first" in a.difference(Tokenizer(other))


TEMPLATE = ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n"
            "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")  # fmt: skip


def test_chat_template(backends):
    tokenizer = Tokenizer(backends[0], TEMPLATE, {"bos_token": "<s>"})
    assert tokenizer.apply_chat("hi") == "<s>[user] hi\n[assistant]"
    with pytest.raises(sj.ModelError, match="no chat template"):
        Tokenizer(backends[0]).apply_chat("hi")


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{%"]
)
def test_chat_template_cannot_reach_out(backends, template):
    with pytest.raises(sj.ModelError, match="chat template failed"):
        Tokenizer(backends[0], template).apply_chat("hi")


def test_load_reads_everything(tiny_pair_dirs):
    lm = sj.load(tiny_pair_dirs[0])
    assert lm.eos_ids == (0,)
    assert lm.vocab_limit == lm.config.vocab_size == lm.tokenizer.vocab_size
    assert sj.load(tiny_pair_dirs[0], "bfloat16").params["embed"].dtype == "bfloat16"


def test_generation_config_knows_more_eos_ids(tiny_pair_dirs, tmp_path):
    shutil.copytree(tiny_pair_dirs[0], tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [0, 4]}')
    assert sj.load(tmp_path / "m").eos_ids == (0, 4)


def test_tokenizer_of_the_parent_directory(tiny_pair_dirs, tmp_path):
    shutil.copytree(tiny_pair_dirs[0], tmp_path / "m")
    shutil.move(tmp_path / "m" / "tokenizer.json", tmp_path / "tokenizer.json")
    assert sj.load(tmp_path / "m").tokenizer.vocab_size > 0
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(sj.ModelError, match="not a readable tokenizer"):
        sj.load(tmp_path / "m")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(sj.ModelError, match=r"no tokenizer\.json"):
        sj.load(tmp_path / "m")


def test_names_that_lead_nowhere(tiny_pair_dirs, monkeypatch):
    with pytest.raises(sj.ModelError, match="no such model directory"):
        sj.load("nowhere")
    with pytest.raises(sj.ModelError, match="int8"):
        sj.load(tiny_pair_dirs[0], "int8")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(sj.ModelError, match="nobody/nothing") as error:
        sj.load("nobody/nothing")
    assert "\n" not in str(error.value)


def test_pairs_are_checked(tiny_pair_dirs):
    target, draft = map(sj.load, tiny_pair_dirs)
    with pytest.raises(sj.PairError, match="needs a draft"):
        sj.generate(target, "x", method="speculative")
    bare = dataclasses.replace(draft, tokenizer=None)
    assert sj.generate(target, "x", method="speculative", draft=bare, max_new_tokens=2).text
    with pytest.raises(sj.PairError, match="token ids"):
        sj.generate(bare, "x")
    with pytest.raises(sj.OptionError, match="empty"):
        sj.generate(target, [[]])
    with pytest.raises(sj.OptionError, match="from 0 to"):
        sj.generate(target, [[10**6]])
