"""A mixture of experts in the place of an MLP: a router, the chosen experts, perhaps a shared one.

Each token is computed by the few experts that its router chooses. A pass reads the weights of the
experts that some token chose, and of no other. Shapes are static and no token is dropped.

Split over devices, each has a share of the experts, and computes what the tokens choose of those;
the devices' results are summed.

Axis legend: B rows, N tokens, T = B·N, D hidden size, E experts, k experts of a token, F columns
of an expert, S = T·k slots, b slots of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from specjax._util.platform import platform
from specjax.models import expert_kernel, sharding
from specjax.models.config import ExpertsConfig, ModelConfig
from specjax.models.grouped_products import grouped_product
from specjax.models.layers import ACTIVATIONS, linear
from specjax.models.quantized import is_quantized

# Slots of a block; more of them share a read of their expert's weights, and more are padding.
MIN_BLOCK = 4
MAX_BLOCK = 128
# Up to this many slots a GPU gathers the weights of each, rather than group them.
GATHERED_SLOTS = 64
TINY = 1e-20  # beside a sum that scores are divided by


class Router(nnx.Module):
    """Which experts a token chooses, and with what weights."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        experts = _experts_of(cfg)
        self.experts = experts
        shape = (experts.count, cfg.hidden_size)
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), shape, jnp.float32), axes=("router", "hidden"))
        zeros = jnp.zeros((experts.count,))
        self.bias = nnx.Param(zeros, axes=("router",)) if experts.router_bias else None
        self.correction = nnx.Param(zeros, axes=("router",)) if experts.corrected else None

    def __call__(
        self, x: Float[Array, "T D"], labels: Float[Array, ""] | None = None
    ) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """The chosen experts of each token, and the float32 factors of their results.

        Args:
          labels: as :func:`specjax.models.hidden_states` takes it.
        """
        logits = self.logits(x)
        ids, factors = choose(self.experts, logits, self._correction())
        if self.experts.balance and labels is not None:
            # The losses of training are sums over labels, which a step divides by their number.
            loss = labels * self.experts.balance * balancing_loss(self.experts, logits, ids)
            factors = _with_loss(factors, loss)
        return ids, factors

    def logits(self, x: Float[Array, "T D"]) -> Float[Array, "T E"]:
        """float32 scores of all experts, before they are made probabilities."""
        logits = linear(x.astype(jnp.float32), self.weight[...].astype(jnp.float32))
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)

    def _correction(self) -> Float[Array, "E"] | None:
        return None if self.correction is None else self.correction[...].astype(jnp.float32)


def choose(
    experts: ExpertsConfig,
    logits: Float[Array, "T E"],
    correction: Float[Array, "E"] | None = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """The experts of each token by its router's logits, and the factors of their results.

    Args:
      correction: is added to the scores where experts are chosen, and not in their factors
        (auxiliary-loss-free balancing, arXiv 2408.15664).
    """
    scores = jax.nn.sigmoid(logits)
    if experts.scores == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    preferred = scores if correction is None else scores + correction
    if experts.groups > 1:
        preferred = _of_best_groups(experts, preferred)
    ids = jax.lax.top_k(preferred, experts.active)[1]
    factors = jnp.take_along_axis(scores, ids, axis=-1)
    if experts.normalized:
        factors = factors / (factors.sum(-1, keepdims=True) + TINY)
    return ids.astype(jnp.int32), factors * experts.scale


def balancing_loss(
    experts: ExpertsConfig, logits: Float[Array, "T E"], ids: Int[Array, "T k"]
) -> Float[Array, ""]:
    """How unevenly tokens choose their experts: k if all are chosen alike, more otherwise.

    It is ``E · Σ fᵢ · Pᵢ`` over the experts i (Fedus et al. 2021, arXiv 2101.03961, equation (4)).
    fᵢ is how many tokens choose i, as a share of all tokens, and Pᵢ the mean of its scores.
    """
    if experts.scores == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
        scores = scores / (scores.sum(-1, keepdims=True) + TINY)
    chosen = jnp.bincount(ids.reshape(-1), length=experts.count) / len(ids)
    return experts.count * jnp.sum(chosen * scores.mean(0))


@jax.custom_vjp
def _with_loss(x: Float[Array, "T k"], loss: Float[Array, ""]) -> Float[Array, "T k"]:
    """``x``. In gradients ``loss`` counts as if it were added to what is differentiated.

    So a layer adds a loss of its own, and no pass need return it.
    """
    return x


_with_loss.defvjp(lambda x, loss: (x, None), lambda _, g: (g, jnp.ones((), jnp.float32)))


def _of_best_groups(experts: ExpertsConfig, preferred: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """``preferred``, but −inf for experts outside of the token's best groups.

    A group counts as its best experts together (arXiv 2412.19437, §2.1.2; DeepSeek-V2 takes one).
    """
    grouped = preferred.reshape(len(preferred), experts.groups, -1)
    best = jax.lax.top_k(grouped, experts.group_best)[0].sum(-1)
    chosen = jax.lax.top_k(best, experts.active_groups)[1]
    is_chosen = (jnp.arange(experts.groups) == chosen[..., None]).any(1)
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(preferred.shape)


class ExpertLinear(nnx.Module):
    """The weights ``[E, out, in]`` of one layer of all experts; a device has its share of E."""

    def __init__(
        self,
        cfg: ModelConfig,
        shape: tuple[int, int],
        axes: tuple[str, str],
        rngs: nnx.Rngs,
        std: float = 0.02,
    ):
        experts = _experts_of(cfg)
        count = experts.count // cfg.shards
        init = nnx.initializers.normal(std)
        weight = init(rngs.params(), (count, *shape), jnp.float32)
        self.weight = nnx.Param(weight, axes=("experts", *axes))
        zeros = jnp.zeros((count, shape[0]))
        bias_axes = ("experts", axes[0])
        self.bias = nnx.Param(zeros, axes=bias_axes) if experts.biases else None

    def leaves(self) -> tuple[Any, Any]:
        """The weight and the bias; None where there is none."""
        return self.weight[...], None if self.bias is None else self.bias[...]


class ExpertMLP(nnx.Module):
    """All experts: gated MLPs without adapters."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs, std: float):
        d = cfg.hidden_size
        f = _experts_of(cfg).size
        self.gate = ExpertLinear(cfg, (f, d), ("expert_columns", "hidden"), rngs)
        self.up = ExpertLinear(cfg, (f, d), ("expert_columns", "hidden"), rngs)
        self.down = ExpertLinear(cfg, (d, f), ("hidden", "expert_columns"), rngs, std)

    def leaves(self) -> dict[str, tuple[Any, Any]]:
        """Weights and biases by layer, with the experts along their first axis."""
        return {"gate": self.gate.leaves(), "up": self.up.leaves(), "down": self.down.leaves()}


class Mixture(nnx.Module):
    """The chosen experts' results by the router's factors, and the shared expert's.

    ``shared`` makes an MLP of a config; :mod:`specjax.models.blocks` passes it in.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        rngs: nnx.Rngs,
        std: float,
        shared: Callable[[int], nnx.Module],
    ):
        experts = _experts_of(cfg)
        self.cfg = cfg
        self.router = Router(cfg, rngs)
        self.experts = ExpertMLP(cfg, rngs, std)
        if experts.shared_size:
            self.shared = shared(experts.shared_size // cfg.shards)
        if experts.shared_gate:
            init = nnx.initializers.normal(0.02)
            gate = init(rngs.params(), (1, cfg.hidden_size), jnp.float32)
            self.shared_gate = nnx.Param(gate, axes=("router", "hidden"))

    def __call__(
        self,
        x: Float[Array, "B N D"],
        rows: NamedSharding | None = None,
        labels: Float[Array, ""] | None = None,
    ) -> Float[Array, "B N D"]:
        """``rows`` is the sharding of ``[B, N]`` in training: a device sorts its own tokens.

        ``labels`` is for the router.
        """
        experts = _experts_of(self.cfg)
        choices = self.router(x.reshape(-1, x.shape[-1]), labels)
        ids, factors = (choice.reshape(*x.shape[:2], -1) for choice in choices)
        run = _map_tokens(functools.partial(_sum_of_chosen, self.cfg), rows)
        out = sharding.psum_shards(run(self.experts.leaves(), x, ids, factors), self.cfg.shards)
        if not experts.shared_size:
            return out
        shared = self.shared(x)
        if experts.shared_gate:
            shared = shared * jax.nn.sigmoid(linear(x, self.shared_gate[...]))
        return out + shared


def _map_tokens(run: Callable, rows: NamedSharding | None) -> Callable:
    """``run(leaves, ...)`` on each device's own tokens, with the experts of all devices."""
    if rows is None:
        return run
    tokens = PartitionSpec(*rows.spec)
    in_specs = (PartitionSpec(), tokens, tokens, tokens)
    return jax.shard_map(run, mesh=rows.mesh, in_specs=in_specs, out_specs=tokens, check_vma=False)


def _sum_of_chosen(
    cfg: ModelConfig,
    leaves: dict,
    x: Float[Array, "B N D"],
    ids: Int[Array, "B N k"],
    factors: Float[Array, "B N k"],
) -> Float[Array, "B N D"]:
    """:func:`expert_sum` of rows of tokens."""
    tokens, chosen, shares = (array.reshape(-1, array.shape[-1]) for array in (x, ids, factors))
    run = functools.partial(_expert, cfg)
    return expert_sum(run, leaves, tokens, chosen, shares, cfg).reshape(x.shape)


def _experts_of(cfg: ModelConfig) -> ExpertsConfig:
    assert cfg.experts is not None, "only a mixture has experts"
    return cfg.experts


def _expert(cfg: ModelConfig, leaves: dict, x: Float[Array, "b D"]) -> Float[Array, "b D"]:
    """One expert's MLP."""
    return _gated_mlp(cfg, lambda name, x: linear(x, *leaves[name]), x)


def _gated_mlp(
    cfg: ModelConfig, product: Callable[[str, Array], Array], x: Float[Array, "b D"]
) -> Float[Array, "b D"]:
    """An expert's MLP by a function that multiplies with its layer of a name."""
    gate = product("gate", x)
    up = product("up", x)
    return product("down", _combine(cfg, gate, up))


def _combine(
    cfg: ModelConfig, gate: Float[Array, "b F"], up: Float[Array, "b F"]
) -> Float[Array, "b F"]:
    """What an expert's last layer reads."""
    clip = _experts_of(cfg).clip
    if clip is None:
        return ACTIVATIONS[cfg.activation](gate) * up
    alpha, limit = clip
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


def expert_sum(
    run: Callable[[Any, Array], Array],
    leaves: Any,
    x: Float[Array, "T D"],
    ids: Int[Array, "T k"],
    factors: Float[Array, "T k"],
    cfg: ModelConfig,
) -> Float[Array, "T D"]:
    """The sum of ``factor · run(expert, token)`` over the experts that each token chose.

    Of a split model it is the sum over this device's experts.

    Args:
      run: one expert's result for some tokens, from its leaves.
      leaves: weights of all experts of this device, along their first axis.
    """
    experts = _experts_of(cfg)
    count = experts.count // cfg.shards
    slots = ids.reshape(-1)
    if cfg.shards > 1:
        slots = slots - jax.lax.axis_index(sharding.AXIS) * count
    is_own = (slots >= 0) & (slots < count)
    slots = jnp.where(is_own, slots, count)
    inputs = jnp.repeat(x, experts.active, axis=0)
    weights = jnp.where(is_own, factors.reshape(-1), 0).astype(x.dtype)[:, None]
    if experts.scales_inputs:
        inputs = inputs * weights

    plain = not any(map(is_quantized, jax.tree.leaves(leaves, is_leaf=is_quantized)))
    is_narrow = len(slots) <= count * expert_kernel.TOKENS
    if platform().gathers_experts and len(slots) <= min(count, GATHERED_SLOTS):
        out = _by_gather(run, leaves, inputs, slots)
    elif platform().expert_kernel and is_narrow and plain and _suits_kernel(leaves):
        out = _by_kernel(cfg, leaves, inputs, slots, count)
    elif platform().ragged_products and plain:
        out = _by_groups(cfg, leaves, inputs, slots, count)
    else:
        out = _by_blocks(run, leaves, inputs, slots, count)
    out = out * (is_own.astype(x.dtype)[:, None] if experts.scales_inputs else weights)
    return out.reshape(*ids.shape, -1).sum(1)


def _by_gather(
    run: Callable, leaves: Any, inputs: Float[Array, "S D"], slots: Int[Array, "S"]
) -> Float[Array, "S D"]:
    """Each slot with its own expert's weights, which are gathered; for few slots."""
    chosen = jax.tree.map(lambda leaf: jnp.take(leaf, slots, axis=0, mode="clip"), leaves)
    return jax.vmap(run)(chosen, inputs[:, None])[:, 0]


def _suits_kernel(leaves: Any) -> bool:
    """Whether the experts of a mixture have no biases, and sizes that our kernel takes."""
    no_bias = all(bias is None for _, bias in leaves.values())
    return no_bias and expert_kernel.supports_experts(leaves["gate"][0])


def _by_kernel(
    cfg: ModelConfig,
    leaves: dict,
    inputs: Float[Array, "S D"],
    slots: Int[Array, "S"],
    count: int,
    interpret: bool = False,
) -> Float[Array, "S D"]:
    """Slots in blocks of the same expert, by our kernel for TPUs; gradients by groups."""

    def by_kernel(leaves: dict, inputs: Array, slots: Array) -> Array:
        blocks = _make_blocks(slots, count, expert_kernel.TOKENS)
        numbers = jnp.arange(len(blocks.slot_at))
        chosen = jnp.sum(blocks.ends <= numbers[:, None], axis=1)
        out = expert_kernel.run_experts(
            leaves["gate"][0],
            leaves["up"][0],
            leaves["down"][0],
            jnp.take(inputs, blocks.slot_at, axis=0, mode="clip"),
            jnp.minimum(chosen, count - 1).astype(jnp.int32),
            jnp.maximum(blocks.ends[-1], 1).astype(jnp.int32),
            functools.partial(_combine, cfg),
            interpret,
        )
        # Blocks that are not needed hold any numbers.
        rows = out.reshape(-1, inputs.shape[1])
        return jnp.take(rows, blocks.place, axis=0, mode="fill", fill_value=0)

    by_groups = functools.partial(_by_groups, cfg, count=count)
    return _with_gradients_of(by_groups, by_kernel)(leaves, inputs, slots)


def _with_gradients_of(other: Callable, function: Callable) -> Callable:
    """``function`` with the gradients of ``other``, which has the same values."""
    run = jax.custom_vjp(function)
    run.defvjp(lambda *args: jax.vjp(other, *args), lambda pull_back, y: pull_back(y))
    return run


def _by_groups(
    cfg: ModelConfig,
    leaves: dict,
    inputs: Float[Array, "S D"],
    slots: Int[Array, "S"],
    count: int,
) -> Float[Array, "S D"]:
    """Slots sorted by expert, and one grouped product for each layer of the MLP."""
    order = jnp.argsort(slots)
    sizes = jnp.bincount(slots, length=count).astype(jnp.int32)
    sorted_slots = jnp.minimum(slots[order], count - 1)

    def product(name: str, x: Array) -> Array:
        weight, bias = leaves[name]
        y = grouped_product(x, weight, sizes)
        return y if bias is None else y + bias[sorted_slots]

    out = _gated_mlp(cfg, product, inputs[order])
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True)


class _Blocks(NamedTuple):
    """Slots in blocks of the same expert. An expert's last block is padded.

    ``ends`` counts the blocks of the experts up to each. ``slot_at`` has the slots of a block, S
    where there is none, and ``place`` where each slot is: out of range for another device's.
    """

    ends: Int[Array, "E"]
    slot_at: Int[Array, "blocks b"]
    place: Int[Array, "S"]


def _make_blocks(slots: Int[Array, "S"], count: int, size: int) -> _Blocks:
    """There are at most S/b full blocks, and one more for each expert. The last may be empty."""
    blocks = min(len(slots), len(slots) // size + min(count, len(slots)))
    is_chosen = slots[:, None] == jnp.arange(count)
    ranks = jnp.cumsum(is_chosen, axis=0)  # of a slot among those of its expert, from 1 on
    needed = -(-ranks[-1] // size)
    ends = jnp.cumsum(needed)
    own = jnp.minimum(slots, count - 1)
    rank = jnp.take_along_axis(ranks, own[:, None], axis=1)[:, 0] - 1
    place = (ends - needed)[own] * size + rank
    place = jnp.where(slots < count, place, blocks * size)
    slot_at = jnp.full(blocks * size, len(slots)).at[place].set(jnp.arange(len(slots)), mode="drop")
    return _Blocks(ends, slot_at.reshape(blocks, size), place)


def _by_blocks(
    run: Callable,
    leaves: Any,
    inputs: Float[Array, "S D"],
    slots: Int[Array, "S"],
    count: int,
) -> Float[Array, "S D"]:
    """Slots in blocks of the same expert, one block after the other."""

    needed_blocks = functools.partial(_needed_blocks, run)
    every_block = functools.partial(_every_block, run)
    run_blocks = _with_gradients_of(every_block, needed_blocks)
    size = _block_size(len(slots), count)
    return run_blocks(leaves, inputs, _make_blocks(slots, count, size))


def _run_block(run: Callable, leaves: Any, inputs: Array, expert: Array, slots: Array) -> Array:
    own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, 0, False), leaves)
    block = jnp.take(inputs, slots, axis=0, mode="clip")
    return run(own, block).astype(inputs.dtype)


def _needed_blocks(
    run: Callable, leaves: Any, inputs: Float[Array, "S D"], blocks: _Blocks
) -> Float[Array, "S D"]:
    """The blocks up to the last one that is not empty."""
    size = blocks.slot_at.shape[1]

    def add_block(number: Array, out: Array) -> Array:
        # A slice at the loop's counter would not go into a CUDA graph; sums and gathers do.
        expert = jnp.sum(blocks.ends <= number)
        slots = jnp.take(blocks.slot_at.reshape(-1), number * size + jnp.arange(size))
        result = _run_block(run, leaves, inputs, expert, slots)
        return out.at[slots].set(result, mode="drop")

    return jax.lax.fori_loop(0, blocks.ends[-1], add_block, jnp.zeros_like(inputs))


def _every_block(
    run: Callable, leaves: Any, inputs: Float[Array, "S D"], blocks: _Blocks
) -> Float[Array, "S D"]:
    """The same as :func:`_needed_blocks`. It has gradients: the length of its loop is known."""
    run_again = jax.checkpoint(functools.partial(_run_block, run), prevent_cse=False)

    def step(carry: None, block: tuple[Array, Array]) -> tuple[None, Array]:
        number, slots = block
        expert = jnp.sum(blocks.ends <= number)
        out = jax.lax.cond(
            number < blocks.ends[-1],
            lambda: run_again(leaves, inputs, expert, slots),
            lambda: jnp.zeros((len(slots), inputs.shape[1]), inputs.dtype),
        )
        return carry, out

    numbers = jnp.arange(len(blocks.slot_at))
    out = jax.lax.scan(step, None, (numbers, blocks.slot_at))[1].reshape(-1, inputs.shape[1])
    return jnp.take(out, blocks.place, axis=0, mode="clip")


def _block_size(slots: int, count: int) -> int:
    """About as many slots as an expert has on average, a power of two."""
    average = max(1, slots // count)
    # A narrow pass is padded with copies of its last token, which choose the same experts. Smaller
    # blocks would read those once for each block.
    least = max(MIN_BLOCK, platform().pass_width)
    return max(least, min(MAX_BLOCK, 1 << (average - 1).bit_length()))


def distinct_experts(experts: ExpertsConfig, tokens: int) -> float:
    """How many experts are active for so many tokens, if each chooses alike and by itself."""
    return experts.count * (1 - (1 - experts.active / experts.count) ** tokens)
