"""Tokenizers, incremental decoding, chat templates, loading by name."""

import dataclasses
import fnmatch
import functools
import itertools
import json
import shutil

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax as sj
from specjax.lm import HUB_FILES, PICKLES, locate
from specjax.registry.resolve import check_models
from specjax.text import chat
from specjax.text.incremental_decoder import IncrementalDecoder
from specjax.text.tokenizer import Tokenizer
from support.training import save_checkpoint, small_tokenizer
from train.data.corpus import Document
from train.data.tokenizer import train_tokenizer

TEXT = "def f(x):\n    return x + 1  # naïve café 日本 🙂 e\u0301\n" * 40


def metaspace():
    """Spaces are marked as in SentencePiece; the first space is not part of the text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"])
    made.train_from_iterator([TEXT], trainer)
    return made


def byte_fallback():
    """As Llama 1 and 2: pieces with marked spaces, and byte tokens for everything else."""
    pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "d", "x", "▁x", "▁▁"]
    model = tokenizers.models.BPE(
        {piece: i for i, piece in enumerate(pieces)},
        [("▁", "x"), ("▁", "▁")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["<unk>", "</s>"])
    parts = tokenizers.normalizers
    made.normalizer = parts.Sequence([parts.Prepend("▁"), parts.Replace(" ", "▁")])
    parts = tokenizers.decoders
    made.decoder = parts.Sequence(
        [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    )
    return made


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    """One tokenizer of each kind that Llama checkpoints use."""
    path = tmp_path_factory.mktemp("tok") / "tokenizer.json"
    byte_level = train_tokenizer([Document("d", TEXT)], 300, path)
    return byte_level, metaspace(), byte_fallback()


def in_pieces(tokenizer, ids, cuts):
    """The text pieces if ``ids`` are pushed in parts that end at ``cuts``."""
    decoder, edges = IncrementalDecoder(tokenizer), [0, *cuts, len(ids)]
    parts = [decoder.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    return "".join(parts) + decoder.flush()


TEXTS = st.text(max_size=40) | st.text(" \n\tdx🙂日é\u0301\u200d", max_size=20)


@settings(max_examples=150)
@given(text=TEXTS, data=st.data())
def test_pieces_of_a_text_concatenate_to_it(backends, text, data):
    for backend in backends:
        tokenizer = Tokenizer(backend)
        ids = tokenizer.encode(text)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
        whole = tokenizer.decode(ids)
        assert in_pieces(tokenizer, ids, cuts) == whole
        assert in_pieces(tokenizer, ids, range(len(ids))) == whole
    assert Tokenizer(backends[0]).decode(Tokenizer(backends[0]).encode(text)) == text


@settings(max_examples=300)
@given(data=st.data(), kind=st.sampled_from([0, 1, 2]))
def test_pieces_of_any_ids_concatenate_to_their_text(backends, data, kind):
    """Random ids: invalid UTF-8, special tokens anywhere, ids beyond the vocabulary."""
    tokenizer = Tokenizer(backends[kind])
    size = tokenizer.vocab_size
    # The first ids are special and have no text; draw them more often.
    known = st.integers(0, 5) | st.integers(0, size + 2) | st.integers(size - 5, size - 1)
    ids = data.draw(st.lists(known, max_size=24))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    whole = tokenizer.decode(ids)
    assert in_pieces(tokenizer, ids, cuts) == whole
    assert in_pieces(tokenizer, ids, range(len(ids))) == whole


@pytest.mark.parametrize(
    "ids",
    [
        [1, 1, 1, 1, 1, 260, 261],  # special tokens before the first space, then between
        [260, 1, 1, 1, 1, 1, 261, 261],
        [2 + 0xE6, 2 + 0x97, 2 + 0xA5, 2 + 0xFF, 260],  # a whole character, then a bad byte
        [2 + 0xE6, 1, 2 + 0x97, 2 + 0xA5, 261],
        [258, 258, 262, 2 + 0x0A, 258],
        [2 + 0x00, 263, 2 + 0x80],  # an id beyond the vocabulary within a run of bytes
    ],
)
def test_pieces_of_byte_tokens(backends, ids):
    tokenizer = Tokenizer(backends[2])
    assert in_pieces(tokenizer, ids, range(len(ids))) == tokenizer.decode(ids)


def test_a_long_run_of_incomplete_characters_comes_alike_however_it_is_grouped(backends):
    tokenizer = Tokenizer(backends[0])
    token = tokenizer.token_bytes().index(b"\x90")
    word = tokenizer.encode("a")
    together = IncrementalDecoder(tokenizer)
    alone = IncrementalDecoder(tokenizer)
    for number in range(60):
        ids = (word if number % 20 == 0 else []) + [token] * 5
        assert together.push(ids) == "".join(alone.push([i]) for i in ids), number
    assert together.flush() == alone.flush()


def test_an_incomplete_character_is_held_back(backends):
    tokenizer = Tokenizer(backends[0])
    ids = tokenizer.encode("a\U0001f40d")
    decoder = IncrementalDecoder(tokenizer)
    shown = [decoder.push([i]) for i in ids]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == "a\U0001f40d"


def words(**vocab):
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "a")))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (words(a=0, b=1, c=3), None),
        (words(a=0, b=1), "4 against 2 ids"),
        (words(a=0, c=1, b=3), "id 1 is 'b' only in the first"),
        (words(a=0, b=1, d=3), "id 3 is 'c' only in the first"),
        (words(a=0, b=1, x=2, c=3), "extra tokens"),
    ],
)
def test_difference_names_what_differs(other, says):
    mine = words(a=0, b=1, c=3)
    assert mine.difference(other) == says
    assert (mine.fingerprint == other.fingerprint) == (says is None)


def test_fingerprint_covers_special_tokens_and_survives_saving(backends):
    before = Tokenizer(backends[0]).fingerprint
    again = tokenizers.Tokenizer.from_str(backends[0].to_str())
    assert Tokenizer(again).fingerprint == before
    again.add_special_tokens(["<|odd|>"])
    assert Tokenizer(again).fingerprint != before


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_chat_template(backends):
    tokenizer = Tokenizer(backends[0], TEMPLATE, {"bos_token": "<s>"})
    assert tokenizer.apply_chat("hi") == "<s>[user] hi\n[assistant]"
    with pytest.raises(sj.ModelError, match="no chat template"):
        Tokenizer(backends[0]).apply_chat("hi")


RICH = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {{- '<' + m['role'] + '>' + m['content'] | trim | tojson + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<assistant>{{ strftime_now('%%') }}
{% endif %}"""


# Features of published templates: an answer marked for training, and omitted arguments.
MARKED = """{% for m in messages %}{% if m.role == 'user' %}
{% generation %}  {{ m.content }}
{% endgeneration %}{% endif %}{% endfor %}
{{ {'b': [1, 'é']} | tojson(indent=2) }}{{ tools is none }}{{ documents is defined }}"""


@pytest.mark.parametrize("template", [TEMPLATE, RICH, MARKED])
@pytest.mark.parametrize("where", ["setting", "file", "named"])
def test_chat_templates_render_as_in_transformers(backends, tmp_path, template, where):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=backends[0], bos_token="<s>", eos_token="é")
    backends[0].save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "é"}}
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
        config["chat_template"] = template if where == "setting" else named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [
        {"role": "system", "content": " <b>naïve</b> "},
        {"role": "skip", "content": "x"},
        {"role": "user", "content": "日本 'q'"},
    ]
    want = theirs.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert Tokenizer.from_directory(tmp_path).apply_chat(messages) == want


@pytest.mark.parametrize("where", ["setting", "file"])
def test_tools_have_the_template_that_is_made_for_them(backends, tmp_path, where):
    backends[0].save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "default", "template": "plain"}]
    if where == "setting":
        named.append({"name": "tool_use", "template": "{{ tools | length }} tools"})
    else:
        home = tmp_path / "additional_chat_templates"
        home.mkdir()
        (home / "tool_use.jinja").write_text("{{ tools | length }} tools")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.apply_chat("hi", {"tools": [{}, {}]}) == "2 tools"
    assert tokenizer.apply_chat("hi", {"tools": []}) == tokenizer.apply_chat("hi") == "plain"


REACHING = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by name": "{{ (''|attr('__class__')).mro() }}",
    "formatting": "{{ '{0.__class__.__mro__[1].x}'.format(messages) }}",
    "the input": "{{ messages.append(1) }}",
    "syntax": "{%",
    "its own refusal": "{{ raise_exception('no\\nsystem role') }}",
    "types": "{{ 1 + 'a' }}",
    "endless": "{% for i in range(10 ** 9) %}{% endfor %}",
    "a huge text": "{{ 'a' * 10 ** 10 }}",
    "a wide text": "{{ 'a'.ljust(10 ** 10) }}",
    "a huge format": "{{ '%10000000000d' % 1 }}",
    "a huge list": "{{ (range(99999) | list * 99999) | length }}",
    "a huge variable": "{% set x %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}"
    "{% endset %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "depth": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
}


@pytest.mark.parametrize("how", REACHING)
def test_chat_template_cannot_reach_out(backends, how):
    with pytest.raises(sj.ModelError, match=r"m: its chat template failed: .") as error:
        Tokenizer(backends[0], REACHING[how], source="m").apply_chat("hi")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


SLOW = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 3 ** (10 ** 9) }}",
    "a search": "{{ ('a' * 10 ** 8).count('a' * 5 * 10 ** 7 + 'b') }}" * 99,
}


@pytest.mark.parametrize("how", SLOW)
def test_chat_template_has_limited_time(backends, monkeypatch, how):
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.5)
    with pytest.raises(sj.ModelError, match=r"failed: it took longer than 0\.5 s"):
        Tokenizer(backends[0], SLOW[how]).apply_chat("hi")
    monkeypatch.undo()  # the next template gets a new process
    assert Tokenizer(backends[0], TEMPLATE).apply_chat("hi").startswith("[user] hi")


def test_chat_template_has_limited_length(backends, monkeypatch):
    monkeypatch.setattr(chat, "MAX_TEXT", 100)
    long = "{% for i in range(51) %}ab{% endfor %}"
    with pytest.raises(sj.ModelError, match="its text is longer than 100 characters"):
        Tokenizer(backends[0], long).apply_chat("hi")
    assert Tokenizer(backends[0], long.replace("51", "50")).apply_chat("hi") == 50 * "ab"
    monkeypatch.setattr(chat, "MAX_TEMPLATE", len(long) - 1)
    with pytest.raises(sj.ModelError, match="it is longer than 37 characters"):
        Tokenizer(backends[0], long).apply_chat("hi")


def test_one_process_renders_all_conversations(backends, monkeypatch):
    tokenizer, started = Tokenizer(backends[0], TEMPLATE), []
    start = chat._Child._start
    monkeypatch.setattr(chat, "_children", chat._Children())
    monkeypatch.setattr(chat._Child, "_start", lambda self: started.append(1) or start(self))
    for i in range(20):
        assert tokenizer.apply_chat(f"日本\ud800\n{i}") == f"[user] 日本\ud800\n{i}\n[assistant]"
    assert started == [1]


def test_load_reads_everything(tiny_pair_dirs):
    lm = sj.load(tiny_pair_dirs[0])
    assert lm.eos_ids == (0,)
    assert lm.vocab_limit == lm.config.vocab_size == lm.tokenizer.vocab_size
    assert sj.load(tiny_pair_dirs[0], "bfloat16").params["embed"].dtype == "bfloat16"


def test_a_model_prints_as_one_line():
    demo = sj.load("demo")
    assert repr(demo) == "LM('demo', llama, 8.7M params, float32)"
    # Codes count as the weights that they stand for; scales are not counted.
    assert repr(sj.quantize(demo, "int8")) == "LM('demo, int8', llama, 8.7M params, float32)"
    assert repr(sj.load("demo-head", "bfloat16")) == (
        "LM('demo-head', eagle3, 1.5M params, bfloat16)"
    )
    assert repr(demo.net) == "Net(llama, vocab=4096, pass_width=1)"


def test_generation_config_knows_more_eos_ids(tiny_pair_dirs, tmp_path):
    shutil.copytree(tiny_pair_dirs[0], tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [0, 4]}')
    assert sj.load(tmp_path / "m").eos_ids == (0, 4)
    for broken in ("[]", "{", '{"eos_token_id": "0"}'):
        (tmp_path / "m" / "generation_config.json").write_text(broken)
        with pytest.raises(sj.ModelError, match="generation_config"):
            sj.load(tmp_path / "m")


def test_tokenizer_of_the_parent_directory(tiny_pair_dirs, tmp_path):
    shutil.copytree(tiny_pair_dirs[0], tmp_path / "m")
    shutil.move(tmp_path / "m" / "tokenizer.json", tmp_path / "tokenizer.json")
    shutil.move(tmp_path / "m" / "tokenizer_config.json", tmp_path / "tokenizer_config.json")
    (tmp_path / "chat_template.jinja").write_text("hello")
    assert sj.load(tmp_path / "m").tokenizer.apply_chat("x") == "hello"
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(sj.ModelError, match="expected a JSON object"):
        sj.load(tmp_path / "m")
    (tmp_path / "tokenizer_config.json").unlink()
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
    check_models(target, bare)  # as many ids: fine
    with pytest.raises(sj.PairError, match="no telling"):
        smaller = dataclasses.replace(draft.config, vocab_size=9)
        check_models(target, dataclasses.replace(bare, config=smaller))
    other = dataclasses.replace(draft, tokenizer=words(a=0))
    with pytest.raises(sj.PairError, match="against 1 ids"):
        check_models(target, other)
    with pytest.raises(sj.PairError, match="token ids"):
        sj.generate(bare, "x")
    with pytest.raises(sj.OptionError, match="empty"):
        sj.generate(target, [[]])
    with pytest.raises(sj.OptionError, match="from 0 to"):
        sj.generate(target, [[10**6]])


def test_stored_truncation_and_padding_are_ignored(tmp_path):
    """As in transformers: they are settings of the run that saved the tokenizer."""
    made = byte_fallback()
    made.enable_truncation(4)
    made.enable_padding(length=8, pad_id=0, pad_token="<unk>")
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("x" * 10) == Tokenizer(byte_fallback()).encode("x" * 10)
    assert tokenizer.encode("x") == Tokenizer(byte_fallback()).encode("x")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer_config.json", b'{"chat_template": [{"x": 1}]}', "chat_template"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', "chat_template"),
        ("tokenizer_config.json", b'{"chat_template": 7}', "chat_template"),
        ("tokenizer_config.json", b'{"add_bos_token": "yes"}', "add_bos_token"),
        ("chat_template.jinja", b"x" * (2**22 + 1), "chat_template.jinja: longer than 1048576"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja"),
        (
            "tokenizer.json",
            tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode(),
            "empty",
        ),
    ],
)
def test_a_broken_tokenizer_is_refused_by_name(tmp_path, file, content, says):
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(sj.ModelError, match=says):
        Tokenizer.from_directory(tmp_path)


BOS = "<｜begin▁of▁sentence｜>"


@pytest.mark.parametrize("bos", ["<begin of text>", "$0", "<s:1>"])
def test_bos_may_have_characters_of_a_templates_syntax(backends, tmp_path, bos):
    backend = tokenizers.Tokenizer.from_str(backends[0].to_str())
    backend.add_special_tokens([bos])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"add_bos_token": True, "bos_token": bos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    want = [backend.token_to_id(bos), *backends[0].encode("a b").ids]
    assert Tokenizer.from_directory(tmp_path).encode("a b") == want


@pytest.mark.parametrize("writes", ["nothing", "bytes", "bos"])
@pytest.mark.parametrize("asks", [True, False, None])
def test_bos_comes_from_the_tokenizers_config_where_no_other_file_adds_it(
    backends, tmp_path, writes, asks
):
    backend = tokenizers.Tokenizer.from_str(backends[0].to_str())
    backend.add_special_tokens([BOS])
    bos = backend.token_to_id(BOS)
    steps = tokenizers.processors
    if writes == "bytes":
        backend.post_processor = steps.ByteLevel(trim_offsets=False)
    elif writes == "bos":
        backend.post_processor = steps.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, bos)])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"add_bos_token": asks, "bos_token": {"content": BOS}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_directory(tmp_path)
    plain = backends[0].encode("a b").ids
    want = [bos, *plain] if asks or writes == "bos" else plain
    assert tokenizer.encode("a b") == want
    assert tokenizer.encode("a b", add_special_tokens=False) == plain
    saved = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    assert saved.encode("a b").ids == want


def test_eos_comes_from_the_tokenizers_config_where_no_other_file_names_it(tmp_path):
    home = save_checkpoint(tmp_path, small_tokenizer(tmp_path), eos_ids=())
    assert sj.load(str(home)).eos_ids == ()
    (home / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|fim_eot|>"}}')
    (end,) = sj.load(str(home)).eos_ids
    assert sj.load(str(home)).tokenizer.token_name(end) == "<|fim_eot|>"


HUB = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "README.txt": b"r",
    "model.safetensors.index.json": b'{"weight_map": {"a": "part-a.safetensors"}}',
    "part-a.safetensors": b"a",
    "part-b.safetensors": b"b",
    "model.safetensors": b"m",
    "model.fp16.safetensors": b"m",
    "model-00001-of-00001.safetensors": b"m",
    "consolidated.safetensors": b"c",
    "pytorch_model.bin": b"p",
    "model.gguf": b"g",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"o",
}


@pytest.mark.parametrize(
    "lacks, weights",
    [
        ((), {"model.safetensors", "model.safetensors.index.json"}),
        (("model.safetensors",), {"part-a.safetensors", "model.safetensors.index.json"}),
        (
            ("model.safetensors", "model.safetensors.index.json"),
            {"model-00001-of-00001.safetensors"},
        ),
        (
            (
                "model.safetensors",
                "model.safetensors.index.json",
                "model-00001-of-00001.safetensors",
            ),
            {"pytorch_model.bin"},
        ),
    ],
)
def test_of_a_repository_only_what_is_needed_is_downloaded(monkeypatch, tmp_path, lacks, weights):
    offered = {name: data for name, data in HUB.items() if name not in lacks}
    revisions = []

    def snapshot(repository, revision, allow_patterns, ignore_patterns):
        assert repository == "someone/model"
        revisions.append(revision)
        for name, data in offered.items():
            matches = any(map(functools.partial(fnmatch.fnmatch, name), allow_patterns))
            if matches and not any(fnmatch.fnmatch(name, p) for p in ignore_patterns):
                (tmp_path / "c0ffee").mkdir(exist_ok=True)
                (tmp_path / "c0ffee" / name).write_bytes(data)
        return str(tmp_path / "c0ffee")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    directory = locate("someone/model@v2", (*HUB_FILES, *PICKLES))
    found = {path.name for path in directory.iterdir()}
    assert found == weights | {"config.json", "tokenizer.json", "merges.txt"}
    assert revisions[0] == "v2" and set(revisions[1:]) <= {"c0ffee"}


def test_only_ids_have_revisions(tmp_path):
    for name in ("demo", str(tmp_path), "a/b@c"):
        with pytest.raises(sj.ModelError, match=r"revision=v2: .* has no revisions"):
            sj.load(name, revision="v2")
