"""What ``--plan`` prints before any weights load, and the converter of pickled checkpoints."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError

import specjax as sj
from infer import convert
from infer.loading import host_memory
from infer.run import commands as run
from infer.run import job
from infer.run.plan import describe, make_plan
from specjax.lm import DEMO
from specjax.models import init_cache, load_pretrained, save_pretrained
from specjax.models.cache import row_bytes
from specjax.models.hf.layout import INDEX, WEIGHTS
from specjax.models.hf.pickles import PICKLE, PICKLE_INDEX
from specjax.models.hf.read import load_config
from specjax.models.hf.write import to_tensors
from support import variants
from support.checkpoints import same
from support.variant_models import build


@pytest.fixture
def directory(tmp_path):
    save_pretrained(tmp_path / "model", *build("gemma3")[:2])
    return tmp_path / "model"


def test_the_plan_counts_what_loading_and_caching_take(directory):
    (directory / WEIGHTS).unlink()  # the config is enough
    cfg, params, _ = build("gemma3")
    plan = make_plan({"target": str(directory)}, "float32", 2**20)
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    assert plan["weight_bytes"] == plan["target"]["weight_bytes"] == weights
    cache = sum(x.nbytes for x in jax.tree.leaves(init_cache(cfg, 3, 128, "float32")))
    assert plan["target"]["cache_bytes_per_token_and_row"] * 3 * 128 == cache
    rows = plan["largest_batch_by_tokens_per_row"]
    assert list(rows) == [128] and rows[128] == (int(0.9 * 2**20) - weights) // (cache // 3)


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "2097152\n", 2**21),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "1048576\n", 2**20),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("another", "1", None),
    ],
)
def test_memory_is_at_most_what_a_container_allows(tmp_path, name, text, limit):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    machine = host_memory(tmp_path / "missing")
    assert machine > 2**21 and host_memory(tmp_path) == (limit or machine)


def test_the_plan_of_a_mixture_counts_the_active_experts_of_a_pass(tmp_path):
    cfg, params, _ = build("deepseek_v3")
    save_pretrained(tmp_path / "model", cfg, params)
    plan = make_plan({"target": str(tmp_path / "model")}, "float32", 2**30)["target"]
    read = plan["experts"]["read_bytes_by_tokens"]
    assert read[1] == 4 * plan["active_parameters"]
    experts = params["layers"]["1"]["mlp"]["experts"]
    one = sum(x.nbytes for x in jax.tree.leaves(experts)) // 8
    active = 8 * (1 - (5 / 8) ** 4)  # three of eight experts for each of four tokens
    assert read[4] == pytest.approx(plan["weight_bytes"] - (8 - active) * one, abs=1)
    assert "3 of 8 for a token" in plan_text(tmp_path / "model")


def plan_text(directory):
    return describe(make_plan({"target": str(directory)}, "float32", 2**30))


def test_the_plan_of_groups_that_devices_cannot_share(tiny_pair_dirs, capsys):
    """It says what loading says, of the model's own sizes: 48 columns in 6 groups of 8."""
    target, draft = tiny_pair_dirs
    plan = ["--plan", "--memory", "1", "--mesh", "model=4", "--target", target]
    error = "6 groups of 8 inputs (columns) cannot be split over model=4 devices"
    assert run.main([*plan, "--quantize", "int4:8"]) == 2
    assert error in capsys.readouterr().err

    sizes = {}
    for name in (draft, "self:int4:8", "self:int4:4"):
        for option in ([], ["--draft-whole"]):
            assert run.main([*plan, "--draft", name, "--json", *option]) == 0
            model = json.loads(capsys.readouterr().out)["draft"]
            sizes[name, *option] = model["weight_bytes_per_device"]
            assert (model["why_whole_on_each_device"] is not None) == (
                name == "self:int4:8" and not option
            )
            assert not option or sizes[name, *option] == model["weight_bytes"]
    assert sizes["self:int4:8",] == sizes["self:int4:8", "--draft-whole"]
    assert sizes["self:int4:4",] < sizes["self:int4:4", "--draft-whole"]
    assert run.main([*plan, "--draft", "self:int4:8"]) == 0
    assert f"whole on each device: {error}" in capsys.readouterr().out


def test_the_plan_counts_what_windows_hold(directory, capsys):
    config = directory / "config.json"
    long = json.loads(config.read_text()) | {"max_position_embeddings": 32768}
    config.write_text(json.dumps(long))
    assert run.main(["--plan", "--target", str(directory), "--memory", "1", "--json"]) == 0
    plan, cfg = json.loads(capsys.readouterr().out), load_config(directory)
    rows = plan["largest_batch_by_tokens_per_row"]
    for tokens in (1024, 32768):
        free = int(0.9 * 2**30) - plan["weight_bytes"]
        assert rows[str(tokens)] == free // row_bytes(cfg, tokens, "float32")
    assert run.main(["--plan", "--target", str(directory), "--memory", "1"]) == 0
    assert "for the last 1,536 tokens alone" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["autoregressive", "speculative", "specinfer"])
def test_the_plan_of_a_batch_counts_state_and_logits(tiny_pair_dirs, capsys, method):
    target, draft = tiny_pair_dirs
    models = ["--target", target] + (["--draft", draft] if method != "autoregressive" else [])
    batches = {}
    for rows in (2, 8):
        arguments = ["--plan", "batch", "--json", "--method", method, "--batch-size", str(rows)]
        arguments += [
            "--prompt",
            "def f(x):",
            "--max-new-tokens",
            "8",
            "--ignore-generation-config",
        ]
        assert run.main([*models, *arguments]) == 0
        plan = json.loads(capsys.readouterr().out)
        batches[rows] = plan["batch"]
        assert plan["batch"]["peak_bytes"] > plan["weight_bytes"] + plan["batch"]["state_bytes"]
    cached = plan["target"]["cache_bytes_per_token_and_row"]
    if method != "autoregressive":
        cached += plan["draft"]["cache_bytes_per_token_and_row"]
    # Rows have caches and, beside them, less than 30 bytes a token.
    state = batches[8]["state_bytes"] / (8 * 128)
    assert cached < state < cached + 30
    assert batches[8]["state_bytes"] > 3.9 * batches[2]["state_bytes"]
    vocab = load_config(Path(target)).vocab_size
    logits = 4 * vocab * (8 - 2) * (1 if method == "autoregressive" else 5)
    assert batches[8]["temporary_bytes"] - batches[2]["temporary_bytes"] >= logits


def test_the_plan_of_a_batch_of_what_cannot_run_is_one_line(capsys):
    for wrong in (["--method", "nope"], ["--mesh", "model=3"], ["--method", "sdsat"]):
        assert run.main(["--plan", "batch", *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        run.main(["--plan", "rows"])


@pytest.mark.slow
def test_the_plan_of_a_batch_is_what_a_job_takes():
    """VmHWM of a process, above what it held before the batch; it swings by a few per cent."""
    command = ["docs/tools/measure_plan.py", "demo", "--draft", "demo-draft"]
    command += ["--methods", "specinfer", "--batch", "64"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    ratio = float(done.stdout.splitlines()[-1].split("|")[5])
    assert 0.85 < ratio < 1.15


@pytest.mark.parametrize(
    ("memory", "says"), [("1", " rows of 128 tokens"), ("H100", "80.00 GiB"), ("1e-5", "not fit")]
)
def test_the_program_prints_it(directory, capsys, memory, says):
    arguments = ["--plan", "--target", str(directory), "--draft", str(directory)]
    assert run.main([*arguments, "--memory", memory]) == 0
    assert says in capsys.readouterr().out
    assert run.main([*arguments, "--json", "--dtype", "bfloat16"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["weight_bytes"] == 2 * plan["draft"]["weight_bytes"]


def test_an_allocation_that_cannot_fit_is_one_line(monkeypatch, capsys):
    def fail(args):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.\nmore lines")

    monkeypatch.setattr(job, "_run", fail)
    assert run.main(["--target", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def pickled(directory, files):
    """Replaces the weights by pickles; ``files`` maps each to its share of the tensors."""
    torch = pytest.importorskip("torch")
    cfg, params, _ = build("gemma3")
    tensors = {n: torch.from_numpy(np.array(t)) for n, t in to_tensors(cfg, params).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied: one array
    (directory / WEIGHTS).unlink()
    names, weight_map = sorted(tensors), {}
    for i, file in enumerate(files):
        part = names[i :: len(files)]
        torch.save({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    if len(files) > 1:
        (directory / PICKLE_INDEX).write_text(json.dumps({"weight_map": weight_map}))


SHARDS = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]


@pytest.mark.torch
@pytest.mark.parametrize("files", [[PICKLE], SHARDS], ids=["one", "sharded"])
def test_converted_pickles_load(directory, tmp_path, capsys, files):
    pickled(directory, files)
    out = tmp_path / "out"
    assert convert.main([str(directory), "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].endswith(WEIGHTS if len(files) == 1 else INDEX)
    assert same(load_pretrained(out)[1], build("gemma3")[1])
    assert not list(out.glob("*.bin*")) and not list(out.glob(".*"))


@pytest.mark.torch
@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"cos\nsystem\n(S'true'\ntR."])
def test_what_is_no_pickle_of_tensors_is_refused(directory, capsys, content):
    pytest.importorskip("torch")
    (directory / WEIGHTS).unlink()
    (directory / PICKLE).write_bytes(content)
    assert convert.main([str(directory)]) == 2
    err = capsys.readouterr().err
    assert PICKLE in err and err.count("\n") == 1
    assert not (directory / WEIGHTS).exists()


@pytest.mark.torch
@pytest.mark.parametrize("files", [[PICKLE], SHARDS], ids=["one", "sharded"])
def test_pickles_load_where_asked_for(directory, files):
    pickled(directory, files)
    assert same(load_pretrained(directory, pickles=True)[1], build("gemma3")[1])
    with pytest.raises(sj.ModelError, match="--pickles"):
        load_pretrained(directory)


@pytest.mark.torch
def test_pickled_bfloat16_is_read_bit_for_bit(directory):
    torch = pytest.importorskip("torch")
    pickled(directory, [PICKLE])
    tensors = torch.load(directory / PICKLE, weights_only=True)
    torch.save({n: t.bfloat16() for n, t in tensors.items()}, directory / PICKLE)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), build("gemma3")[1])
    assert same(load_pretrained(directory, jnp.bfloat16, pickles=True)[1], rounded)


@pytest.mark.torch
def test_code_in_a_pickle_does_not_run(directory, tmp_path, capsys):
    pytest.importorskip("torch")
    (directory / WEIGHTS).unlink()
    shutil.copy(DEMO / "tokenizer.json", directory)  # loading reads the tokenizer first
    trace = tmp_path / "ran"
    (directory / PICKLE).write_bytes(f"cos\nsystem\n(S'touch {trace}'\ntR.".encode())
    assert run.main(["--prompt", "def", "--target", str(directory), "--pickles"]) == 2
    err = capsys.readouterr().err
    assert PICKLE in err and err.count("\n") == 1
    assert not trace.exists()


def test_without_torch_a_pickle_is_one_line(directory, monkeypatch):
    (directory / WEIGHTS).rename(directory / PICKLE)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(sj.ModelError, match=r"specjax\[torch\]"):
        load_pretrained(directory, pickles=True)
    with pytest.raises(sj.ModelError, match="--pickles"):
        load_pretrained(directory)


def test_nothing_to_convert(directory, capsys):
    assert convert.main([str(directory)]) == 2
    assert "pytorch_model.bin" in capsys.readouterr().err


OUTSIDE = ["../evil.bin", "/evil.bin", "deeper/evil.bin", "..", "", "evil\0.bin", "..\\evil.bin"]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
@pytest.mark.parametrize("index", [INDEX, PICKLE_INDEX])
def test_an_index_that_leads_out_of_the_directory_is_refused(directory, capsys, name, index):
    (directory / WEIGHTS).rename(directory.parent / "evil.bin")
    before = sorted(directory.parent.rglob("*"))
    (directory / index).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(sj.ModelError, match="no plain name"):
        load_pretrained(directory, pickles=True)
    assert index == INDEX or convert.main([str(directory), "--overwrite"]) == 2
    assert capsys.readouterr().err.count("\n") == (index != INDEX)
    assert sorted(directory.parent.rglob("*")) == sorted([*before, directory / index])


@pytest.mark.torch
def test_what_is_there_is_replaced_only_where_asked_for(directory, capsys):
    pickled(directory, [PICKLE])
    (directory / WEIGHTS).write_bytes(b"mine")
    assert convert.main([str(directory)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (directory / WEIGHTS).read_bytes() == b"mine"
    assert convert.main([str(directory), "--overwrite"]) == 0
    assert same(load_pretrained(directory)[1], build("gemma3")[1])


@pytest.mark.torch
def test_a_full_disk_leaves_nothing_half_written(directory, capsys, monkeypatch):
    pickled(directory, [PICKLE])

    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    assert convert.main([str(directory)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (directory / WEIGHTS).exists() and not list(directory.glob(".*"))


def test_a_stretched_context_is_planned_for(tmp_path, capsys):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for scaling, says in (
        (yarn, "context: 256 tokens\n"),
        ({"type": "dynamic", "factor": 4.0}, "context: 64 tokens; rope_type dynamic stretches"),
    ):
        config = variants.config("tinyllama") | {"rope_scaling": scaling}
        (tmp_path / "config.json").write_text(json.dumps(config))
        argv = ["--plan", "--target", str(tmp_path), "--memory", "1"]
        assert run.main(argv) == 0
        assert says in capsys.readouterr().out


def test_the_plan_says_what_a_cpu_does_with_codes(directory, monkeypatch):
    names = {"target": str(directory)}
    plan = make_plan(names, "float32", 2**20, schemes={"target": "int8"})
    assert plan["target"]["codes_on_cpu"]
    assert make_plan(names, "float32", 2**20)["target"]["codes_on_cpu"] is None
    monkeypatch.setenv("SPECJAX_CPU_KERNELS", "0")
    plan = make_plan(names, "float32", 2**20, schemes={"target": "int8"})
    assert "slower than --quantize none" in plan["target"]["codes_on_cpu"]
