"""Loads a sharded 1 B checkpoint here and in transformers: python docs/tools/measure_loading.py

The weights are random and of TinyLlama's shape, in bfloat16, in files of at most 1 GB. Every load
is a process of its own. It starts with its imports done and the files in the page cache, and ends
with 8 greedy tokens. It prints the least seconds of three loads, and the largest peak of their
anonymous memory (RssAnon) relative to the weights' size: while loading, and until the tokens came.
It needs torch and 12 GB of memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

DTYPES, REPEATS = ("bfloat16", "float32"), 3
PROMPT, NEW_TOKENS = [1, 5, 9, 14], 8


def main() -> None:
    """Prints a table; without arguments it starts itself as each loader."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loader", nargs="?", choices=sorted(LOADERS))
    parser.add_argument("directory", nargs="?")
    parser.add_argument("dtype", nargs="?")
    args = parser.parse_args()
    if args.loader:
        print(json.dumps(measured(LOADERS[args.loader], args.directory, args.dtype)))
        return
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [sys.executable, __file__, "make", directory, "bfloat16"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        shards = len(list(Path(directory).glob("model-*.safetensors")))
        print(f"{shards} shards\n| loader | dtype kept | seconds | peak, loading | decoding |")
        print("| --- | --- | ---: | ---: | ---: |")
        for dtype in DTYPES:
            for loader in ("transformers", "specjax"):
                runs = [child(loader, directory, dtype) for _ in range(REPEATS)]
                best = min(run["seconds"] for run in runs)
                loading, decoding = (
                    max(run[key] / run["weights"] for run in runs)
                    for key in ("loading", "decoding")
                )
                cells = loader, dtype, f"{best:.1f}", f"{loading:.2f}", f"{decoding:.2f}"
                print("|", " | ".join(cells), "|", flush=True)


def child(loader: str, directory: str, dtype: str) -> dict:
    """Runs one load in a process of its own, and returns its measurements."""
    done = subprocess.run(
        [sys.executable, __file__, loader, directory, dtype],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measured(loader, directory: str, dtype: str) -> dict:
    """Seconds of the load, bytes of weights, and the peaks of anonymous memory."""
    load, decode = loader()
    before, peak, done = anonymous(), [0], threading.Event()

    def watch():
        while not done.wait(0.005):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.perf_counter()
    model, weights = load(directory, dtype)
    seconds = time.perf_counter() - began
    loading = peak[0] - before
    decode(model)
    done.set()
    watcher.join()
    return {
        "seconds": seconds,
        "weights": weights,
        "loading": loading,
        "decoding": peak[0] - before,
    }


def anonymous() -> int:
    """Bytes of this process's anonymous memory (RssAnon)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def specjax():
    """Our loader."""
    import jax

    import specjax as sj
    from specjax.models import load_pretrained

    jax.numpy.zeros(1).block_until_ready()

    def load(directory, dtype):
        cfg, params = load_pretrained(directory, jax.numpy.dtype(dtype), fused=True)
        jax.block_until_ready(params)
        model = sj.LM(cfg, params, None, cfg.eos_ids, cfg.vocab_size, directory)
        return model, sum(x.nbytes for x in jax.tree.leaves(params))

    def decode(model):
        out = sj.generate(model, [PROMPT], max_new_tokens=NEW_TOKENS)
        assert len(out.tokens[0]) == NEW_TOKENS

    return load, decode


def transformers():
    """Its loader."""
    import torch
    from transformers import AutoModelForCausalLM

    def load(directory, dtype):
        dtype = getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        return model, sum(x.nbytes for x in model.parameters())

    def decode(model):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False)

    return load, decode


def make():
    """Writes the checkpoint with transformers, so that its shards are the usual ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def write(directory, dtype):
        torch.set_default_dtype(getattr(torch, dtype))
        cfg = LlamaConfig(
            hidden_size=2048,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            intermediate_size=5632,
            vocab_size=32000,
            eos_token_id=None,
        )
        model = LlamaForCausalLM(cfg)
        model.save_pretrained(directory, max_shard_size="1GB")
        return model, 1

    return write, lambda model: None


LOADERS = {"specjax": specjax, "transformers": transformers, "make": make}

if __name__ == "__main__":
    main()
