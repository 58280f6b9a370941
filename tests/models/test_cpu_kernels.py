"""The CPU's kernel for narrow passes against float64, and how it is compiled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax._util.files import program_cache
from specjax._util.platform import CPU, platform
from specjax.models import layers
from specjax.models.cpu_kernels import building, narrow_product
from specjax.models.quantization import parse_scheme, quantize
from specjax.models.quantized import Grouped, PerOutput, is_quantized
from support.variant_models import build

ROWS = 16
# Outputs and inputs: of models, and odd ones. The last are more than the kernel reads at a time.
SHAPES = [(576, 192), (50, 96), (1, 64), (98, 33), (7, 2080)]
FORMS = ("float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_1", "q4_k", "act-order")
TOLERANCE = {"bfloat16": 5e-3}


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    """The kernel computes small products, too. Only where no compiler is installed it cannot."""
    monkeypatch.setattr(narrow_product, "LEAST_ENTRIES", 0)
    if not any(map(shutil.which, building.COMPILERS)):
        pytest.skip(f"none of {', '.join(building.COMPILERS)} is installed")
    assert building.kernels().problem is None


def made(form, outputs, inputs, seed=0):
    """A random weight in a form."""
    random = np.random.Generator(np.random.Philox(seed))

    def factors(groups, dtype=jnp.float16):
        return jnp.asarray(random.normal(size=(groups, outputs)), dtype)

    def codes(low, high, dtype, shape=(inputs, outputs)):
        return jnp.asarray(random.integers(low, high, shape)).astype(dtype)

    if form in ("float32", "bfloat16"):
        return jnp.asarray(random.normal(size=(outputs, inputs)), form)
    dtype = jnp.dtype(jnp.float32)
    if form == "int8":
        scales = jnp.asarray(random.normal(size=outputs), jnp.float32)
        return PerOutput(codes(-127, 128, jnp.int8, (outputs, inputs)), scales, dtype)
    groups = inputs // 32 or 1
    groups = groups if inputs % groups == 0 else 1
    if form == "q8_0":
        return Grouped(codes(-127, 128, jnp.int8), factors(groups), dtype)
    if form == "q4_0":
        return Grouped(codes(-8, 8, jnp.int4), factors(groups, jnp.bfloat16), dtype)
    if form == "q4_1":
        return Grouped(codes(0, 16, jnp.uint4), factors(groups), dtype, factors(groups))
    if form == "q4_k":  # scales are codes, with scales of their own
        nested = (
            Grouped(codes(0, 64, jnp.int8, (groups, outputs)), factors(1), dtype) for _ in range(2)
        )
        scales, offsets = nested
        return Grouped(codes(0, 16, jnp.uint4), scales, dtype, offsets)
    order = jnp.asarray(random.permutation(inputs), jnp.int32)
    return Grouped(codes(-7, 8, jnp.int4), factors(groups), dtype, None, order)


def inputs_for(weight, seed=1):
    x = np.random.Generator(np.random.Philox(seed)).normal(size=(ROWS, weight.shape[1]))
    return jnp.asarray(x, weight.dtype)


def by_kernel(x, weight):
    return layers._kernel_product(x, weight)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(form, shape):
    weight = made(form, *shape)
    x = inputs_for(weight)
    if not narrow_product.supports(x, weight):
        assert "4" in form or form == "act-order"  # an odd number of outputs in 4 bits
        assert shape[0] % 2
        return
    dense = weight.dense(jnp.float32) if is_quantized(weight) else weight
    want = np.asarray(x, np.float64) @ np.asarray(dense, np.float64).T
    got = np.asarray(by_kernel(x, weight), np.float64)
    assert np.abs(got - want).max() <= TOLERANCE.get(form, 2e-6) * np.abs(want).max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(576, 192), (50, 96), (8, 2080)])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(form, shape):
    weight = made(form, *shape)
    x = inputs_for(weight)
    want = np.asarray(by_kernel(x, weight))
    for rows in (1, 2, 3, 4, 5, 8, 15):
        np.testing.assert_array_equal(by_kernel(x[:rows], weight), want[:rows])
    many = jnp.tile(x, (8, 1))
    np.testing.assert_array_equal(by_kernel(many, weight), np.tile(want, (8, 1)))


def test_small_scales_of_16_bits_are_exact():
    """float16 numbers below the normal ones, and zeros."""
    codes = jnp.ones((32, 16), jnp.int8)
    scales = jnp.asarray(np.arange(-8, 8, dtype=np.int16).view(np.uint16) & 0x83FF).view(
        jnp.float16
    )
    weight = Grouped(codes, scales[None], jnp.dtype(jnp.float32))
    got = by_kernel(jnp.eye(1, 32, dtype=jnp.float32) * 2.0**24, weight)
    np.testing.assert_array_equal(got[0], np.asarray(scales, np.float32) * 2.0**24)


@pytest.mark.parametrize("form", ["float32", "int8", "q4_1"])
def test_derivatives_and_mapped_products_are_xlas(form):
    weight = made(form, 64, 64)
    x = inputs_for(weight)

    def total(product):
        return lambda x: jnp.sum(product(x, weight) ** 2)

    value = jax.jit(jax.value_and_grad(total(by_kernel)))(x)
    want = jax.jit(jax.value_and_grad(total(layers._product)))(x)
    jax.tree.map(np.testing.assert_array_equal, value, want)
    mapped = jax.jit(jax.vmap(by_kernel, (0, None)))(x, weight)
    np.testing.assert_array_equal(mapped, jax.jit(jax.vmap(layers._product, (0, None)))(x, weight))


def test_training_has_the_programs_that_it_had(monkeypatch):
    weight = made("float32", 64, 64)
    x = inputs_for(weight)
    step = jax.grad(lambda weight: layers.linear(x, weight).sum())
    text = jax.jit(step).lower(weight).as_text()
    monkeypatch.setattr(narrow_product, "supports", lambda x, weight: False)
    assert "custom_call" not in text
    assert text == jax.jit(step).lower(weight).as_text()


@pytest.mark.parametrize("rows", [1, 128, 129])
def test_wide_products_and_other_codes_are_xlas(rows):
    weight = made("float32", 64, 64)
    x = jnp.ones((rows, 64))
    assert narrow_product.supports(x, weight) == (rows <= CPU.kernel_rows)
    assert not narrow_product.supports(x, quantize(weight, parse_scheme("fp8"), jnp.float32))
    assert not narrow_product.supports(x.astype(jnp.float16), weight.astype(jnp.float16))


def test_the_kernel_is_for_one_device(monkeypatch):
    assert platform().kernel_rows
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 2)  # XLA would not split the calls
        assert not platform().kernel_rows
    monkeypatch.setenv("SPECJAX_CPU_KERNELS", "0")
    assert not platform().kernel_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_speculative_rows_are_plain_decodings(dtype):
    cfg, params, _ = build("codellama")
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    target = sj.from_params(cfg, params, pass_width=8)
    prompts = [[5, 9, 13], [7, 7, 2, 30]]
    plain = sj.generate(target, prompts, max_new_tokens=16)
    drafted = sj.generate(target, prompts, max_new_tokens=16, method="lookup", options={"gamma": 3})
    assert list(map(list, drafted.tokens)) == list(map(list, plain.tokens))


# How it is compiled -----------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache directory, and a process that has not compiled anything."""
    monkeypatch.setenv(building.CACHE_VARIABLE, str(tmp_path))
    building._kernels.cache_clear()
    yield tmp_path
    building._kernels.cache_clear()


def write_compiler(directory: Path, script: str) -> None:
    path = directory / "bin" / "c++"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def assert_xla_computes():
    assert not building.kernels().names
    weight = made("int8", 64, 64)
    x = inputs_for(weight)
    assert not narrow_product.supports(x, weight)
    assert layers.linear(x, weight).shape == (ROWS, 64)


def test_without_a_compiler_products_are_xlas(fresh, monkeypatch):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    assert_xla_computes()
    assert "no C++ compiler" in building.kernels().problem


@pytest.mark.parametrize(
    "script, problem",
    [
        ("exit 1", "failed with exit code 1"),
        ('test "$1" = --version', "failed with exit code 1"),
        ('test "$1" = --version && exit; for out; do :; done; echo junk > "$out"', "product-"),
        ("sleep 9", "took more than"),
    ],
    ids=["broken", "refuses the source", "writes junk", "hangs"],
)
def test_with_a_broken_compiler_products_are_xlas(fresh, monkeypatch, capfd, script, problem):
    write_compiler(fresh, script)
    monkeypatch.setenv("PATH", f"{fresh / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(building, "SECONDS", 1)
    assert_xla_computes()
    assert problem in building.kernels().problem
    assert capfd.readouterr() == ("", "")


def test_without_a_cache_directory_products_are_xlas(fresh, monkeypatch):
    monkeypatch.setenv(building.CACHE_VARIABLE, "")
    assert_xla_computes()


def test_two_processes_may_compile_it_at_once(tmp_path):
    """Both see no library, compile at the same time, and load a whole one."""
    compiled = next(program_cache("kernels").glob("product-*.so"))
    log = tmp_path / "log"
    write_compiler(
        tmp_path,
        f'test "$1" = --version && exit; echo >> {log}; for out; do :; done\n'
        f'head -c 1000 {compiled} > "$out"\n'
        f"until [ $(wc -l < {log}) = 2 ]; do sleep 0.1; done\n"  # the other compiles, too
        f'cat {compiled} > "$out"',
    )
    code = (
        "from specjax.models.cpu_kernels.building import kernels; "
        "print(kernels().problem, len(kernels().names))"
    )
    environment = os.environ | {
        building.CACHE_VARIABLE: str(tmp_path / "cache"),
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.communicate(timeout=300)[0].strip() == "None 2"
    files = [path.name for path in (tmp_path / "cache" / "kernels").iterdir()]
    assert len(files) == 1
    assert files[0].endswith(".so")


def test_the_library_depends_on_what_it_is_made_of(monkeypatch):
    command = [sys.executable, *building.OPTIONS]
    digest = building._digest(command)
    assert digest == building._digest(command)
    assert digest != building._digest([*command, "-g"])
    monkeypatch.setattr(building, "_cpu", lambda: "another CPU")
    assert digest != building._digest(command)


def test_a_library_of_another_user_is_not_loaded(fresh, monkeypatch):
    monkeypatch.setattr(building.os, "getuid", lambda: 12345)

    def compile_nothing(command):
        if "-o" in command:
            Path(command[-1]).write_text("")
        return ""

    monkeypatch.setattr(building, "_run", compile_nothing)
    assert_xla_computes()
