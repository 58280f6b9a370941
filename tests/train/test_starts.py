"""Which checkpoints the programs start from: ``model.init_from``."""

import json

import pytest

from support.training import TINY_LM, TINY_SDSAT, overrides
from train.lm.__main__ import main as train_lm
from train.sdsat.__main__ import main as train_sdsat

SHORT = ("data.corpora=[]", 'data.files=["specjax"]', "data.seq_len=64")
DEMO_TOKENIZER = "tokenizer.path=specjax/demo/tokenizer.json"


@pytest.mark.parametrize("program", [train_lm, train_sdsat], ids=["lm", "sdsat"])
def test_a_head_is_no_model_to_start_from(program, tmp_path, capsys):
    config = TINY_LM if program is train_lm else TINY_SDSAT
    settings = (*SHORT, "model.init_from=demo-head", f"run.dir={tmp_path / 'run'}")
    if program is train_lm:
        settings = (*settings, DEMO_TOKENIZER)
    assert program([config, *overrides(*settings), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "model.init_from='demo-head' is a head: name its target" in error


def test_a_draft_starts_from_a_published_one_by_its_name(tmp_path, capsys):
    settings = (*SHORT, "model.init_from=demo-draft", DEMO_TOKENIZER)
    argv = [TINY_LM, *overrides(*settings, f"run.dir={tmp_path / 'run'}"), "--dry-run", "--json"]
    assert train_lm(argv) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 4096
