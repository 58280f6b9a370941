"""A head on hidden states, slow and without a cache: NumPy, float64, from the specification.

Params are those of a checkpoint in speculators' names. Axis legend: T pairs, P layers of the
target, D hidden size, v draft vocabulary.
"""

import numpy as np


def rms(x, weight, eps):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotate(x, position, theta):
    """One head's vector ``[E]``, its two halves as pairs."""
    half = len(x) // 2
    angle = position / theta ** (np.arange(half) / half)
    a, b = x[:half], x[half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    )


def features(cfg, w, states):
    """The features f ``[D]`` of one token, from the target's auxiliary states ``[P, Dt]``."""
    if cfg.fc_norm:
        norms = [w[f"fc_norm.{i}.weight"] for i in range(len(states))]
        states = [rms(x, norm, cfg.norm_eps) for x, norm in zip(states, norms, strict=True)]
    joined = np.concatenate(list(states))
    if cfg.norm_before_fc:
        joined = rms(joined, w["input_norm.weight"], cfg.norm_eps)
    return w["fc.weight"] @ joined


def outputs(cfg, w, tokens, f, positions):
    """The hidden state of the last of T pairs (f, token). Each pair sees those before it."""
    name, eps = "layers.0.", cfg.norm_eps
    e = rms(w["embed_tokens.weight"][tokens], w[name + "input_layernorm.weight"], eps)
    g = rms(f, w[name + "hidden_norm.weight"], eps)
    both, count = np.concatenate([e, g], -1), len(tokens)
    q, k, v = (both @ w[f"{name}self_attn.{x}_proj.weight"].T for x in "qkv")
    mixed, group = [], cfg.num_heads // cfg.num_kv_heads
    for head in range(cfg.num_heads):
        own = slice(head * cfg.head_dim, (head + 1) * cfg.head_dim)
        shared = slice(head // group * cfg.head_dim, (head // group + 1) * cfg.head_dim)
        turned = rotate(q[-1, own], positions[-1], cfg.rope.theta)
        keys = [rotate(k[i, shared], positions[i], cfg.rope.theta) for i in range(count)]
        scores = np.array(keys) @ turned / np.sqrt(cfg.head_dim)
        weights = np.exp(scores - scores.max())
        mixed.append(weights / weights.sum() @ v[:, shared])
    start = g[-1] if cfg.norm_before_residual else f[-1]
    r = start + w[name + "self_attn.o_proj.weight"] @ np.concatenate(mixed)
    x = rms(r, w[name + "post_attention_layernorm.weight"], eps)
    gate, up = (w[f"{name}mlp.{part}_proj.weight"] @ x for part in ("gate", "up"))
    return r + w[name + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)


def drafted_logits(cfg, w, tokens, states, drafted):
    """Logits over the draft vocabulary after the tokens, then after each of ``drafted``.

    ``states[i]`` are of token i, ``[P, Dt]``; the last token's are not known yet.
    """
    w = {name: np.asarray(x, np.float64) for name, x in w.items()}
    f = [features(cfg, w, np.asarray(x, np.float64)) for x in states[: len(tokens) - 1]]
    read, logits = list(tokens[1:]), []
    for token in (*drafted, None):
        at = np.arange(len(read))
        hidden = outputs(cfg, w, np.array(read), np.array(f), at)
        normed = rms(hidden, w["norm.weight"], cfg.norm_eps)
        logits.append(w["lm_head.weight"] @ normed)
        read.append(token)
        f.append(normed if cfg.norm_output else hidden)
    return np.array(logits)
