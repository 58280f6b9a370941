"""Decoding on eight simulated devices gives what one device gives.

test_mesh.py runs this file in a subprocess that has eight devices.
"""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import specjax as sj
from conftest import tiny_lm
from infer.bench import benchmark
from infer.bench import commands as bench
from infer.run import commands as run
from infer.scoring import score
from specjax import lm
from specjax._util.errors import ModelWarning
from specjax.core import loop
from specjax.models import from_hf, init_params
from specjax.models.sharding import PARTIAL_SUMS
from specjax.registry import Context
from specjax.runtime.engine import Engine
from support import stack_variants, variants
from support.gated import base_and_gated
from support.heads import fitted_head
from support.variant_models import pair

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]
SAMPLED = sj.Sampling(0.9, top_p=0.9)
FEW = ("speculative",)  # cdsl runs below
FAMILIES = ("gpt2", "bloom")
FIVE_EXPERTS = ("mixtral", "granitemoe", "gpt_oss", "llama4_text")  # two devices cannot share five
STACKS = tuple(name for name in stack_variants.ALL if name not in FIVE_EXPERTS)


def some(names, fast):
    """Parameters of a test; those that are not ``fast`` are slow."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


def same(one, many, counters=True):
    for a, b in zip(one.tokens, many.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    for name, counts in one.stats.items() if counters else ():
        np.testing.assert_array_equal(counts, many.stats[name], err_msg=name)
    if one.logprobs is not None:
        for a, b in zip(one.logprobs, many.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


def spread(models, **axes):
    mesh = sj.make_mesh(**axes)
    return [sj.on_mesh(model, mesh) for model in models]


@pytest.mark.parametrize("name", some(sj.methods(), FEW))
def test_every_method(name, target, draft):
    # With model=4, two devices share a key head, and tables of 98 rows are padded. A tree and beams
    # also run on two devices, where neither is so. Other tests below run chains on two.
    shares = (2, 4) if name in ("specinfer", "beam") else (4,)
    many = [spread((target, draft), data=2, model=n) for n in shares]
    spec = sj.method(name)
    for sampling in (sj.Sampling(), SAMPLED):
        options = {
            "method": name,
            "max_new_tokens": 20,
            "sampling": sampling,
            "logprobs": True,
            "reward": "length:5-9" if spec.needs_reward else None,
        }
        one, *others = (
            sj.generate(p, PROMPTS, draft=q if spec.needs_draft else None, **options)
            for p, q in ((target, draft), *many)
        )
        for other in others:
            # suffix drafts only from the rows of its device, and each device sizes its drafts, so
            # their counters differ.
            same(one, other, counters=name not in ("lookup", "suffix"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdsat", "sdsat-single"])
def test_gated_adapters_are_split_as_their_weights(name):
    _, own = base_and_gated(num_heads=4, num_kv_heads=2)
    options = {"method": name, "max_new_tokens": 20, "sampling": SAMPLED}
    prompts = [[1, 2, 3], [4], [0, 3, 3, 1, 2]]
    one = sj.generate(own, prompts, **options)
    for axes in ({"data": 2, "model": 4}, {"data": 4, "model": 2}):
        (many,) = spread((own,), **axes)
        same(one, sj.generate(many, prompts, **options))
    assert one.stats["accepted"].sum() > 0


@pytest.mark.slow
def test_each_device_sizes_its_drafts(target, draft):
    """Draft lengths follow the costs of each device; greedy tokens do not depend on them."""
    many = spread((target, draft), data=2, model=2)
    options = {"method": "speculative", "max_new_tokens": 20, "batch_size": 4}
    one = sj.generate(target, PROMPTS * 2, draft=draft, **options)
    for costs in ("measured", (9, 1, 1, 1, 1, 1)):
        sizes = {"gamma": "auto", "costs": costs}
        two = sj.generate(many[0], PROMPTS * 2, draft=many[1], options=sizes, **options)
        same(one, two, counters=False)


def test_slots_are_reused_on_every_device(target, draft):
    """Slots are reused for different prompts, and for prompts with a common prefix."""
    many = spread((target, draft), data=2, model=2)
    options = {"method": "speculative", "sampling": SAMPLED, "batch_size": 3}
    prefix = list(range(20, 50))
    for prompts, budgets in (
        ([[1 + i] * (1 + i % 4) for i in range(9)], [3, 19, 1, 7, 2, 12, 1, 4, 9]),
        ([prefix, *([*prefix, i, i] for i in range(5))], 6),
    ):
        one, two = (
            sj.generate(p, prompts, draft=q, max_new_tokens=budgets, **options)
            for p, q in ((target, draft), many)
        )
        same(one, two)
        assert two.occupancy > 0.5  # without reuse the first job would have 0.36
    # Each device prefills the common prefix once.
    assert sorted(two.cached_tokens)[:2] == [0, 0] and sorted(two.cached_tokens)[2] >= 29


@pytest.mark.parametrize("name", some((*variants.FAMILIES, *variants.VARIANTS, *STACKS), FAMILIES))
def test_every_family(name):
    same_on_two_devices(pair(name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", FIVE_EXPERTS)
def test_families_whose_variants_have_five_experts(name):
    cfg = from_hf(variants.config(name) | {"num_local_experts": 6})
    params = init_params(cfg, jax.random.key(0))
    same_on_two_devices(sj.from_params(dataclasses.replace(cfg, eos_ids=()), params))


def same_on_two_devices(one):
    options = {"max_new_tokens": 16, "logprobs": True}
    same(*(sj.generate(model, PROMPTS, **options) for model in (one, *spread([one], model=2))))


def test_a_head(target):
    """Head and target are both split, and batch slots are reused."""
    head = fitted_head(target, np.arange(90), (0, 1))
    prompts = [[1 + i] * (1 + i % 4) for i in range(5)]
    options = {"drafter": "head", "rule": "speculative", "sampling": SAMPLED, "batch_size": 2}
    one, many = (
        sj.generate(p, prompts, draft=q, max_new_tokens=[3, 14, 1, 7, 2], **options)
        for p, q in ((target, head), spread((target, head), data=2, model=2))
    )
    assert one.stats["accepted"].sum() > 0
    same(one, many)


def test_a_draft_may_be_whole_on_each_device(target, draft):
    mesh = sj.make_mesh(model=4)
    many = sj.on_mesh(target, mesh), sj.on_mesh(draft, mesh, split=False)
    options = {"method": "speculative", "max_new_tokens": 20, "sampling": SAMPLED}
    same(*(sj.generate(p, PROMPTS, draft=q, **options) for p, q in ((target, draft), many)))


@pytest.mark.slow
def test_a_draft_that_cannot_be_split_is_whole(tiny_pair_dirs):
    """Six groups of 8 columns cannot be split over four devices; that is said, and decodes."""
    name = "self:int4:8"
    options = {"method": "speculative", "max_new_tokens": 12, "sampling": SAMPLED}
    one = sj.load(tiny_pair_dirs[0])
    expected = sj.generate(one, ["def f(x):"], draft=name, **options)
    mesh = sj.make_mesh(model=4)
    many = sj.load(tiny_pair_dirs[0], mesh=mesh)
    with pytest.warns(ModelWarning, match=f"{name} is whole on each device: 6 groups of 8"):
        draft = lm.load_draft(name, many, mesh=mesh)
    assert draft.config.shards == 1
    same(expected, sj.generate(many, ["def f(x):"], draft=draft, **options))
    asked = lm.load_draft(tiny_pair_dirs[1], many, whole=True, mesh=mesh)
    assert (
        asked.config.shards == 1
        and lm.load_draft(tiny_pair_dirs[1], many, mesh=mesh).config.shards == 4
    )


def test_a_host_driven_reward(tiny_pair_dirs):
    mesh = sj.make_mesh(data=2, model=2)
    one, many = ([sj.load(d, mesh=m) for d in tiny_pair_dirs] for m in (None, mesh))
    options = {"method": "cdsl", "max_new_tokens": 12, "reward": lambda text: len(text) % 3 / 2}
    prompts = ["def f(x):", "import", "class A"]
    same(*(sj.generate(p, prompts, draft=q, **options) for p, q in (one, many)))


def start(model, draft, method, rows=4):
    """Prefills the prompts on the model's mesh; returns (method, inputs, state)."""
    spec = sj.method(method)
    draft = draft if spec.needs_draft else None
    built, settings = spec.build(Context(model, draft), {})
    inputs = Engine(model, draft, built, settings).inputs(SAMPLED, rows)
    keys, budget = jax.random.split(jax.random.key(0), rows), np.full(rows, 10, np.int32)
    return built, inputs, loop.start(built, inputs, [np.arange(5)] * rows, budget, keys, chunk=16)


def test_the_next_bucket_stays_split(target, draft):
    many = spread((target, draft), data=2, model=2)
    options = {"method": "speculative", "max_new_tokens": 200}
    same(*(sj.generate(p, PROMPTS, draft=q, **options) for p, q in ((target, draft), many)))
    method, _, state = start(*many, "speculative")
    for buffer in jax.tree.leaves((state.cache, loop.resize_state(method)(state, 256).cache)):
        shards = buffer.addressable_shards
        assert len(shards) == 4 and all(s.data.nbytes * 4 == buffer.nbytes for s in shards)


@pytest.mark.parametrize("method", ["autoregressive", "speculative"])
def test_a_round_sums_twice_per_layer_and_exchanges_no_logits(method, target, draft):
    built, inputs, state = start(*spread((target, draft), model=2), method)
    compiled = loop.run_rounds(built).lower(inputs, state, np.int32(5)).compile()
    kinds = "all-[a-z-]+|collective-permute|reduce-scatter"
    exchanges = re.findall(rf' (?:{kinds})\(.*op_name="([^"]*)"', compiled.as_text())
    in_round = [path.split("/") for path in exchanges if "/while/" in path]
    sums = [path for path in in_round if PARTIAL_SUMS in path]
    # Layers of each pass in the program; the first draft pass is compiled separately.
    layers = [2] if method == "autoregressive" else [2, 1, 1]
    # Two sums per layer and one for the embedding.
    assert len(sums) == sum(2 * count + 1 for count in layers)
    # No other exchange is in a pass: what is drawn from logits is exchanged, and not they.
    others = [path for path in in_round if path not in sums]
    assert others and all("draw" in path or "rule" in path for path in others)


def test_each_device_holds_its_share_of_a_loaded_model(tiny_pair_dirs):
    one, mesh = sj.load(tiny_pair_dirs[0]), sj.make_mesh(model=4)
    many = sj.load(tiny_pair_dirs[0], mesh=mesh)
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: (np.asarray(a) == np.asarray(b)).all(),
            sj.on_mesh(one, mesh).params,
            many.params,
        )
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(many.params["layers"]):
        share = leaf.nbytes // (1 if "norm" in str(path) else 4)
        assert {s.data.nbytes for s in leaf.addressable_shards} == {share}, path


@pytest.mark.slow
@pytest.mark.parametrize("count", (2, 4))
def test_tables_of_any_size_are_split(count):
    """Neither two nor four devices divide 61 rows. What pads them is never drawn."""
    one = tiny_lm(3, vocab=60)
    (many,) = spread((one,), model=count)
    table = many.params["embed"]
    assert table.shape[0] == -(-61 // count) * count and many.net.vocab == 61
    assert {s.data.shape[0] for s in table.addressable_shards} == {table.shape[0] // count}
    assert not np.asarray(table[61:]).any()
    (small,) = spread((sj.quantize(one, "int8"),), model=count)
    assert small.params["embed"].shape == table.shape
    for method, sampling in (("autoregressive", sj.Sampling()), ("sdsat", sj.Sampling(1.5))):
        options = {"method": method, "max_new_tokens": 24, "sampling": sampling, "logprobs": True}
        same(*(sj.generate(model, [[5, 6], [7]], **options) for model in (one, many)))


def test_the_program(tiny_pair_dirs, tmp_path):
    target, draft = tiny_pair_dirs
    lines = [{"prompt": f"def f{i}(" + "x, " * i} for i in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    token_ids = []
    for name, mesh in (("one", []), ("many", ["--mesh", "model=4,data=2"])):
        out = tmp_path / f"{name}.jsonl"
        assert (
            run.main(
                [
                    "--target",
                    target,
                    "--draft",
                    draft,
                    "--prompts",
                    str(tmp_path / "in.jsonl"),
                    "--out",
                    str(out),
                    "--batch-size",
                    "3",
                    "--max-new-tokens",
                    "12",
                    "--temperature",
                    "0.7",
                    *mesh,
                ]
            )
            == 0
        )
        token_ids.append([json.loads(line)["token_ids"] for line in out.read_text().splitlines()])
    assert token_ids[0] == token_ids[1] and len(token_ids[0]) == 5


@pytest.mark.parametrize("methods", some(["speculative", "specinfer,mentored"], []))
def test_the_bench(methods, tiny_pair_dirs, tmp_path, monkeypatch, capsys):
    """The bench reports the tokens and metrics of one device, and times passes of split models."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "def one(x):"}\n{"prompt": "def two(y):"}\n')
    monkeypatch.setattr("infer.timing.CURVE", (1,))
    measured, reports, measure = [], [], benchmark.measure

    def noted(*args, **named):
        measured.append(measure(*args, **named))
        return measured[-1]

    monkeypatch.setattr(benchmark, "measure", noted)
    monkeypatch.setattr(
        "infer.bench.timed_cases.warm_up", lambda *_: None
    )  # times are not compared
    for mesh in ([], ["--mesh", "data=2,model=2"]):
        models = ["--target", tiny_pair_dirs[0], "--draft", tiny_pair_dirs[1]]
        asked = ["--prompts", str(tmp_path / "in.jsonl"), "--methods", methods, "--repeats", "1"]
        sizes = ["--max-new-tokens", "12", "--batch-size", "2", "--json"]
        assert bench.main([*models, *asked, *sizes, *mesh]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    for one, many in zip(*measured, strict=True):
        same(one.runs[0], many.runs[0])
    for one, many in zip(*(report["rows"] for report in reports), strict=True):
        names = [n for n in ("perplexity", "acceptance_rate", "kl") if isinstance(one[n], float)]
        for name in names:
            assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
        assert "perplexity" in names and not many.get("mismatches")
    assert all(report["v"]["1"] == 1 and report["c"] is not None for report in reports)


ANY_MESH = {
    "explicit axes": lambda: jax.make_mesh((2, 2), ("data", "model")),
    "the other order": lambda: jax.make_mesh((2, 2), ("model", "data")),
    "one axis": lambda: jax.make_mesh((4,), ("model",)),
    "a third axis": lambda: jax.make_mesh((1, 2, 1), ("stage", "data", "replica")),
}


@pytest.mark.parametrize("axes", some(ANY_MESH, ("explicit axes",)))
def test_any_mesh_of_our_axes(axes, target, draft):
    mesh = ANY_MESH[axes]()
    usual = sj.make_mesh(data=mesh.shape.get("data", 1), model=mesh.shape.get("model", 1))
    many = sj.on_mesh(target, mesh), sj.on_mesh(draft, usual)
    assert dict(many[0].mesh.shape) == dict(usual.shape)
    options = {"method": "speculative", "max_new_tokens": 6, "sampling": SAMPLED}
    if axes == "the other order":  # the same devices in other places
        many = many[0], sj.on_mesh(draft, mesh)
    one = sj.generate(target, PROMPTS, draft=draft, **options)
    same(one, sj.generate(many[0], PROMPTS, draft=many[1], **options))


def test_another_mesh_that_is_set_is_refused(target):
    other = jax.make_mesh((2, 2), ("data", "model"))  # of explicit axes
    (many,) = spread((target,), data=2, model=2)
    refusals = [
        lambda: sj.on_mesh(target, other),
        lambda: sj.generate(many, PROMPTS, max_new_tokens=2),
    ]
    for refused in refusals:
        with jax.set_mesh(other), pytest.raises(sj.OptionError, match="set another mesh"):
            refused()
    one = sj.generate(target, PROMPTS, max_new_tokens=2)
    with jax.set_mesh(many.mesh):
        same(one, sj.generate(many, PROMPTS, max_new_tokens=2))


@pytest.mark.parametrize("axes", ["x", "model,x", "data,x,model"])
def test_a_mesh_of_other_axes_is_refused(axes, target, tiny_pair_dirs):
    names = tuple(axes.split(","))
    mesh = jax.make_mesh((2,) * len(names), names)
    expected = rf"mesh {names[0]}=2.*x=2.*: expected axes named data.* and model"
    if names == ("x",):
        expected = "mesh x=2: expected axes named data"
    for load in (lambda: sj.on_mesh(target, mesh), lambda: sj.load(tiny_pair_dirs[0], mesh=mesh)):
        with pytest.raises(sj.OptionError, match=expected):
            load()


def test_models_on_different_devices_are_refused(target, draft):
    mesh = sj.make_mesh(model=2)
    with pytest.raises(sj.PairError, match="the same mesh"):
        sj.generate(sj.on_mesh(target, mesh), [[1]], method="speculative", draft=draft)
    with pytest.raises(sj.ModelError, match="on a mesh already"):
        sj.on_mesh(sj.on_mesh(target, mesh), mesh)
    with pytest.raises(sj.ModelError, match="num_heads=4 cannot be split over model=3"):
        sj.on_mesh(target, sj.make_mesh(model=3))


MUTANTS = {
    "no sum": ("sharding.psum_shards", lambda x, shards: x, lambda: tiny_lm(3)),
    "the first device's slopes": (
        "attention.dense.own_part",
        lambda x, shards: jax.numpy.asarray(x[: len(x) // shards]),
        lambda: pair("bloom")[0],
    ),
    "a table's own rows alone": (
        "sharding.look_up",
        lambda table, ids, rows: table[ids % len(table)],
        lambda: tiny_lm(3),
    ),
}


def forget_programs():
    """Clears all traces, so that the next run is traced again, with or without a mutant."""
    jax.clear_caches()
    loop.prefill_prompts.made.clear()
    loop.run_rounds.made.clear()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(mutant, monkeypatch):
    where, change, make = MUTANTS[mutant]
    one = make()
    (many,) = spread([one], model=2)
    options = {"max_new_tokens": 16, "logprobs": True}
    with monkeypatch.context() as patched:
        patched.setattr(f"specjax.models.{where}", change)
        forget_programs()
        mutated = sj.generate(many, PROMPTS, **options)
    forget_programs()
    expected = sj.generate(one, PROMPTS, **options)
    same(expected, sj.generate(many, PROMPTS, **options))
    with pytest.raises(AssertionError):
        same(expected, mutated)


@pytest.mark.parametrize("scheme", some(["int8", "fp8", "int4:8"], ("int4:8",)))
def test_quantised_weights(scheme, target):
    """Weights quantized before the split, or after it; then the quantized copy is the draft."""
    small = sj.quantize(target, scheme)
    before = spread((small,), data=2, model=2)[0]
    after = sj.quantize(spread((target,), data=2, model=2)[0], scheme)
    for a, b in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    options = {"max_new_tokens": 12, "sampling": SAMPLED, "logprobs": True}
    one = sj.generate(small, PROMPTS, **options)
    same(one, sj.generate(before, PROMPTS, **options))
    options |= {"method": "speculative", "draft": f"self:{scheme}"}
    split = spread((target,), data=2, model=2)[0]
    same(sj.generate(target, PROMPTS, **options), sj.generate(split, PROMPTS, **options))


def test_scores_of_texts_are_those_of_one_device(target):
    """Three rows on two devices of rows, and a split table."""
    one = score(target, PROMPTS)
    (many,) = spread((target,), data=2, model=2)
    for a, b in zip(one, score(many, PROMPTS), strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
        np.testing.assert_array_equal(a.top_ids[:, 0], b.top_ids[:, 0])
        assert len(a.log_probs) == len(b.log_probs)
