"""A model that a run reads beside its checkpoint must be the same when the run is resumed."""

import json

import jax
import pytest

from specjax.models import init_params, load_pretrained, save_pretrained
from support.training import ROOT, TINY_LM, TINY_SDSAT, overrides, save_checkpoint, small_tokenizer
from train.head.__main__ import main as head
from train.lm.__main__ import main as lm
from train.sdsat.__main__ import main as sdsat

slow = pytest.mark.slow
HEAD = str(ROOT / "configs" / "head_demo.toml")
SMALL = (
    *("data.corpora=[]", "data.seq_len=32", "optim.batch_size=2", "optim.accumulate=1"),
    *("optim.warmup_steps=0", "run.eval_batches=0", "run.checkpoint_every=1"),
)
LOW_RANK = ("sdsat.decode_prompts=0", "sdsat.fim_rate=0.0", "model.lora_rank=2")
# Program, config, the key that names the model, other settings.
CASES = {
    "head": (
        head,
        HEAD,
        "model.init_from",
        ("head.layers=[0]", "head.draft_vocab=0", "head.decode_tokens=8"),
    ),
    "lora": (sdsat, TINY_SDSAT, "model.init_from", ("model.train=lora", *LOW_RANK)),
    "gated": (sdsat, TINY_SDSAT, "model.init_from", ("model.train=gated-lora", *LOW_RANK)),
    "teacher": (lm, TINY_LM, "distill.teacher", ()),
    "start": (lm, TINY_LM, "model.init_from", ()),
}


@pytest.mark.parametrize(
    "name", ["head", "gated", "teacher", *(pytest.param(x, marks=slow) for x in ("lora", "start"))]
)
def test_a_replaced_model_is_refused_on_resume(tmp_path, capsys, monkeypatch, name):
    program, config, key, more = CASES[name]
    home = tmp_path / "base"
    home.mkdir()
    base = save_checkpoint(home, small_tokenizer(home))
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{i * i} is a number, " * 20}) + "\n" for i in range(40))
    )
    files = f"data.files={json.dumps([str(tmp_path / 'text.jsonl')])}"
    own = (f"tokenizer.path={base}/tokenizer.json",) if program is lm else ()
    sets = (f"{key}={base}", f"run.dir={tmp_path / 'run'}", files, *own, *SMALL, *more)

    def run(steps, *argv):
        return program([config, *overrides(*sets, f"optim.total_steps={steps}"), *argv])

    assert run(1) == 0
    cfg, _ = load_pretrained(base)
    other = init_params(cfg, jax.random.key(9))
    save_pretrained(base, cfg, other, (base / "tokenizer.json").read_text())
    capsys.readouterr()
    assert run(2, "--resume") == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "--resume" in x]
    assert f"{key}={str(base)!r} is not the model that the run began with" in line
