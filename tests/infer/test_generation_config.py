"""What a checkpoint's generation_config.json asks for: taken where the user gave nothing, shown."""

import json
import shutil

import pytest

import specjax as sj
from infer.run import commands as run
from infer.run.job import make_job
from infer.serve import commands as serve
from infer.serve.schemas import CompletionBody
from infer.serve.server import assembled
from specjax.registry import Context

QWEN = {  # Qwen2.5-7B-Instruct's
    "bos_token_id": 1,
    "pad_token_id": 0,
    "do_sample": True,
    "eos_token_id": [0, 4],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
PENALTY = {"repetition_penalty": 1.05}
TEMPERED = GREEDY | PENALTY | {"temperature": 0.7}
OWN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8} | PENALTY


@pytest.fixture
def directory(tiny_pair_dirs, tmp_path):
    """``directory(settings)``: a model with this generation config."""

    def write(settings):
        home = tmp_path / "model"
        if not home.exists():
            shutil.copytree(tiny_pair_dirs[0], home)
        (home / "generation_config.json").write_text(json.dumps(settings))
        return str(home)

    return write


def completion(capsys, home, *argv):
    """(the sampling of the row, stderr) of one short completion."""
    argv = ["--target", home, "--prompt", "def f", "--max-new-tokens", "2", "--json", *argv]
    assert run.main(argv) == 0
    out = capsys.readouterr()
    (line,) = out.out.splitlines()
    return json.loads(line)["sampling"], out.err


LINE = (
    "infer.run: generation_config.json of {}: takes temperature=0.7, top_k=20, top_p=0.8, "
    "repetition_penalty=1.05 (--ignore-generation-config: nothing)\n"
)


def test_a_run_takes_it_and_says_so_in_one_line(directory, capsys):
    home = directory(QWEN)
    assert completion(capsys, home) == (OWN, LINE.format(home))


@pytest.mark.parametrize(
    ("argv", "sampling", "says"),
    [
        (["--temperature", "0.9"], OWN | {"temperature": 0.9}, "takes top_k=20, top_p=0.8, rep"),
        (
            ["--top-k", "0", "--top-p", "1"],
            GREEDY | {"temperature": 0.7} | PENALTY,
            "takes temperature=0.7, rep",
        ),
        (["--temperature", "0"], GREEDY | PENALTY, ": takes repetition_penalty=1.05 ("),
        (["--repetition-penalty", "1.2"], OWN | {"repetition_penalty": 1.2}, "top_p=0.8 ("),
        (["--ignore-generation-config"], GREEDY, ""),
        (
            ["--ignore-generation-config", "--temperature", "1"],
            GREEDY | {"temperature": 1.0},
            "",
        ),
    ],
)
def test_what_the_user_gives_counts(directory, capsys, argv, sampling, says):
    got, err = completion(capsys, directory(QWEN), *argv)
    assert got == sampling
    assert says in err and err.count("\n") == bool(says)


@pytest.mark.parametrize(
    ("settings", "sampling", "says"),
    [
        ({"do_sample": True}, {"temperature": 1.0}, "takes temperature=1.0 ("),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}, "takes temperature=0.0 ("),
        ({"temperature": 0.6, "top_p": 0.9}, {}, "does not take temperature=0.6, top_p=0.9 ("),
        ({"do_sample": True, "top_k": -1, "top_p": 1}, {"temperature": 1.0}, "takes temp"),
        ({"_from_model_config": True, "eos_token_id": 0, "max_length": 4096}, {}, ""),
        ({"repetition_penalty": 1.0, "num_beams": 1, "min_p": 0, "bad_words_ids": None}, {}, ""),
        (
            {"num_beams": 4, "max_new_tokens": 512, "suppress_tokens": [3]},
            {"suppress_tokens": [3]},
            "takes suppress_tokens=[3]; does not take num_beams=4, max_new_tokens=512 (",
        ),
    ],
)
def test_do_sample_decides_as_in_transformers(directory, capsys, settings, sampling, says):
    got, err = completion(capsys, directory(settings))
    assert got == GREEDY | sampling
    assert says in err and err.count("\n") == bool(says)


def test_the_ends_of_sequence_always_count(directory, capsys):
    home = directory(QWEN)
    assert sj.load(home).eos_ids == (0, 4)
    _, err = completion(capsys, home, "--ignore-generation-config")
    assert not err


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_k": 2.5},
        {"top_p": 1.5},
        {"do_sample": "yes"},
        {"do_sample": True, "temperature": float("nan")},
    ],
)
def test_a_wrong_value_is_one_line(directory, capsys, settings):
    assert run.main(["--target", directory(settings), "--prompt", "a"]) == 2
    err = capsys.readouterr().err
    assert "generation_config.json" in err and err.count("\n") == 1


def test_the_library_shows_it_and_decodes_as_it_is_told(directory):
    model = sj.load(directory(QWEN))
    own = sj.Sampling(**model.generation_defaults.sampling)
    assert own == sj.Sampling(0.7, 20, 0.8, repetition_penalty=1.05)
    assert not model.generation_defaults.not_taken
    plain = sj.load(directory({}))
    assert not plain.generation_defaults.sampling and not plain.generation_defaults.not_taken
    prompt = [[5, 6, 7]]
    greedy = sj.generate(model, prompt, max_new_tokens=8).tokens[0].tolist()
    assert greedy == sj.generate(plain, prompt, max_new_tokens=8).tokens[0].tolist()
    assert not sj.load("demo").generation_defaults.sampling


@pytest.mark.parametrize(
    ("argv", "default"),
    [
        ([], sj.Sampling(0.7, 20, 0.8, repetition_penalty=1.05)),
        (["--ignore-generation-config"], None),
    ],
)
def test_a_server_takes_it_for_requests_that_say_nothing(directory, capsys, argv, default):
    home = directory(QWEN)
    args = serve.parser().parse_args(["--target", home, *argv])
    with assembled(args, sj.load(home), None) as (server, _):
        admission = server.admission
        assert capsys.readouterr().err == (
            "" if argv else LINE.format(home).replace("run", "serve")
        )
        assert admission._sampling(CompletionBody(prompt="a")) == (default or sj.Sampling(1.0))
        body = CompletionBody(prompt="a", temperature=0.2, top_k=0, repetition_penalty=1)
        assert admission._sampling(body) == sj.Sampling(0.2, 0, 0.8 if default else 1.0)
        body = CompletionBody(prompt="a", temperature=0, top_p=0.5, repetition_penalty=1)
        assert admission._sampling(body) == sj.Sampling(0.0, 20 if default else 0, 0.5)


@pytest.mark.torch
def test_a_peer_is_not_penalized(directory):
    pytest.importorskip("torch")
    from infer.bench.peer_process import PeerJob, decode
    from infer.bench.peer_transformers import load, make_mode

    prompts = [[5, 6, 7], [8, 9]]
    job = PeerJob("", None, prompts, 12, 4, [], threads=2, on_cpu=True, dtype="float32")
    penalized = directory({"repetition_penalty": 5.0, "no_repeat_ngram_size": 1})
    got = decode(make_mode(load(penalized, job)), prompts, 12)["tokens"]
    plain = directory({})
    assert got == decode(make_mode(load(plain, job)), prompts, 12)["tokens"]
    ours = sj.generate(sj.load(plain), prompts, max_new_tokens=12)
    assert got == [ids.tolist() for ids in ours.tokens]


@pytest.mark.parametrize(
    ("name", "follows"),
    [
        *((name, True) for name in ("speculative", "specinfer", "lookup", "contrastive", "sdsat")),
        *((name, False) for name in ("beam", "mtjd", "mtad", "bild")),
    ],
)
def test_a_method_says_whether_it_takes_penalties(target, draft, name, follows):
    built, _ = sj.method(name).build(Context(target, draft), {})
    assert built.follows_paths == follows


def test_a_method_without_penalties_leaves_the_model_s_own_out(directory, capsys):
    home = directory(QWEN)
    sampling, said = completion(capsys, home, "--method", "beam")
    assert sampling == {name: OWN[name] for name in GREEDY}
    assert "; method beam leaves out repetition_penalty=1.05 (" in said
    argv = ["--target", home, "--prompt", "a", "--method", "beam", "--repetition-penalty", "1.2"]
    assert run.main(argv) == 2
    assert "repetition_penalty: method beam does not support it" in capsys.readouterr().err


MIN_P = QWEN | {"top_k": 0, "min_p": 0.1}


@pytest.mark.parametrize(
    ("settings", "argv", "taken", "left"),
    [
        (QWEN, [], {"temperature": 0.7, "top_p": 0.8}, "top_k=20, repetition_penalty=1.05"),
        (QWEN, ["width=20"], {"temperature": 0.7, "top_p": 0.8, "top_k": 20}, "repetition_penalty"),
        (QWEN, ["joint=warped"], {"temperature": 0.7, "top_p": 0.8, "top_k": 20}, "repetition_pen"),
        (MIN_P, [], {"temperature": 0.7, "top_p": 0.8}, "min_p=0.1, repetition_penalty=1.05 ("),
        (
            QWEN | {"min_p": 0.1},
            ["width=20"],
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1},
            "repetition_penalty=1.05 (",
        ),
    ],
)
def test_a_method_leaves_out_what_it_cannot_draw_with(
    directory, capsys, settings, argv, taken, left
):
    """The joint of a block has no cutoffs, and a top-k only of as many blocks as beams."""
    home = directory(settings)
    options = [part for option in argv for part in ("--set", option)]
    argv = ["--target", home, "--prompt", "a", "--method", "mtjd", *options]
    assert make_job(run.arguments(argv)).settings["sampling"] == GREEDY | taken
    assert f"; method mtjd leaves out {left}" in capsys.readouterr().err


def test_what_the_user_gives_is_never_left_out(directory, capsys):
    argv = ["--target", directory(QWEN), "--prompt", "a", "--method", "mtjd", "--top-k", "20"]
    assert run.main(argv) == 2
    assert "top_k=20 likeliest blocks, and width=8" in capsys.readouterr().err


def test_a_server_leaves_out_what_a_method_cannot_draw_with(directory, capsys):
    home = directory(QWEN)
    for given in ([], ["--method", "mtjd"]):
        args = serve.parser().parse_args(["--target", home, *given])
        with assembled(args, sj.load(home), None) as (server, _):

            def sampling(server=server, **fields):
                body = CompletionBody(prompt="def f", max_tokens=2, **fields)
                return server.admission.make_submission(body, print).sampling

            assert sampling(method="mtjd") == sj.Sampling(0.7, 0, 0.8)
            assert sampling(method="mtjd", temperature=0).temperature == 0
            with pytest.raises(sj.OptionError, match="top_k=20 likeliest blocks"):
                sampling(method="mtjd", top_k=20)
            own = 0 if given else 20
            assert sampling(method="mtjd", options={"width": 20}).top_k == own
    assert "; method mtjd leaves out top_k=20, repetition_penalty=1.05 (" in capsys.readouterr().err


def test_a_server_whose_model_names_no_temperature_draws(directory, capsys):
    """OpenAI's default is 1, at which mtjd refuses the model's top-k."""
    home = directory(QWEN | {"temperature": None})
    args = serve.parser().parse_args(["--target", home, "--method", "mtjd"])
    with assembled(args, sj.load(home), None) as (server, _):
        body = CompletionBody(prompt="a", max_tokens=2)
        assert server.admission.make_submission(body, print).sampling == sj.Sampling(1.0, 0, 0.8)


def test_a_request_for_such_a_method_has_no_penalty(directory):
    home = directory(QWEN)
    args = serve.parser().parse_args(["--target", home])
    with assembled(args, sj.load(home), None) as (server, _):

        def sampling(**fields):
            body = CompletionBody(prompt="def f", max_tokens=2, **fields)
            return server.admission.make_submission(body, print).sampling

        assert sampling().repetition_penalty == 1.05
        assert sampling(method="beam").repetition_penalty == 1.0
        with pytest.raises(sj.OptionError, match="repetition_penalty: method beam does not"):
            sampling(method="beam", repetition_penalty=1.2)
