"""train.demo.continuations: what the target writes after the heads of functions it trained on."""

import json

import specjax as sj
from train.data.corpus import Document, is_held_out
from train.demo import continuations

BODY = "def area(width, height):\n    if width < 0:\n        width = 0\n    return width * height\n"


def documents():
    return [Document(f"d/{i}.py", f"# file {i}\n\n{BODY}") for i in range(60)]


def test_heads_come_from_training_documents_alone():
    heads = continuations.training_heads([*documents(), Document("x", "def broken(")], seed=0)
    numbers = {int(head.split()[2]) for head in heads}
    assert numbers == {i for i in range(60) if not is_held_out(f"d/{i}.py")}
    assert all(head.endswith("height):") for head in heads)


def test_documents_are_the_head_and_the_models_own_text(tiny_pair_dirs, tmp_path):
    target = sj.load(tiny_pair_dirs[0])
    heads = [f"# {i}\n\ndef f(x):" for i in range(3)]
    out = tmp_path / "new" / "out.jsonl"
    assert continuations.write(out, continuations.continued(target, heads, 8, seed=0)) == 3
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    expected = sj.generate(target, heads, max_new_tokens=8)
    assert texts == [head + text for head, text in zip(heads, expected.text, strict=True)]
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]
