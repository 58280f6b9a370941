"""Every command of docs/papers.md runs, on synthetic rows, with small models and few tokens."""

import dataclasses
import gzip
import importlib.util
import itertools
import json
import re
import shlex
import shutil
import sqlite3
import warnings
import zlib
from pathlib import Path

import jax
import pyarrow
import pytest
from pyarrow import parquet

from infer import config, timing
from infer.bench import commands as bench
from infer.bench import pictures, sweep_pictures
from infer.bench.benchmark import run_benchmark
from infer.bench.cases import make_cases
from infer.datasets.files import read_rows
from infer.prompts import PromptEncoder
from infer.reporting import save_figure
from infer.run import commands as run
from infer.run.job import run_job
from infer.tune import cdsl, lossy
from infer.tune import commands as tune
from infer.tune import report as tune_report
from specjax.lm import DEMO
from specjax.models import load_pretrained, save_pretrained
from support.judging import judging_with
from support.letter_models import save_letter_model
from support.training import ROOT, logged, overrides
from train import ablation
from train.config import SDSATConfig, from_toml
from train.sdsat import __main__ as sdsat
from train.sdsat.variants import VARIANTS

SAMPLES = ROOT / "tests" / "samples"
PAGE = (ROOT / "docs" / "papers.md").read_text()
COMMANDS = re.findall(r"`(infer\.(?:bench|tune|run) [^`]*--target [^`]*)`", PAGE)
TRAINED = re.findall(r"`train\.sdsat (configs/\w+\.toml[^`]*)`", PAGE)
ABLATIONS = re.findall(r"`train\.ablation (configs/\w+\.toml[^`]*)`", PAGE)
# (optional package, the argument that needs it, its replacement if the package is missing).
NEEDED = (
    ("mauve", r" --metric mauve\S+", ""),
    ("torch", r" --metric coherence\S+", ""),
    ("torch", r"classifier:REWARD", "regex:e"),
)
FEW_STEPS = overrides(
    *("data.seq_len=64", "optim.total_steps=2", "optim.warmup_steps=1"),
    *("optim.batch_size=2", "optim.accumulate=1", "mesh.fsdp=1", "mesh.devices=0"),
    *("run.eval_every=2", "run.eval_batches=1", "run.checkpoint_every=2"),
    # The small models have another vocabulary than CodeLlama.
    *("sdsat.decode_prompts=0", "run.keep=1", "run.log_every=1", "sdsat.ids=[]"),
)
METRICS = {  # a metric's column
    "mauve": "MAUVE",
    "coherence": "coherence",
    "judge": "rating, 1–10",
    "judge:pair": "wins",
    "gsm8k": "GSM8K",
    "rouge": "rouge-score L",
    "execution": "execution",
    "satisfaction": "hard",
}
TRACED = ("alpha", "beta", "tau", "max_kl")
CDSL_TABLES = (  # columns and rows of Tables 5 to 8
    *("c = ", "draft calls/token", "target calls/token", "acceptance rate"),
    *("target, greedy", "draft, greedy", "speculative, hard", "speculative, ratio"),
)
COLUMNS = {
    "scd_wikitext": ("diversity, SimCTG", "acceptance", "expected, c = 0.05"),
    "scd_alpacaeval": ("acceptance", "expected, c = 0.05"),
    "scd_gsm8k": ("GSM8K", "target, accepted", "draft, rejected", "expected, c = 0.05"),
    "scd_humaneval": ("pass@1", "target, accepted", "draft, accepted", "expected, c = 0.05"),
    "scd_surface": ("alpha=0.3 beta=", "expected, c = 0.01", "expected, c = 0.2"),
    "mentored": ("max_kl=0.03", "acceptance", "KL, nats/token"),
    "mtad_methods": (
        *("tokens/s", "J/token", "perplexity", "perplexity, mean of rows", "tokens/round"),
        *("spectr", "bild", "specinfer", "speculative", "mtad"),
    ),
    "mtad_joint": ("block=1", "perplexity", "ROUGE-L"),
    "mtad_batches": ("s/pass", "s/prompt", "J/token"),
    "mtad_beams": ("width=2", "tokens/s", "J/token", "perplexity"),
    "mtad_tau": ("tau=0.1", "tokens/s", "perplexity"),
    "sdsat_code": ("k=1", "pass@1", "tokens/s", "accepted/drafted"),
    "sdsat_nucleus": ("sdsat k=", "tokens/s", "accepted/drafted"),
    "sdsat_infilling": ("sdsat k=", "exact match", "tokens/s"),
    "mtad_tuning": ("Chosen on the validation file", "perplexity", "P"),
    "cdsl_commongen": (
        *("soft, of all constraints", "hard", "modeled speedup", "a_t", *CDSL_TABLES),
        *("nucleus, 0.9", "nucleus, 0.5", "beam", "CDLH", "CDLH-appx", "CDSL"),
    ),
    "cdsl_harmless": ("llama-guard", "modeled speedup", "r_t", *CDSL_TABLES),
    "cdsl_lengths": ("| d |", "soft, of all constraints", "hard", "modeled speedup"),
    "cdsl_satisfaction": ("soft, of all constraints", "hard", "acceptance", "greedy", "sampled"),
    None: ("perplexity",),
}
# Columns that must have a value in some row, by config.
SDSAT_FILLED = ("accepted/drafted, mean of prompts", "tokens/s, mean of prompts", "plain, tokens/s")
FILLED = {
    "sdsat_code": ("pass@1", *SDSAT_FILLED),
    "sdsat_nucleus": (*SDSAT_FILLED, "temperature", "data"),
    "sdsat_infilling": ("exact match, py", "exact match, js", *SDSAT_FILLED),
    "mtad_joint": ("perplexity", "ROUGE-L"),
    "mtad_tau": ("tokens/s", "perplexity"),
    "scd_surface": ("expected, c = 0.05",),
    "scd_gsm8k": ("target, accepted", "draft, accepted"),
    "scd_humaneval": ("target, accepted", "draft, accepted"),
}
# The axes of the pictures that are a paper's figures: (x, y) of each panel, by config.
COST_AXES = {"costs.png": [("c, draft step time / target step time", "expected acceleration")]}
K_AXES = [("number of adaptive tokens, k", head) for head in SDSAT_FILLED[:2]]
PICTURES = {
    "scd_surface": COST_AXES,
    "scd_gsm8k": {"entropies.png": [("", "mean entropy, nats")]},
    "scd_humaneval": {"entropies.png": [("", "mean entropy, nats")]},
    "mtad_joint": {
        "sweep.png": [("K, tokens of a block", "perplexity"), ("K, tokens of a block", "ROUGE-L")]
    },
    "mtad_tau": {
        "sweep.png": [
            ("acceptance threshold τ", "tokens/s"),
            ("acceptance threshold τ", "perplexity"),
        ]
    },
    "mentored": {
        "sweep.png": [
            ("D, bound on the KL divergence, nats", head)
            for head in ("acceptance", "KL, nats/token", "perplexity")
        ]
    },
    "cdsl_commongen": {"methods.png": [("constraints satisfied, %", "speedup over CDLH")]},
    "cdsl_harmless": {"methods.png": [("llama-guard, %", "speedup over CDLH")]},
    "sdsat_code": {"sweep.png": K_AXES},
    "sdsat_nucleus": {"sweep.png": K_AXES},
    "sdsat_infilling": {"sweep.png": K_AXES},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with the data files and models that the page names, except S.

    P is the smaller embedded model, and Q its first layer.
    """
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
    whole, params, *_ = load_pretrained(DEMO / "draft")
    cut = dataclasses.replace(whole, num_layers=1)
    first = {"layers": {"0": params["layers"]["0"]}}
    tokenizer = (DEMO / "tokenizer.json").read_text()
    for name, cfg, other in (("P", whole, {}), ("Q", cut, first)):
        save_pretrained(home / name, cfg, jax.device_get(params | other), tokenizer)
    for name in ("GPT2", "GUARD"):
        (home / name).symlink_to(home / "P")
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (home / "P" / "chat_template.jinja").write_text(template)
    if importlib.util.find_spec("torch"):
        save_letter_model(home / "EMBED", "BertModel", pad_token="[PAD]")
        save_letter_model(home / "REWARD", "BertForSequenceClassification")
    return home


@pytest.fixture(scope="module")
def tuned(home):
    """The exports of the page's trainings, by command. They start at Q.

    The first one is S, and those with distinct ids are D and D13.
    """
    (home / "checkpoints").mkdir()
    for size in (7, 13):
        (home / "checkpoints" / f"CodeLlama-{size}b-hf").symlink_to(home / "Q")
    code = home / "data" / "starcoder"
    shutil.copytree(ROOT / "specjax", code, ignore=shutil.ignore_patterns("demo", "__pycache__"))
    exports = {}
    with pytest.MonkeyPatch.context() as here:
        here.chdir(home)
        for command in TRAINED:
            argv = shlex.split(command)
            assert sdsat.main([*argv, *FEW_STEPS]) == 0
            cfg = from_toml(SDSATConfig, argv[0], argv[2::2])
            exports[command] = Path(cfg.run.dir, "export")
    (home / "S").symlink_to(home / exports[TRAINED[0]])
    distinct = [command for command in TRAINED if "sdsat.distinct=true" in command]
    for name, command in zip(("D", "D13"), distinct, strict=True):
        (home / name).symlink_to(home / exports[command])
    return exports


@pytest.fixture
def small(home, monkeypatch):
    """Short prompts, which fit in one bucket, and constant costs instead of measured ones."""
    whole = PromptEncoder.text

    def text(self, said, first=None):
        return whole(self, said, min(first or 24, 24))

    def costs(target, draft, widths=(1,), seconds=1.0):
        return dict.fromkeys(widths, 1.0), 0.05 if draft else None

    monkeypatch.chdir(home)
    monkeypatch.setattr(PromptEncoder, "text", text)
    for module in (timing, cdsl, lossy):
        monkeypatch.setattr(module, "costs", costs)


def shrunk(args):
    """The arguments of the same job with few prompts, repeats, options and tokens."""
    for name in ("num_prompts", "repeats"):
        if name in args:
            vars(args)[name] = 2
    for name in ("sample", "test_sample"):
        if vars(args).get(name):
            vars(args)[name] = 1
    for name in ("batch_size", "a_t", "r_t", "b", "d"):
        if isinstance(vars(args).get(name), list | tuple):
            vars(args)[name] = vars(args)[name][:2]
    for name in ("sweep", "grid"):
        if isinstance(vars(args).get(name), list):
            # One value of an option that is compiled in, two of the others.
            each = vars(args)[name]
            vars(args)[name] = [(o, values[: 2 if o in TRACED else 1]) for o, values in each]
    # WikiText's metrics count n-grams of words, which need more tokens.
    args.max_new_tokens = 16 if "wikitext" in (vars(args).get("prompts") or "") else 4
    return args


def test_the_page_names_every_config():
    named = set(re.findall(r"configs/papers/(\w+)\.toml", PAGE))
    assert named == {path.stem for path in (ROOT / "configs" / "papers").iterdir()}
    assert named == COLUMNS.keys() - {None} and len(COMMANDS) > 25


def test_the_page_trains_what_it_decodes_with():
    configs = {"7b": "configs/sdsat_codellama_7b.toml", "13b": "configs/sdsat_codellama_13b.toml"}
    windows = []
    for command in TRAINED:
        argv = shlex.split(command)
        cfg = from_toml(SDSATConfig, argv[0], argv[2::2])
        size = next(size for size, path in configs.items() if path == argv[0])
        windows.append((size, cfg.sdsat.window, cfg.sdsat.distinct))
    assert windows == [
        ("7b", 5, False),
        ("13b", 7, False),
        ("7b", 3, False),
        ("7b", 5, True),
        ("13b", 7, True),
    ]
    assert len(ABLATIONS) == 2


@pytest.mark.parametrize(("target", "most"), [("D", 5), ("D13", 7)])
def test_models_with_distinct_ids_take_no_more_tokens_than_they_were_tuned_with(target, most):
    """A later --sweep replaces the config's. Temperatures and files are the paper's."""
    commands = [command for command in COMMANDS if f" --target {target} " in command]
    measured = []
    for command in commands:
        args = config.parse_with_config(bench.parser(), shlex.split(command)[1:])
        assert [int(k) for k in dict(args.sweep)["k"]] == list(range(1, most + 1))
        measured.append((args.dataset, 0.0 if args.greedy_only else args.temperature))
    each = itertools.product(("humaneval", "infilling"), (0.0, 0.2, 1.0))
    assert sorted(measured) == sorted([*each, ("mbpp", 0.0)])
    *others, last = (re.search(r"--out (\S+)", one) for one in commands if "--out" in one)
    assert re.findall(r"--beside (\S+)", last.string) == [one[1] for one in others]


def test_the_page_names_every_table_and_figure_of_sdsat_and_contrastive_decoding():
    for title, figures, tables in (("Speculative contrastive", 5, 2), ("SDSAT", 7, 7)):
        text = PAGE[PAGE.index(f"## {title}") :].removeprefix("## ").partition("\n## ")[0]
        named = {"Figure": set(), "Table": set()}
        for kind, numbers in re.findall(r"(Figure|Table)s? ((?:\d(?:, | and | to )?)+)", text):
            ends = re.findall(r"(\d) to (\d)", numbers)
            named[kind] |= {int(number) for number in re.findall(r"\d", numbers)}
            for first, last in ends:
                named[kind] |= set(range(int(first), int(last) + 1))
        assert named["Figure"] == set(range(1, figures + 1)), title
        assert named["Table"] == set(range(1, tables + 1)), title


@pytest.fixture
def axes(monkeypatch):
    """The axes' titles of the pictures that are written, by file name."""
    made = {}

    def save(figure, path):
        shown = [axis for axis in figure.axes if axis.get_visible()]
        made[path.name] = [(axis.get_xlabel(), axis.get_ylabel()) for axis in shown]
        return save_figure(figure, path)

    for module in (pictures, sweep_pictures, tune_report):
        monkeypatch.setattr(module, "save_figure", save)
    return made


# MTAD, Table 13: m, BiLD's two thresholds and MTAD's, by column.
TABLE_13 = {
    "chatgpt-prompts": {"Llama": (4, 0.9, 2, 0.1), "OPT": (4, 0.9, 2, 0.1)},
    "chatalpaca": {"Llama": (2, 0.9, 1, 0.1), "OPT": (2, 0.3, 2, 0.1)},
    "cnn-dailymail": {"Llama": (4, 0.9, 3, 0.1), "OPT": (2, 0.3, 2, 0.1)},
    "spider": {"Llama": (2, 0.9, 1, 0.9), "OPT": (2, 0.9, 1, 0.1)},
    "mt-bench": {"Llama": (2, 0.9, 1, 0.9), "OPT": (2, 0.9, 1, 0.1)},
}
OPT_COLUMNS = {"chatalpaca": "CA", "cnn-dailymail": "CD", "spider": "SP", "mt-bench": "MT"}


def options_of_mtad(command):
    """m, BiLD's two thresholds and MTAD's of a command; the draft lengths are asserted."""
    args = config.parse_with_config(bench.parser(), shlex.split(command)[1:])
    by_method = {case.method: case.options for case in make_cases(args, has_draft=True)}
    for name in ("speculative", "spectr", "mtad"):
        assert by_method[name]["gamma"] == 4
    bild = by_method["bild"]
    chains = by_method["spectr"]["chains"]
    assert by_method["specinfer"]["branching"] == (chains, 1, 1, 1)
    assert bild["gamma"] == 10 and by_method["mtad"]["width"] == 8
    return chains, bild["tau1"], bild["tau2"], by_method["mtad"]["tau"]


@pytest.mark.parametrize("dataset", TABLE_13)
def test_mtads_commands_have_the_options_of_its_table_13(dataset, monkeypatch):
    monkeypatch.chdir(ROOT)
    of_methods = [command for command in COMMANDS if "mtad_methods" in command]
    commands = [c for c in of_methods if f"--dataset {dataset} " in c and "--top-k" not in c]
    assert {options_of_mtad(command) for command in commands} == {TABLE_13[dataset]["Llama"]}

    base = next(c for c in of_methods if "--dataset chatgpt-prompts " in c)
    if dataset not in OPT_COLUMNS:
        assert options_of_mtad(base) == TABLE_13[dataset]["OPT"]
        return
    rows = [line for line in PAGE.splitlines() if re.match(r"\| \w\w and \w\w, OPT \|", line)]
    (row,) = (line for line in rows if OPT_COLUMNS[dataset] in line)
    own = re.search("`(.*)`", row)[1]
    assert options_of_mtad(f"{base} {own}") == TABLE_13[dataset]["OPT"]


@pytest.fixture
def judge():
    """A judge's endpoint whose ratings differ between questions."""

    def answer_to(question):
        drawn = zlib.crc32(question.encode())
        return 200, f"[[{1 + drawn % 10}]] [[{'ABC'[drawn % 3]}]]", {}

    with judging_with(answer_to) as (url, asked):
        yield url
        assert all(path == "/v1/chat/completions" for path, *_ in asked)


def run_program(command):
    """Runs a command of the page on less; returns its exit code."""
    program, *argv = shlex.split(command)
    if program == "infer.run":
        args = run.parser().parse_args(argv)
        run.check(args, run.parser())
        return run_job(shrunk(args))
    if program == "infer.bench":
        commands = bench.parser()
        args = config.parse_with_config(commands, argv)
        bench.check(args, commands)
        return run_benchmark(shrunk(args))
    args = tune.parse(argv)
    args.grid = {option: values[:2] for option, values in (args.grid or {}).items()}
    work = cdsl.tune if args.method == "cdsl" else lossy.tune
    return work(shrunk(args))


def run_what_it_shows_beside(command):
    """Runs the commands that make the reports of ``--beside``, if no test has."""
    for directory in re.findall(r"--beside (\S+)", command):
        if not Path(directory, "bench.json").exists():
            makes_it = re.compile(rf"--out {re.escape(directory)}(?!\S)")
            (other,) = (one for one in COMMANDS if makes_it.search(one.split("--beside")[0]))
            assert run_program(other) == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_of_the_page_makes_its_table(command, small, judge, axes, request, capsys):
    if re.search(r" --target (S|D|D13) ", command):
        request.getfixturevalue("tuned")
    command = command.replace("--judge-url URL", f"--judge-url {judge}")
    for module, asked, instead in NEEDED:
        if re.search(asked, command) and not importlib.util.find_spec(module):
            command = re.sub(asked, instead, command)
            warnings.warn(f"no {module} here: runs as {command}", stacklevel=1)
    if "infer.bench" in command and "--out" not in command:
        command += " --out runs/bench"
    run_what_it_shows_beside(command)
    axes.clear()
    capsys.readouterr()
    assert run_program(command) == 0
    out = capsys.readouterr().out
    if command.startswith("infer.run"):
        lines = Path("multipl-e.jsonl").read_text().splitlines()
        assert [json.loads(line)["method"] for line in lines] == ["sdsat"] * 2
        return

    stem = re.search(r"configs/papers/(\w+)", command)
    stem = stem and stem[1]
    assert [name for name in COLUMNS[stem] if name not in out] == []
    assert [head for head in FILLED.get(stem, ()) if not any(column(out, head))] == []
    if command.startswith("infer.bench"):
        assert " ± " in out and "mean ± standard error of the runs" in out
    for name, expected in PICTURES.get(stem, {}).items():
        assert list(dict.fromkeys(axes[name])) == expected
    for head in re.findall(r"--plot (\S+)", command):
        of_original = "variant=original" in command
        assert axes["sweep.png"] == ([("α", head)] if of_original else [("α", "β"), ("", head)])
    for metric in re.findall(r"--metric (judge:pair|\w+)", command):
        measured = column(out, METRICS[metric])
        assert measured and all(measured), metric
    shown = set(column(out, "data")) if "--beside" in command else set()
    assert shown in (set(), {"humaneval", "infilling"})


def column(out, head):
    """The cells of a column, from all Markdown tables that have its head."""
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines()]
    found, at = [], None
    for row in rows:
        if len(row) == 1:
            at = None
        elif head in row:
            at = row.index(head)
        elif at and row[1] != "---":
            found.append(row[at])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINED, ids=range(len(TRAINED)))
def test_a_recipe_of_the_page_exports_a_model_that_drafts(command, home, tuned):
    exported = json.loads((home / tuned[command] / "config.json").read_text())
    argv = shlex.split(command)
    section = from_toml(SDSATConfig, ROOT / argv[0], argv[2::2]).sdsat
    assert len(exported["adaptive_ids"]) == section.window
    assert len(set(exported["adaptive_ids"])) == (section.window if section.distinct else 1)
    assert [row["step"] for row in logged(home / tuned[command].parent) if "loss" in row] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("command", ABLATIONS, ids=range(len(ABLATIONS)))
def test_an_ablation_of_the_page_makes_its_figure(command, home, tuned, monkeypatch):
    """It trains on the code that the recipes read; without --only, three of the variants."""
    monkeypatch.chdir(home)
    figures = []
    monkeypatch.setattr(pictures.pyplot(), "close", figures.append)
    own = overrides("model.init_from=Q", "data.corpora=[]", 'data.files=["data/starcoder"]')
    argv = shlex.split(command)
    some = ["none", "isolated-self", "improved-data"]
    if "--only" in argv:
        some = argv[argv.index("--only") + 1].split(",")
    assert ablation.main([*argv, *FEW_STEPS, *own, "--only", ",".join(some)]) == 0

    changed = argv[argv.index("--set") + 1 :] if "--set" in argv else []
    made = home / from_toml(SDSATConfig, argv[0], changed).run.dir
    rows = json.loads((made / "ablation.json").read_text())
    assert [row["variant"] for row in rows] == sorted(some, key=list(VARIANTS).index)
    assert all([step for step, _ in row["training"]] == [1, 2] for row in rows)
    assert all([step for step, _ in row["curve"]] == [2] for row in rows)
    table = (made / "ablation.md").read_text()
    heads = ["held-out clean loss, nats", "acceptance per place"]
    for head in [*heads, "against none"] if "none" in some else heads:
        assert len(column(table, head)) == len(some) and all(column(table, head)), head
    assert (made / "ablation.png").stat().st_size > 0

    (figure,) = figures
    training, *_ = figure.axes
    assert training.get_xlabel() == "training step"
    assert training.get_ylabel() == "training loss of standard tokens, nats"
    assert [line.get_label() for line in training.get_lines()] == [row["variant"] for row in rows]
