"""The embedded model that drafts for itself: how it is kept, and what it decodes."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax as sj
from infer.rescoring import mismatches
from specjax.demo import tuned
from specjax.demo.heldout import held_out_functions

NEAR_TIE = 1e-4


def test_differences_come_back(tmp_path):
    """Quantized differences unpack to within half a level, also for new rows and for vectors."""
    rng = np.random.Generator(np.random.Philox(0))
    old = {"table": rng.normal(size=(6, 8)), "norm": rng.normal(size=8)}
    new = {"table": np.vstack([old["table"], rng.normal(size=(2, 8))]), "norm": old["norm"] + 0.5}
    new["table"][:6] += 0.1 * rng.normal(size=(6, 8))
    for name, tensors in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        stored = {k: v.astype(np.float16) for k, v in tensors.items()}
        save_file(stored, tmp_path / name / tuned.WEIGHTS)
    (tmp_path / "new" / "config.json").write_text("{}")
    tuned.pack(tmp_path / "new", tmp_path / "delta", tmp_path / "old")
    got = tuned.unpack(tmp_path / "delta", tmp_path / "old")
    change = np.pad(old["table"], [(0, 2), (0, 0)]) - new["table"]
    level = np.abs(change).max(1, keepdims=True) / tuned.MAX_CODE
    assert (np.abs(got["table"] - new["table"]) <= level / 2 + 4e-3).all()
    np.testing.assert_allclose(got["norm"], new["norm"], atol=4e-3)


def test_the_directory_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = tuned.directory()
    assert {f.name for f in made.iterdir()} == {"config.json", "tokenizer.json", tuned.WEIGHTS}
    before = (made / tuned.WEIGHTS).stat().st_mtime_ns
    assert tuned.directory() == made
    assert (made / tuned.WEIGHTS).stat().st_mtime_ns == before
    assert [f.name for f in made.parent.iterdir()] == [made.name]
    for name, tensor in tuned.unpack().items():
        np.testing.assert_array_equal(load_file(made / tuned.WEIGHTS)[name], tensor)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("method", ["sdsat", "sdsat-single"])
def test_the_tuned_demo_drafts_for_itself(method):
    """Greedy output equals the tuned model's plain decoding, and drafts are accepted."""
    model = sj.load("demo-sdsat")
    functions, _ = held_out_functions(16)
    prompts = [model.tokenizer.encode(function.prompt) for function in functions]
    plain = sj.generate(model, prompts, max_new_tokens=32, batch_size=8)
    for k in (1, 13):
        out = sj.generate(
            model, prompts, method=method, options={"k": k}, max_new_tokens=32, batch_size=8
        )
        differ = mismatches(model, prompts, plain.tokens, out.tokens)
        assert all(row["gap"] < NEAR_TIE for row in differ), differ
        assert out.stats["accepted"].sum() > 0.2 * out.stats["rounds"].sum()
