"""What the programs export besides weights: the checkpoint's small files, names, dtypes."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax as sj
from infer.run.commands import main as decode
from specjax._util.errors import InputError, ModelError
from specjax.lm import name_beside
from specjax.models.adapters import KEY
from specjax.models.hf.delta import TENSORS, load_delta, read_delta, save_delta
from specjax.models.hf.read import load_pretrained
from support.gated import tuned
from support.training import ROOT, TINY_LM, TINY_SDSAT, overrides, save_checkpoint, small_tokenizer
from train.config import LMConfig, SDSATConfig, from_toml
from train.engine.directory import without_local_paths
from train.head.__main__ import main as head
from train.lm.__main__ import main as lm
from train.sdsat.__main__ import main as sdsat

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
BROUGHT = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "model_max_length": 77,
    },
    "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
    "generation_config.json": {"temperature": 0.6, "eos_token_id": [0]},
}
FAST = (
    *("data.corpora=[]", 'data.files=["specjax/draft"]', "data.seq_len=48"),
    *("optim.batch_size=2", "optim.total_steps=2", "optim.warmup_steps=1", "run.eval_batches=0"),
)
HEAD = (
    *("head.layers=[0]", "head.num_kv_heads=1", "head.intermediate_size=16", "head.steps=2"),
    *(
        "head.draft_vocab=128",
        "head.decode_prompts=0",
        "head.decode_tokens=8",
        "optim.accumulate=1",
    ),
)
PROGRAMS = {
    "train.lm": (lm, TINY_LM, ()),
    "train.sdsat": (sdsat, TINY_SDSAT, ("sdsat.decode_prompts=0",)),
    "train.head": (head, str(ROOT / "configs" / "head_demo.toml"), HEAD),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A random model's directory, with the small files that published ones have."""
    home = tmp_path_factory.mktemp("start")
    save_checkpoint(home, small_tokenizer(tmp_path_factory.mktemp("tok")))
    for name, value in BROUGHT.items():
        (home / name).write_text(json.dumps(value))
    (home / "chat_template.jinja").write_text(TEMPLATE)
    return home


def run(name, directory, start, *more):
    main, config, own = PROGRAMS[name]
    settings = (*FAST, *own, f"run.dir={directory}", f"model.init_from={start}", *more)
    assert main([config, *overrides(*settings)]) == 0
    return directory / "export"


@pytest.mark.parametrize("name", PROGRAMS)
def test_exports_keep_what_the_checkpoint_brought(start, tmp_path, monkeypatch, name):
    monkeypatch.chdir(ROOT)
    own = (f"tokenizer.path={start}/tokenizer.json",) if name == "train.lm" else ()
    home = run(name, tmp_path / "run", start, *own)
    for file, value in BROUGHT.items():
        written = json.loads((home / file).read_text())
        assert {key: written[key] for key in value} == value, file
    assert (home / "chat_template.jinja").read_text() == TEMPLATE
    # Others get this directory: it names no place of this machine.
    for path in home.glob("*.json"):
        assert str(tmp_path) not in path.read_text() and str(start) not in path.read_text(), path
    card = json.loads((home / "card.json").read_text())
    assert card["recipe"]["model"]["init_from"] == start.name and card["run_dir"] == "run"


@pytest.mark.slow
def test_transformers_finds_the_end_of_sequence_of_a_new_tokenizer(tmp_path, monkeypatch):
    # Here, because its import takes seconds.
    import transformers

    monkeypatch.chdir(ROOT)
    home = run("train.lm", tmp_path / "run", "''", "tokenizer.vocab_size=300")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home)
    assert tokenizer.eos_token_id == json.loads((home / "config.json").read_text())["eos_token_id"]


def test_absolute_paths_lose_their_directories():
    value = {"a": ["/home/me/data/x.jsonl", "runs/y", "demo"], "b": {"c": "~/model", "d": 3}}
    assert without_local_paths(value, ROOT) == {
        "a": ["x.jsonl", "runs/y", "demo"],
        "b": {"c": "model", "d": 3},
    }


def test_a_base_is_named_as_others_find_it(tmp_path):
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    home = tmp_path / "runs" / "export"
    (tmp_path / "base").mkdir()
    assert name_beside(str(snapshot), home) == "some/model"
    assert name_beside("demo", home) == "demo" and name_beside("some/model", home) == "some/model"
    assert name_beside(str(tmp_path / "base"), home) == "../../base"
    assert name_beside(str(snapshot), snapshot.parent) == "some/model"
    assert name_beside(str(tmp_path / "base"), tmp_path) == "./base"


@pytest.fixture
def delta(start, tmp_path):
    """A delta beside a copy of its base, and the adapters."""
    base = tmp_path / "base"
    base.mkdir()
    for path in start.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    cfg, params = load_pretrained(base)
    cfg = type(cfg)(**{**vars(cfg), "adaptive_ids": (400,) * 3})
    adapters = tuned(params, (400,), matrices=("q", "down"))[KEY]

    def save(dtype):
        home = tmp_path / "delta"
        save_delta(name_beside(str(base), home), base, cfg, adapters, dtype, "", home)
        return home

    return save, base, cfg, adapters


def test_a_delta_and_its_base_can_be_moved_together(delta, tmp_path):
    home = delta[0]("float32")
    assert read_delta(home).base == "../base"
    sj.load(home)
    (tmp_path / "elsewhere").mkdir()
    for name in ("delta", "base"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    sj.load(tmp_path / "elsewhere" / "delta")
    (tmp_path / "elsewhere" / "base").rename(tmp_path / "renamed")
    with pytest.raises(ModelError, match=r"its base ../base is not there: name it with --base DIR"):
        sj.load(tmp_path / "elsewhere" / "delta")
    moved = sj.load(tmp_path / "elsewhere" / "delta", base=tmp_path / "renamed")
    assert moved.config.adaptive_ids == (400,) * 3


def test_the_fingerprint_decides_about_a_given_base(delta, start, tmp_path):
    home = delta[0]("float32")
    assert sj.load(home, base=start).adapters  # a copy has the same weights
    other = save_checkpoint(tmp_path / "other", small_tokenizer(tmp_path), tie_embeddings=False)
    with pytest.raises(ModelError, match=r"the weights in .*other are others"):
        sj.load(home, base=other)
    with pytest.raises(ModelError, match="is no delta, so it has no base"):
        sj.load(start, base=start)


def test_base_is_an_option_of_the_programs(delta, start, tmp_path, capsys):
    home = delta[0]("float32")
    delta[1].rename(tmp_path / "renamed")
    prompt = ("--prompt", "def", "--max-new-tokens", "2", "--target")
    given = (*prompt, str(home), "--base", str(tmp_path / "renamed"))
    assert decode([*given]) == 0 and decode([*given, "--plan"]) == 0
    capsys.readouterr()
    assert decode([*prompt, str(home)]) == 2
    assert decode([*prompt, str(start), "--base", str(start)]) == 2
    missing, needless = capsys.readouterr().err.splitlines()
    assert "name it with --base DIR" in missing
    assert "neither the target nor the draft is a delta" in needless


@pytest.mark.parametrize(("dtype", "error"), [("float16", 1e-3), ("int8", 5e-3)])
def test_adapters_are_exported_small(delta, dtype, error):
    save, base, cfg, adapters = delta
    whole = save("float32").joinpath(TENSORS).stat().st_size
    home = save(dtype)
    read = load_delta(home, read_delta(home), base, cfg, np.float32)
    for path, wanted in jax.tree_util.tree_leaves_with_path(adapters):
        got = read
        for key in path:
            got = got[key.key]
        np.testing.assert_allclose(got, wanted, atol=error * float(np.abs(wanted).max()))
    assert home.joinpath(TENSORS).stat().st_size < whole
    if dtype == "int8":
        kinds = {x.dtype.name for x in load_file(home / TENSORS).values()}
        assert kinds == {"int8", "float32", "float16"}


def test_int8_is_for_deltas(start):
    with pytest.raises(InputError, match=r'run.export_dtype="int8" is for the adapters'):
        from_toml(LMConfig, TINY_LM, ["run.export_dtype=int8"])
    changes = ["run.export_dtype=int8", "model.train=gated-lora"]
    assert from_toml(SDSATConfig, TINY_SDSAT, changes).run.export_dtype == "int8"
