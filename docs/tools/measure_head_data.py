"""How well heads draft chats that saw other texts in training, for docs/pages/train-chats.md.

  python -m infer.convert smollm2 --out models/smollm2
  python -m train.answers runs/own.jsonl --own 320 --target models/smollm2 \
      --temperature 0=3,1=1 --max-new-tokens 96 --batch-size 48
  python -m train.answers runs/held_out.jsonl --own 40 --seed 7 --target models/smollm2 \
      --max-new-tokens 96 --batch-size 40
  pip install chitchat-dataset
  python docs/tools/measure_head_data.py models/smollm2 runs/own.jsonl runs/held_out.jsonl

It trains a head on the target's own answers, one on what people said to each other
(chitchat-dataset, MIT license) and one on library text (Python's standard library). Each corpus
has --tokens trained tokens, and each head takes as many steps. The target's states are
stored once. What is in --work already is kept.

All heads then decode the same prompts: held-out questions of the model, and what other people
began with. It prints tokens per pass of the target. ± is half of the 95 % interval over prompts
(bootstrap); differences are paired by prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import specjax as sj
from specjax import lm
from specjax._util.files import markdown_table
from train.data.corpus import stdlib_files
from train.head.__main__ import main as train_head
from train.states import main as store_states

CONFIG = Path(__file__).parents[2] / "configs" / "chat_head.toml"
KINDS = {"own": "own answers", "people": "people's chats", "library": "library text"}
ROW = 256  # tokens
LONGEST = 200  # tokens of a chat of people, so that none is cut to fit a row
DOCUMENT = 2000  # characters that are taken of a library file
WORDS = 6  # the fewest of what people began with, to be a prompt
SAMPLINGS = {"greedy": ((0.0, 0),), "temperature 1": ((1.0, 1), (1.0, 2))}  # (temperature, seed)
RESAMPLES = 10000


def own_answers(path: str) -> Iterator[tuple[dict[str, Any], int]]:
    """(a line of train.answers, its trained tokens)."""
    for line in Path(path).read_text().splitlines():
        record = json.loads(line)
        yield record, sum(record["loss_mask"])


def library(count: Callable[[str], int]) -> Iterator[tuple[dict[str, Any], int]]:
    """(a document of the standard library, its trained tokens), in random order."""
    files = sorted(stdlib_files())
    random.Random(0).shuffle(files)
    for _, path in files:
        text = path.read_text(errors="ignore")[:DOCUMENT]
        if len(text) == DOCUMENT:
            yield {"text": text}, count(text) + 1


def people(count: Callable[[str], int]) -> Iterator[tuple[dict[str, Any], int]]:
    """(a chat of two people, its trained tokens), in random order: the second one answers."""
    for chat in _chats():
        messages = []
        tokens = 0
        trained = 0
        for number, text in enumerate(chat):
            length = count(text) + 1
            tokens += length + 4  # the template's own
            if tokens > LONGEST:
                break
            role = "assistant" if number % 2 else "user"
            trained += length if number % 2 else 0
            messages.append({"role": role, "content": text})
        if trained:
            yield {"messages": messages}, trained


def _chats() -> list[list[str]]:
    try:
        from chitchat_dataset import ConversationDataset
    except ImportError:
        raise SystemExit("people's chats are in a package: pip install chitchat-dataset") from None
    chats = [list(chat) for chat in ConversationDataset()]
    random.Random(0).shuffle(chats)
    return chats


def write_until(records: Iterator[tuple[dict[str, Any], int]], tokens: int, path: Path) -> int:
    """Writes records until they have so many trained tokens; returns how many they have."""
    lines = []
    total = 0
    for record, trained in records:
        lines.append(json.dumps(record))
        total += trained
        if total >= tokens:
            break
    else:
        raise SystemExit(f"{path.stem}: {total} trained tokens are fewer than --tokens {tokens}")
    path.write_text("\n".join(lines) + "\n")
    return total


def train(kind: str, corpus: Path, args: argparse.Namespace) -> Path:
    """Trains a head, unless that is done; returns its directory."""
    home = args.work / kind
    settings = [
        f"model.init_from={json.dumps(args.target)}",
        f"data.files={json.dumps([str(corpus)])}",
        f"head.states={json.dumps(str(home / 'states'))}",
        *(f"data.seq_len={ROW}", f"head.draft_vocab={args.draft_vocab}"),
        *(f"head.steps={args.gamma}", f"head.intermediate_size={args.intermediate_size}"),
        *("optim.accumulate=1", "optim.batch_size=4", "optim.warmup_steps=10"),
        *("optim.learning_rate=1e-3", f"optim.total_steps={args.steps}"),
        *("run.log_every=10", "run.eval_every=40", "run.checkpoint_every=40"),
        *('run.keep_best=""', f"run.dir={json.dumps(str(home / 'run'))}"),
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    export = home / "run" / "export"
    if not export.exists():
        shutil.rmtree(home / "run", ignore_errors=True)  # of a run that was killed
        if store_states([str(CONFIG), *options]):
            raise SystemExit(f"the states of {kind} failed")
        if train_head([str(CONFIG), *options]):
            raise SystemExit(f"the run of {kind} failed")
    return export


def prompts_of(args: argparse.Namespace) -> dict[str, list[list[dict[str, str]]]]:
    """Chats of one message, by where they come from."""
    lines = map(json.loads, Path(args.held_out).read_text().splitlines())
    own = [line["messages"][:1] for line in lines]
    # Training takes chats from the front of the list.
    begun = [chat[0] for chat in reversed(_chats()) if len(chat[0].split()) >= WORDS]
    said = [[{"role": "user", "content": text}] for text in begun]
    return {"the model's questions": own[: args.prompts], "people's": said[: args.prompts]}


def decode(
    target: lm.LM,
    draft: lm.LM,
    chats: list[list[dict[str, str]]],
    sampling: str,
    args: argparse.Namespace,
) -> np.ndarray:
    """``[prompts, 2]``: tokens written after a prompt, and passes of the target for them."""
    prompts = [target.tokenizer.encode_chat(chat) for chat in chats]
    sums = np.zeros((len(chats), 2))
    for temperature, seed in SAMPLINGS[sampling]:
        out = sj.generate(
            target,
            prompts,
            draft=draft,
            method="speculative",
            options={"gamma": args.gamma},
            sampling=sj.Sampling(temperature),
            seed=seed,
            max_new_tokens=args.new_tokens,
        )
        hist = out.stats["accepted_hist"]
        sums += np.stack([(hist * (1 + np.arange(hist.shape[1]))).sum(1), hist.sum(1)], 1)
    return sums


def said(values: np.ndarray) -> str:
    """A figure and its resamples, the figure first, as text."""
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return f"{values[0]:.3f} ± {(high - low) / 2:.3f}"


def per_pass(sums: np.ndarray) -> np.ndarray:
    """Tokens per pass over all prompts, then over resamples of them."""
    picks = np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))
    tokens, passes = np.concatenate([sums.sum(0)[None], sums[picks].sum(1)]).T
    return tokens / passes


def decoded(kind: str, export: Path, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """:func:`decode` of a head, by prompts and sampling, unless that is done."""
    path = args.work / kind / "decoded.json"
    if not path.exists():
        target = lm.load(args.target)
        draft = lm.load_draft(str(export), target)
        found = {}
        for source, chats in prompts_of(args).items():
            for sampling in SAMPLINGS:
                sums = decode(target, draft, chats, sampling, args)
                found[f"{source}, {sampling}"] = sums.tolist()
        path.write_text(json.dumps(found))
    return json.loads(path.read_text())


def rows_of(found: dict[str, dict[str, list[list[float]]]]) -> Iterator[list[str]]:
    """A row of the table per kind of prompts and sampling: the first head, then the others."""
    first, *others = found
    for name in found[first]:
        own = per_pass(np.array(found[first][name]))
        cells = [name, said(own)]
        for kind in others:
            other = per_pass(np.array(found[kind][name]))
            cells += [said(other), said(own - other)]
        yield cells


def main() -> None:
    """Prints the sizes, and a line per kind of prompts and sampling."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("own", help="what the target wrote, by train.answers")
    parser.add_argument("held_out", help="held-out conversations of the target")
    parser.add_argument("--work", type=Path, default=Path("runs/head_data"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--draft-vocab", type=int, default=2048)
    parser.add_argument("--intermediate-size", type=int, default=768)
    parser.add_argument("--gamma", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16, help="of each kind")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=24000, help="trained ones of each file")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()

    encoder = Tokenizer.from_file(f"{args.target}/tokenizer.json")
    count = lambda text: len(encoder.encode(text, add_special_tokens=False))  # noqa: E731
    args.work.mkdir(parents=True, exist_ok=True)
    made = {"own": own_answers(args.own), "people": people(count), "library": library(count)}
    found = {}
    for kind in args.kinds:
        corpus = args.work / f"{kind}.jsonl"
        total = write_until(made[kind], args.tokens, corpus)
        print(f"{KINDS[kind]}: {total:,} trained tokens", flush=True)
        found[kind] = decoded(kind, train(kind, corpus, args), args)
    first, *others = (KINDS[kind] for kind in found)
    columns = ["prompts", first, *(cell for other in others for cell in (other, "difference"))]
    print(markdown_table(columns, list(rows_of(found))))


if __name__ == "__main__":
    main()
