"""Fill in the middle: how documents are rearranged, tokenized and cached."""

import dataclasses
import itertools

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from specjax._util.errors import InputError
from specjax.models import ModelConfig
from specjax.runtime.infill import Sentinels, find_sentinels
from support.training import small_tokenizer
from train.config import LMConfig, Model
from train.data.corpus import Document, is_held_out
from train.data.encoding import Plain
from train.data.fim import CodeLayout
from train.data.in_memory import prepare
from train.data.tokenizer import EOS_ID
from train.lm import prepare as lm


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tok"))


def test_rearranged_documents_put_their_parts_in_codellamas_order(tokenizer):
    marks = find_sentinels(tokenizer)
    assert marks == Sentinels(1, 2, 3, 4)
    layout = CodeLayout(EOS_ID, None, marks, fim_rate=0.5, seed=1)
    kinds = {"plain": 0, "psm": 0, "spm": 0}
    for i in range(400):
        document = Document(f"d/{i}.py", f"def f{i}(x):\n    return {i}\n")
        pieces = layout.parts(document)
        if pieces == [document.text, EOS_ID]:
            kinds["plain"] += 1
        elif pieces[1] == marks.suffix:
            _, _, suffix, middle, both, end = pieces
            assert (middle, end, both + suffix) == (marks.middle, marks.end, document.text)
            kinds["spm"] += 1
        else:
            first, prefix, second, suffix, third, middle, end = pieces
            assert (first, second, third, end) == (1, 2, 3, 4)
            assert prefix + middle + suffix == document.text
            kinds["psm"] += 1
        if is_held_out(document.name):
            assert pieces == [document.text, EOS_ID]
    assert 180 < kinds["plain"] < 250 and kinds["psm"] > 70 and kinds["spm"] > 70


@pytest.mark.parametrize(("rate", "same"), [(0.0, True), (0.5, False)])
def test_the_seed_is_part_of_a_layout_that_rearranges(rate, same):
    first, second = (CodeLayout(EOS_ID, None, Sentinels(1, 2, 3, 4), rate, seed) for seed in (0, 1))
    assert (first.fingerprint == second.fingerprint) is same
    assert (first.fingerprint == CodeLayout(EOS_ID).fingerprint) is same


def test_rearranged_documents_are_tokenized_and_cached_separately(tokenizer, tmp_path):
    documents = [Document(f"d/{i}.py", f"x{i} = {i}\n" * 9) for i in range(40)]
    plain = prepare(documents, tokenizer, tmp_path)
    assert (prepare(documents, tokenizer, tmp_path, Plain()).train == plain.train).all()
    layout = CodeLayout(EOS_ID, None, find_sentinels(tokenizer), 1.0)
    fim = prepare(documents, tokenizer, tmp_path, layout)
    assert (fim.valid == plain.valid).all() and (fim.train == 3).sum() == len(fim.train_offsets) - 1
    ends = fim.train[fim.train_offsets[1:] - 1]
    assert (ends == 4).all() and not (fim.train == EOS_ID).any()
    assert (prepare(documents, tokenizer, tmp_path, layout).train == fim.train).all()


def test_a_tokenizer_that_adds_a_space_does_so_at_the_start_only(tmp_path):
    """As with CodeLlama's tokenizer: a suffix must be encoded as the middle of a text."""
    pieces = ["<s>", "\n", "▁", *"abc"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    spaced = Tokenizer(models.BPE(vocab, []))
    spaced.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    spaced.decoder = decoders.Replace("▁", " ")
    layout = CodeLayout(0, 0, Sentinels(10, 11, 12, 13), 1.0)
    documents = [Document(f"d/{i}.py", "abcabcabc") for i in range(30)]
    data = prepare(documents, spaced, None, layout)
    spaces = 0
    for begin, end in itertools.pairwise(data.train_offsets):
        spaces += (data.train[begin:end] == vocab["▁"]).sum()
        assert data.train[begin] == 0, "BOS"
    assert spaces <= len(data.train_offsets) - 1
    assert not (data.train == vocab["\n"]).any()


# ((BOS, EOS) of config.json, the template's first id, (ids before, ids after) a document)
FAMILIES = {
    "llama": ((1, 2), 1, ([1], [2])),
    "opt": ((2, 2), 2, ([2], [2])),
    "gpt2": ((399, 399), None, ([], [399])),
    "qwen, whose template leaves its BOS out": ((5, 7), None, ([], [7])),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_between_the_bos_and_eos_of_the_checkpoint(tokenizer, tmp_path, family):
    (bos, eos), first, (begin, end) = FAMILIES[family]
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    if first is not None:
        name = tokenizer.id_to_token(first)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, first)]
        )
    model = ModelConfig.llama(
        vocab_size=400, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24
    )
    model = dataclasses.replace(model, bos_id=bos, eos_ids=(eos,))
    cfg = LMConfig(model=Model(init_from="a checkpoint"))
    text = "x = 1\n"
    documents = [Document(f"d/{i}.py", text) for i in range(3)]
    data = prepare(documents, tokenizer, tmp_path, lm.layout(cfg, model, tokenizer))
    whole = [*begin, *tokenizer.encode(text, add_special_tokens=False).ids, *end]
    count = sum(not is_held_out(document.name) for document in documents)
    assert data.train.tolist() == whole * count and count


def test_a_checkpoint_without_eos_is_refused(tokenizer):
    model = ModelConfig.llama(
        vocab_size=400, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24
    )
    with pytest.raises(InputError, match="no eos_token_id"):
        lm.layout(LMConfig(model=Model(init_from="a checkpoint")), model, tokenizer)
