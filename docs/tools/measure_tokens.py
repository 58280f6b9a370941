"""Measures the path from files to training rows: speed relative to the tokenizer's, and memory.

python docs/tools/measure_tokens.py [--gb 0.5] [--kills 10] [--out DIR]

``train.tokens`` tokenizes synthetic JSONL and Parquet in two processes. The texts are functions of
the standard library in a random order, so that no two documents are near-duplicates. Before and
after, the tokenizer alone encodes a part of the same texts, in calls of the same size and in two
processes, too. Two processes that share a core's units are slower than one, and a shared machine
changes its speed. Processor time is compared. Then a loader reads rows in a process of its own.

With ``--kills N`` it instead kills ``train.tokens`` N times at random moments, and then
``train.lm``, which reads the shards, N times. It compares shards and losses with those of
undisturbed runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet
from tokenizers import Tokenizer

from train.config import DataSection
from train.data.corpus import load_corpus, source_files
from train.data.encoding import Plain
from train.data.loader import make_loader
from train.data.reading import Intake, read_piece
from train.data.shards.building import load_shards

TOKENIZER = "specjax/demo/tokenizer.json"
CHARS = 4096  # of a document, on average
PROCESSES = 2


def write_corpus(home: Path, size: int) -> list[str]:
    """Writes about `size` bytes of text, two thirds as JSON lines and one as Parquet."""
    rng = np.random.default_rng(0)
    blocks = [b for d in load_corpus(["stdlib"]) for b in d.text.split("\n\n") if len(b) > 40]
    schema = pyarrow.schema([("content", pyarrow.string())])
    done, rows = 0, []
    with (
        (home / "lines.jsonl").open("w", encoding="utf-8") as lines,
        parquet.ParquetWriter(home / "rows.parquet", schema) as groups,
    ):
        while done < size:
            text, length = "", rng.lognormal(np.log(CHARS) - 0.5, 1)
            while len(text) < length:
                text += blocks[rng.integers(len(blocks))] + "\n\n"
            done += len(text)
            if done < size * 2 / 3:
                lines.write(json.dumps({"content": text}) + "\n")
                continue
            rows.append(text)
            if len(rows) == 1000 or done >= size:
                groups.write_table(pyarrow.table({"content": rows}, schema))
                rows = []
    return [str(home / "lines.jsonl"), str(home / "rows.parquet")]


def tokenizer_alone(files: list[str], most: int) -> dict[str, float]:
    """Bytes and MB per processor second of the tokenizer's own calls, over the first texts.

    It runs in as many processes at once as ``train.tokens`` uses, and returns their mean.
    """
    command = [sys.executable, __file__, "--alone", json.dumps([files, most])]
    with contextlib.ExitStack() as held:
        pipe = {"stdout": subprocess.PIPE, "text": True}
        started = [held.enter_context(subprocess.Popen(command, **pipe)) for _ in range(PROCESSES)]
        said = [json.loads(process.communicate()[0]) for process in started]
    return {name: sum(one[name] for one in said) / PROCESSES for name in said[0]}


def encode(files: list[str], most: int) -> None:
    """Encodes until ``most`` bytes of text are done; runs in a process of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(TOKENIZER)
    seconds, done, batch, chars = 0.0, 0, [], 0
    pieces = [piece for source in source_files([], files, Intake()) for piece in source]
    for document in itertools.chain.from_iterable(read_piece(p, Intake()) for p in pieces):
        batch.append(document.text)
        chars += len(document.text)
        if len(batch) == 256 or chars >= 1 << 20:
            since = time.process_time()
            tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            seconds += time.process_time() - since
            done += sum(len(text.encode()) for text in batch)
            batch, chars = [], 0
        if done >= most:
            break
    print(json.dumps({"bytes": done, "mb_per_cpu_second": done / 1e6 / seconds}))


def watched(command: list[str]) -> dict[str, float]:
    """Runs a command: processor seconds of its processes, wall time, memory of the largest one.

    The memory is at least that of this process, because the command is forked from it.
    """
    since = time.perf_counter()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"exit status {status}: {' '.join(command)}")
    return {
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "wall_seconds": time.perf_counter() - since,
        "peak_mib_of_one_process": usage.ru_maxrss / 1024,
    }


def read_rows(data: DataSection, rows: int) -> None:
    """In a process of its own: rows per second of the loader, and its memory."""
    before = peak_mib()
    corpus = load_shards(data, Tokenizer.from_file(TOKENIZER), Plain(), make=False)
    loader = make_loader(corpus, 4096, 8, 0)
    since = time.perf_counter()
    for _ in range(rows // 8):
        next(loader)
    seconds = time.perf_counter() - since
    said = {"tokens_per_second": rows * 4096 / seconds, "mib_before": before}
    print(json.dumps(said | {"peak_mib": peak_mib()}))


def peak_mib() -> float:
    """This process's peak memory in MiB. getrusage would count the parent's memory, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def command_of(program: str, data: dict, *more: str) -> list[str]:
    """A program's command line on the corpus."""
    sets = [f"data.{name}={json.dumps(value)}" for name, value in data.items()]
    sets = [*sets, f"tokenizer.path={TOKENIZER}", *more]
    words = [word for setting in sets for word in ("--set", setting)]
    return [sys.executable, "-m", program, "configs/tiny.toml", *words]


def stop_at_random(
    command: list[str], kills: int, seconds: float, more: list[str], made: Path
) -> None:
    """Kills the command repeatedly, each time within its first ``seconds``, then lets it finish.

    ``more`` are arguments of all runs but the first. A run that ends before its kill does not
    count: what it has ``made`` is removed, and the next one starts over.
    """
    rng, hit = np.random.default_rng(0), 0
    while hit < kills:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*command, *more * made.exists()], **quiet)
        try:
            process.wait(rng.uniform(0, seconds))
            shutil.rmtree(made)
        except subprocess.TimeoutExpired:
            hit += 1
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*command, *more], check=True, stderr=subprocess.DEVNULL)


def kill(home: Path, files: list[str], kills: int) -> dict[str, object]:
    """Whether shards and losses equal those of undisturbed runs."""
    report: dict[str, object] = {"kills_of_each": kills}
    for name in ("whole", "broken"):
        data = {"corpora": [], "files": files, "shards": str(home / name / "shards")}
        steps = ("optim.total_steps=400", "optim.batch_size=16", "run.checkpoint_every=20")
        trained = command_of("train.lm", data, f"run.dir={home / name / 'lm'}", *steps)
        for program, command, more, made in (
            ("tokens", [*command_of("train.tokens", data), "--processes", "2"], [], "shards"),
            ("lm", trained, ["--resume"], "lm"),
        ):
            since = time.perf_counter()
            if name == "whole":
                subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
                report[f"seconds_of_{program}"] = time.perf_counter() - since
            else:
                seconds, made = report[f"seconds_of_{program}"], home / name / made
                stop_at_random(command, kills, seconds, more, made)
    whole, broken = home / "whole", home / "broken"
    paths = [path.relative_to(whole) for path in (whole / "shards").rglob("*.*")]
    same = [(whole / path).read_bytes() == (broken / path).read_bytes() for path in paths]
    logs = [(home / "lm" / "metrics.jsonl").read_text().splitlines() for home in (whole, broken)]
    losses = [[(r["step"], r.get("loss")) for r in map(json.loads, log)] for log in logs]
    return report | {
        "files_of_shards": len(same),
        "the_same": sum(same),
        "losses": len(losses[0]),
        "losses_the_same": losses[0] == losses[1],
    }


def measure(home: Path, files: list[str]) -> dict[str, object]:
    """Speed against the tokenizer's own, sizes, and the memory of each stage."""
    size = sum(os.path.getsize(file) for file in files)
    before = tokenizer_alone(files, size // 20)
    data = {"corpora": [], "files": files, "shards": str(home / "shards")}
    command = command_of("train.tokens", data)
    made = watched([*command, "--processes", str(PROCESSES)])
    alone = [before, tokenizer_alone(files, size // 20)]
    again = watched(command)
    manifest = json.loads((home / "shards" / "manifest.json").read_text())
    text = sum(manifest["bytes"].values())
    rate = text / 1e6 / made["cpu_seconds"]
    reading = [sys.executable, __file__, "--read", json.dumps(data)]
    read = subprocess.run(reading, check=True, capture_output=True, text=True).stdout
    return {
        "gb_of_text": text / 1e9,
        "gb_of_files": size / 1e9,
        "gb_of_shards": sum(shard["bytes"] for shard in manifest["shards"]) / 1e9,
        "documents": manifest["documents"],
        "tokens": manifest["tokens"],
        "tokenizer_alone": alone,
        "tokenizing": made | {"mb_per_cpu_second": rate},
        "share_of_the_tokenizers_own": [rate / one["mb_per_cpu_second"] for one in alone],
        "when_all_is_there": again,
        "reading": json.loads(read),
        "training": watched(command_of("train.lm", data, f"run.dir={home / 'lm'}")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--out", default="")
    parser.add_argument("--read", default="", help=argparse.SUPPRESS)
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        data = json.loads(args.read)
        read_rows(DataSection((), tuple(data["files"]), data["shards"]), 4000)
        return
    if args.alone:
        encode(*json.loads(args.alone))
        return
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out or None) as scratch:
        home = Path(scratch)
        files = write_corpus(home, int(args.gb * 1e9))
        report = kill(home, files, args.kills) if args.kills else measure(home, files)
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
