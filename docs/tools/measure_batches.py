"""Batches beside llama.cpp and transformers: python docs/tools/measure_batches.py TARGET PROMPTS

TARGET is what `python -m infer.convert smollm2 --out TARGET` writes, and PROMPTS a file of prompts,
which are put as chats. The first --batch of them are decoded together, greedily, for 48 new tokens
each, whether a text has ended or not. Every library takes its turn in a process of its own, and
prefill counts. The table has the libraries' tokens per second, and ours over theirs with ± twice
the standard error over --turns. With --quantize int8 llama.cpp has Q8_0, and transformers is left
out. llama.cpp is called through the C functions of llama-cpp-python, whose own class decodes one
prompt at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

NEW_TOKENS = 48
PASS_TOKENS = 512  # of llama.cpp's passes over prompts

Ids = list[list[int]]


def main() -> None:
    """One row per library, or with --library one time of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--quantize", choices=("int8",))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--gguf", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.library:
        print(json.dumps(LIBRARIES[args.library](args, json.loads(args.prompts.read_text()))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        prepare(args, Path(scratch))
        names = [name for name in LIBRARIES if name != "transformers" or not args.quantize]
        turns = [{name: seconds_of(args, name) for name in names} for _ in range(args.turns)]
    print("| library | tokens per second | ours over it |\n| --- | ---: | --- |")
    for name in names:
        speed = args.batch * NEW_TOKENS / statistics.median(turn[name] for turn in turns)
        ratios = [turn[name] / turn["specjax"] for turn in turns]
        spread = 2 * statistics.stdev(ratios) / len(ratios) ** 0.5
        print(f"| {name} | {speed:.1f} | {statistics.mean(ratios):.2f} ± {spread:.2f} |")


def prepare(args: argparse.Namespace, scratch: Path) -> None:
    """Writes the prompts' ids and the GGUF file. ``args`` names them, and the number of threads."""
    import specjax as sj
    from infer.gguf_weights import write_weights
    from specjax._util.platform import usable_cores

    tokenizer = sj.load(args.target).tokenizer
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.batch]
    chats = [tokenizer.encode_chat(json.loads(line)["prompt"]) for line in lines]
    args.prompts = scratch / "ids.json"
    args.prompts.write_text(json.dumps([[int(token) for token in ids] for ids in chats]))
    args.gguf = str(scratch / "target.gguf")
    write_weights(Path(args.target), Path(args.gguf), args.quantize)
    args.threads = usable_cores()


def seconds_of(args: argparse.Namespace, library: str) -> float:
    """The time of a batch, in a process of its own."""
    command = [sys.executable, __file__, args.target, str(args.prompts), "--gguf", args.gguf]
    command += ["--library", library, "--threads", str(args.threads)]
    if args.quantize:
        command += ["--quantize", args.quantize]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def timed(decode: Callable[[], object]) -> float:
    """Seconds of the second call: the first one compiles and warms up."""
    decode()
    begin = time.perf_counter()
    decode()
    return time.perf_counter() - begin


def by_specjax(args: argparse.Namespace, prompts: Ids) -> float:
    """Plain decoding of all prompts in one batch."""
    import specjax as sj
    from specjax._util.compilation_cache import use_compilation_cache

    use_compilation_cache()
    target = sj.load(args.target, quantize=args.quantize)
    options = {"sampling": sj.Sampling(temperature=0.0, ignore_eos=True), "prefixes": 0}
    options |= {"max_new_tokens": NEW_TOKENS, "batch_size": len(prompts)}

    def decode() -> None:
        lengths = sj.generate(target, prompts, **options).lengths
        if (np.asarray(lengths) != NEW_TOKENS).any():
            sys.exit(f"lengths={lengths}: expected {NEW_TOKENS} of every prompt")

    return timed(decode)


def by_llama_cpp(args: argparse.Namespace, prompts: Ids) -> float:
    """The same by llama.cpp: a sequence for each prompt, with keys and values in float32."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        args.gguf.encode(), llama_cpp.llama_model_default_params()
    )
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = len(prompts) * (max(map(len, prompts)) + NEW_TOKENS)
    settings.n_batch = PASS_TOKENS
    settings.n_ubatch = PASS_TOKENS
    settings.n_seq_max = len(prompts)
    settings.n_threads = args.threads
    settings.n_threads_batch = args.threads
    settings.type_k = llama_cpp.GGML_TYPE_F32
    settings.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(model, settings)
    words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(PASS_TOKENS, 0, 1)

    def run(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """The likeliest next tokens of the entries (token, position, row, is its logits wanted)."""
        batch.n_tokens = len(entries)
        for at, (token, position, row, is_wanted) in enumerate(entries):
            batch.token[at] = token
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = row
            batch.logits[at] = is_wanted
        if llama_cpp.llama_decode(context, batch):
            sys.exit("llama.cpp failed")
        wanted = [at for at, entry in enumerate(entries) if entry[3]]
        logits = [llama_cpp.llama_get_logits_ith(context, at) for at in wanted]
        return [int(np.ctypeslib.as_array(row, (words,)).argmax()) for row in logits]

    def decode() -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        entries = [
            (token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens = []
        for first in range(0, len(entries), PASS_TOKENS):
            tokens += run(entries[first : first + PASS_TOKENS])
        for step in range(NEW_TOKENS - 1):
            tokens = run(
                [(tokens[row], len(prompt) + step, row, True) for row, prompt in enumerate(prompts)]
            )

    return timed(decode)


def by_transformers(args: argparse.Namespace, prompts: Ids) -> float:
    """The same by ``generate`` of transformers, on prompts that are padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype="float32").eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": NEW_TOKENS}

    def decode() -> None:
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **options)

    return timed(decode)


LIBRARIES = {
    "specjax": by_specjax,
    "llama.cpp": by_llama_cpp,
    "transformers": by_transformers,
}

if __name__ == "__main__":
    main()
