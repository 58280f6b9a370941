"""Speculative sampling in one function: batched, jitted, lossless.

The whole algorithm (Leviathan et al. 2023, Algorithm 1) by hand, on specjax's models. p is the
target, q the draft. It writes what ``sj.generate(method="speculative")`` writes, token for token.

  python examples/speculative_in_one_function.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax.core.probs import Purpose, residual, round_keys, sample, uniforms
from specjax.core.warp import warp


@functools.partial(jax.jit, static_argnames=("gamma", "new_tokens"))
def speculate(inputs, prompts, length, keys, gamma=4, new_tokens=64):
    """prompts int32 [B, T] of length[B] ≥ 2 tokens → tokens [B, S], length [B], rounds [B]."""
    p_model, q_model = inputs.target, inputs.draft
    rows, longest = prompts.shape
    capacity = longest + new_tokens + gamma + 2  # a round may write past the budget
    end = length + new_tokens
    row = jnp.arange(rows)[:, None]

    # Prefill: both caches then hold the prompts. What is past a shorter one is overwritten later.
    p_cache, _ = p_model.prefill_chunk(p_model.cache(rows, capacity), prompts, 0 * length)
    q_cache, _ = q_model.prefill_chunk(q_model.cache(rows, capacity), prompts, 0 * length)
    tokens = jnp.pad(prompts, ((0, 0), (0, capacity - longest)))

    def one_round(state):
        tokens, length, rounds, done, p_cache, q_cache = state
        key = round_keys(keys, rounds)
        root = tokens[row, length[:, None] - 1]  # the last committed token

        # 1. Draft x_1 … x_γ from q. The first step reads two tokens: if all of the last draft was
        # accepted, q has not seen its last token yet.
        x, log_q = [], []
        for i in range(gamma):
            new = x[-1] if x else jnp.concatenate([tokens[row, length[:, None] - 2], root], axis=1)
            start = length - 1 + i if x else length - 2
            logits, q_cache, _ = q_model.logits(q_cache, new, start)
            log_q.append(warp(logits[:, -1:], inputs.warp))
            u = uniforms(key, Purpose.DRAFT, jnp.full((rows, 1), i + 1))
            x.append(sample(jnp.exp(log_q[-1][:, 0]), u[:, 0])[:, None])
        x, log_q = jnp.concatenate(x, axis=1), jnp.concatenate(log_q, axis=1)

        # 2. One target pass gives p after the root and after every drafted token.
        nodes = jnp.concatenate([root, x], axis=1)
        logits, p_cache, _ = p_model.logits(p_cache, nodes, length - 1)
        log_p = warp(logits, inputs.warp)

        # 3. Accept x_i with probability min(1, p/q), up to the first that is rejected.
        log_ratio = (log_p[:, :-1] - log_q)[row, jnp.arange(gamma), x]
        u = uniforms(key, Purpose.ACCEPT, jnp.broadcast_to(jnp.arange(1, gamma + 1), x.shape))
        accepted = jnp.cumprod(jnp.log(u) <= log_ratio, axis=1).sum(axis=1)

        # 4. Draw one more token: from norm(max(0, p − q)) after a rejection, else a bonus from p.
        p = jnp.exp(log_p[jnp.arange(rows), accepted])
        q = jnp.exp(log_q[jnp.arange(rows), jnp.minimum(accepted, gamma - 1)])
        weights = jnp.where((accepted < gamma)[:, None], residual(p, q), p)
        y = sample(weights, uniforms(key, Purpose.EMIT, accepted[:, None])[:, 0])

        # 5. Commit: x_1 … x_n, then y, cut at the end of sequence and at the budget.
        place = jnp.arange(gamma + 1)
        new = jnp.where(place == accepted[:, None], y[:, None], jnp.pad(x, ((0, 0), (0, 1))))
        ends = inputs.is_eos(new) & (place <= accepted[:, None])
        # Kept are the tokens up to the end of sequence, or else x_1 … x_n and y: hence + 1.
        count = jnp.where(ends.any(1), jnp.argmax(ends, axis=1), accepted) + 1
        count = jnp.where(done, 0, jnp.minimum(count, end - length))
        tokens = tokens.at[row, length[:, None] + place].set(new, mode="drop")
        stopped = (ends & (place < count[:, None])).any(1) | (length + count == end)
        return tokens, length + count, rounds + ~done, done | stopped, p_cache, q_cache

    state = tokens, length, 0 * length, length >= end, p_cache, q_cache
    tokens, length, rounds, *_ = jax.lax.while_loop(lambda s: ~jnp.all(s[3]), one_round, state)
    return tokens, length, rounds


def decode(target, draft, prompts, sampling, seed=0, gamma=4, new_tokens=64):
    """The new tokens of each prompt (token ids), and how many target passes each took."""
    inputs = sj.Inputs.of(target, draft, sampling, batch=len(prompts))
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), max(length)), np.int32)
    for i, prompt in enumerate(prompts):
        padded[i, : len(prompt)] = prompt
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(len(prompts)))
    tokens, ends, rounds = speculate(inputs, padded, length, keys, gamma, new_tokens)
    return [np.asarray(tokens[i, length[i] : ends[i]]) for i in range(len(prompts))], rounds


if __name__ == "__main__":
    target, draft = sj.load("demo"), sj.load("demo-draft")
    texts = ["def fibonacci(n):\n", "class Stack:\n    def push(self, item):\n"]
    prompts = [target.tokenizer.encode(text) for text in texts]
    new, rounds = decode(target, draft, prompts, sj.Sampling(temperature=0.8, top_p=0.9))
    for text, tokens, passes in zip(texts, new, rounds):
        print(text + target.tokenizer.decode(tokens))
        print(f"--- {len(tokens) / int(passes):.2f} tokens per target pass\n")
