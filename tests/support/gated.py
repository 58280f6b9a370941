"""Gated adapters for tests: random ones, and a reference token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax.models import ModelConfig, init_params
from specjax.models.adapters import KEY
from train.config import Tuned
from train.sdsat.trainable import gated_lora


def tuned(params, ids, seed=0, rank=3, matrices=()):
    """The params with random adapters of all, or some, matrices: none of them is zero."""
    section = Tuned(lora_rank=rank, lora_alpha=2.0 * rank, lora_matrices=matrices)
    tuning = gated_lora(ids, section, seed)
    trainable, frozen = tuning.split(params)
    leaves, tree = jax.tree.flatten(trainable)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    moved = [x + e for x, e in zip(leaves, noise, strict=True)]
    return tuning.merge(jax.tree.unflatten(tree, moved), frozen)


def base_and_gated(**other):
    """(base, base with adapters), with five tokens, so that random answers are often accepted."""
    sizes = {"vocab_size": 5, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    sizes |= {"intermediate_size": 24, "max_position": 256} | other
    cfg = ModelConfig.llama(**sizes)
    params = init_params(cfg, jax.random.key(0))
    params["layers"] = jax.tree.map(lambda x: 7 * x, params["layers"])
    params["embed"] = params["embed"] * 25
    own = dataclasses.replace(cfg, adaptive_ids=(cfg.vocab_size,) * 3)
    return sj.from_params(cfg, params), sj.from_params(own, tuned(params, own.adaptive_ids[:1]))


def reference(cfg, params, tokens, sees, positions):
    """Final-normed hidden states ``[N, D]`` of a Llama of one key head per query head.

    Token by token: each has its own weights, and attends to the tokens ``sees[i]``.
    """
    adapters, ids = params[KEY], sorted(set(cfg.adaptive_ids))

    def weight(i, layer, part, name):
        w = params["layers"][layer][part][name]["weight"]
        pair = adapters["layers"][layer].get(part, {}).get(name)
        return w if pair is None or tokens[i] not in ids else w + pair["up"] @ pair["down"]

    def norm(x, scale):
        return scale * x / jnp.sqrt(jnp.mean(x**2) + cfg.norm_eps)

    def turned(x, position):
        half = cfg.head_dim // 2
        angle = position / cfg.rope.theta ** (np.arange(half) / half)
        x = x.reshape(cfg.num_heads, 2, half)
        a, b = x[:, 0], x[:, 1]
        cos, sin = np.cos(angle), np.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def embedded(token):
        return adapters["embed"][ids.index(token)] if token in ids else params["embed"][token]

    xs = [embedded(token) for token in tokens]
    for layer, block in params["layers"].items():
        q, k, v = [], [], []
        for i, x in enumerate(xs):
            h = norm(x, block["attention_norm"]["weight"])
            q.append(turned(weight(i, layer, "attention", "q") @ h, positions[i]))
            k.append(turned(weight(i, layer, "attention", "k") @ h, positions[i]))
            v.append((weight(i, layer, "attention", "v") @ h).reshape(cfg.num_heads, -1))
        for i in range(len(xs)):
            scores = jnp.stack([(q[i] * k[j]).sum(-1) for j in sees[i]]) * cfg.head_dim**-0.5
            shares = jax.nn.softmax(scores, axis=0)
            mixed = sum(
                share[:, None] * v[j] for share, j in zip(shares, sees[i], strict=True)
            ).reshape(-1)
            x = xs[i] + weight(i, layer, "attention", "out") @ mixed
            h = norm(x, block["mlp_norm"]["weight"])
            gate, up = (weight(i, layer, "mlp", name) @ h for name in ("gate", "up"))
            xs[i] = x + weight(i, layer, "mlp", "down") @ (jax.nn.silu(gate) * up)
    return jnp.stack([norm(x, params["norm"]["weight"]) for x in xs])
