"""Gemma 3 270M: its logits and tokens are transformers', and one method is lossless."""

import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.models import hidden_states, logits_of
from support.checkpoints import same
from support.real_prompts import prompts_of

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.usefixtures("optimized")]


def test_logits_and_tokens_are_transformers(gemma3, golden):
    wanted = golden["gemma3-270m"]
    rows = prompts_of(gemma3.tokenizer)[: len(wanted["prompts"])]
    assert [row[:8] for row in rows] == wanted["prompts"]
    for row, want in zip(rows, wanted["logits"], strict=False):
        positions = jnp.arange(len(row))[None]
        hidden = hidden_states(
            gemma3.config, gemma3.params, jnp.asarray([row]), positions, positions * 0 + 1
        )
        got = np.asarray(logits_of(gemma3.config, gemma3.params, hidden.hidden[0, -1:]))[0]
        step = len(got) // len(want)
        np.testing.assert_allclose(got[::step][: len(want)], want, atol=2e-3)

    plain = sj.generate(gemma3, rows, max_new_tokens=8).tokens
    for got, want in zip(plain, wanted["tokens"], strict=True):
        before = [token for token in got.tolist() if token not in gemma3.eos_ids]
        assert before == want[: len(before)] and before
    drafted = sj.generate(gemma3, rows, method="lookup", max_new_tokens=8).tokens
    assert same(plain, drafted)
