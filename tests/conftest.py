"""Shared fixtures: tiny random models whose greedy output varies."""

import dataclasses
import os
import time

import hypothesis
import jax
import pytest

import specjax as sj
from infer.loading import use_compilation_cache
from infer.programs import make_room
from specjax.models import ModelConfig, init_params, save_pretrained
from support.sweeps import leave_to_sweeps
from support.training import code
from train.data.tokenizer import train_tokenizer

# The tests compile hundreds of programs that run for milliseconds, so compile time decides. Most of
# it is LLVM's passes, then MLIR's, which XLA sets up for each kernel unless the older emitters run.
# Subprocesses get the same flags, so that both sides of a comparison round the same way.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if jax.__version_info__[:2] == (0, 10):  # XLA aborts if it does not know a flag
    flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

pytest_plugins = ["support.real_models"]  # fixtures

# Drawing examples is slow on a busy machine; that must not fail a test.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser):
    parser.addoption(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="begin no test after this time, in seconds since 1970; -rs names what is left",
    )


def pytest_runtest_setup(item):
    deadline = item.config.getoption("--deadline")
    if deadline and time.time() > deadline:
        pytest.skip(f"not begun before --deadline: {item.nodeid}")  # -rs then names each


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items):
    leave_to_sweeps(items)


def tiny_lm(seed: int, layers: int = 2, hidden: int = 32, vocab: int = 97, **other) -> sj.LM:
    """A random model; scaled up so that its distributions are far from uniform.

    The id after ``vocab`` is an adaptive token, so that SDSAT's methods accept the model.
    """
    cfg = ModelConfig.llama(
        vocab_size=vocab + 1,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        max_position=512,
        **other,
    )
    cfg = dataclasses.replace(cfg, adaptive_ids=(vocab,) * 4)
    params = init_params(cfg, jax.random.key(seed))
    params["layers"] = jax.tree.map(lambda x: 4 * x, params["layers"])
    params["embed"] = params["embed"] * 20
    return sj.from_params(cfg, params)


@pytest.fixture(scope="session")
def target() -> sj.LM:
    return tiny_lm(0)


def tiny_draft(target: sj.LM) -> sj.LM:
    """The target's first layer alone: it often agrees with the target, but not always."""
    cfg = ModelConfig.llama(
        vocab_size=98,
        hidden_size=32,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        max_position=512,
    )
    layers = {"0": target.params["layers"]["0"]}
    return sj.LM(cfg, target.params | {"layers": layers}, None, (), 97, "draft")


@pytest.fixture(scope="session")
def draft(target) -> sj.LM:
    return tiny_draft(target)


@pytest.fixture(scope="session")
def tiny_pair_dirs(tmp_path_factory) -> tuple[str, str]:
    """Two random models saved with one small tokenizer: target and draft directories."""
    home = tmp_path_factory.mktemp("pair")
    tokenizer = train_tokenizer(code(), 500, home / "tokenizer.json")
    directories = []
    for seed, layers in ((0, 2), (1, 1)):
        cfg = ModelConfig.llama(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=32,
            num_layers=layers,
            num_heads=4,
            intermediate_size=48,
            max_position=2048,
            eos_ids=(0,),
        )
        params = init_params(cfg, jax.random.key(seed))
        params["embed"] = params["embed"] * 20
        save_pretrained(home / str(seed), cfg, params, tokenizer.to_str())
        directories.append(str(home / str(seed)))
    return tuple(directories)


@pytest.fixture(autouse=True, scope="session")
def own_compilation_cache(request, tmp_path_factory):
    """All workers and runs share one cache of compiled programs, apart from the user's.

    It lies in pytest's own cache directory, so ``pytest --cache-clear`` empties it.
    """
    kept = getattr(request.config, "cache", None)
    directory = str(kept.mkdir("xla") if kept else tmp_path_factory.mktemp("xla"))
    os.environ["SPECJAX_CACHE_DIR"] = directory
    use_compilation_cache()
    # Writing every program takes longer than reading the few that are wanted twice saves.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


@pytest.fixture(autouse=True)
def bounded_compiled_programs():
    """Drops compiled programs before they take gigabytes of each worker.

    A test of under 0.1 s of processor time compiled nothing, so nothing is checked after it.
    """
    before = time.process_time()
    yield
    if time.process_time() - before > 0.1:
        make_room(share=0.12)
