"""Infilling: sentinels of every style, their prompts, the command line, exact match."""

import json
from pathlib import Path

import jax
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import specjax as sj
from infer.bench.text_quality import exact_match
from infer.prompts import PromptEncoder, read_prompts
from infer.run.commands import main
from specjax._util.errors import PairError
from specjax.models import ModelConfig, init_params, save_pretrained
from specjax.runtime.infill import (
    STYLES,
    Sentinels,
    ending_middles,
    exact_matches,
    find_sentinels,
    infill_prompt,
)
from specjax.text.tokenizer import Tokenizer

LETTERS = {chr(ord("a") + i): i for i in range(26)} | {"Ċ": 26}
EOS = 27


def backend(style, spaces=False):
    """A tokenizer of letters and line breaks, with one model's sentinels.

    ``spaces``: it puts a space before a text, as SentencePiece models do.
    """
    vocab = LETTERS | {"<eos>": EOS} | ({"▁": EOS + 1, "\n": EOS + 2} if spaces else {})
    out = tokenizers.Tokenizer(models.BPE(vocab, []))
    if spaces:
        out.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        out.decoder = decoders.Metaspace()
    else:
        out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        out.decoder = decoders.ByteLevel()
    out.add_special_tokens(["<eos>", *(name for name in style)])
    return out


def lm(style, spaces=False, bos=None):
    own = backend(style, spaces)
    cfg = ModelConfig.llama(
        vocab_size=own.get_vocab_size(),
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        intermediate_size=24,
        max_position=64,
        eos_ids=(EOS,),
        bos_id=bos,
    )
    return sj.from_params(cfg, init_params(cfg, jax.random.key(0)), Tokenizer(own)), own


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_found_and_frames_the_parts(style):
    target, own = lm(style)
    ids = [own.token_to_id(name) for name in style]
    assert find_sentinels(own) == find_sentinels(target.tokenizer) == Sentinels(*ids)
    pre, suf, mid, end = ids
    assert infill_prompt(target, "ab", "c") == [pre, 0, 1, suf, 2, mid]
    assert infill_prompt(target, "", "") == [pre, suf, mid]
    assert infill_prompt(target, "ab", "c", "spm") == [pre, suf, 2, mid, 0, 1]
    ends = ending_middles(target).eos_ids
    assert set(ends) == {EOS, end} and len(ends) == len(set(ends))


def test_a_suffix_has_no_space_of_the_tokenizers_own():
    target, own = lm(STYLES[0], spaces=True)
    pre, suf, mid, _ = (own.token_to_id(name) for name in STYLES[0])
    space = own.token_to_id("▁")
    assert own.encode("c").ids == [space, 2]
    assert infill_prompt(target, "a", "c") == [pre, space, 0, suf, 2, mid]


def test_models_without_sentinels_are_refused(target):
    with pytest.raises(PairError, match=r"no fill-in-the-middle tokens.*CodeLlama"):
        infill_prompt(target, "a", "b")
    missing, _ = lm(STYLES[0][:3])
    with pytest.raises(PairError, match="no fill-in-the-middle tokens"):
        ending_middles(missing)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """(a model with sentinels, one without)."""
    directories = []
    for style in (STYLES[1], ()):
        target, own = lm(style)
        directories.append(tmp_path_factory.mktemp("model"))
        params = init_params(target.config, jax.random.key(0))
        save_pretrained(directories[-1], target.config, params, own.to_str())
    return directories


def test_the_command_line_decodes_the_middle_and_ends_with_it(directories, capsys):
    settings = ["--json", "--max-new-tokens", "12", "--method", "autoregressive"]
    settings += ["--target", str(directories[0])]
    assert main([*settings, "--prefix", "ab", "--suffix", "c"]) == 0
    row = json.loads(capsys.readouterr().out)
    target = ending_middles(sj.load(directories[0]))
    prompt = infill_prompt(target, "ab", "c")
    want = sj.generate(target, [prompt], max_new_tokens=12)
    assert row["token_ids"] == want.tokens[0].tolist()
    assert (row["prompt"], row["suffix"], row["prompt_tokens"]) == ("ab", "c", len(prompt))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--prefix", "a"), "--prefix and --suffix go together"),
        (("--prefix", "a", "--suffix", "b", "--prompt", "c"), "exclude each other"),
        (("--prefix", "a", "--suffix", "b", "--chat"), "--chat and --prefix exclude"),
        (("--prefix", "a", "--suffix", "b"), "no fill-in-the-middle tokens"),
    ],
)
def test_what_does_not_go_together_is_one_line(directories, capsys, argv, says):
    try:
        code = main(["--target", str(directories[1]), "--method", "autoregressive", *argv])
    except SystemExit as left:
        code = left.code
    out = capsys.readouterr()
    assert code == 2 and out.out == "" and len(out.err.strip().splitlines()) == 1
    assert says in out.err


def test_files_mix_prompts_and_infilling(directories, tmp_path):
    lines = [{"prompt": "ab"}, {"prefix": "a", "suffix": "b", "middle": "x"}, {"prefix": "a"}]
    file = Path(tmp_path / "in.jsonl")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    target = sj.load(directories[0])
    good, bad = read_prompts(str(file), PromptEncoder(target))
    assert good[0].tokens == [0, 1] and good[1].tokens == infill_prompt(target, "a", "b")
    assert [line.number for line in bad] == [3] and "suffix" in bad[0].reason


def test_exact_match_counts_the_middles_alone():
    tasks = [
        {"prefix": "a", "suffix": "b", "middle": "x = 1"},
        {"prompt": "c"},
        {"prefix": "a", "suffix": "", "middle": "y"},
    ]
    assert list(map(exact_match, tasks, [" x = 1\n", "z", "not y"])) == [1, None, 0]
    assert exact_matches(["a", "a b"], ["a", "ab"]) == 0.5


def test_exact_matches_of_nothing_are_an_error_of_one_line():
    with pytest.raises(sj.OptionError, match="at least one text"):
        exact_matches([], [])
    with pytest.raises(sj.OptionError, match="2 texts and 1 middles"):
        exact_matches(["a", "b"], ["a"])
