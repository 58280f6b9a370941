"""The EAGLE-3 head's loss: several draft steps from every token, against the target's distribution.

Training-time test (Li et al. 2025, "EAGLE-3", arXiv 2503.01840, §3.2). The first step of the head
reads the target's auxiliary hidden states. Each later step reads the head's own output in their
place, as it does when it drafts.

Axes: B rows, T tokens, P auxiliary layers of the target, D hidden size, H query heads, K key heads,
G = H/K, E head size, v draft vocabulary, S draft steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from specjax.models import ModelConfig
from specjax.models.attention.dense import MASKED_SCORE, PADDING_SEGMENT, Meta, causal_mask
from specjax.models.families.head_config import HeadConfig
from specjax.models.forward_pass import (
    BLOCKWISE_FROM,
    HiddenStates,
    hidden_states,
    module_of,
)
from specjax.models.head import draft_logits, fed_back, fused_states, share_embedding
from specjax.models.sharding import head_axis, split_by_heads, splits_tokens
from train.data.packing import IGNORE
from train.engine.loop import LossFn
from train.engine.losses import (
    OutputHead,
    cast,
    label_count,
    row_arguments,
    sum_over_chunks,
    summed_kl,
)

# Names in a batch that holds the target's states: [B, T, D] and [B, T, P, D].
HIDDEN = "hidden_states"  # final-normed
AUX = "aux_states"  # the inputs of the auxiliary layers

QUERY_BLOCK = 256  # queries of a long row whose scores exist at the same time

KeysValues = tuple[Float[Array, "B T K E"], Float[Array, "B T K E"]]  # of one draft step


@dataclasses.dataclass(frozen=True)
class HeadObjective:
    """What is minimized.

    Attributes:
      steps: S, the draft steps from every token.
      decay: β; step k has the weight β^(k − 1).
      dtype: of the forward pass; params and their gradients keep theirs.
      remat: recompute each step in the backward pass.
      drop_outside: leave out tokens whose likeliest id of the target the head does not draft.
      mean_per_step: divide each step's sum by its own tokens, instead of by those of the first.
    """

    steps: int
    decay: float = 1.0
    dtype: str = "float32"
    remat: bool = False
    drop_outside: bool = False
    mean_per_step: bool = False


def head_loss(
    target: ModelConfig,
    head: HeadConfig,
    objective: HeadObjective,
    rows: NamedSharding | None = None,
) -> LossFn:
    """The sum over tokens of Σ_k β^(k−1) · KL(p ‖ q_k) in nats, and the token count.

    p is the target's distribution, restricted to the ids that the head drafts and renormalized;
    q_k is the head's distribution at step k. EAGLE-3 trains with the cross-entropy of p and q_k,
    which is the KL plus the entropy of p and has the same gradient (arXiv 2503.01840, §3.2).

    With ``drop_outside``, tokens whose likeliest id is not drafted add 0, but count in the mean. So
    do they in SafeAILab's code (``traineagle3/cnets.py``): its mean is over all places of a batch,
    with prompts and padding. With ``mean_per_step``, as in speculators' code, step k is a mean over
    the tokens that add to it. Documents end, so later steps have fewer.

    Args:
      target: the target's config; the loss's ``frozen`` argument holds its params. Embedding
        and LM head are enough for batches that hold its states (:mod:`train.head.states`).
      head: the head's config.
      objective: steps, decay and precision.
      rows: the sharding of a batch's rows; None: on one device.

    Logged with it, per step: ``kl`` in nats per token, and ``agreement``, the share of tokens for
    which p and q_k have the same most probable id.
    """

    def loss(params, frozen, batch):
        params = cast(params, objective.dtype)
        # The head reads the auxiliary hidden states; the final ones give p.
        hidden, aux_states = _target_states(target, head, frozen, batch, rows)
        # The target's output layer, restricted to the ids that the head drafts.
        teacher = OutputHead.of(target, frozen, rows, head.ids)
        whole_teacher = None
        if objective.drop_outside and head.ids is not None:
            whole_teacher = OutputHead.of(target, frozen, rows)
        cfg, params = share_embedding(head, params, frozen["embed"])
        sums = _step_sums(cfg)
        shared = (params, teacher, whole_teacher)

        per_step = []
        steps = draft_steps(cfg, params, batch, aux_states, objective, rows)
        for k, head_hidden in enumerate(steps, start=1):
            labels = labels_of_step(batch, k)
            # Step k at place i predicts what the target predicts at place i + k.
            inputs = (head_hidden, shifted(hidden, k, 0))
            per_step.append(sum_over_chunks(sums, shared, inputs, labels, rows=rows))

        kl, agreed, counts = (jnp.stack(column) for column in zip(*per_step, strict=True))
        weights = objective.decay ** jnp.arange(objective.steps)
        tokens = label_count(labels_of_step(batch, 1))
        if objective.mean_per_step:
            # The sum is divided by `tokens` later, so that each step becomes a mean of its own.
            weights = weights * tokens / jnp.maximum(counts, 1)
        extras = {"kl": (kl, counts), "agreement": (agreed, counts)}
        return jnp.sum(weights * kl), tokens, jax.lax.stop_gradient(extras)

    return loss


def _target_states(
    target: ModelConfig,
    head: HeadConfig,
    frozen: dict,
    batch: dict,
    rows: NamedSharding | None,
) -> HiddenStates:
    """The target's hidden states: those of the batch if they were stored ahead, or computed."""
    if HIDDEN in batch:
        return HiddenStates(batch[HIDDEN], batch[AUX])
    states = hidden_states(
        target, frozen, *row_arguments(batch), aux_layers=head.layer_ids, rows=rows
    )
    return jax.lax.stop_gradient(states)


def _step_sums(cfg: HeadConfig) -> Callable:
    """Sums over a chunk of tokens of one step: (KL in nats, tokens of equal argmax, tokens).

    Given the target's whole output layer, tokens whose likeliest id is not drafted are left out.
    """
    drafted = np.zeros(cfg.vocab_size, bool)
    drafted[slice(None) if cfg.ids is None else cfg.ids] = True

    def sums(shared, head_hidden, target_hidden, labels):
        params, teacher, whole_teacher = shared
        if whole_teacher is not None:
            likeliest = jnp.argmax(whole_teacher.logits(target_hidden), axis=-1)
            labels = jnp.where(jnp.asarray(drafted)[likeliest], labels, IGNORE)
        student = draft_logits(cfg, params, head_hidden).astype(jnp.float32)
        pad = ((0, 0), (0, teacher.padding))
        student = jnp.pad(student, pad, constant_values=MASKED_SCORE)
        target_logits = jax.lax.stop_gradient(teacher.logits(target_hidden))
        same = jnp.argmax(student, axis=-1) == jnp.argmax(target_logits, axis=-1)
        kl = summed_kl(target_logits, student, labels)
        return kl, jnp.sum(same & (labels != IGNORE)) * 1.0, label_count(labels)

    return sums


def draft_steps(
    cfg: HeadConfig,
    params: dict,
    batch: dict,
    aux_states: Float[Array, "B T P target"],
    objective: HeadObjective,
    rows: NamedSharding | None = None,
) -> Iterator[Float[Array, "B T D"]]:
    """Yields the head's hidden states of each draft step, as they are when it decodes.

    At place i, tokens up to i + 1 and the target's states up to i are known. Step k drafts token
    i + k + 1: it reads token i + k, from the data. It attends to the entries of the first step up
    to place i, which the head made of the target's states. It also attends to its own earlier
    steps at place i.
    """
    meta = {"segment": batch["segments"], "position": batch["positions"]}
    attend_steps = _step_attention(meta, rows)

    def step(params, features, tokens, positions, past):
        entries: list[KeysValues] = []

        # The head has one layer, so attend is called one time. It has no sinks.
        def attend(layer, q, k, v, sinks):
            q, k, v = (split_by_heads(x, rows) for x in (q, k, v))
            entries.append((k, v))
            return attend_steps(q, (*past, (k, v)))

        module = module_of(cfg, params)
        hidden, _ = module(tokens, positions, attend, features=features, rows=rows)
        return hidden, entries[0]

    run = jax.checkpoint(step) if objective.remat else step
    features = fused_states(cfg, params, aux_states)
    past = ()
    for k in range(1, objective.steps + 1):
        tokens = shifted(batch["tokens"], k, 0)
        positions = batch["positions"] + k - 1
        hidden, entry = run(params, features, tokens, positions, past)
        past = (*past, entry)
        features = fed_back(cfg, params, hidden)
        yield hidden


def _step_attention(meta: Meta, rows: NamedSharding | None) -> Callable:
    """``attend(q, entries)`` of a draft step: :func:`attend_to_steps`, in blocks for long rows.

    Args:
      meta: positions and segments of the tokens, ``[B, T]`` each.
      rows: the sharding of ``[B, T]``; None: on one device. Where tokens are split, a device has
        its own queries and later steps, and all entries of the first step.
    """
    if meta["position"].shape[1] < BLOCKWISE_FROM and not splits_tokens(rows):
        mask = causal_mask(meta, meta)
        return lambda q, entries: attend_to_steps(q, entries, mask)

    run = _attend_in_blocks
    if rows is not None:
        own = PartitionSpec(*rows.spec)
        whole = PartitionSpec(rows.spec[0])
        tokens = rows.spec[1] if splits_tokens(rows) else None
        own_heads = PartitionSpec(rows.spec[0], tokens, head_axis(rows))
        whole_heads = PartitionSpec(rows.spec[0], None, head_axis(rows))
        run = jax.shard_map(
            run,
            mesh=rows.mesh,
            in_specs=(own_heads, whole_heads, own_heads, own, whole),
            out_specs=own_heads,
            check_vma=False,
        )
    return lambda q, entries: run(q, entries[0], entries[1:], meta, meta)


def _attend_in_blocks(
    q: Float[Array, "B t H E"],
    first: KeysValues,
    later: tuple[KeysValues, ...],
    query: Meta,
    key: Meta,
) -> Float[Array, "B t H E"]:
    """:func:`attend_to_steps` for some queries at a time, whose scores are computed twice.

    Args:
      first: the first step's entries at all T places.
      later: the later steps' entries at the t places of the queries.
      query, key: metadata of those places.
    """
    tokens = q.shape[1]
    block = min(QUERY_BLOCK, tokens)
    pad = -tokens % block

    def split(x: Array) -> Array:
        """``[blocks, B, block, ...]`` of ``[B, t, ...]``."""
        x = jnp.pad(x, [(0, pad if axis == 1 else 0) for axis in range(x.ndim)])
        return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def attend(blocks):
        q, later, query = blocks
        return attend_to_steps(q, (first, *later), causal_mask(query, key))

    out = jax.lax.map(attend, jax.tree.map(split, (q, later, dict(query))))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :tokens]


def attend_to_steps(
    q: Float[Array, "B t H E"], entries: tuple[KeysValues, ...], mask: Bool[Array, "B t T"]
) -> Float[Array, "B t H E"]:
    """Attention of one draft step, with scores and softmax in float32.

    Args:
      q: the step's queries, at t places of the row.
      entries: keys and values of each step so far. The first step's, at all T places, are attended
        to wherever ``mask`` allows; a later step's, at the t places, only at the query's own.
      mask: which places of the row each query may see.
    """
    (first_k, first_v), *later = entries
    B, t, H, E = q.shape
    T, K = first_k.shape[1:3]
    q = q.reshape(B, t, K, H // K, E).astype(jnp.float32) * E**-0.5

    scores = jnp.einsum("btkge,bske->btkgs", q, first_k.astype(jnp.float32))
    scores = jnp.where(mask[:, :, None, None], scores, MASKED_SCORE)
    # A later step's entry at another place belongs to another draft: only one score per place.
    later_scores = [jnp.einsum("btkge,btke->btkg", q, k.astype(jnp.float32)) for k, _ in later]
    scores = jnp.concatenate([scores, *(x[..., None] for x in later_scores)], -1)
    weights = jax.nn.softmax(scores, axis=-1)

    out = jnp.einsum("btkgs,bske->btkge", weights[..., :T], first_v.astype(jnp.float32))
    for i, (_, v) in enumerate(later):
        out += weights[..., T + i, None] * v[:, :, :, None].astype(jnp.float32)
    return out.reshape(B, t, H, E).astype(first_v.dtype)


def labels_of_step(batch: dict, k: int) -> Int[Array, "B T"]:
    """The labels of the tokens that step k predicts; IGNORE if they are not trained.

    So the first drafts of an answer count, which start at the last tokens of its prompt.
    """
    # Place i trains step k only if all k tokens that it reads are of its document.
    same_document = shifted(batch["segments"], k, PADDING_SEGMENT) == batch["segments"]
    real = same_document & (batch["segments"] != PADDING_SEGMENT)
    return jnp.where(real, shifted(batch["labels"], k, IGNORE), IGNORE)


def shifted(x: Array, k: int, fill: int) -> Array:
    """``[B, T, ...]`` shifted left: place i holds what was at i + k, or ``fill`` past the end."""
    pad = [(0, k if axis == 1 else 0) for axis in range(x.ndim)]
    return jnp.pad(x, pad, constant_values=fill)[:, k:]
