"""The head's loss: several drafted steps from every place of a row, against the target's own law.

Axis legend: B rows, T tokens, P layers of the target, D hidden size, H query heads, K key heads,
G = H/K, E head size, v draft vocabulary, S steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from specjax.models import ModelConfig
from specjax.models.attention.dense import MASKED_SCORE, PADDING_SEGMENT, causal_mask
from specjax.models.families.head_config import HeadConfig
from specjax.models.forward_pass import hidden_states, module_of
from specjax.models.head import draft_logits, fed_back, fused_states, share_embedding
from train.data.packing import IGNORE
from train.engine.loop import LossFn
from train.engine.losses import OutputHead, cast, label_count, sum_over_chunks, summed_kl

Entry = tuple[Float[Array, "B T K E"], Float[Array, "B T K E"]]  # keys and values of one step


@dataclasses.dataclass(frozen=True)
class HeadObjective:
    """What is minimised.

    Attributes:
      steps: S, drafted steps from every place: the first reads the target's states, each further
        one the head's own output (EAGLE-3's training-time test).
      decay: β; step k weighs β^(k − 1).
      dtype: the forward pass's; params and their gradients stay as they are.
      remat: recompute each step in the backward pass.
    """

    steps: int
    decay: float = 1.0
    dtype: str = "float32"
    remat: bool = False


def head_loss(
    target: ModelConfig,
    head: HeadConfig,
    objective: HeadObjective,
    rows: NamedSharding | None = None,
) -> LossFn:
    """Σ_k β^(k−1) · KL(p ‖ q_k) per token, p of the target over the draft vocabulary.

    p is the target's distribution restricted to the ids that the head drafts and renormalized; KL
    less the entropy of p is the cross-entropy, with the same gradient. ``frozen`` are the target's
    params. Logged beside it, per step: ``kl`` in nats and ``agreement``, the share of places where
    both have the same likeliest id. ``rows``: where those of a batch lie, on several devices.
    """

    def loss(params, frozen, batch):
        params = cast(params, objective.dtype)
        tokens = (batch[name] for name in ("tokens", "positions", "segments"))
        seen = hidden_states(target, frozen, *tokens, aux_layers=head.layer_ids, rows=rows)
        hidden, states = jax.lax.stop_gradient(seen)
        teacher = OutputHead.of(target, frozen)
        if head.ids is not None:
            teacher = dataclasses.replace(teacher, table=teacher.table[head.ids])
        cfg, params = share_embedding(head, params, frozen["embed"])

        def sums(shared, own, taught, labels):
            params, teacher = shared
            student = draft_logits(cfg, params, own).astype(jnp.float32)
            other = jax.lax.stop_gradient(teacher.logits(taught))
            same = jnp.argmax(student, axis=-1) == jnp.argmax(other, axis=-1)
            return summed_kl(other, student, labels), jnp.sum(same & (labels != IGNORE)) * 1.0

        found = []
        for k, own in enumerate(
            drafted_steps(cfg, params, batch, states, objective, rows), start=1
        ):
            labels = labels_of_step(batch, k)
            inputs = (own, shifted(hidden, k, 0))
            sums_of_step = sum_over_chunks(sums, (params, teacher), inputs, labels, rows=rows)
            found.append((*sums_of_step, label_count(labels)))
        kl, same, counts = (jnp.stack(column) for column in zip(*found, strict=True))
        weights = objective.decay ** jnp.arange(objective.steps)
        extras = {"kl": (kl, counts), "agreement": (same, counts)}
        return jnp.sum(weights * kl), counts[0], jax.lax.stop_gradient(extras)

    return loss


def drafted_steps(
    cfg: HeadConfig,
    params: dict,
    batch: dict,
    states: Float[Array, "B T P target"],
    objective: HeadObjective,
    rows: NamedSharding | None = None,
) -> Iterator[Float[Array, "B T D"]]:
    """The head's hidden states of each step, as decoding makes them.

    Step k at place i stands for the k-th token drafted after the pair (features of token i, token
    i + 1): it reads token i + k, sees what the head made of true features up to i, and of its own
    steps those that began at i.
    """
    own = {"segment": batch["segments"], "position": batch["positions"]}
    mask = causal_mask(own, own)

    def step(params, features, tokens, positions, past):
        made: list[Entry] = []

        def attend(layer, q, k, v):
            made.append((k, v))
            return attend_steps(q, (*past, (k, v)), mask)

        module = module_of(cfg, params)
        hidden, _ = module(tokens, positions, attend, features=features, rows=rows)
        return hidden, made[0]

    run = jax.checkpoint(step) if objective.remat else step
    features, past = fused_states(cfg, params, states), ()
    for k in range(1, objective.steps + 1):
        tokens, positions = shifted(batch["tokens"], k, 0), batch["positions"] + k - 1
        hidden, entry = run(params, features, tokens, positions, past)
        past = (*past, entry)
        features = fed_back(cfg, params, hidden)
        yield hidden


def attend_steps(
    q: Float[Array, "B T H E"], entries: tuple[Entry, ...], mask: Bool[Array, "B T T"]
) -> Float[Array, "B T H E"]:
    """Attention over the first entry where ``mask`` allows, and over each further one at the same
    place; scores and softmax in float32."""
    (first_k, first_v), *sides = entries
    b, t, h, e = q.shape
    heads = first_k.shape[2]
    q = q.reshape(b, t, heads, h // heads, e).astype(jnp.float32) * e**-0.5
    scores = jnp.einsum("btkge,bske->btkgs", q, first_k.astype(jnp.float32))
    scores = jnp.where(mask[:, :, None, None], scores, MASKED_SCORE)
    own = [jnp.einsum("btkge,btke->btkg", q, k.astype(jnp.float32)) for k, _ in sides]
    weights = jax.nn.softmax(jnp.concatenate([scores, *(x[..., None] for x in own)], -1), axis=-1)
    out = jnp.einsum("btkgs,bske->btkge", weights[..., :t], first_v.astype(jnp.float32))
    for i, (_, v) in enumerate(sides):
        out += weights[..., t + i, None] * v[:, :, :, None].astype(jnp.float32)
    return out.reshape(b, t, h, e).astype(first_v.dtype)


def labels_of_step(batch: dict, k: int) -> Int[Array, "B T"]:
    """The labels of the tokens that step k predicts; IGNORE where its document has ended."""
    same = shifted(batch["segments"], k, PADDING_SEGMENT) == batch["segments"]
    real = same & (batch["segments"] != PADDING_SEGMENT)
    return jnp.where(real, shifted(batch["labels"], k, IGNORE), IGNORE)


def shifted(x: Array, k: int, fill: int) -> Array:
    """``[B, T, ...]``: at place i what stood at i + k; ``fill`` past the end."""
    pad = [(0, k if axis == 1 else 0) for axis in range(x.ndim)]
    return jnp.pad(x, pad, constant_values=fill)[:, k:]
