"""train.demo.signatures: the functions that a target continues, and what it makes of them."""

import json

import specjax as sj
from support.training import ROOT
from train.answers.__main__ import main as answers
from train.data.corpus import Document, is_held_out
from train.demo import signatures

BODY = "def area(width, height):\n    if width < 0:\n        width = 0\n    return width * height\n"


def documents():
    return [Document(f"d/{i}.py", f"# file {i}\n\n{BODY}") for i in range(60)]


def test_signatures_come_from_training_documents_alone():
    found = signatures.training_signatures([*documents(), Document("x", "def broken(")], seed=0)
    numbers = {int(signature.split()[2]) for signature in found}
    assert numbers == {i for i in range(60) if not is_held_out(f"d/{i}.py")}
    assert all(signature.endswith("height):") for signature in found)


def test_documents_are_the_signature_and_the_models_own_text(tiny_pair_dirs, tmp_path):
    target = sj.load(tiny_pair_dirs[0])
    prompts = [f"# {i}\n\ndef f(x):" for i in range(3)]
    out = tmp_path / "new" / "signatures.jsonl"
    assert signatures.write(out, prompts) == 3
    assert [path.name for path in out.parent.iterdir()] == ["signatures.jsonl"]
    written = tmp_path / "written.jsonl"
    template = str(ROOT / "configs" / "plain.jinja")
    words = ["--target", str(tiny_pair_dirs[0]), "--chat-template", template]
    assert answers([str(out), str(written), *words, "--max-new-tokens", "8"]) == 0
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    ids = [target.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    expected = sj.generate(target, ids, max_new_tokens=8)
    for line, prompt, made in zip(lines, ids, expected.tokens, strict=True):
        assert line["input_ids"] == [*prompt, *made.tolist()]
