"""Random heads whose output matrix is fitted, so that they often agree with a target; layouts."""

import json

import jax
import jax.numpy as jnp
import numpy as np

import specjax as sj
from specjax.lm import attach
from specjax.models import init_params, logits_of
from specjax.models.families.head_config import HeadConfig
from specjax.models.forward_pass import hidden_states, module_of
from specjax.models.head import fused_states, head_states
from support.checkpoints import edit_weights


def random_params(cfg: HeadConfig) -> dict:
    """A head's params, norms included at random; far from uniform."""
    leaves, tree = jax.tree.flatten(init_params(cfg, jax.random.key(7)))
    generator = np.random.Generator(np.random.Philox(5))
    moved = [
        jnp.asarray(generator.normal(1, 0.3, x.shape) if x.ndim == 1 else 12 * x, jnp.float32)
        for x in leaves
    ]
    return jax.tree.unflatten(tree, moved)


def fitted_head(target: sj.LM, ids: np.ndarray, layers: tuple[int, ...]) -> sj.LM:
    """A head whose last matrix fits the target's logits over random texts, by least squares.

    ``ids`` are the target ids that it drafts, ``layers`` the auxiliary layers that it reads.
    """
    cfg = HeadConfig.of(target.config, ids, layer_ids=layers)
    head = attach(sj.from_params(cfg, random_params(cfg)), target)
    cfg, params = head.config, head.params
    generator = np.random.Generator(np.random.Philox(11))
    tokens = generator.integers(0, target.vocab_limit, (48, 24)).astype(np.int32)
    at = np.broadcast_to(np.arange(24, dtype=np.int32), tokens.shape)
    segments = np.ones_like(at)

    @jax.jit
    def read(params, whole):
        hidden, states = hidden_states(
            target.config, whole, tokens, at, segments, aux_layers=layers
        )
        features = fused_states(cfg, params, states[:, :-1])
        made = head_states(cfg, params, tokens[:, 1:], features, at[:, :-1], segments[:, 1:])
        wanted = logits_of(target.config, whole, hidden)[:, 1:, ids]
        return module_of(cfg, params).norm(made), wanted

    normed, wanted = read(params, target.params)
    a, b = (np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in (normed, wanted))
    matrix = np.linalg.lstsq(a, b - b.mean(-1, keepdims=True), rcond=None)[0].T
    fitted = params | {"head": jnp.asarray(matrix, jnp.float32)}
    return sj.LM(cfg, fitted, None, head.eos_ids, head.vocab_limit, "fitted")


def to_midlayer(directory) -> None:
    """Rewrites a saved head in SafeAILab's layout: other tensor names, a flat config."""

    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)

    edit_weights(directory, rename)
    config = json.loads((directory / "config.json").read_text())
    kept = {n: x for n, x in config.items() if n.startswith(("norm_", "fc_", "draft_", "eagle_"))}
    flat = config["transformer_layer_config"] | kept
    flat["architectures"] = ["LlamaForCausalLMEagle3"]
    (directory / "config.json").write_text(json.dumps(flat))
