"""Peers of infer.bench: the weights that they load, and stand-ins for libraries that are absent."""

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import specjax as sj
from infer.bench import peer_llama_cpp, peer_process, peer_transformers, peer_vllm, peers
from infer.bench.commands import main
from infer.bench.peer_process import PeerJob
from infer.gguf_weights import write_weights
from specjax._util.errors import ModelError, OptionError
from specjax.models import load_pretrained
from specjax.models.gguf.header import read_header
from specjax.models.gguf.read import load_gguf
from support import gguf_files, variants
from support.checkpoints import same
from support.running import run_main
from support.stand_ins import llama_cpp

PROMPTS = [[5, 6, 7, 8], [9, 10]]
BUDGET = 6


@pytest.fixture
def checkpoint(tmp_path):
    """Saves a random checkpoint of a variant."""

    def save(name, **changes):
        config = variants.config(name) | changes
        directory = tmp_path / name
        directory.mkdir()
        save_file(gguf_files.tensors_of(config), directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return save


LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("name", ["head-dim", "tied", "llama-3.1", "mistral", "qwen2", "qwen3"])
def test_written_weights_are_the_checkpoints(checkpoint, tmp_path, name):
    changes = {"rope_scaling": LLAMA_31} if name == "llama-3.1" else {}
    directory = checkpoint(name, **changes)
    write_weights(directory, tmp_path / "model.gguf")
    assert same(load_gguf(tmp_path / "model.gguf")[1], load_pretrained(directory)[1])


@pytest.mark.parametrize(
    ("name", "says"), [("gemma2", "gemma2 is not written"), ("yarn", "rope=.* is not written")]
)
def test_a_model_that_the_file_cannot_describe_is_refused(checkpoint, tmp_path, name, says):
    with pytest.raises(ModelError, match=says):
        write_weights(checkpoint(name), tmp_path / "model.gguf")


def test_8_bits_are_within_half_a_step(checkpoint, tmp_path):
    directory = checkpoint("tinyllama", hidden_size=64, num_attention_heads=4)
    path = tmp_path / "model.gguf"
    write_weights(directory, path, "int8")
    kinds = {name: tensor.kind for name, tensor in read_header(path).tensors.items()}
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == "Q8_0"
    assert kinds["output_norm.weight"] == "F32"
    want = load_pretrained(directory)[1]["layers"]["0"]["mlp"]["up"]["weight"]
    got = load_gguf(path)[1]["layers"]["0"]["mlp"]["up"]["weight"]
    blocks = np.abs(np.asarray(want)).reshape(want.shape[0], -1, 32)
    step = blocks.max(-1) / 127
    off = np.abs(np.asarray(want - got)).reshape(blocks.shape).max(-1)
    # Half a step, and up to 127 times what the step loses as float16.
    assert (off <= (0.5 + 127 / 2048) * step).all() and off.max() > 0


def greedy(model, prompt, count):
    """Token ids of plain decoding."""
    return sj.generate(model, [prompt], max_new_tokens=count).tokens[0].tolist()


class StandInVllm:
    """vllm.LLM as far as the peer uses it; it decodes with our own code."""

    def __init__(self, model, dtype, max_model_len, **settings):
        assert dtype == "float32" and max_model_len == max(map(len, PROMPTS)) + BUDGET
        assert settings == {
            "max_num_seqs": 1,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
        }
        self.model = sj.from_params(*load_pretrained(model))

    def generate(self, prompts, sampling, use_tqdm):
        assert sampling["temperature"] == 0 and not sampling["detokenize"] and not use_tqdm
        ((ids,),) = (prompt.values() for prompt in prompts)
        text = greedy(self.model, ids, sampling["max_tokens"])
        ends = [i for i, token in enumerate(text) if token in sampling["stop_token_ids"]]
        text = text[: ends[0] + 1] if ends else text
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tuple(text))])]


STAND_INS = {
    "llama.cpp": (peer_llama_cpp, "llama_cpp", llama_cpp),
    "vllm": (
        peer_vllm,
        "vllm",
        types.SimpleNamespace(LLM=StandInVllm, SamplingParams=dict, TokensPrompt=dict),
    ),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_a_peer_decodes_what_we_decode(checkpoint, tmp_path, monkeypatch, name):
    """Both stop at an end of sequence, and at the budget."""
    peer, package, module = STAND_INS[name]
    monkeypatch.setitem(sys.modules, package, module)
    directory = checkpoint("tinyllama")
    plain = sj.from_params(*load_pretrained(directory))
    first = greedy(plain, PROMPTS[0], BUDGET)
    eos_ids = [first[2]]  # so the first prompt ends early
    job = PeerJob(
        target=peers.peer_weights(name, str(directory), None, tmp_path),
        draft=None,
        prompts=PROMPTS,
        budget=BUDGET,
        gamma=4,
        eos_ids=eos_ids,
        threads=2,
        on_cpu=True,
        dtype="float32",
    )
    lines = iter([json.dumps(job._asdict()), "{}", "{}"])
    ready, *repeats = peer_process.answers(lines, peer.make_modes)
    assert ready == {"ready": True}
    ours = sj.generate(
        sj.from_params(*load_pretrained(directory), eos_ids=eos_ids),
        PROMPTS,
        max_new_tokens=BUDGET,
    )
    for repeat in repeats:
        answer = repeat["generate"]
        assert answer["tokens"] == [ids.tolist() for ids in ours.tokens]
        assert len(answer["tokens"][0]) < BUDGET
        assert all(second > 0 for second in answer["seconds"])
        tells = name == "llama.cpp"
        assert [second is not None for second in answer["first_token_s"]] == [tells] * 2


@pytest.mark.parametrize(
    ("name", "file", "quantize", "says"),
    [
        ("transformers", True, None, "infer.convert"),
        ("vllm", True, None, "infer.convert"),
        ("transformers", False, "int8", "leave --quantize out"),
        ("llama.cpp", True, "int8", "as it is"),
        ("llama.cpp", False, "int4", "int8"),
    ],
)
def test_weights_that_a_peer_cannot_read(tmp_path, name, file, quantize, says):
    source = tmp_path / ("model.gguf" if file else "directory")
    with pytest.raises(OptionError, match=says) as caught:
        peers.peer_weights(name, str(source), quantize, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def on_a_gpu():
    """A job beside a model of ours in bfloat16 on a GPU."""
    return PeerJob("", None, PROMPTS, BUDGET, 4, [], threads=1, on_cpu=False, dtype="bfloat16")


@pytest.mark.torch
def test_transformers_beside_a_gpu_needs_one(on_a_gpu, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"torch sees no GPU: .*JAX_PLATFORMS=cpu"):
        peer_transformers.make_modes(on_a_gpu)


@pytest.mark.torch
def test_transformers_has_our_device_and_dtype(tiny_pair_dirs, on_a_gpu, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert peer_transformers.device_of(on_a_gpu) == "cuda"
    model = peer_transformers.load(tiny_pair_dirs[0], on_a_gpu._replace(on_cpu=True))
    assert (model.device.type, model.dtype) == ("cpu", torch.bfloat16)


def test_a_file_is_read_as_it_is(tmp_path):
    source = str(tmp_path / "model.gguf")
    assert peers.peer_weights("llama.cpp", source, None, tmp_path) == source


def test_a_peer_runs_in_a_process_of_its_own(tiny_pair_dirs, tmp_path, monkeypatch, capsys):
    """The stand-in of llama.cpp, which that process finds as it would find the library."""
    stand_ins = str(Path(llama_cpp.__file__).parent)
    monkeypatch.syspath_prepend(stand_ins)
    monkeypatch.setenv("PYTHONPATH", stand_ins, prepend=os.pathsep)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def one(x):"}\n{"prompt": "def two(y):"}\n')
    argv = ["--target", tiny_pair_dirs[0], "--prompts", prompts, "--max-new-tokens", 6]
    argv += ["--methods", "lookup", "--greedy-only", "--repeats", 1, "--no-curve", "--json"]
    code, out, _ = run_main(main, capsys, *argv, "--peer", "llama.cpp")
    assert code == 0
    (row,) = json.loads(out)["peers"]
    assert row["name"] == "llama.cpp generate" and row["ours"] == "autoregressive"
    assert row["first_token_ms"] > 0 and row["mismatches"] == []
