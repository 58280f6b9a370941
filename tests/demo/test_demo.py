"""The embedded pair: sizes, greedy equality on held-out code, acceptance, the contributed rule."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from infer.rescoring import mismatches
from specjax import verify
from specjax.core import loop
from specjax.core.scoring import score
from specjax.demo.heldout import held_out_functions
from specjax.lm import DEMO
from specjax.models.quantized import is_quantized
from specjax.registry import Context
from specjax.runtime.engine import Engine

ACCEPTANCE = 0.7  # the shipped draft reaches 0.87
NEAR_TIE = 1e-4  # top-2 logit gap below which float32 passes of different sizes may disagree


@pytest.fixture(scope="module")
def pair():
    return sj.load("demo"), sj.load("demo-draft")


@pytest.fixture(scope="module")
def prompts(pair):
    functions, _ = held_out_functions(200)
    return [pair[0].tokenizer.encode(function.prompt) for function in functions]


def test_sizes(pair):
    target, draft = pair
    assert sj.models.num_params(target.config) <= 10e6
    assert sj.models.num_params(draft.config) <= 1.5e6
    assert sum(f.stat().st_size for f in DEMO.rglob("*.safetensors")) <= 40e6
    assert (DEMO / "head" / "model.safetensors").stat().st_size <= 3e6
    assert target.tokenizer.difference(draft.tokenizer) is None


def test_the_head_is_plain_greedy_and_accepted(pair, prompts):
    """The head loads by name. Like published ones it has no embedding and names its target."""
    head, few = sj.load("demo-head"), prompts[:8]
    assert head.is_head and not head.config.own_embedding and head.config.verifier == "demo"
    how = {"max_new_tokens": 24, "batch_size": 8}
    plain = sj.generate(pair[0], few, **how)
    fast = sj.generate(pair[0], few, method="speculative", draft=head, **how)
    differ = mismatches(pair[0], few, plain.tokens, fast.tokens)
    assert all(row["gap"] < NEAR_TIE for row in differ), differ
    assert fast.stats["accepted"].sum() >= ACCEPTANCE * fast.stats["tested"].sum()


def test_the_head_for_smollm2_loads_without_its_target():
    head = sj.load("smollm2-head")
    assert head.is_head and head.config.verifier == "smollm2" and is_quantized(head.params["head"])
    assert (head.config.target_size, head.config.vocab_size) == (576, 49152)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "count"), [pytest.param(1, 40, marks=pytest.mark.sweep), (8, 80)]
)
def test_speculative_is_plain_greedy_on_held_out_functions(pair, prompts, batch_size, count):
    target, draft = pair
    prompts = prompts[:count]
    plain = sj.generate(target, prompts, max_new_tokens=32, batch_size=8)
    fast = sj.generate(
        target,
        prompts,
        method="speculative",
        draft=draft,
        max_new_tokens=32,
        batch_size=batch_size,
        options={"gamma": 3},
    )
    differ = mismatches(target, prompts, plain.tokens, fast.tokens)
    assert all(row["gap"] < NEAR_TIE for row in differ), differ
    acceptance = fast.stats["accepted"].sum() / fast.stats["tested"].sum()
    assert acceptance >= ACCEPTANCE


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.usefixtures("optimized")
def test_greedy_is_transformers_greedy_on_held_out_functions(pair, prompts):
    pytest.importorskip("torch")
    from infer.bench.peer_process import PeerJob, decode
    from infer.bench.peer_transformers import load, make_mode
    from specjax.lm import EMBEDDED

    prompts = prompts[:24]
    job = PeerJob(
        target=str(EMBEDDED["demo"]),
        draft=None,
        prompts=prompts,
        budget=24,
        gamma=4,
        eos_ids=[],
        threads=2,
        on_cpu=True,
        dtype="float32",
    )
    theirs = decode(make_mode(load(job.target, job)), prompts, job.budget)["tokens"]
    ours = sj.generate(pair[0], prompts, max_new_tokens=24, batch_size=8)
    differ = mismatches(pair[0], prompts, ours.tokens, [np.array(t) for t in theirs])
    assert all(row["gap"] < NEAR_TIE for row in differ), differ


def test_text_reads_as_python(pair, prompts):
    out = sj.generate(pair[0], prompts[:16], max_new_tokens=64, batch_size=16)
    text = "\n".join(out.text)
    assert len(re.findall(r"^ +(if|for|return|self\.|raise|try|def|while|\w+ =)", text, re.M)) > 30


@functools.cache
def demo_runs():
    """Sampled runs of several methods on the same held-out functions; every draft has depth 3."""
    target, draft = sj.load("demo"), sj.load("demo-draft")
    functions, _ = held_out_functions(16)
    # Only the ends of the prompts: then all fit in one bucket, with one program per method.
    prompts = [target.tokenizer.encode(function.prompt)[-40:] for function in functions]
    runs = {}
    for name, options in (
        ("speculative", {"gamma": 3}),
        ("specinfer", {"branching": (4, 2, 2)}),
        ("mtad", {"gamma": 3}),
    ):
        out = sj.generate(
            target,
            prompts,
            method=name,
            draft=draft,
            options=options,
            sampling=sj.Sampling(1.0, 20, 0.9),
            max_new_tokens=40,
            num_samples=2,
            logprobs=True,
        )
        runs[name] = out
    return runs


def tokens_per_round(out):
    return out.stats["emitted"] / out.stats["rounds"]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("better", ["specinfer", "mtad"])
def test_more_tokens_per_round_than_the_chain(better):
    """A tree of 4,2,2 and MTAD's best beam both win: paired over prompts and samples, one-sided."""
    runs = demo_runs()
    gain = tokens_per_round(runs[better]) - tokens_per_round(runs["speculative"])
    assert gain.mean() > 3 * gain.std() / len(gain) ** 0.5


@pytest.mark.slow
@pytest.mark.sweep
def test_mtad_is_less_perplexing_than_samples():
    runs = demo_runs()
    mtad, plain = (
        np.array([row.mean() for row in runs[n].logprobs]) for n in ("mtad", "speculative")
    )
    assert (mtad - plain).mean() > 3 * (mtad - plain).std() / len(plain) ** 0.5


@pytest.mark.slow
def test_block_accepts_more_of_the_demo_drafts(pair, prompts):
    """Block verification accepts more in 10⁵ verdicts on the same drafts: paired, one-sided."""
    target, draft = pair
    method, _ = sj.method("speculative").build(Context(target, draft), {"gamma": 4})
    rows, per_draft = 32, 160
    inputs = Engine(target, draft, method, {"tau1": 0.0}).inputs(sj.Sampling(1.0), rows)
    budget, keys = np.full(rows, 8, np.int32), jax.random.split(jax.random.key(0), rows)
    state = loop.start(
        method, inputs, [np.array(p[-40:]) for p in prompts[:rows]], budget, keys, chunk=64
    )

    @jax.jit
    def gains(keys):
        drafted = method.drafter.propose(inputs, state, keys).draft
        scores, *_ = score(target.net, state.cache, state.length - 1, drafted)
        log_p, _ = method.target.log_p(inputs, state, drafted, scores)

        def gain(i):
            again = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
            one, two = (
                rule(again, drafted, log_p).num_accepted
                for rule in (verify.speculative, verify.block)
            )
            return two - one

        return jax.lax.map(gain, jnp.arange(per_draft)).mean(0)  # of each draft

    found = np.concatenate(
        [gains(jax.random.split(key, rows)) for key in jax.random.split(jax.random.key(1), 20)]
    )
    assert found.size * per_draft >= 1e5
    assert found.mean() > 5 * found.std() / found.size**0.5
