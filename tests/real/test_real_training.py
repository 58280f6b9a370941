"""SmolLM2 as a directory: gated adapters and a draft head, trained for ten steps, are lossless."""

import pytest

import specjax as sj
from infer import convert
from support.checkpoints import same
from support.training import ROOT, overrides
from train.head.__main__ import main as train_head
from train.sdsat.__main__ import main as train_sdsat

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.usefixtures("optimized")]
SHORT = (
    *("data.corpora=[]", 'data.files=["LICENSE"]', "data.seq_len=64"),
    *("optim.total_steps=10", "optim.batch_size=1", "optim.accumulate=1", "optim.warmup_steps=1"),
    *("run.log_every=5", "run.eval_every=10", "run.eval_batches=1", "run.checkpoint_every=10"),
)


@pytest.fixture(scope="module")
def directory(smollm2, tmp_path_factory):
    out = tmp_path_factory.mktemp("smollm2") / "directory"
    assert convert.main([smollm2.source, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def plain(smollm2, prompts):
    return sj.generate(smollm2, prompts[:4], max_new_tokens=8).tokens


@pytest.mark.sweep  # minutes, most of them compilation
def test_gated_adapters(directory, tmp_path, monkeypatch, prompts, plain):
    monkeypatch.chdir(ROOT)
    settings = (f"model.init_from={directory}", f"run.dir={tmp_path}", "sdsat.decode_prompts=0")
    gated = ("model.lora_rank=4", "sdsat.window=3")
    config = str(ROOT / "configs" / "sdsat_demo_gated.toml")
    assert train_sdsat([config, *overrides(*settings, *gated, *SHORT)]) == 0
    tuned = sj.load(tmp_path / "export", dtype="float32")
    made = sj.generate(tuned, prompts[:4], method="sdsat", max_new_tokens=8)
    assert same(made.tokens, plain)


def test_a_draft_head(directory, smollm2, tmp_path, monkeypatch, prompts, plain):
    monkeypatch.chdir(ROOT)
    sizes = ("head.layers=[2,15,27]", "head.draft_vocab=512", "head.intermediate_size=64")
    steps = ("head.num_kv_heads=1", "head.steps=2", "head.decode_prompts=0")
    settings = (f"model.init_from={directory}", f"run.dir={tmp_path}", "run.export_dtype=float32")
    config = str(ROOT / "configs" / "head_demo.toml")
    assert train_head([config, *overrides(*settings, *sizes, *steps, *SHORT)]) == 0
    head = sj.load(tmp_path / "export", dtype="float32")
    made = sj.generate(smollm2, prompts[:4], method="speculative", draft=head, max_new_tokens=8)
    assert same(made.tokens, plain)
