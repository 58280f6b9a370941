"""Fixtures: pretrained models from PyPI. A test is skipped only where their package is missing."""

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

import specjax as sj
from specjax.models.gguf.packages import PACKAGES, packaged_file
from support.real_prompts import prompts_of

GOLDEN = Path(__file__).parents[1] / "golden" / "real.json"


@pytest.fixture(scope="module")
def optimized():
    """Real models decode for seconds, so all of XLA's passes pay."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def installed_file(name: str) -> Path:
    """The model's file. Only a package that is not there skips a test; what is damaged fails it."""
    missing = [module for module, _ in PACKAGES[name].parts if find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: CONTRIBUTING says how")
    return packaged_file(name)


def loaded(name: str, **options) -> sj.LM:
    installed_file(name)
    return sj.load(name, dtype="float32", **options)


@pytest.fixture(scope="session")
def smollm2():
    """The model with its weights dequantized, which a CPU computes fastest."""
    return loaded("smollm2", quantize="none")


@pytest.fixture(scope="session")
def gemma3():
    return loaded("gemma3-270m", quantize="none")


@pytest.fixture(scope="session")
def prompts(smollm2):
    return prompts_of(smollm2.tokenizer)


@pytest.fixture(scope="session")
def shallow(smollm2):
    """A draft: the target's first six layers, which sometimes agree with it."""
    layers = {str(i): smollm2.params["layers"][str(i)] for i in range(6)}
    config = dataclasses.replace(smollm2.config, num_layers=6)
    return dataclasses.replace(smollm2, config=config, params=smollm2.params | {"layers": layers})


@pytest.fixture(scope="session")
def golden():
    """What transformers computed (tests/real/make_golden.py)."""
    return json.loads(GOLDEN.read_text())
