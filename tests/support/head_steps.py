"""A head's training loss by hand in NumPy: one chain from one place at a time.

Written from the specification of EAGLE-3 training (arXiv 2503.01840, §3), for heads with a
Llama layer and no flag besides ``norm_before_residual``.
"""

from __future__ import annotations

import numpy as np


def weights(params):
    """The head's weights, as float64 arrays."""
    layer = params["layers"]["0"]
    named = {name: layer["attention"][name]["weight"] for name in ("q", "k", "v", "out")}
    named |= {name: layer["mlp"][name]["weight"] for name in ("gate", "up", "down")}
    named |= {n: layer[n]["weight"] for n in ("attention_norm", "hidden_norm", "mlp_norm")}
    named |= {"fc": params["fc"]["weight"], "norm": params["norm"]["weight"]}
    named |= {"head": params["head"]}
    return {name: np.asarray(x, np.float64) for name, x in named.items()}


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x**2) + eps) * weight


def rotate(x, position, theta):
    """``x [heads, E]`` with rotary positions; a pair is one entry of each half."""
    half = x.shape[1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1
    )


class Head:
    """One EAGLE-3 head, evaluated pair by pair."""

    def __init__(self, cfg, params, embed):
        self.cfg, self.w, self.embed = cfg, weights(params), np.asarray(embed, np.float64)

    def features(self, states):
        return self.w["fc"] @ np.asarray(states, np.float64).reshape(-1)

    def read(self, token, features, position, past):
        """Hidden state and (key, value) of one pair; ``past`` are the (key, value) that it sees."""
        cfg, w = self.cfg, self.w
        normed = rms(features, w["hidden_norm"], cfg.norm_eps)
        both = np.concatenate([rms(self.embed[token], w["attention_norm"], cfg.norm_eps), normed])
        q, k, v = ((w[name] @ both).reshape(-1, cfg.head_dim) for name in ("q", "k", "v"))
        q, k = (rotate(x, position, cfg.rope.theta) for x in (q, k))
        seen, out = [*past, (k, v)], []
        for head, query in enumerate(q):
            own = head * len(k) // len(q)
            scores = np.array([query @ key[own] for key, _ in seen]) / np.sqrt(cfg.head_dim)
            share = np.exp(scores - scores.max())
            values = np.array([value[own] for _, value in seen])
            out.append(share / share.sum() @ values)
        x = normed if cfg.norm_before_residual else features
        x = x + w["out"] @ np.concatenate(out)
        y = rms(x, w["mlp_norm"], cfg.norm_eps)
        gate = w["gate"] @ y
        x = x + w["down"] @ (gate / (1 + np.exp(-gate)) * (w["up"] @ y))
        return x, (k, v)

    def logits(self, hidden):
        return self.w["head"] @ rms(hidden, self.w["norm"], self.cfg.norm_eps)


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def loss(head, tokens, positions, segments, states, target_logits, steps, decay, fed_back=True):
    """(Σ_k β^(k−1) KL_k, places of the first step, [KL_k], [agreements of step k], [places]).

    One row; ``states [T, P, D]`` and ``target_logits [T, V]`` are the target's. ``fed_back=False``
    gives later steps the true features, which decoding does not have.
    """
    ids = np.arange(head.cfg.vocab_size) if head.cfg.ids is None else head.cfg.ids
    kl, agreed, places = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    features = [head.features(x) for x in states]
    for anchor in range(len(tokens)):
        true = [j for j in range(anchor) if segments[j] == segments[anchor]]
        past = [head.read(tokens[j + 1], features[j], positions[j], [])[1] for j in true]
        given = features[anchor]
        for k in range(1, steps + 1):
            predicted = anchor + k + 1
            inside = predicted < len(tokens) and segments[predicted] == segments[anchor] != 0
            if not inside:
                break
            hidden, entry = head.read(tokens[anchor + k], given, positions[anchor] + k - 1, past)
            past = [*past, entry]
            given = hidden if fed_back else features[anchor + k]
            p = log_softmax(np.asarray(target_logits[anchor + k], np.float64)[ids])
            q = log_softmax(head.logits(hidden))
            kl[k - 1] += np.sum(np.exp(p) * (p - q))
            agreed[k - 1] += np.argmax(p) == np.argmax(q)
            places[k - 1] += 1
    return np.sum(decay ** np.arange(steps) * kl), places[0], kl, agreed, places
