"""Tokens and streamed texts of the packaged models' tokenizers are transformers'."""

import random

import pytest

from specjax.lm import read_tokenizer
from specjax.text.incremental_decoder import IncrementalDecoder
from support.real_models import installed_file

pytestmark = [pytest.mark.slow, pytest.mark.real]
COUNT = 500
ALPHABETS = (
    "abc def\n\t 123 ",
    "äöüßéçñøœ",
    "日本語中文한국어ไทย",
    "🙂👩‍👩‍👧🇩🇪✌🏽",
    "  \n\n\t\r\n",
    "'s'll!?.,;:()[]{}<>|\\",
    "\u200b\u0301\u00a0\u2028\u202e\ufeff",
    "ابتثДЖЗक्षि",
)
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<bos>",
    "<eos>",
    "<|endoftext|>",
    "[multimodal]",
    "<0x41>",
)


def hard_strings() -> list[str]:
    """Texts of mixed alphabets, with special tokens inside."""
    draw = random.Random(0)
    texts = ["", " ", "  leading", "trailing  ", "a\x00b", "x" * 300, "1" * 50]
    while len(texts) < COUNT:
        parts = []
        for _ in range(draw.randint(1, 40)):
            kind = draw.randrange(len(ALPHABETS) + 1)
            parts.append(
                draw.choice(SPECIAL) if kind == len(ALPHABETS) else draw.choice(ALPHABETS[kind])
            )
        texts.append("".join(parts))
    return texts


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_tokens_and_streamed_texts_are_transformers(name):
    pytest.importorskip("torch")  # transformers reads GGUF files with it
    from transformers import AutoTokenizer

    path = installed_file(name)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = read_tokenizer(path)
    assert ours.eos_id == theirs.eos_token_id
    for text in hard_strings():
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        decoder = IncrementalDecoder(ours)
        streamed = "".join(decoder.push([token]) for token in ids) + decoder.flush()
        assert streamed == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    if theirs.chat_template:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Grüße!"},
        ]
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.apply_chat(messages) == wanted
