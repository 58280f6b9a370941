"""Every command of docs/papers.md, on made-up rows with small models and few tokens."""

import dataclasses
import gzip
import json
import re
import shlex
import shutil
import sqlite3
from pathlib import Path

import jax
import pyarrow
import pytest
from pyarrow import parquet

from infer import config, timing
from infer.bench import commands as bench
from infer.bench.benchmark import run_benchmark
from infer.datasets.files import read_rows
from infer.prompts import Encoder
from infer.run import commands as run
from infer.run.job import run_job
from infer.tune import commands as tune
from infer.tune import lossy, tuning
from specjax.models import load_pretrained, save_pretrained
from specjax.text import Tokenizer

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "samples"
PAGE = (ROOT / "docs" / "papers.md").read_text()
COMMANDS = re.findall(r"`(infer\.(?:bench|tune|run) [^`]*--target [^`]*)`", PAGE)
# What needs a model or an endpoint that no test has; the metrics' own tests run them.
ELSEWHERE = re.compile(r"--metric (?:mauve|coherence|judge)\S*|--judge-\w+ \S+")
TRACED = ("alpha", "beta", "tau", "max_kl")
COLUMNS = {
    "scd_wikitext": ("diversity, SimCTG", "acceptance", "expected, c = 0.05"),
    "scd_alpacaeval": ("acceptance", "expected, c = 0.05"),
    "scd_gsm8k": ("GSM8K", "target, accepted", "draft, refused", "expected, c = 0.05"),
    "scd_humaneval": ("pass@1", "target, accepted", "draft, accepted", "expected, c = 0.05"),
    "scd_surface": ("alpha=0.3 beta=0.5", "expected, c = 0.01", "expected, c = 0.2"),
    "mentored": ("max_kl=0.03", "acceptance", "KL, nats/token"),
    "mtad_methods": ("tokens/s", "J/token", "perplexity", "tokens/round", "spectr", "bild"),
    "mtad_joint": ("block=1", "perplexity", "ROUGE-L"),
    "mtad_batches": ("s/pass", "s/prompt", "J/token"),
    "mtad_beams": ("width=2", "tokens/s", "J/token", "perplexity"),
    "mtad_tau": ("tau=0.1", "tokens/s", "perplexity"),
    "sdsat_code": ("k=1", "pass@1", "tokens/s", "accepted/drafted"),
    "sdsat_nucleus": ("k=5", "tokens/s", "accepted/drafted"),
    "sdsat_infilling": ("k=5", "exact match", "tokens/s"),
    "mtad_tuning": ("Chosen on the validation file", "perplexity", "P"),
    "cdsl_commongen": ("soft, of all constraints", "hard", "modelled speedup", "a_t"),
    "cdsl_harmless": ("soft, of all constraints", "hard", "modelled speedup", "r_t"),
    None: ("perplexity",),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_pair_dirs):
    """The files that the page names, in the formats that it names, and the models P, Q and S."""
    home = tmp_path_factory.mktemp("papers")
    for name in set(re.findall(r"([\w-]+)\.parquet", PAGE)):
        rows = list(read_rows(str(next(SAMPLES.glob(f"{name}.json*")))))
        columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
        parquet.write_table(pyarrow.table(columns), home / f"{name}.parquet")
    for name in set(re.findall(r"([\w-]+)\.jsonl\.gz", PAGE)):
        text = (SAMPLES / f"{name}.jsonl").read_bytes()
        (home / f"{name}.jsonl.gz").write_bytes(gzip.compress(text))
    for name in ("alpaca-eval.json", "chatalpaca.json", "mt-bench.jsonl"):
        shutil.copy(SAMPLES / name, home)
    shutil.copytree(SAMPLES / "spider", home / "spider")
    folder = home / "spider" / "database" / "pets"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "pets.sqlite") as database:
        database.execute("CREATE TABLE owner (owner_id, name)")
        database.execute("CREATE TABLE pet (pet_id, owner_id, name, age)")
    shutil.copytree(ROOT / "configs", home / "configs")
    for name, directory in zip("PQ", tiny_pair_dirs, strict=True):
        (home / name).symlink_to(directory)
    cfg, params, *_ = load_pretrained(tiny_pair_dirs[0])
    cfg = dataclasses.replace(cfg, adaptive_ids=(cfg.vocab_size - 1,) * 4)
    tokenizer = (Path(tiny_pair_dirs[0]) / "tokenizer.json").read_text()
    save_pretrained(home / "S", cfg, jax.device_get(params), tokenizer)
    return home


@pytest.fixture
def small(home, monkeypatch):
    """Prompts of one bucket, no cost curve, a chat template."""
    whole = Encoder.text

    def text(self, said, first=None):
        return whole(self, said, min(first or 24, 24))

    def costs(target, draft, widths=(1,)):
        return dict.fromkeys(widths, 1.0), 0.05 if draft else None

    monkeypatch.chdir(home)
    monkeypatch.setattr(Encoder, "text", text)
    for module in (timing, tuning, lossy):
        monkeypatch.setattr(module, "costs", costs)
    monkeypatch.setattr(Tokenizer, "apply_chat", lambda self, said: f"<{said}>")


def shrunk(args):
    """The same job, with two of everything."""
    for name in ("num_prompts", "repeats"):
        if name in args:
            vars(args)[name] = 2
    for name in ("sample", "test_sample"):
        if vars(args).get(name):
            vars(args)[name] = 1
    for name in ("batch_size", "a_t", "r_t", "b"):
        if isinstance(vars(args).get(name), list | tuple):
            vars(args)[name] = vars(args)[name][:2]
    for name in ("sweep", "grid"):
        if isinstance(vars(args).get(name), list):
            # Of an option that compiles anew one value, of the others two.
            each = vars(args)[name]
            vars(args)[name] = [(o, values[: 2 if o in TRACED else 1]) for o, values in each]
    args.max_new_tokens = 32 if args.target == "demo" else 4
    return args


def test_the_page_names_every_config():
    named = set(re.findall(r"configs/papers/(\w+)\.toml", PAGE))
    assert named == {path.stem for path in (ROOT / "configs" / "papers").iterdir()}
    assert named == COLUMNS.keys() - {None} and len(COMMANDS) > 25


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_of_the_page_makes_its_table(command, small, capsys):
    command = ELSEWHERE.sub("", command).replace("classifier:REWARD", "regex:e")
    if "wikitext" in command:  # n-grams of words are counted, of which random models write none
        command = command.replace("--target P --draft Q", "--target demo")
    program, *argv = shlex.split(command)
    if "rouge" in argv:
        pytest.importorskip("rouge_score")
    if program == "infer.run":
        args = run.parser().parse_args(argv)
        run.check(args, run.parser())
        assert run_job(shrunk(args)) == 0
        rows = [json.loads(line) for line in Path(args.out).read_text().splitlines()]
        assert [row["method"] for row in rows] == ["sdsat"] * 2
        return
    if program == "infer.bench":
        commands = bench.parser()
        args = config.parse_with_config(commands, argv)
        bench.check(args, commands)
        code = run_benchmark(shrunk(args))
    else:
        args = tune.parse(argv)
        args.grid = {option: values[:2] for option, values in (args.grid or {}).items()}
        work = tuning.tune if args.method == "cdsl" else lossy.tune
        code = work(shrunk(args))
    out = capsys.readouterr().out
    assert code == 0
    stem = re.search(r"configs/papers/(\w+)", command)
    assert [name for name in COLUMNS[stem and stem[1]] if name not in out] == []
    if program == "infer.bench":
        assert " ± " in out and "mean ± standard error of the runs" in out
