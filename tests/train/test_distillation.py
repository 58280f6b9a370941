"""Teachers whose vocabulary or context is not that of the draft."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax._util.errors import InputError
from specjax.models import init_params, load_pretrained, save_pretrained
from support.training import code, save_checkpoint, small_tokenizer
from train.config import LMConfig, from_dict
from train.data.packing import IGNORE
from train.data.tokenizer import train_tokenizer
from train.lm.losses import distillation_loss, training_loss

T = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("teacher")
    save_checkpoint(home, small_tokenizer(home))
    return home


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, 400, (2, T)).astype(np.int32)
    labels = np.concatenate([tokens[:, 1:], np.full((2, 1), IGNORE, np.int32)], 1)
    positions = np.tile(np.arange(T, dtype=np.int32), (2, 1))
    return {
        "tokens": tokens,
        "labels": labels,
        "segments": np.ones((2, T), np.int32),
        "positions": positions,
    }


def padded(params, rows):
    """The params with rows of large random numbers behind the vocabulary."""
    more = 30 * jax.random.normal(jax.random.key(5), (rows, params["embed"].shape[1]))
    return params | {"embed": np.concatenate([params["embed"], more])}


def config(teacher, seq_len=T, **distill):
    distill |= {"teacher": str(teacher)}
    return from_dict(LMConfig, {"distill": distill, "data": {"seq_len": seq_len}})


@pytest.mark.parametrize("which", ["teacher", "draft"])
def test_rows_of_padding_change_no_loss(home, batch, which, tmp_path):
    cfg, params = load_pretrained(home)
    tokenizer = small_tokenizer(tmp_path)
    draft_params = init_params(cfg, jax.random.key(3))
    plain = distillation_loss(cfg, cfg, 0.7, 2.0)
    expected = plain(draft_params, params, batch)
    wide = dataclasses.replace(cfg, vocab_size=512)
    if which == "teacher":
        save_pretrained(tmp_path / "wide", wide, padded(params, 112), tokenizer.to_str())
        other = config(tmp_path / "wide", alpha=0.7, temperature=2.0)
        loss, frozen = training_loss(other, cfg, tokenizer)
        got = loss(draft_params, frozen, batch)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, expected)
        return
    # A draft that gives its padding no probability loses nothing; the loss teaches it to.
    loss = distillation_loss(wide, cfg, 1.0, 1.0, ids=400)
    value, grads = jax.value_and_grad(lambda p: loss(p, params, batch)[0])(
        padded(draft_params, 112)
    )
    assert np.isfinite(value) and np.abs(grads["embed"][400:]).max() > 0
    assert value > distillation_loss(cfg, cfg, 1.0, 1.0)(draft_params, params, batch)[0]


def test_a_teacher_of_another_tokenizer_is_refused_with_the_reason(home, tmp_path):
    cfg, _ = load_pretrained(home)
    other = train_tokenizer(code()[:2], 400, tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"has another tokenizer than the draft \(id \d+ is"):
        training_loss(config(home), cfg, other)


def test_a_teacher_with_fewer_positions_than_a_row_is_refused(home, tmp_path):
    cfg, _ = load_pretrained(home)
    tokenizer = small_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"has a context of 128 tokens, shorter than data.seq_len"):
        training_loss(config(home, 129), cfg, tokenizer)
