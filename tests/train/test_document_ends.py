"""EOS and BOS are those of the tokenizer or the checkpoint, and ids may have holes."""

import dataclasses
import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from specjax._util.errors import InputError
from specjax.models import ModelConfig
from support.training import TINY_LM, logged, overrides
from train.data.document_ends import checkpoint_ends, tokenizer_ends
from train.data.encoding import Plain, TextEncoder
from train.data.reading import Document
from train.data.tokenizer import id_count
from train.lm import __main__ as lm

LETTERS = {letter: i for i, letter in enumerate("!abcdefghijklmnopqrstuvwxyz ")}


def letters(*special, hole=0):
    """A tokenizer of letters in which id 0 is "!", with these special tokens behind them."""
    vocab = LETTERS | {token: len(LETTERS) + hole + i for i, token in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def saved(tokenizer, home, **settings):
    (home / "tokenizer.json").write_text(tokenizer.to_str())
    if settings:
        (home / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(home / "tokenizer.json")


def test_eos_comes_from_the_setting_then_the_files_then_a_known_name(tmp_path):
    tokenizer = letters("<unk>", "<stop>", "</s>")
    stop, known = tokenizer.token_to_id("<stop>"), tokenizer.token_to_id("</s>")
    path = saved(tokenizer, tmp_path)
    assert tokenizer_ends(tokenizer, path, "") == (known, None)
    saved(tokenizer, tmp_path, eos_token={"content": "<stop>"})
    assert tokenizer_ends(tokenizer, path, "") == (stop, None)
    assert tokenizer_ends(tokenizer, path, "a") == (LETTERS["a"], None)


def test_bos_is_what_the_template_writes(tmp_path):
    tokenizer = letters("<s>", "</s>")
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    ends = tokenizer_ends(tokenizer, saved(tokenizer, tmp_path), "")
    assert ends == (tokenizer.token_to_id("</s>"), begin)
    ((_, (ids,)),) = TextEncoder(tokenizer.to_str(), Plain(*ends))([Document("d", "ab")])
    assert ids.tolist() == [begin, LETTERS["a"], LETTERS["b"], ends.eos_id]


def test_a_checkpoints_bos_counts_where_the_template_begins_with_it():
    tokenizer = letters("<s>", "<x>", "</s>")
    bos, x, eos = (tokenizer.token_to_id(token) for token in ("<s>", "<x>", "</s>"))
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8}
    cfg = ModelConfig.llama(vocab_size=40, **sizes)
    cfg = dataclasses.replace(cfg, bos_id=bos, eos_ids=(eos,))
    for template, expected in [("<s> <x> $A", bos), ("<x> $A", None), ("$A", None)]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", bos), ("<x>", x)]
        )
        assert checkpoint_ends("name", cfg, tokenizer) == (eos, expected)


@pytest.mark.parametrize(("template", "begins"), [("$A </s>", False), ("<s> $A </s>", True)])
def test_a_template_may_write_the_end_too(template, begins):
    tokenizer = letters("<s>", "</s>")
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    bos = tokenizer.token_to_id("<s>") if begins else None
    assert tokenizer_ends(tokenizer, "", "</s>") == (tokenizer.token_to_id("</s>"), bos)


@pytest.mark.parametrize(
    ("special", "settings", "eos", "says"),
    [
        (["<x>"], {}, "", "does not say which token ends a document: set tokenizer.eos"),
        (["<eos>", "</s>"], {}, "", "set tokenizer.eos"),
        (["</s>"], {}, "<none>", "tokenizer.eos='<none>' is no token"),
        (["</s>"], {"eos_token": "<gone>"}, "", "eos_token '<gone>' is no token"),
    ],
)
def test_where_nothing_says_which_token_ends_a_document_it_asks(
    tmp_path, special, settings, eos, says
):
    tokenizer = letters(*special)
    with pytest.raises(InputError, match=says):
        tokenizer_ends(tokenizer, saved(tokenizer, tmp_path, **settings), eos)


def test_a_run_with_another_tokenizer_ends_documents_in_its_eos(tmp_path, capsys):
    """Ids have a hole before EOS, so that there are fewer tokens than rows."""
    tokenizer = letters("</s>", hole=40)
    eos = tokenizer.token_to_id("</s>")
    assert tokenizer.get_vocab_size() < id_count(tokenizer) == eos + 1
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{'abc ' * 60}{'xyz'[number % 3]}" * 2)

    words = [
        "data.corpora=[]",
        f"data.files={json.dumps([str(tmp_path / 'text')])}",
        f"tokenizer.path={saved(tokenizer, tmp_path)}",
        f"run.dir={tmp_path / 'run'}",
        "optim.total_steps=3",
    ]
    assert lm.main([TINY_LM, *overrides(*words), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["vocab_size"] == eos + 1
    assert all(row["loss"] < 10 for row in logged(tmp_path / "run") if "loss" in row)
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["eos_token_id"] == eos
