"""SmolLM2-135M-Instruct: parity, lossless methods, chat, a server, long prompts, prefixes."""

import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax.models import hidden_states, logits_of
from specjax.models.quantized import is_quantized
from support.checkpoints import same
from support.serving import openai_client, serving

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.usefixtures("optimized")]
TOKENS = 8  # new ones per prompt
EXACT = ("speculative", "block", "spectr", "specinfer", "tree-match", "lookup", "suffix")


@pytest.fixture(scope="module")
def plain(smollm2, prompts):
    """The tokens of plain greedy decoding, eight prompts at a time."""
    return sj.generate(smollm2, prompts, max_new_tokens=TOKENS, batch_size=8).tokens


def test_greedy_tokens_are_transformers(smollm2, plain, prompts, golden):
    wanted = golden["smollm2"]
    assert [row[:8] for row in prompts] == wanted["prompts"]
    assert len(plain) == 40 and len(prompts[-1]) == 1500
    for got, want in zip(plain, wanted["tokens"], strict=True):
        # Ours ends with EOS, which the reference was forbidden to write.
        before = [token for token in got.tolist() if token not in smollm2.eos_ids]
        assert before == want[: len(before)] and before


def test_logits_are_transformers(smollm2, prompts, golden):
    for row, want in zip(prompts, golden["smollm2"]["logits"], strict=False):
        tokens = jnp.asarray([row])
        positions = jnp.arange(len(row))[None]
        hidden = hidden_states(smollm2.config, smollm2.params, tokens, positions, positions * 0 + 1)
        got = np.asarray(logits_of(smollm2.config, smollm2.params, hidden.hidden[0, -1:]))[0]
        step = len(got) // len(want)
        np.testing.assert_allclose(got[::step][: len(want)], want, atol=2e-3)


@pytest.mark.parametrize(
    ("method", "batch"), [*((method, 8) for method in EXACT), ("speculative", 1)]
)
def test_lossless_methods_give_plain_decodings_tokens(
    smollm2, shallow, prompts, plain, method, batch
):
    """Eight prompts, two where rows are alone: each method compiles for a minute."""
    chosen = (0, 22) if batch == 1 else range(0, 39, 5)
    draft = shallow if sj.methods()[method].needs_draft else None
    made = sj.generate(
        smollm2,
        [prompts[i] for i in chosen],
        method=method,
        draft=draft,
        max_new_tokens=TOKENS,
        batch_size=batch,
    )
    assert same(made.tokens, [plain[i] for i in chosen])


@pytest.mark.sweep
def test_speculative_gives_plain_decodings_tokens_for_all_prompts(smollm2, shallow, prompts, plain):
    how = {"method": "speculative", "draft": shallow, "batch_size": 8}
    assert same(sj.generate(smollm2, prompts, max_new_tokens=TOKENS, **how).tokens, plain)


def test_the_shipped_head_drafts_answers(smollm2):
    """It writes plain decoding's tokens, and is accepted more often than chance."""
    head = sj.load("smollm2-head")
    asked = ("Name three colors.", "What is rain?")
    rows = [smollm2.tokenizer.encode_chat(text) for text in asked]
    how = {"max_new_tokens": 24, "batch_size": 2}
    wanted = sj.generate(smollm2, rows, **how)
    made = sj.generate(smollm2, rows, method="speculative", draft=head, **how)
    assert same(made.tokens, wanted.tokens)
    assert made.stats["accepted"].sum() > 0.25 * made.stats["tested"].sum()


@pytest.mark.sweep
def test_a_quantized_copy_drafts(smollm2, prompts, plain):
    made = sj.generate(
        smollm2, prompts[:2], method="speculative", draft="self:int4", max_new_tokens=TOKENS
    )
    assert same(made.tokens, plain[:2])
    assert made.stats["accepted"].sum() > 0.5 * made.stats["tested"].sum()


def test_a_long_prompt_in_pieces_and_a_prefix(smollm2, prompts, plain):
    """The long prompt twice, after another: in pieces of 128 tokens, then as a prefix."""
    long = prompts[-1]
    made = sj.generate(smollm2, [prompts[0], long, long], max_new_tokens=TOKENS, batch_size=2)
    assert same(made.tokens, [plain[0], plain[-1], plain[-1]])
    assert made.cached_tokens[2] > 1000


@pytest.mark.sweep
def test_the_files_codes_give_the_same_tokens(plain, prompts):
    """The weights as they are in the file; a CPU dequantizes them for each pass."""
    kept = sj.load("smollm2")
    weight = kept.params["layers"]["0"]["mlp"]["down"]["weight"]
    assert is_quantized(weight) and weight.codes.dtype == jnp.uint4
    made = sj.generate(kept, prompts[:1], max_new_tokens=4)
    assert made.tokens[0].tolist() == plain[0][:4].tolist()


def test_a_server_answers_the_openai_client(smollm2, shallow):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"model": "tiny", "messages": question, "max_tokens": 12, "temperature": 0}
    with serving(smollm2, shallow, "--method", "speculative") as running:
        client = openai_client(running)
        answer = client.chat.completions.create(**options).choices[0].message.content
        pieces = client.chat.completions.create(**options, stream=True)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert "Paris" in answer and streamed == answer
    ids = smollm2.tokenizer.encode_chat("What is the capital of France?")
    direct = sj.generate(smollm2, [ids], max_new_tokens=12).text[0]
    assert direct == answer
