"""Experts and latents: every way to compute them, quantized, split, and what a defect changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax as sj
from specjax.models import (
    expert_kernel,
    experts,
    from_hf,
    grouped_products,
    init_params,
    load_pretrained,
    num_params,
)
from specjax.models.adapters import KEY, fuse_adapters
from specjax.models.config import ExpertsConfig
from specjax.models.experts import Router, balancing_loss, choose
from specjax.models.hf.write import save_quantized
from specjax.models.quantization import param_bytes, parse_scheme, quantize_params
from specjax.models.sharding import split_config
from support import stack_variants, variants
from support.gated import tuned
from support.variant_models import build, close, golden_stacks, whole

MIXTURE = "qwen3_moe"
LATENT = "deepseek_v3"


def naive(cfg, leaves, x, ids, factors):
    """Each token with each of its experts, one by one."""
    out = np.zeros_like(x)
    for token, (chosen, weights) in enumerate(zip(ids, factors, strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            own = jax.tree.map(lambda leaf, e=expert: leaf[e], leaves)
            out[token] += weight * np.asarray(experts._expert(cfg, own, x[token][None]))[0]
    return out


def inputs(tokens, skewed=False):
    """A mixture's config, leaves, tokens, and the experts and factors of each."""
    cfg, params, _ = build(MIXTURE)
    tree = params["layers"]["0"]["mlp"]["experts"]
    leaves = {name: (layer["weight"], None) for name, layer in tree.items()}
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, cfg.hidden_size)).astype(np.float32)
    logits = rng.standard_normal((tokens, cfg.experts.count)).astype(np.float32)
    if skewed:  # all tokens choose the same two experts
        logits[:] = np.arange(cfg.experts.count)
    ids, factors = choose(cfg.experts, jnp.asarray(logits))
    return cfg, leaves, x, ids, factors


@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
@pytest.mark.parametrize("skewed", [False, True])
def test_every_way_computes_every_token(tokens, skewed):
    """Groups of very different sizes: no token is dropped, whatever the experts' shares."""
    cfg, leaves, x, ids, factors = inputs(tokens, skewed)
    want = naive(cfg, leaves, x, np.asarray(ids), np.asarray(factors))
    slots = ids.reshape(-1)
    rows = jnp.repeat(x, cfg.experts.active, axis=0)
    run = functools.partial(experts._expert, cfg)
    count = cfg.experts.count
    ways = {
        "blocks": experts._by_blocks(run, leaves, rows, slots, count),
        "gathered": experts._by_gather(run, leaves, rows, slots),
        "groups": experts._by_groups(cfg, leaves, rows, slots, count),
    }
    for name, out in ways.items():
        got = (np.asarray(out).reshape(*ids.shape, -1) * np.asarray(factors)[..., None]).sum(1)
        np.testing.assert_allclose(got, want, atol=1e-4, err_msg=name)


def wide_experts(chosen):
    """Leaves of five experts whose columns are several of the kernel's tiles, slots and inputs."""
    columns, hidden = 384, 128
    rng = np.random.default_rng(len(chosen))
    leaves = {}
    shapes = {"gate": (columns, hidden), "up": (columns, hidden), "down": (hidden, columns)}
    for name, shape in shapes.items():
        weight = rng.standard_normal((5, *shape)) / np.sqrt(hidden)
        leaves[name] = jnp.asarray(weight, jnp.float32), None
    rows = jnp.asarray(rng.standard_normal((len(chosen), hidden)), jnp.float32)
    return leaves, rows, jnp.asarray(chosen, jnp.int32)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(expert_kernel, "TILE_BYTES", 128 * 128 * 4)
    cfg = build(MIXTURE)[0]
    return lambda *args: experts._by_kernel(cfg, *args, count=5, interpret=True)


@pytest.mark.parametrize("chosen", [[3, 1, 1, 1, 0, 3], [2] * 40, [5, 5, 5, 0]])
def test_the_kernel_for_tpus_computes_every_slot(chosen, kernel):
    """Full and padded blocks, and slots whose expert another device has."""
    leaves, rows, slots = wide_experts(chosen)
    run = functools.partial(experts._expert, build(MIXTURE)[0])
    want = experts._by_blocks(run, leaves, rows, slots, 5)
    np.testing.assert_allclose(kernel(leaves, rows, slots), want, atol=1e-4)


@pytest.mark.slow
def test_gradients_of_the_kernel_are_those_of_groups(kernel):
    leaves, rows, slots = wide_experts([3, 1, 1, 5, 0, 3])
    cfg = build(MIXTURE)[0]
    found, wanted = (
        jax.grad(lambda *args, way=way: (way(*args, slots) ** 2).sum(), (0, 1))(leaves, rows)
        for way in (kernel, functools.partial(experts._by_groups, cfg, count=5))
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max())


@pytest.mark.parametrize("sizes", [[300, 0, 1, 211], [512, 0, 0, 0], [0, 100, 0, 0], [0, 0, 0, 0]])
def test_the_grouped_kernels_for_tpus_multiply_as_xla_does(sizes, monkeypatch):
    """Values and gradients; groups meet in a tile, are empty, and do not have all rows."""
    monkeypatch.setattr(grouped_products, "INPUTS", 256)
    monkeypatch.setattr(grouped_products, "OUTPUTS", 256)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((512 + 30, 640)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((4, 384, 640)) / 16, jnp.float32)
    factors = jnp.asarray(rng.standard_normal((len(x), 384)), jnp.float32)
    sizes = jnp.asarray(sizes, jnp.int32)

    def loss(product, x, weight):
        y = product(x, weight, sizes)
        return (y * y * factors).sum(), y

    by_kernels = functools.partial(grouped_products.product_by_kernels, interpret=True)
    found, want = (
        jax.grad(functools.partial(loss, way), (0, 1), has_aux=True)(x, weight)
        for way in (by_kernels, grouped_products.grouped_product)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_gradients_of_blocks_are_those_of_groups():
    cfg, leaves, x, ids, _ = inputs(20)
    slots = ids.reshape(-1)
    count = cfg.experts.count

    def loss(way, leaves, x):
        rows = jnp.repeat(x, cfg.experts.active, axis=0)
        return jnp.sum(way(leaves, rows) ** 2)

    def blocks(leaves, rows):
        return experts._by_blocks(
            functools.partial(experts._expert, cfg), leaves, rows, slots, count
        )

    def groups(leaves, rows):
        return experts._by_groups(cfg, leaves, rows, slots, count)

    found = [jax.grad(functools.partial(loss, way), (0, 1))(leaves, x) for way in (blocks, groups)]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max())


def test_groups_limit_the_choice_and_corrections_stay_out_of_the_factors():
    """Hand-computed: 4 experts in 2 groups, of which one is chosen by its two best scores."""
    config = ExpertsConfig(
        count=4,
        active=1,
        size=8,
        scores="sigmoid",
        corrected=True,
        groups=2,
        active_groups=1,
        group_best=2,
    )
    logits = jnp.asarray([[2.0, -9.0, 1.0, 1.0]])
    ids, factors = choose(config, logits, jnp.zeros(4))
    assert ids.tolist() == [[2]]  # the first group has the best expert, the second the best two
    np.testing.assert_allclose(factors, [[1 / (1 + np.exp(-1.0))]], rtol=1e-6)
    ids, factors = choose(config, logits, jnp.asarray([0.0, 0.0, 0.0, 0.1]))
    assert ids.tolist() == [[3]]
    np.testing.assert_allclose(factors, [[1 / (1 + np.exp(-1.0))]], rtol=1e-6)


def test_the_balancing_loss_is_k_for_equal_choices_and_more_for_others():
    config = ExpertsConfig(count=8, active=2, size=8)
    equal = jnp.arange(8).reshape(4, 2)
    assert balancing_loss(config, jnp.zeros((4, 8)), equal) == pytest.approx(2)
    collapsed = jnp.full((4, 8), -30.0).at[:, :2].set(0)  # all probability on two experts
    assert balancing_loss(config, collapsed, jnp.tile(jnp.arange(2), (4, 1))) == pytest.approx(8)


def test_the_balancing_loss_is_experts_times_shares_of_choices_and_of_probability():
    """The sum of the Switch Transformer's §2.2 over random logits, with each token's choices."""
    config = ExpertsConfig(count=8, active=3, size=8)
    logits = np.random.default_rng(0).normal(size=(20, 8))
    chosen = np.argsort(-logits, axis=1)[:, :3]
    choices = np.bincount(chosen.ravel(), minlength=8) / len(logits)
    probability = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).mean(axis=0)
    ours = balancing_loss(config, jnp.asarray(logits, jnp.float32), jnp.asarray(chosen))
    assert ours == pytest.approx(8 * choices @ probability, rel=1e-5)


def test_a_router_adds_the_balancing_loss_to_gradients_alone():
    cfg = from_hf(variants.config(MIXTURE)).layer(1)
    balanced = dataclasses.replace(cfg.experts, balance=0.3)
    x = jax.random.normal(jax.random.key(1), (12, cfg.hidden_size))

    def router(experts, weight):
        made = Router(dataclasses.replace(cfg, experts=experts), nnx.Rngs(0))
        made.weight[...] = weight
        return made

    labels = jnp.float32(5)

    def total(experts, weight):
        return jnp.sum(router(experts, weight)(x, labels)[1] ** 2)

    def loss(weight):
        logits = router(cfg.experts, weight).logits(x)
        return balancing_loss(cfg.experts, logits, choose(cfg.experts, logits)[0])

    weight = jax.random.normal(jax.random.key(2), (cfg.experts.count, cfg.hidden_size))
    plain, added = (
        jax.value_and_grad(functools.partial(total, experts))(weight)
        for experts in (cfg.experts, balanced)
    )
    assert plain[0] == added[0]
    want = plain[1] + labels * 0.3 * jax.grad(loss)(weight)
    np.testing.assert_allclose(added[1], want, rtol=1e-4, atol=1e-5)


@pytest.mark.torch
def test_the_balancing_loss_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = ExpertsConfig(count=8, active=3, size=8)
    logits = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    theirs = load_balancing_loss_func((torch.from_numpy(logits),), 8, 3)
    ours = balancing_loss(config, jnp.asarray(logits), choose(config, jnp.asarray(logits))[0])
    assert ours == pytest.approx(float(theirs), rel=1e-5)


def last_logits(name, cfg, params):
    return np.asarray(whole(cfg, params, variants.tokens(), "dense"))[:, -variants.LAST :]


def set_leaf(params, layer, path, change):
    """The params with ``change`` of one leaf of a layer."""
    copy = jax.tree.map(lambda x: x, params)
    node = copy["layers"][layer]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = change(node[path[-1]])
    return copy


MUTANTS = {
    "an expert of a neighbor": (
        MIXTURE,
        ("mlp", "experts", "down", "weight"),
        lambda x: jnp.roll(x, 1, axis=0),
    ),
    "sinks left out": ("gpt_oss", ("attention", "sinks"), lambda x: jnp.full_like(x, -1e30)),
    "the latent's rotated part dropped": (
        LATENT,
        ("attention", "kv_down", "weight"),
        lambda x: x.at[stack_variants.LATENT[LATENT]["kv_lora_rank"] :].set(0),
    ),
    "a router's weights of a neighbor": (
        MIXTURE,
        ("mlp", "router", "weight"),
        lambda x: jnp.roll(x, 1, axis=0),
    ),
    "a correction dropped": (LATENT, ("mlp", "router", "correction"), jnp.zeros_like),
    "a shared expert dropped": (LATENT, ("mlp", "shared", "down", "weight"), jnp.zeros_like),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_defect_changes_the_logits(mutant):
    """The golden logits would not pass with one of these."""
    name, path, change = MUTANTS[mutant]
    cfg, _, fused = build(name)
    want = golden_stacks()[f"{name}/logits"]
    close(last_logits(name, cfg, fused), want)
    assert np.abs(last_logits(name, cfg, set_leaf(fused, "1", path, change)) - want).max() > 1e-2


@pytest.mark.parametrize("name", [MIXTURE, LATENT, "deepseek_v2-lite"])
def test_gated_adapters_act_alike_in_both_layouts(name):
    """Experts and routers have none, and neither has what decoding absorbs."""
    cfg, params, fused = build(name)
    ids = (7,)
    cfg = dataclasses.replace(cfg, adaptive_ids=ids)
    adapted = tuned(params, ids)
    adapters = adapted[KEY]
    names = {
        name for block in adapters["layers"].values() for part in block.values() for name in part
    }
    assert "out" in names and not names & {"router", "experts", "shared", "kv_up"}
    tokens = np.where(variants.tokens() % 3 == 0, ids[0], variants.tokens())
    want = whole(cfg, adapted, tokens, "dense")
    got = whole(cfg, fused | {KEY: fuse_adapters(cfg, adapters)}, tokens, "dense")
    assert np.abs(np.asarray(want) - whole(cfg, params, tokens, "dense"))[..., 8:].max() > 0.1
    finite = np.isfinite(np.asarray(want))
    close(np.asarray(got)[finite], np.asarray(want)[finite])


@pytest.mark.parametrize("name", [MIXTURE, LATENT])
@pytest.mark.parametrize("scheme", ["int8", "int4:4"])
def test_quantized(name, scheme, tmp_path):
    """Experts are quantized one by one, and the checkpoint gives the same logits back."""
    cfg, _, fused = build(name)
    parsed = parse_scheme(scheme)
    quantized = quantize_params(cfg, fused, parsed, jnp.float32)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(quantized))
    assert size < 0.6 * sum(leaf.nbytes for leaf in jax.tree.leaves(fused))
    got = last_logits(name, cfg, quantized)
    bound = 0.3 if scheme == "int8" else 3.0
    assert np.abs(got - golden_stacks()[f"{name}/logits"]).max() < bound
    save_quantized(tmp_path, cfg, variants.config(name), quantized, parsed)
    read, loaded = load_pretrained(tmp_path, fused=True)
    np.testing.assert_array_equal(last_logits(name, read, loaded), got)


@pytest.mark.parametrize(
    ("name", "changes", "too_many"),
    [("mixtral", {"num_local_experts": 6}, 4), (LATENT, {"num_attention_heads": 16}, 16)],
)
def test_sizes_of_a_split_model(name, changes, too_many):
    cfg = from_hf(variants.config(name) | changes)
    share = split_config(cfg, 2)
    assert num_params(share) < 0.75 * num_params(cfg)
    assert param_bytes(share, jnp.float32) == 4 * num_params(share)
    with pytest.raises(sj.ModelError, match="experts") as error:
        split_config(cfg, too_many)
    assert "\n" not in str(error.value)


def test_initial_params_have_the_shapes_of_all_kinds_of_layers():
    cfg = from_hf(variants.config(LATENT))
    params = init_params(cfg, jax.random.key(0))
    assert (
        "experts" not in params["layers"]["0"]["mlp"] and "experts" in params["layers"]["1"]["mlp"]
    )
    hidden = dataclasses.replace(cfg, adaptive_ids=())
    assert np.isfinite(whole(hidden, params, variants.tokens(), "dense")).all()
