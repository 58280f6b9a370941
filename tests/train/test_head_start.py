"""train.head from an earlier or a published head: ``head.init_from``."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.models import load_pretrained
from specjax.models.families.head_config import HeadConfig
from specjax.models.hf.write import save_pretrained
from support.checkpoints import edit_weights, same
from support.heads import random_params, to_midlayer
from support.training import (
    HEAD_DEMO,
    head_arguments,
    logged,
    overrides,
    save_checkpoint,
    small_tokenizer,
)
from train.config import HeadRunConfig, from_toml
from train.head.__main__ import main as program
from train.head.prepare import read_target
from train.head.starting import first_params, read_start

STEPS = 16
RUN = (f"optim.total_steps={STEPS}", "run.eval_every=1", "head.decode_prompts=0")
# What the settings of a small head say about its sizes, left to the head that is started from.
UNSET = (
    "head.layers=[]",
    "head.draft_vocab=0",
    "head.num_kv_heads=0",
    "head.intermediate_size=0",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random target's Hugging Face directory."""
    home = tmp_path_factory.mktemp("target")
    return save_checkpoint(home, small_tokenizer(home))


@pytest.fixture(scope="module")
def earlier(target, tmp_path_factory):
    """A head of the sizes that the settings of a small head ask for."""
    home = tmp_path_factory.mktemp("earlier")
    cfg = load_pretrained(target)[0]
    head = HeadConfig.of(
        cfg,
        np.arange(0, 256, 2),
        layer_ids=(0,),
        num_kv_heads=1,
        intermediate_size=16,
        own_embedding=False,
        verifier=str(target),
    )
    save_pretrained(home, head, random_params(head))
    return home


def config(target, run, *settings):
    path, *arguments = head_arguments(target, run, *settings)
    return from_toml(HeadRunConfig, path, arguments[1::2])


def start_of(target, run, *settings):
    """(the config that a run starts with, its first params)."""
    cfg = config(target, run, *settings)
    files = read_target(cfg)
    directory, head = read_start(cfg, files.config, files.directory)
    _, params = load_pretrained(files.directory)
    return head, first_params(head, directory, files.config, params, 0)


def held_out(run):
    return [record["valid_loss"] for record in logged(run) if "valid_loss" in record]


@pytest.mark.slow
def test_a_warm_start_reaches_the_loss_in_half_of_the_steps(target, tmp_path):
    """Both train on other files than the head that one of them starts from."""
    assert program(head_arguments(target, tmp_path / "earlier", *RUN)) == 0
    earlier = tmp_path / "earlier/export"
    other = (*RUN, 'data.files=["train"]')
    assert program(head_arguments(target, tmp_path / "cold", *other)) == 0
    warm = (*other, *UNSET, f"head.init_from={earlier}")
    assert program(head_arguments(target, tmp_path / "warm", *warm)) == 0
    cold_losses = held_out(tmp_path / "cold")
    warm_losses = held_out(tmp_path / "warm")
    reached = next(step for step, x in enumerate(warm_losses, 1) if x <= cold_losses[-1])
    assert reached <= STEPS // 2
    assert cold_losses[reached - 1] > cold_losses[-1], "the cold run must still have been learning"
    # The export is a head of the same form, which can be started from again.
    assert load_pretrained(tmp_path / "warm/export")[0] == load_pretrained(earlier)[0]


@pytest.mark.parametrize("layout", ["speculators", "SafeAILab"])
def test_the_first_params_are_the_stored_ones(target, earlier, tmp_path, layout):
    home = shutil.copytree(earlier, tmp_path / "head")
    if layout == "SafeAILab":
        to_midlayer(home)
    head, params = start_of(target, tmp_path, *UNSET, f"head.init_from={home}")
    stored_config, stored = load_pretrained(earlier)
    assert head == stored_config
    assert same(params, stored)


def test_an_embedding_is_shared_if_it_is_the_targets(target, earlier, tmp_path):
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    for name, own in (("equal", table), ("other", table + 1)):
        home = shutil.copytree(earlier, tmp_path / name)
        edit_weights(home, lambda tensors, own=own: tensors.update({"embed_tokens.weight": own}))
        head, params = start_of(target, tmp_path, f"head.init_from={home}")
        assert head.own_embedding == ("embed" in params) == (name == "other")
    np.testing.assert_array_equal(params["embed"], table + 1)


@pytest.fixture(scope="module")
def wide(target, tmp_path_factory):
    """A head for a target of another width."""
    cfg = load_pretrained(target)[0]
    home = tmp_path_factory.mktemp("wide")
    head = HeadConfig.of(cfg, layer_ids=(0,), own_embedding=False, target_size=32)
    save_pretrained(home, head, random_params(head))
    return home


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("head.draft_vocab=64", "head.draft_vocab=64, but head.init_from="),
        ("head.num_kv_heads=2", "head.num_kv_heads=2, but head.init_from="),
        ("head.intermediate_size=24", "has 16: leave head.intermediate_size out"),
        ("head.layers=[0, 0]", "head.layers=[0, 0], but head.init_from="),
        ("head.norm_before_residual=true", "head.norm_before_residual=True, but"),
        ("head.init_from={target}", "is a model, expected an EAGLE-3 head"),
        ("head.init_from={wide}", "is for hidden states of size 32, model.init_from="),
        ("head.init_from=./none", "none: no such model directory"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    target, earlier, wide, tmp_path, capsys, setting, says
):
    setting = setting.format(target=target, wide=wide)
    settings = (f"head.init_from={earlier}", setting)
    argv = head_arguments(target, tmp_path / "bad", *settings)
    assert program([*argv, "--dry-run"]) == 2
    output = capsys.readouterr().err
    assert len(output.splitlines()) == 1 and says in output


def test_a_longer_row_than_the_heads_context_is_refused(target, earlier, tmp_path, capsys):
    home = shutil.copytree(earlier, tmp_path / "short")
    stored = json.loads((home / "config.json").read_text())
    stored["transformer_layer_config"]["max_position_embeddings"] = 49
    (home / "config.json").write_text(json.dumps(stored))
    argv = head_arguments(target, tmp_path / "bad", f"head.init_from={home}")
    assert program([*argv, "--dry-run"]) == 2
    assert (
        "48 and 2 draft steps are longer than the context of head.init" in capsys.readouterr().err
    )


def test_the_embedded_head_can_be_started_from(tmp_path, capsys):
    settings = ("head.init_from=demo-head", 'data.files=["specjax"]', "data.seq_len=64")
    argv = [HEAD_DEMO, *overrides(*settings, f"run.dir={tmp_path / 'run'}")]
    assert program([*argv, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft_vocabulary"] == 1792
