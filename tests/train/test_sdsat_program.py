"""train.sdsat and train.ablation as programs: ids, runs, resumption, bad input, exports."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models

import specjax as sj
from specjax._util.errors import InputError
from specjax.models import (
    ModelConfig,
    hidden_states,
    load_pretrained,
    logits_of,
    num_params,
    param_shapes,
    save_pretrained,
)
from specjax.models.attention.dense import Causal, Isolated
from support.training import (
    ROOT,
    TINY_SDSAT,
    overrides,
    repeatable,
    save_checkpoint,
    small_tokenizer,
)
from train import ablation
from train.config import Adaptive, DataSection, SDSATConfig, from_toml, to_dict
from train.data.corpus import is_held_out
from train.sdsat import operations
from train.sdsat import training as sdsat
from train.sdsat.__main__ import main
from train.sdsat.ablation import CARD, FIGURES, read_variant, run_variant, write_report
from train.sdsat.insertion import Insertion, appended_slots
from train.sdsat.prepare import choose_ids, transforms
from train.sdsat.variants import CONTINUED, VARIANTS


def program(*argv):
    return main([TINY_SDSAT, *map(str, argv)])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tok"))


@pytest.fixture(scope="module")
def start(tokenizer, tmp_path_factory):
    """A random model's Hugging Face directory, its head apart from its embedding."""
    return save_checkpoint(tmp_path_factory.mktemp("start"), tokenizer, tie_embeddings=False)


@pytest.fixture
def quick(start, monkeypatch):
    """Arguments of a run in a directory; more are appended as section.key=value."""
    monkeypatch.chdir(ROOT)

    def arguments(directory, *settings):
        return overrides(f"run.dir={directory}", f"model.init_from={start}", *settings)

    return arguments


def test_runs_log_every_loss_and_export_the_adaptive_ids(quick, tmp_path, start):
    assert program(*quick(tmp_path / "run", "sdsat.decode_prompts=0")) == 0
    trained = [row for row in repeatable(tmp_path / "run") if "loss" in row]
    assert len(trained) == 20 and len(trained[0]["adaptive_accuracy"]) == 3
    for row in trained:
        np.testing.assert_allclose(
            row["objective"], (row["loss"] + row["adaptive_loss"]) / 2, rtol=1e-4
        )
    assert trained[-1]["loss"] < trained[0]["loss"]
    held_out = [row for row in repeatable(tmp_path / "run") if "valid_loss" in row]
    assert [row["step"] for row in held_out] == [10, 20]
    assert len(held_out[0]["valid_acceptance"]) == 3
    cfg, params = load_pretrained(tmp_path / "run" / "export")
    assert cfg.adaptive_ids == (400, 400, 400) and cfg.vocab_size == 401
    assert params["embed"].shape == params["head"].shape == (401, 16)
    card = json.loads((tmp_path / "run" / "export" / "card.json").read_text())
    assert card["adaptive_ids"] == [400] and card["recipe"]["sdsat"]["window"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "part"), [("isolated", "full"), ("improved", "full"), ("isolated", "gated-lora")]
)
def test_killed_and_resumed_gives_the_same_numbers(quick, tmp_path, loss, part):
    targets = "self" if loss == "isolated" else "data"
    objective = (f"sdsat.loss={loss}", f"sdsat.adaptive_targets={targets}", f"model.train={part}")
    settings = (*objective, "run.log_every=3")
    whole, broken = quick(tmp_path / "whole", *settings), quick(tmp_path / "broken", *settings)
    assert program(*whole) == 0
    command = [sys.executable, "-m", "train.sdsat", TINY_SDSAT, *broken]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / "broken/checkpoints/5").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert program(*broken, "--resume") == 0
    assert repeatable(tmp_path / "broken") == repeatable(tmp_path / "whole")
    assert len(repeatable(tmp_path / "whole")[-1]["valid_decode_acceptance"]) == 3
    exports = [(tmp_path / name).glob("export/*.safetensors") for name in ("whole", "broken")]
    (whole,), (broken,) = exports
    assert whole.read_bytes() == broken.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [1, 4])
def test_eight_devices_give_the_losses_of_one(quick, tmp_path, fsdp):
    settings = ("optim.batch_size=8", "optim.total_steps=6", f"mesh.fsdp={fsdp}")
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    devices = os.environ | {"XLA_FLAGS": flags}
    command = [
        sys.executable,
        "-m",
        "train.sdsat",
        TINY_SDSAT,
        *quick(tmp_path / "many", *settings),
    ]
    subprocess.run(command, env=devices, check=True, capture_output=True)
    assert program(*quick(tmp_path / "one", *settings[:2])) == 0
    records = (repeatable(tmp_path / name) for name in ("many", "one"))
    for many, one in zip(*records, strict=True):
        assert many.keys() == one.keys()
        for name in ("loss", "objective", "adaptive_loss", "grad_norm", "valid_loss"):
            if name in one:
                np.testing.assert_allclose(many[name], one[name], rtol=2e-4, err_msg=name)
    # A checkpoint of eight devices is resumed on one, and the other way round.
    longer = (*settings[:1], "optim.total_steps=8")
    assert program(*quick(tmp_path / "many", *longer), "--resume") == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["embeddings", "lora"])
def test_parts_of_a_model_are_trained_and_merged(quick, tmp_path, start, part):
    settings = (f"model.train={part}", "sdsat.distinct=true", "sdsat.loss=improved")
    assert program(*quick(tmp_path / "run", *settings, "model.lora_rank=2")) == 0
    cfg, tuned = load_pretrained(tmp_path / "run" / "export")
    _, before = load_pretrained(start)
    assert cfg.adaptive_ids == (400, 401, 402)
    moved = jax.tree.map(lambda a, b: bool((a[: len(b)] != b).any()), tuned, before)
    matrices = moved["layers"]["0"]["attention"]["q"]["weight"]
    assert (matrices, moved["embed"]) == ((False, True) if part == "embeddings" else (True, False))
    rows = np.asarray(tuned["embed"][400:])
    assert (rows[0] != rows[1]).any() and not moved["norm"]["weight"]


def test_new_rows_and_unused_rows_start_at_the_mean():
    params = {"embed": jnp.arange(12.0).reshape(4, 3), "head": jnp.ones((4, 3))}
    grown = sdsat.grow(params, (3, 4), 1)
    assert grown["embed"].shape == grown["head"].shape == (5, 3)
    for row in (3, 4):
        np.testing.assert_allclose(grown["embed"][row], [3, 4, 5])


def test_ids_come_from_the_config_the_checkpoint_unused_vocabulary_or_new_rows(tokenizer):
    def choose(vocab, had=(), **section):
        cfg = from_toml(SDSATConfig, TINY_SDSAT).sdsat
        cfg = type(cfg)(**{**vars(cfg), **section})
        model = ModelConfig.llama(
            vocab_size=vocab,
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            intermediate_size=24,
            adaptive_ids=had,
            eos_ids=(0,),
        )
        return choose_ids(cfg, model, tokenizer)

    assert choose(400) == ((400,), 1)
    assert choose(402) == ((400,), 0)
    assert choose(402, distinct=True) == ((402, 403, 404), 3)
    assert choose(408, distinct=True) == ((400, 401, 402), 0)
    assert choose(408, had=(405, 405)) == ((405,), 0)
    assert choose(408, ids=(407,)) == ((407,), 0)
    assert choose(400, ids=(399,)) == ((399,), 0)  # the corpus is checked later


@pytest.mark.parametrize("size", ["7b", "13b"])
def test_the_papers_recipes_add_no_row_to_codellamas_vocabulary(size):
    """Every id of CodeLlama stands for a token. A row more would not divide the recipe's mesh."""
    words = {f"w{i}": i for i in range(32016)}
    every_id = Tokenizer(models.WordLevel(words, unk_token="w0"))
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24}
    model = ModelConfig.llama(vocab_size=32016, bos_id=1, eos_ids=(2,), **shape)
    path = ROOT / "configs" / f"sdsat_codellama_{size}.toml"
    cfg = from_toml(SDSATConfig, path)
    assert choose_ids(cfg.sdsat, model, every_id) == ((32011,), 0)
    assert model.vocab_size % cfg.mesh.devices == 0

    more = [32011, 32012, 32013, 32014, 32015, 31864, 31857][: cfg.sdsat.window]
    distinct = from_toml(SDSATConfig, path, ["sdsat.distinct=true", f"sdsat.ids={more}"])
    assert choose_ids(distinct.sdsat, model, every_id) == (tuple(more), 0)


def test_reserved_tokens_may_be_adaptive_if_the_corpus_lacks_them(
    tokenizer, quick, start, tmp_path, capsys
):
    where = tmp_path / "reserved"
    where.mkdir()
    grown = Tokenizer.from_str(tokenizer.to_str())
    grown.add_tokens(["<reserved>"])
    cfg, params = load_pretrained(start)
    cfg = dataclasses.replace(cfg, vocab_size=402)
    save_pretrained(where, cfg, sdsat.grow(params, (400, 401), 2), grown.to_str())
    settings = (f"model.init_from={where}", "sdsat.ids=[400]", "sdsat.decode_prompts=0")
    assert program(*quick(tmp_path / "run", *settings, "optim.total_steps=2")) == 0
    tuned = sj.load(tmp_path / "run" / "export")
    assert tuned.config.adaptive_ids == (400,) * 3 and tuned.vocab_limit == 401
    hot = sj.Sampling(temperature=9.0)
    out = sj.generate(tuned, [[7, 8]] * 8, method="sdsat", max_new_tokens=40, sampling=hot)
    assert max(int(tokens.max()) for tokens in out.tokens) < 400
    capsys.readouterr()
    text = next(tmp_path / f"{i}.txt" for i in range(99) if not is_held_out(f"{i}.txt"))
    text.write_text("a <reserved> word\n" * 50)
    present = [f"model.init_from={where}", "sdsat.ids=[400]", f'data.files=["{text}"]']
    assert program(*quick(tmp_path / "other", *present)) == 2
    assert "400 is '<reserved>', which the corpus holds" in capsys.readouterr().err


def test_bad_input_exits_2_with_one_line(quick, tmp_path, start, capsys):
    held_out_file = next(f"{i}.txt" for i in range(1000) if is_held_out(f"{i}.txt"))
    (tmp_path / "empty").mkdir()
    (tmp_path / held_out_file).write_text("y = 3\n" * 90)
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (plain / name).write_bytes((start / name).read_bytes())
    text = (plain / "tokenizer.json").read_text()
    (plain / "tokenizer.json").write_text(text.replace("fim_suffix", "other"))
    cases = [
        (("sdsat.distinct=true", "sdsat.probe_length=4"), "3 distinct ids"),
        (("sdsat.distinct=true", "sdsat.ids=[1]"), "ask for 3 distinct"),
        (("sdsat.ids=[300]",), "300 is "),
        (("sdsat.ids=[0]",), "real text uses"),
        (("sdsat.ids=[4000]",), "outside the vocabulary of 400"),
        (("sdsat.ids=[3]", "sdsat.fim_rate=0.5"), "3 is '<|fim_middle|>'"),
        (("data.seq_len=256",), "longer than the model's context (128)"),
        ((f"model.init_from={plain}", "sdsat.fim_rate=0.5"), "no fill-in-the-middle sentinels"),
        (("data.corpora=[]", f'data.files=["{tmp_path}/empty"]'), "the corpus is empty"),
        (
            ("data.corpora=[]", f'data.files=["{tmp_path}/{held_out_file}"]'),
            "is left for training",
        ),
        (("sdsat.windw=3",), "did you mean sdsat.window"),
        (("sdsat.ids=[1.5]",), "sdsat.ids=1.5: expected int"),
        (("model.init_from=/no/model",), "/no/model"),
        (("model.init_from=''",), "name a Hugging Face directory"),
        (("sdsat.loss=basic",), "needs a clean sequence"),
        (("sdsat.start_rate=0",), "only loss basic"),
        (("model.train=lora", "optim.optimizer=muon"), "only adamw"),
        (("mesh.fsdp=3",), "does not divide the 1 devices"),
    ]
    for number, (settings, says) in enumerate(cases):
        assert program(*quick(tmp_path / f"run{number}", *settings)) == 2, settings
        out = capsys.readouterr()
        assert out.out == "" and "Traceback" not in out.err, settings
        assert says in out.err.strip().splitlines()[-1], (settings, out.err)
        assert not list((tmp_path / f"run{number}").glob("metrics*"))


@pytest.mark.slow
def test_damaged_checkpoints_and_other_settings_are_refused(quick, tmp_path, capsys):
    directory = tmp_path / "run"
    assert program(*quick(directory)) == 0
    capsys.readouterr()
    for settings, argv, says in (
        ((), (), "go on with --resume"),
        (("sdsat.window=4",), ("--resume",), "sdsat.window"),
        (("sdsat.loss=improved",), ("--resume",), "sdsat.loss"),
    ):
        assert program(*quick(directory, *settings), *argv) == 2
        assert says in capsys.readouterr().err
    before = (directory / "metrics.jsonl").read_text()
    for file in (directory / "checkpoints/20").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert program(*quick(directory), "--resume") == 2
    assert "is damaged" in capsys.readouterr().err
    assert (directory / "metrics.jsonl").read_text() == before


def test_isolated_windows_cost_three_quarters_of_two_sequences_at_16k():
    seven_b = ModelConfig.llama(
        vocab_size=32016,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        intermediate_size=11008,
        tie_embeddings=False,
    )
    flops = {}
    for loss in ("basic", "improved", "isolated"):
        flops[loss] = operations.forward_flops(seven_b, Adaptive(loss=loss), 16384) / 16384
    dense = 2 * (num_params(seven_b) - 32016 * 4096) + 4 * 16384 * 4096 * 32
    np.testing.assert_allclose(flops["basic"], dense, rtol=1e-3)
    assert flops["improved"] == 2 * flops["basic"]
    assert flops["isolated"] < 0.75 * flops["improved"]


@pytest.mark.slow
def test_the_ablation_keeps_what_is_finished_and_reports_it(start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    settings = [f"run.dir={tmp_path}", f"model.init_from={start}", "sdsat.decode_prompts=0"]

    def run(names, steps):
        changes = overrides(*settings, f"optim.total_steps={steps}")
        return ablation.main([TINY_SDSAT, *changes, "--only", names])

    assert run("none", 3) == 0
    card = (tmp_path / "none/export/card.json").stat().st_mtime_ns
    assert run("none,improved-data", 3) == 0
    assert (tmp_path / "none/export/card.json").stat().st_mtime_ns == card
    rows = json.loads((tmp_path / "ablation.json").read_text())
    assert [row["variant"] for row in rows] == ["none", "improved-data"]
    base, improved = (row["clean_loss"] for row in rows)
    assert f"{improved / base - 1:+.2%}" in (tmp_path / "ablation.md").read_text()
    assert (tmp_path / "ablation.png").exists()
    capsys.readouterr()
    assert run("none", 4) == 2 and "another optim.total_steps" in capsys.readouterr().err
    (tmp_path / "none/export/card.json").write_text('{"recipe": ')
    assert (
        run("none", 3) == 2 and "none/export/card.json is not the card" in capsys.readouterr().err
    )
    assert run("nothing", 3) == 2 and "--only nothing" in capsys.readouterr().err


def test_the_ablation_keeps_a_run_of_whole_epochs(tmp_path, monkeypatch):
    """The recipe of its card has the steps that the corpus gave."""
    monkeypatch.chdir(ROOT)
    cfg = from_toml(SDSATConfig, TINY_SDSAT, ["optim.num_epochs=2", *VARIANTS[CONTINUED]])
    recipe = to_dict(cfg)
    recipe["optim"]["total_steps"] = 77
    recipe["run"]["dir"] = CONTINUED
    card = {"recipe": recipe, **dict.fromkeys(FIGURES - {"recipe"}, 1)}
    (tmp_path / CONTINUED / "export").mkdir(parents=True)
    (tmp_path / CONTINUED / CARD).write_text(json.dumps(card))
    assert run_variant(TINY_SDSAT, ["optim.num_epochs=2"], tmp_path, CONTINUED)
    with pytest.raises(InputError, match=r"another optim\.num_epochs"):
        run_variant(TINY_SDSAT, ["optim.num_epochs=3"], tmp_path, CONTINUED)


def test_the_ablation_reports_runs_with_nothing_held_out(tmp_path, capsys):
    """Their cards have no held-out figures; the curves of training are still worth a report."""
    for name, loss in (("none", 2.0), ("improved", 2.5)):
        card = {"recipe": {}, "clean_tokens_per_step": 8, "steps": 3}
        card["compute_against_improved"] = 1.0
        (tmp_path / name / "export").mkdir(parents=True)
        (tmp_path / name / "export" / "card.json").write_text(json.dumps(card))
        record = json.dumps({"step": 1, "loss": loss, "clean_loss": loss})
        (tmp_path / name / "metrics.jsonl").write_text(record + "\n")
    rows = [read_variant(tmp_path / name) for name in ("none", "improved")]
    write_report(tmp_path, rows)
    assert "nothing is held out" in capsys.readouterr().err
    assert "| improved | 24 |  |  | 1.000 |  |  |  |" in (tmp_path / "ablation.md").read_text()
    assert rows[1]["training"] == [(1, 2.5)] and (tmp_path / "ablation.png").exists()


@pytest.mark.parametrize("loss", ["basic", "isolated"])
def test_counted_operations_equal_those_of_the_compiler(loss):
    """For the blocks, with dense attention. The head is left out: XLA counts its loop once."""
    cfg = ModelConfig.llama(
        vocab_size=64, hidden_size=128, num_layers=2, num_heads=4, intermediate_size=256
    )
    T, window, rate = 256, 3, 0.1
    tokens = T + (appended_slots(window, rate, T) if loss == "isolated" else 0)
    row = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    run = jax.jit(lambda params, *row: hidden_states(cfg, params, *row).hidden)
    compiled = run.lower(param_shapes(cfg), row, row, row).compile().cost_analysis()["flops"]
    section = Adaptive(loss=loss, window=window, start_rate=rate)
    counted = operations.forward_flops(cfg, section, T)
    head = 2 * tokens * cfg.vocab_size * cfg.hidden_size
    np.testing.assert_allclose(compiled, counted - head, rtol=0.05)


@pytest.mark.parametrize("loss", ["basic", "improved", "isolated"])
def test_useful_operations_count_each_token_and_each_visible_pair(loss):
    model = ModelConfig.llama(
        vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, intermediate_size=128
    )
    T, insertion = 512, Insertion((60,) * 5, (), 0.1)
    cfg = SDSATConfig(
        data=DataSection(seq_len=T),
        sdsat=Adaptive(loss=loss, window=insertion.window, start_rate=0.1),
    )
    row = dict.fromkeys(("tokens", "labels", "segments"), np.ones(T, np.int32))
    row |= {"positions": np.arange(T, dtype=np.int32)}
    batch = {name: x[None] for name, x in transforms(cfg, insertion)[0](row, 0).items()}
    tokens = batch["tokens"].size
    meta = batch | {"position": batch["positions"], "segment": batch["segments"]}
    mask = (Isolated(clean=T) if loss == "isolated" else Causal())(meta, meta)
    sequences = 2 if loss == "improved" else 1
    products = 2 * num_params(model) * sequences * tokens
    pairs = sequences * int(np.asarray(mask).sum())
    attention = 4 * pairs * model.num_heads * model.head_dim * model.num_layers
    assert attention > products / 2
    counted = operations.useful_operations(cfg, model) * T
    np.testing.assert_allclose(counted, 3 * (products + attention), rtol=0.03)


def test_dry_run_counts_tokens_writes_nothing_and_needs_no_corpus(quick, tmp_path, capsys):
    settings = ("data.seq_len=128", "data.corpora=[]", 'data.files=["/nowhere"]')
    assert program(*quick(tmp_path / "run", *settings), "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert "gib_evaluation" in plan
    assert plan["clean_tokens_per_step"] == 512 and 614 < plan["forward_tokens_per_step"] < 900
    assert plan["new_rows"] == 1 and list(tmp_path.iterdir()) == []


def test_what_would_fail_late_fails_before_the_corpus_is_read(quick, tmp_path, capsys, monkeypatch):
    nowhere = ("data.corpora=[]", 'data.files=["/nowhere"]')
    assert program(*quick(tmp_path / "devices", *nowhere, "mesh.devices=3")) == 2
    assert "mesh.devices=3, but the run has 1 devices" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 10))
    assert program(*quick(tmp_path / "disk", *nowhere)) == 2
    assert "has 0.0 GB free, but run.keep=2 checkpoints and one more" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert program(*quick(tmp_path / "events", *nowhere, "run.tensorboard=true")) == 2
    assert "needs tensorboardX" in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.slow
def test_transformers_loads_the_export_with_equal_logits(quick, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    assert program(*quick(tmp_path / "run", "optim.total_steps=3")) == 0
    where = tmp_path / "run" / "export"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    cfg, params = load_pretrained(where)
    assert theirs.config.adaptive_ids == [400, 400, 400]
    tokens = np.array([[7, 30, 200, 400, 400]], np.int32)
    places = np.arange(5)[None]
    hidden = hidden_states(cfg, params, tokens, places, np.ones_like(tokens)).hidden
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    ours = np.asarray(logits_of(cfg, params, hidden))
    np.testing.assert_allclose(ours[..., :400], want[..., :400], atol=1e-4)
    assert np.isneginf(ours[..., 400]).all()  # an adaptive id is only an input
