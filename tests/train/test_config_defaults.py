"""Defaults follow from what is trained; keys without effect and other trainers' names are said."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from specjax._util.errors import InputError
from support.training import ROOT, save_checkpoint, small_tokenizer
from train.config import HeadRunConfig, LMConfig, Optim, SDSATConfig, from_dict, from_toml
from train.config.effects import OF_ONE_PROGRAM, RULES
from train.data.tokenizer import id_count
from train.engine.optim import make_optimizer
from train.lm import prepare
from train.lm.losses import training_loss
from train.lm.prepare import build_model, get_tokenizer
from train.lm.training import useful_operations
from train.sdsat.prepare import prepare_setup as prepare_sdsat

CONFIGS = (LMConfig, SDSATConfig, HeadRunConfig)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A random model's Hugging Face directory, of 400 ids."""
    home = tmp_path_factory.mktemp("start")
    return save_checkpoint(home, small_tokenizer(home))


# --- what the defaults are ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "model", "rate"),
    [
        (LMConfig, {}, 3e-3),
        (LMConfig, {"init_from": "x"}, 2e-5),
        (SDSATConfig, {"init_from": "x"}, 2e-5),
        (SDSATConfig, {"init_from": "x", "train": "lora"}, 2e-4),
        (SDSATConfig, {"init_from": "x", "train": "gated-lora"}, 2e-4),
        (SDSATConfig, {"init_from": "x", "train": "embeddings"}, 1e-3),
        (HeadRunConfig, {"init_from": "x"}, 1e-4),
    ],
)
def test_the_learning_rate_follows_from_what_is_trained(cls, model, rate):
    assert from_dict(cls, {"model": model}).optim.learning_rate == rate
    # Another key of the section does not bring back a general default.
    values = {"model": model, "optim": {"total_steps": 7}}
    assert from_dict(cls, values).optim.learning_rate == rate
    values["optim"]["learning_rate"] = 0.5
    assert from_dict(cls, values).optim.learning_rate == 0.5


@pytest.mark.parametrize("cls", CONFIGS)
def test_a_section_that_is_given_in_part_keeps_its_programs_defaults(cls):
    assert from_dict(cls, {"run": {"log_every": 3}}).run.dir == cls().run.dir


@pytest.mark.parametrize("cls", CONFIGS)
def test_no_text_is_trained_on_that_nobody_named(cls):
    assert from_dict(cls, {"data": {"files": ["mine"]}}).data.corpora == ()


def test_a_clip_norm_of_zero_clips_nothing():
    params = {"w": jnp.ones((2, 2))}
    grads = {"w": jnp.full((2, 2), 1e3)}
    step = {}
    for norm in (0.0, 1.0, 1e9):
        optimizer = make_optimizer(Optim(clip_norm=norm, warmup_steps=0))
        state = optimizer.init(params)
        step[norm] = optimizer.update(grads, state, params)[1]
    moments = {norm: float(optax.tree.norm(state)) for norm, state in step.items()}
    assert moments[0.0] == moments[1e9] > 100 * moments[1.0]
    # A resumed run may turn clipping on: its state has the same tree.
    trees = {norm: jax.tree.structure(state) for norm, state in step.items()}
    assert trees[0.0] == trees[1.0]


def test_a_checkpoint_is_continued_with_its_own_tokenizer(start, tmp_path):
    cfg = from_dict(LMConfig, {"model": {"init_from": str(start)}})
    tokenizer = get_tokenizer(cfg, None, tmp_path)
    assert id_count(tokenizer) == 400 and list(tmp_path.iterdir()) == []
    other = small_tokenizer(tmp_path)
    values = {"model": {"init_from": str(start)}}
    values |= {"tokenizer": {"path": f"{tmp_path}/tokenizer.json"}}
    assert get_tokenizer(from_dict(LMConfig, values), None, tmp_path).to_str() == other.to_str()


def test_weights_are_read_when_training_asks_for_them(start, monkeypatch):
    """There they go to the host's memory; a dry run needs none."""
    read = []
    load = prepare.load_pretrained
    monkeypatch.setattr(prepare, "load_pretrained", lambda *args: read.append(args) or load(*args))
    cfg = from_dict(LMConfig, {"model": {"init_from": str(start)}, "data": {"seq_len": 32}})
    model, first_params = build_model(cfg, get_tokenizer(cfg, None, start))
    assert read == []
    assert first_params()["embed"].shape == (model.vocab_size, 16) and len(read) == 1


def test_a_hub_id_names_a_start_and_a_teacher(start, monkeypatch):
    monkeypatch.setattr("specjax.models.hf.hub.download", lambda name, files: start)
    values = {"model": {"init_from": "some/model"}, "data": {"seq_len": 32}}
    cfg = from_dict(LMConfig, values)
    tokenizer = get_tokenizer(cfg, None, start)
    model, _ = build_model(cfg, tokenizer)
    assert model.vocab_size == 400
    cfg = from_dict(LMConfig, {"distill": {"teacher": "some/model"}, "data": {"seq_len": 32}})
    assert training_loss(cfg, model, tokenizer)[1] is not None
    assert useful_operations(cfg, model) > 0


def test_documents_are_rearranged_for_infilling_only_if_asked(start):
    values = {"model": {"init_from": str(start)}, "sdsat": {"decode_tokens": 8}}
    values |= {"data": {"seq_len": 32}}
    assert prepare_sdsat(from_dict(SDSATConfig, values)).layout.fim_rate == 0


@pytest.mark.parametrize(
    ("cls", "section", "best", "says"),
    [
        (SDSATConfig, {"model": {"train": "gated-lora"}}, "loss", 'set run.keep_best="accepted"'),
        (HeadRunConfig, {"head": {"states": "x"}}, "accepted", "leave head.states out"),
    ],
)
def test_a_best_that_no_evaluation_can_tell_is_refused(cls, section, best, says):
    other = {"loss": "accepted", "accepted": "loss"}[best]
    assert from_dict(cls, section | {"run": {"keep_best": other}}).run.keep_best == other
    with pytest.raises(InputError, match=f'run.keep_best="{best}" with .*{says}'):
        from_dict(cls, section | {"run": {"keep_best": best, "patience": 3}})


# --- keys without effect -----------------------------------------------------------------------


def read(tmp_path, cls, text, *overrides):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return from_toml(cls, path, overrides)


@pytest.mark.parametrize(
    ("cls", "text", "says"),
    [
        (LMConfig, 'model = {init_from = "x", hidden_size = 8}', "model.hidden_size has no effect"),
        (LMConfig, 'tokenizer = {path = "x", vocab_size = 400}', "tokenizer.vocab_size has"),
        (LMConfig, "distill = {alpha = 0.5}", "alpha has no effect without distill.teacher"),
        (LMConfig, "optim = {muon_learning_rate = 0.1}", "optim.muon_learning_rate has no effect"),
        (LMConfig, "optim = {num_epochs = 2.0, total_steps = 9}", "total_steps has no effect"),
        (SDSATConfig, 'sdsat = {loss = "basic", weight = 2.0}', "sdsat.weight has no effect"),
        (SDSATConfig, "model = {lora_rank = 4}", "lora_rank has no effect with model.train='full'"),
        (HeadRunConfig, "head = {drop_outside = true}", "head.drop_outside has no effect"),
        (LMConfig, "optim = {num_epochs = 2.0, max_steps = 9}", "optim.total_steps has no effect"),
        (SDSATConfig, "model = {lora_r = 4}", "model.lora_rank has no effect"),
        (
            HeadRunConfig,
            'head = {states = "x", decode_tokens = 9}',
            "head.decode_tokens has no effect with head.states='x'",
        ),
        (
            SDSATConfig,
            "sdsat = {decode_prompts = 9}\nrun = {eval_batches = 0}",
            "sdsat.decode_prompts has no effect with run.eval_batches=0",
        ),
        (SDSATConfig, "run = {sample_tokens = 9}", "run.sample_tokens has no effect: only"),
        (HeadRunConfig, "mesh = {memory_gib = 9}", "has no effect: only train.sdsat reads it"),
    ],
)
def test_keys_without_effect_are_said(tmp_path, capsys, cls, text, says):
    read(tmp_path, cls, text)
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_what_is_turned_off_is_not_missed(tmp_path, capsys):
    read(tmp_path, HeadRunConfig, 'head = {states = "x", decode_prompts = 0}')
    assert capsys.readouterr().err == ""


def test_shipped_configs_have_no_key_without_effect(capsys):
    for path in sorted((ROOT / "configs").glob("*.toml")):
        name = path.name
        cls = LMConfig
        if "sdsat" in name:
            cls = SDSATConfig
        elif "head" in name:
            cls = HeadRunConfig
        from_toml(cls, path)
        assert capsys.readouterr().err == "", name


def test_every_rule_names_keys_of_a_config():
    known = {
        f"{section.name}.{field.name}"
        for cls in CONFIGS
        for section in dataclasses.fields(cls)
        for field in dataclasses.fields(getattr(cls(), section.name))
    }
    assert {key for rule in RULES for key in rule.keys} | set(OF_ONE_PROGRAM) <= known


# --- names of other trainers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "name", "value", "key"),
    [
        ("optim", "max_grad_norm", 0.5, "clip_norm"),
        ("optim", "gradient_accumulation_steps", 4, "accumulate"),
        ("optim", "max_steps", 40, "total_steps"),
        ("optim", "adam_beta2", 0.99, "beta2"),
        ("run", "output_dir", "runs/x", "dir"),
        ("run", "logging_steps", 5, "log_every"),
        ("run", "eval_steps", 5, "eval_every"),
        ("run", "save_steps", 5, "checkpoint_every"),
        ("run", "save_total_limit", 5, "keep"),
        ("data", "max_length", 64, "seq_len"),
        ("model", "gradient_checkpointing", True, "remat"),
        ("model", "model_name_or_path", "demo", "init_from"),
    ],
)
def test_names_of_transformers_are_accepted_where_they_mean_the_same(section, name, value, key):
    cfg = from_dict(SDSATConfig, {section: {name: value}})
    assert getattr(getattr(cfg, section), key) == value
    with pytest.raises(InputError, match=rf"{section}\.{name} and {section}\.{key} are the same"):
        from_dict(SDSATConfig, {section: {name: value, key: value}})


@pytest.mark.parametrize(
    ("section", "name", "says"),
    [
        ("optim", "per_device_train_batch_size", "optim.batch_size"),
        ("optim", "warmup_ratio", "optim.warmup_steps"),
        ("optim", "lr_scheduler_type", "optim.schedule"),
        ("model", "bf16", "model.compute_dtype"),
        ("run", "report_to", "run.tensorboard"),
        ("run", "learning_rate", "did you mean optim.learning_rate"),
        ("run", "max_grad_norm", "did you mean optim.clip_norm"),
        ("optim", "learning_rte", "did you mean optim.learning_rate"),
    ],
)
def test_other_names_are_answered_with_ours(section, name, says):
    with pytest.raises(InputError, match=rf"unknown key {section}\.{name}; .*{says}"):
        from_dict(SDSATConfig, {section: {name: 1}})


def test_a_key_outside_of_its_section_is_answered_with_its_place():
    with pytest.raises(InputError, match=r"unknown key seq_len; did you mean data\.seq_len"):
        from_dict(LMConfig, {"seq_len": 4})
    with pytest.raises(InputError, match=r"unknown key max_steps; did you mean optim\.total_steps"):
        from_dict(LMConfig, {"max_steps": 4})
