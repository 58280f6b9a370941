"""The text of a completion: its spaces, its bytes, and where stop strings end it."""

import itertools

import numpy as np
import pytest
import tokenizers

import specjax as sj
from infer.bench.sandbox import humaneval_program
from specjax.text.incremental_decoder import IncrementalDecoder
from specjax.text.tokenizer import Tokenizer
from support.scripted import BYTES, ids_of, strip_tokenizer, writer
from support.training import code
from train.data.tokenizer import train_tokenizer

LINE = "<0x0A>"
PIECES = ("▁▁▁▁", "return", "▁x", "▁+", "▁1", "def", "▁f", "(x):", "a", "b", "▁<", "/s>", "▁the")


@pytest.fixture(scope="module")
def tokenizer():
    return strip_tokenizer(*PIECES)


def completion(tokenizer, prompt, new, **options):
    """The generation of a model that writes ``new`` after ``prompt``, and then EOS."""
    (eos,) = ids_of(tokenizer, "</s>")
    ids = [*ids_of(tokenizer, *prompt), *ids_of(tokenizer, *new)]
    model = writer(tokenizer, ids, eos)
    settings = {"max_new_tokens": 20, "options": {"gamma": 4}} | options
    return sj.generate(model, [ids[: len(prompt)]], method="speculative", draft=model, **settings)


def test_a_continuation_keeps_its_first_space(tokenizer):
    """A body of four spaces would have three, and a program that is right would not run."""
    prompt = ("def", "▁f", "(x):", LINE)
    new = ("▁▁▁▁", "return", "▁x", "▁+", "▁1")
    out = completion(tokenizer, prompt, new)
    assert out.text == ["    return x + 1"]
    task = {"prompt": tokenizer.decode(ids_of(tokenizer, *prompt))}
    space = {}
    exec(humaneval_program(task, out.text[0]), space)
    assert space["f"](4) == 5


def test_pieces_of_a_stream_join_to_the_text(tokenizer):
    (eos,) = ids_of(tokenizer, "</s>")
    ids = ids_of(tokenizer, "def", "▁f", LINE, "▁▁▁▁", "return", "▁x")
    model = writer(tokenizer, ids, eos)
    pieces = list(sj.stream(model, ids[:3], rounds_per_piece=1, max_new_tokens=9))
    assert (
        "".join(piece.text for piece in pieces) == "    return x" == pieces[-1].generation.text[0]
    )


# --- stop strings ----------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 4])
def test_a_stop_string_that_is_a_byte_token_ends_a_completion(tokenizer, gamma):
    """Characters of byte tokens count at once, also in a run of bytes that goes on."""
    run = [BYTES[byte] for byte in "é\n日".encode()]
    out = completion(tokenizer, ("a",), ("b", *run), stop="\n", options={"gamma": gamma})
    assert out.text == ["bé"] and out.finish_reasons == ["stop"]
    assert len(out.tokens[0]) == 4


@pytest.mark.parametrize("budget", [5, 6, 20])
def test_a_stop_in_the_round_of_another_end_is_the_reason(tokenizer, budget):
    """The budget or EOS ends the row in the same round; piece and generation agree."""
    (eos,) = ids_of(tokenizer, "</s>")
    ids = ids_of(tokenizer, "a", "b", "▁x", "▁+", "▁1", "return", "▁the")
    model = writer(tokenizer, ids, eos)
    options = {"stop": "+", "max_new_tokens": budget, "options": {"gamma": 6}}
    pieces = list(sj.stream(model, ids[:1], method="speculative", draft=model, **options))
    last = [piece for piece in pieces if piece.finish_reason]
    assert [piece.finish_reason for piece in last] == ["stop"]
    assert last[0].row.finish_reasons == ["stop"] and last[0].row.text == ["b x "]
    assert pieces[-1].generation.stats["emitted"].tolist() == [3]


def test_a_stop_string_that_is_a_special_token_is_matched_by_its_id(tokenizer):
    marked = strip_tokenizer(*PIECES, special=("<s>", "</s>", "<|end|>"))
    out = completion(marked, ("a",), ("b", "▁x", "<|end|>", "▁the"), stop=["<|end|>", "zz"])
    assert out.text == ["b x"] and out.finish_reasons == ["stop"]
    assert out.tokens[0].tolist() == ids_of(marked, "b", "▁x", "<|end|>")
    # The same letters as text of ordinary tokens end it as well.
    out = completion(tokenizer, ("a",), ("b", "▁<", "/s>", "▁the"), stop="</s>")
    assert out.text == ["b "] and out.finish_reasons == ["stop"]


@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        ("<|end|>\n", "ab", 4),
        ("b<|end|>", "a", 3),
        ("b<|end|>\n", "a", 4),
        ("nd|>\na", None, None),  # it names no special token
        ("b<|end|>\na", "a", 5),
        ("<|end|><|end|>", "ab\naé", 9),
        ("é<|end|>", "ab\na", 8),
        ("end", None, None),
        ("a\n", None, None),
    ],
)
@pytest.mark.parametrize("beside", [(), ("zz",), ("zz<|end|>",)])
def test_a_stop_string_may_have_a_special_token_beside_other_text(stop, text, kept, beside):
    """Special tokens have no text, so such a stop is found where they are written out."""
    marked = strip_tokenizer(*PIECES, special=("<s>", "</s>", "<|end|>"))
    pieces = ["a", "b", "<|end|>", LINE, "a", *(BYTES[byte] for byte in "é".encode())]
    ids = ids_of(marked, *pieces, "<|end|>", "<|end|>")
    whole = "ab\naé"
    for size in (1, 2, 3, 9):
        detokenizer = sj.runtime.detokenizer.Detokenizer(marked, (stop, *beside))
        shown = ""
        for first in range(0, len(ids), size):
            last = first + size >= len(ids)
            shown += detokenizer.add(np.array(ids[first : first + size]), last)[0]
            if detokenizer.stopped:
                break
        assert detokenizer.stopped == (text is not None)
        assert shown == detokenizer.text == (whole if text is None else text)
        assert detokenizer.count == (len(ids) if text is None else kept)


def test_a_special_token_inside_a_character_leaves_it_whole():
    """Whatever stop strings there are, the text before them is the same."""
    marked = strip_tokenizer(*PIECES, special=("<s>", "</s>", "<|end|>"))
    first, last = (BYTES[byte] for byte in "é".encode())
    ids = np.array(ids_of(marked, "a", first, "<|end|>", last, "b"))
    for stop in ((), ("zz",), ("zz<|end|>",)):
        detokenizer = sj.runtime.detokenizer.Detokenizer(marked, stop)
        assert detokenizer.add(ids, True)[0] == "aéb"


def test_such_a_stop_ends_a_completion():
    marked = strip_tokenizer(*PIECES, special=("<s>", "</s>", "<|end|>"))
    out = completion(marked, ("a",), ("b", "<|end|>", LINE, "▁the"), stop="b<|end|>\n")
    assert out.text == [""] and out.finish_reasons == ["stop"] and len(out.tokens[0]) == 3


# --- random ids ------------------------------------------------------------------------------


def byte_level(tmp_path):
    return Tokenizer(train_tokenizer(code(), 300, tmp_path / "tokenizer.json"))


def metaspace(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"])
    made.train_from_iterator([document.text for document in code()], trainer)
    return Tokenizer(made)


def byte_fallback(tmp_path):
    """Its runs of byte tokens are characters, or parts of them, or nothing of the kind."""
    return strip_tokenizer(*PIECES)


def whole_text(tokenizer, ids):
    """The text by another way: the library's for words, Python's for each run of byte tokens."""
    known = [i for i in ids if tokenizer.has_text(i)]
    text = ""
    place = 0
    for is_byte, group in itertools.groupby(known, lambda i: tokenizer.byte_of(i) is not None):
        run = list(group)
        if is_byte:
            text += bytes(tokenizer.byte_of(i) for i in run).decode(errors="replace")
        else:
            before = known[:place]
            start = tokenizer.decode_whole(before)
            text += tokenizer.decode_whole(before + run)[len(start) :]
        place += len(run)
    return text


@pytest.mark.parametrize("make", [byte_level, metaspace, byte_fallback])
def test_streamed_text_is_the_whole_and_stops_cut_where_a_search_says(make, tmp_path):
    tokenizer = make(tmp_path)
    rng = np.random.default_rng(0)
    characters = [[tokenizer.token_to_id(BYTES[b]) for b in c.encode()] for c in "é日🙂\n "]
    stopped = 0
    for _ in range(200):
        ids = rng.integers(0, tokenizer.vocab_size + 1, rng.integers(1, 40)).tolist()
        if make is byte_fallback:
            for place in rng.integers(0, len(ids), 6):
                ids[place:place] = characters[rng.integers(len(characters))]
        cut = int(rng.integers(0, len(ids)))
        prompt, new = ids[:cut], ids[cut:]

        before, text = whole_text(tokenizer, prompt), whole_text(tokenizer, ids)
        if not text.startswith(before):
            before = before[:-1]  # the last character was incomplete
        want = text[len(before) :]
        decoder = IncrementalDecoder(tokenizer, prompt)
        pieces = [decoder.push([i]) for i in new]
        assert "".join(pieces) + decoder.flush() == want
        assert tokenizer.decode_after(prompt, new) == want

        stops = [want[i : i + 2] for i in rng.integers(0, len(want) + 1, 2) if want[i : i + 2]]
        detokenizer = sj.runtime.detokenizer.Detokenizer(tokenizer, stops, prompt)
        shown = ""
        for edges in itertools.pairwise([*range(0, len(new), 3), len(new)]):
            last = edges[1] == len(new)
            shown += detokenizer.add(np.array(new[slice(*edges)]), last)[0]
            if detokenizer.stopped:
                break
        ends = [want.find(stop) for stop in stops]
        assert shown == detokenizer.text == want[: min(ends, default=None)]
        stopped += bool(stops)
    assert stopped > 100


# --- names of tokens -------------------------------------------------------------------------


def test_tokens_are_named_by_their_bytes(tokenizer):
    names = [tokenizer.token_name(i) for i in ids_of(tokenizer, "▁the", LINE, BYTES[0xE6], "</s>")]
    assert names == [" the", "\n", r"bytes:\xe6", "</s>"]
    assert tokenizer.token_name(tokenizer.vocab_size + 3).startswith("token_id:")
    assert [tokenizer.bytes_of(i) for i in ids_of(tokenizer, "▁the", BYTES[0xE6], "</s>")] == [
        b" the",
        b"\xe6",
        b"",
    ]
