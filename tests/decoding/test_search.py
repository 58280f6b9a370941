"""Searches: beam search against transformers, MTJD against enumeration of the joint."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import specjax as sj
from specjax.models import ModelConfig, init_params, save_pretrained
from support.variant_models import logits_jit

PROMPTS = [[1, 2, 3], [4], [7, 7, 5, 2, 6, 0, 3]]
V = 11


@pytest.fixture(scope="module")
def model():
    """Eleven tokens, two of them EOS, so that hypotheses finish at all lengths."""
    cfg = ModelConfig.llama(
        vocab_size=V,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=24,
        max_position=128,
        eos_ids=(9, 10),
    )
    params = init_params(cfg, jax.random.key(4))
    params["layers"] = jax.tree.map(lambda x: 8 * x, params["layers"])
    params["embed"] = params["embed"] * 30
    return cfg, params


@pytest.fixture(scope="module")
def lm(model):
    return sj.from_params(*model)


def log_probs(lm, sequences):
    """Unwarped log p of the next token after every position, ``[n, T, V]``.

    Each length is compiled, so rows are padded to multiples of 8; padding changes nothing.
    """
    tokens = np.asarray(sequences, np.int32)
    padded = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % 8)))
    at = np.tile(np.arange(padded.shape[1]), (len(tokens), 1))
    logits = logits_jit(lm.config, lm.params, padded, at, np.ones_like(padded), "dense")
    return np.asarray(jax.nn.log_softmax(logits), np.float64)[:, : tokens.shape[1]]


def beam_reference(lm, prompt, beams, budget):
    """Beam search in plain Python: finished hypotheses by mean log-probability, no cache."""
    running, finished = [(0.0, [])], []
    for length in range(1, budget + 1):
        rows = [[*prompt, *tokens] for _, tokens in running]
        # Always ``beams`` rows, so that one program per length is compiled.
        table = log_probs(lm, rows + rows[:1] * (beams - len(rows)))[:, -1]
        grown = [
            (score + row[token], [*tokens, token])
            for (score, tokens), row in zip(running, table, strict=False)
            for token in range(V)
        ]
        grown.sort(key=lambda pair: -pair[0])
        ended = [length == budget or tokens[-1] in (9, 10) for _, tokens in grown]
        # Only the best W candidates of a step may finish; the best W others go on.
        finished += [
            (score / length, tokens)
            for (score, tokens), end in zip(grown[:beams], ended, strict=False)
            if end
        ]
        finished = sorted(finished, key=lambda pair: -pair[0])[:beams]
        running = [pair for pair, end in zip(grown, ended, strict=True) if not end][:beams]
        if not running or (len(finished) == beams and running[0][0] / length <= finished[-1][0]):
            break
    return finished[0][1]


@pytest.mark.parametrize("beams", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_beam_search_is_the_reference(lm, beams):
    ours = sj.generate(lm, PROMPTS, method="beam", options={"beams": beams}, max_new_tokens=16)
    for prompt, tokens in zip(PROMPTS, ours.tokens, strict=True):
        assert tokens.tolist() == beam_reference(lm, prompt, beams, 16)


@pytest.mark.torch
@pytest.mark.parametrize("beams", [1, 3, 5])
def test_beam_search_is_transformers_num_beams(model, lm, beams, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    save_pretrained(tmp_path, *model)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    options = {"beams": beams, "num_return_sequences": beams}
    # Fewer slots than prompts: rows that have ended wait while others go on.
    how = {"options": options, "max_new_tokens": 24, "batch_size": 2}
    ours = sj.generate(lm, PROMPTS, method="beam", **how)
    lengths = set()
    for row, (prompt, mine) in enumerate(zip(PROMPTS, ours.tokens, strict=True)):
        ids = torch.tensor([prompt])
        theirs = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beams,
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=[9, 10],
            pad_token_id=0,
            num_return_sequences=beams,
            return_dict_in_generate=True,
            output_scores=True,
        )
        wanted = theirs.sequences[:, len(prompt) :].tolist()
        lengths.add(len(mine))
        if beams == 1:
            assert ours.hypotheses is None and mine.tolist() == wanted[0]
            continue
        found = ours.hypotheses[row]
        assert found[0].tokens.tolist() == mine.tolist() and len(found) == beams
        for one, want in zip(found, wanted, strict=True):
            ended = one.tokens.tolist()
            # It fills shorter ones with its first end token, for its padding's id is 0.
            assert want == ended + [9] * (len(want) - len(ended))
            assert len(ended) == 24 or ended[-1] in (9, 10)
        scores = [one.score for one in found]
        np.testing.assert_allclose(scores, theirs.sequences_scores.numpy(), rtol=1e-4)
    assert len(lengths) > 1, "some hypothesis must end before the budget"


def test_more_sequences_than_beams_are_refused(lm):
    with pytest.raises(sj.OptionError, match="num_return_sequences=3: expected at most beams=2"):
        options = {"beams": 2, "num_return_sequences": 3}
        sj.generate(lm, [PROMPTS[0]], method="beam", options=options)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    "early_stopping",
    [True, *(pytest.param(value, marks=pytest.mark.sweep) for value in (False, "never"))],
)
def test_length_penalty_and_early_stopping_are_transformers(model, lm, early_stopping, tmp_path):
    """Tokens, and the scores of the texts by the tokens' log-probabilities."""
    torch = pytest.importorskip("torch")
    import transformers

    save_pretrained(tmp_path, *model)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = {}
    for penalty in (-2.0, 0.6, 3.0):
        options = {"beams": 3, "length_penalty": penalty, "early_stopping": early_stopping}
        ours = sj.generate(
            lm, PROMPTS, method="beam", options=options, max_new_tokens=24, logprobs=True
        )
        for prompt, mine, logprobs in zip(PROMPTS, ours.tokens, ours.logprobs, strict=True):
            ids = torch.tensor([prompt])
            theirs = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=3,
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=[9, 10],
                pad_token_id=0,
                length_penalty=penalty,
                early_stopping=early_stopping,
                return_dict_in_generate=True,
                output_scores=True,
            )
            assert mine.tolist() == theirs.sequences[0, len(prompt) :].tolist()
            score = logprobs.sum() / len(mine) ** penalty
            assert score == pytest.approx(float(theirs.sequences_scores[0]), rel=1e-4)
        found[penalty] = [tokens.tolist() for tokens in ours.tokens]
    assert found[-2.0] != found[3.0], "the penalty must matter"


@pytest.mark.slow
def test_a_row_of_a_batch_is_the_prompt_alone(lm):
    for method, temperature in itertools.product(("beam", "mtjd"), (0.0, 0.9)):
        sampling = sj.Sampling(temperature)
        kw = {"method": method, "max_new_tokens": 20, "sampling": sampling, "seed": 3}
        together = sj.generate(lm, PROMPTS, **kw)
        for i, prompt in enumerate(PROMPTS):
            alone = sj.generate(lm, [prompt], indices=[i], **kw)
            np.testing.assert_array_equal(together.tokens[i], alone.tokens[0])
            for name, values in alone.stats.items():
                np.testing.assert_array_equal(together.stats[name][i], values[0], name)


def test_beam_of_one_is_greedy(lm):
    greedy = sj.generate(lm, PROMPTS, max_new_tokens=30)
    one = sj.generate(lm, PROMPTS, method="beam", options={"beams": 1}, max_new_tokens=30)
    for a, b in zip(greedy.tokens, one.tokens, strict=True):
        np.testing.assert_array_equal(a, b)


def best_block(lm, prompt, length):
    """The likeliest continuation of at most ``length`` tokens, by enumeration. EOS is absorbing."""
    blocks = list(itertools.product(range(V), repeat=length))
    tables = log_probs(lm, [list(prompt) + list(b) for b in blocks])
    best = {}
    for block, table in zip(blocks, tables, strict=True):
        ends = [i for i, token in enumerate(block) if token in (9, 10)]
        kept = block[: ends[0] + 1] if ends else block
        rows = table[len(prompt) - 1 : len(prompt) - 1 + len(kept)]
        best[kept] = sum(row[token] for row, token in zip(rows, kept, strict=True))
    return max(best, key=best.get)


def test_mtjd_takes_the_argmax_of_the_exact_joint(lm):
    out = sj.generate(lm, PROMPTS, method="mtjd", options={"block": 3}, max_new_tokens=8)
    for prompt, tokens in zip(PROMPTS, out.tokens, strict=True):
        text, want = list(prompt), []
        while len(want) < 8 and (not want or want[-1] not in (9, 10)):
            block = best_block(lm, text, min(3, 8 - len(want)))
            text, want = text + list(block), want + list(block)
        assert tokens.tolist() == want
    greedy = sj.generate(lm, PROMPTS, max_new_tokens=8)
    assert any(
        len(a) != len(b) or (a != b).any() for a, b in zip(out.tokens, greedy.tokens, strict=True)
    )


def test_likelier_blocks_may_make_less_likely_text():
    """Corollary 3.3 of Qin et al. 2024 does not hold: docs/pages/mtad.md has this Markov chain.

    From 0 greedy decoding stays (0.6); the likeliest two tokens are 1, 2 (0.4 > 0.36), and from 2,
    3 or 4 two of these are likelier than any way back.
    """
    p = np.array([[0.6, 0.4, 0, 0, 0], [0, 0, 1, 0, 0], *[[0.04, 0, 0.32, 0.32, 0.32]] * 3])

    def perplexity(block: int, length: int) -> float:
        """The perplexity of likeliest blocks in a row, each found by enumeration of its joint."""
        at, total = 0, 0.0
        for _ in range(length // block):
            joint = p[at] if block == 1 else p[at][:, None] * p
            total += np.log(joint.max())
            at = joint.argmax() % len(p)
        return float(np.exp(-total / length))

    assert perplexity(1, 1000) == pytest.approx(1 / 0.6)
    assert perplexity(2, 1000) == pytest.approx(1 / 0.32, rel=0.01)


@pytest.mark.parametrize("method", ["beam", "mtjd"])
def test_logprobs_are_the_targets(lm, method):
    out = sj.generate(lm, PROMPTS, method=method, max_new_tokens=12, logprobs=True)
    for prompt, tokens, found in zip(PROMPTS, out.tokens, out.logprobs, strict=True):
        table = log_probs(lm, [[*prompt, *tokens]])[0, len(prompt) - 1 : -1]
        np.testing.assert_allclose(found, table[np.arange(len(tokens)), tokens], atol=1e-4)


@pytest.mark.slow
def test_mtad_loses_little_of_mtjds_joint(lm):
    """With the target as its own draft, MTAD's block is the best beam: its joint is maximal."""
    mtjd = sj.generate(
        lm, PROMPTS, method="mtjd", options={"block": 3, "width": 11}, max_new_tokens=4
    )
    mtad = sj.generate(
        lm, PROMPTS, method="mtad", draft=lm, options={"gamma": 3, "width": 11}, max_new_tokens=4
    )
    for a, b in zip(mtjd.tokens, mtad.tokens, strict=True):
        n = min(3, len(a))
        np.testing.assert_array_equal(a[:n], b[:n])


@pytest.mark.slow
@pytest.mark.sweep
def test_mtad_lies_within_its_bound_of_mtjd(lm):
    """Qin et al. 2024, Theorem 3.5, with its proof's constants (equations 26 to 29).

    With |log p − log q| ≤ U, beams that find the best block (ε = 0) and γ̄ tokens per round:
    ln PPL(MTAD) − ln PPL(MTJD) ≤ (−ln τ + H(p) + (1 + γ̄)·U) / γ̄. Plain samples break it.
    """
    generator = np.random.Generator(np.random.Philox(5))
    params = jax.tree.map(
        lambda x: x * (1 + 1e-4 * generator.normal(size=x.shape).astype(np.float32)), lm.params
    )
    draft = dataclasses.replace(lm, params=params)
    endless, tau, budget = dataclasses.replace(lm, eos_ids=()), 0.95, 12
    prompts = [[i, j, 3] for i in range(4) for j in range(3)]
    kw = {"max_new_tokens": budget}
    mtjd = sj.generate(endless, prompts, method="mtjd", options={"block": 3}, **kw)
    # V beams make the search over two tokens exact; greedy rows compare unwarped joints.
    mtad = sj.generate(
        endless,
        prompts,
        method="mtad",
        draft=draft,
        options={"gamma": 2, "width": V, "tau": tau},
        **kw,
    )
    plain = sj.generate(endless, prompts, sampling=sj.Sampling(1.0), **kw)
    rounds = mtad.stats["emitted"].sum() / mtad.stats["rounds"].sum()

    def scored(model, out):
        rows = [[*prompt, *new] for prompt, new in zip(prompts, out.tokens, strict=True)]
        return log_probs(model, rows)[:, 2:-1]

    def mean_log_p(out):
        chosen = np.take_along_axis(scored(lm, out), np.array(out.tokens)[..., None], -1)
        return chosen.mean()

    log_p, log_q = scored(lm, mtad), scored(draft, mtad)
    entropy = -(np.exp(log_p) * log_p).sum(-1).mean()
    distance = np.abs(log_p - log_q).max()
    bound = (-np.log(tau) + entropy + (1 + rounds) * distance) / rounds
    assert distance > 0 and 1.5 < rounds <= 3
    assert mean_log_p(mtjd) - mean_log_p(mtad) <= bound
    assert mean_log_p(mtjd) - mean_log_p(plain) > bound, "or the bound would say nothing"
