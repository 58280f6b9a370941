"""specjax as lm-eval's model: local tasks, and scores compared with a simple computation."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import specjax as sj
from infer.lm_eval.__main__ import main
from infer.prompts import PromptEncoder
from infer.rescoring import output_logprobs
from infer.scoring import score
from infer.serve.admission import Admission
from infer.serve.schemas import ChatBody
from support.serving import serving
from support.variant_models import build

GENERATED = """
task: local_generate
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["%s"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOSEN = """
task: local_choose
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: ["{{answer}}", "{{other}}"]
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
READ = """
task: local_read
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{prompt}}"
metric_list: [{metric: byte_perplexity}]
"""
PROMPTS = ["def f(x):\n", "import jax\n", "class A", "return ", "    for i in", "x = 1\ny"]


def own_logprobs(model, tokens):
    """Log-probabilities of every token but the first, from one pass without a cache."""
    return output_logprobs(model, tokens[:1], np.array(tokens[1:]))


def test_scores_are_the_logits_of_one_pass(target):
    """Rows of several lengths, in passes of 128 tokens. The longest fills the context."""
    drawing = np.random.default_rng(0)
    rows = [drawing.integers(0, 97, length).tolist() for length in (1, 2, 130, 300)]
    for ids, found in zip(rows, score(target, rows), strict=True):
        assert len(found.log_probs) == len(found.top_ids) == len(ids) - 1
        if len(ids) > 1:
            np.testing.assert_allclose(found.log_probs, own_logprobs(target, ids), atol=2e-4)
            best = found.top_ids[:, 0] == ids[1:]
            np.testing.assert_array_equal(found.is_best, best)


@pytest.mark.slow
def test_a_pass_may_reach_beyond_learned_positions():
    """This GPT-2 has fewer positions than a pass has tokens. Its whole context is still scored."""
    config, params, _ = build("gpt2")
    context = 100
    params = params | {"positions": params["positions"][:context]}
    model = sj.from_params(dataclasses.replace(config, max_position=context), params)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, context).tolist()
    (found,) = score(model, [ids])
    logits = jax.nn.log_softmax(model.net.rescore(np.array([ids[:-1]]))[0])
    want = logits[np.arange(context - 1), np.array(ids[1:])]
    np.testing.assert_allclose(found.log_probs, want, atol=1e-3)


def test_without_lm_eval_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main() == 2
    assert capsys.readouterr().err == (
        'infer.lm_eval: it needs lm-eval: pip install "specjax[lm-eval]"\n'
    )


@pytest.fixture(scope="module")
def harness(tiny_pair_dirs, tmp_path_factory):
    """Runs three local tasks under a method. Half of the gold answers are plain decoding's."""
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from lm_eval.tasks import TaskManager

    from infer.lm_eval.model import Specjax

    home = tmp_path_factory.mktemp("tasks")
    target = sj.load(tiny_pair_dirs[0])
    texts = sj.generate(target, PROMPTS, max_new_tokens=12).text
    stop = texts[0][3:5]
    answers = [text.split(stop)[0] if i % 2 else "nothing" for i, text in enumerate(texts)]
    lines = [
        {"prompt": prompt, "answer": answer, "other": " import"}
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    data = home / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    quoted = json.dumps(str(data))
    (home / "generate.yaml").write_text(GENERATED % (quoted, json.dumps(stop)[1:-1]))
    (home / "choose.yaml").write_text(CHOSEN % quoted)
    (home / "read.yaml").write_text(READ % quoted)
    manager = TaskManager(include_path=str(home), include_defaults=False)

    def evaluate(tasks, client=None, **how):
        given = {"model": "local-completions", "model_args": client}
        if client is None:
            given = {"model": Specjax(pretrained=tiny_pair_dirs[0], batch_size=4, **how)}
        found = evaluator.simple_evaluate(
            **given, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0
        )
        return found["results"], found["samples"]

    return evaluate, lines, target


@pytest.mark.slow
def test_lm_eval_gives_a_lossless_method_plain_decodings_score(harness, tiny_pair_dirs):
    evaluate, lines, _ = harness
    how = {"method": "speculative", "draft": tiny_pair_dirs[1], "gamma": 3}
    task = "local_generate"
    plain, theirs = evaluate([task])
    drafted, ours = evaluate([task], **how)
    key = "exact_match,none"
    assert plain[task][key] == drafted[task][key] == 0.5
    said = [[sample["resps"] for sample in run[task]] for run in (theirs, ours)]
    assert said[0] == said[1] and len(said[0]) == len(lines)


@pytest.mark.slow
def test_lm_eval_scores_as_the_model_does(harness):
    evaluate, lines, target = harness
    results, samples = evaluate(["local_choose", "local_read"])
    encode = target.tokenizer.encode
    for sample in samples["local_choose"]:
        arguments = sample["arguments"]
        pairs = [arguments[key] for key in arguments] if isinstance(arguments, dict) else arguments
        for (said, greedy), pair in zip(
            [found[0] for found in sample["resps"]], pairs, strict=True
        ):
            context, continuation = pair.values() if isinstance(pair, dict) else pair
            # As the harness splits them: trailing spaces of the context belong to the continuation.
            begins, whole = encode(context.rstrip()), encode(context + continuation)
            values = own_logprobs(target, whole)[len(begins) - 1 :]
            assert said == pytest.approx(values.sum(), abs=1e-3)
            logits = np.asarray(target.net.rescore(np.array([whole])))[0, len(begins) - 1 : -1]
            assert greedy == (logits.argmax(-1) == whole[len(begins) :]).all()
    assert results["local_read"]["byte_perplexity,none"] > 1
    total = sum(
        own_logprobs(target, [target.eos_ids[0], *encode(line["prompt"], False)]).sum()
        for line in lines
    )
    count = sum(len(line["prompt"].encode()) for line in lines)
    assert results["local_read"]["byte_perplexity,none"] == pytest.approx(
        np.exp(-total / count), rel=1e-3
    )


@pytest.mark.slow
def test_local_completions_of_a_server_gives_the_same(harness, tiny_pair_dirs, tmp_path):
    """lm-eval through the server gives the scores and texts of the model in this process."""
    evaluate, _, target = harness
    home = tmp_path / "tokenizer"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{tiny_pair_dirs[0]}/tokenizer.json")
    tokenizer.eos_token = target.tokenizer.decode_with_special(target.eos_ids)
    tokenizer.save_pretrained(home)
    tasks = ["local_choose", "local_generate", "local_read"]
    results, samples = evaluate(tasks)
    with serving(target, sj.load(tiny_pair_dirs[1])) as server:
        arguments = {
            "model": "tiny",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(home),
            "max_retries": 1,
        }
        theirs, said = evaluate(tasks, client=arguments)
    for task, key in zip(tasks, ("acc", "exact_match", "byte_perplexity"), strict=True):
        assert theirs[task][f"{key},none"] == pytest.approx(results[task][f"{key},none"], rel=1e-4)
    for ours, one in zip(samples["local_choose"], said["local_choose"], strict=True):
        for (a, greedy), (b, also) in zip(
            *([found[0] for found in each["resps"]] for each in (ours, one)), strict=True
        ):
            assert a == pytest.approx(b, abs=1e-3) and greedy == also


@pytest.fixture(scope="module")
def bos_dir(tiny_pair_dirs, tmp_path_factory):
    """The tiny target with a tokenizer that adds a BOS, and a chat template that writes it."""
    home = tmp_path_factory.mktemp("bos") / "model"
    shutil.copytree(tiny_pair_dirs[0], home)
    backend = tokenizers.Tokenizer.from_file(str(home / "tokenizer.json"))
    bos = backend.id_to_token(0)
    backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    backend.save(str(home / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}U: {{ m['content'] }}\nA:{% endfor %}"
    settings = {"bos_token": bos, "chat_template": template}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(home)


def test_a_chat_prompt_has_the_templates_bos_alone(bos_dir):
    target = sj.load(bos_dir)
    ids = target.tokenizer.encode_chat("hi")
    assert ids.count(0) == 1 and ids[0] == 0
    assert PromptEncoder(target, chat=True).text("hi")[0] == ids
    body = ChatBody(model="m", messages=[{"role": "user", "content": "hi"}])
    server = SimpleNamespace(
        target=target, bounds=SimpleNamespace(prompt=100), _max_token_bytes=100
    )
    text = Admission.chat_text(server, body.messages, (), None)
    assert Admission.text_ids(server, text, "messages", False) == ids


def test_tokenize_of_messages_adds_no_second_bos(bos_dir):
    """A template writes it itself. Of a text, and where it is asked for, the tokenizer adds it."""
    target = sj.load(bos_dir)
    messages = [{"role": "user", "content": "hi"}]
    with serving(target, None) as server:

        def ids_of(**body):
            return server.ask("POST", "/tokenize", body)[1]["tokens"]

        assert ids_of(messages=messages) == target.tokenizer.encode_chat("hi")
        bodies = [{"messages": messages}, {"messages": messages, "add_special_tokens": True}]
        bodies += [{"prompt": "hi"}, {"prompt": "hi", "add_special_tokens": False}]
        assert [ids_of(**body).count(0) for body in bodies] == [1, 2, 1, 0]


def test_lm_eval_encodes_a_templates_text_without_another_bos(bos_dir):
    pytest.importorskip("lm_eval")
    from infer.lm_eval.model import Specjax

    model = Specjax(pretrained=bos_dir)
    encode = model._target.tokenizer.encode
    assert model.tok_encode("x = 1") == [0, *encode("x = 1", False)]

    text = model.apply_chat_template([{"role": "user", "content": "hi"}])
    chat = encode(text, False)
    assert model.tok_encode(text) == chat and chat.count(0) == 1
    context, continuation = model._encode_pair(text, " yes")
    assert context == chat and context + continuation == encode(text + " yes", False)
    assert model.tok_encode("x = 1", add_special_tokens=True)[0] == 0

    # The harness may read rendered contexts from its cache. It still asks for the template's name.
    cached = Specjax(pretrained=bos_dir)
    cached.chat_template(True)
    assert cached.tok_encode(text) == chat


def test_the_sizes_of_a_mesh_are_checked(tiny_pair_dirs):
    pytest.importorskip("lm_eval")
    from infer.lm_eval.model import Specjax

    with pytest.raises(sj.OptionError, match="tensor_parallel_size=x: expected a whole number"):
        Specjax(tiny_pair_dirs[0], tensor_parallel_size="x")
    with pytest.raises(sj.OptionError, match="data=2,model=64 needs 128 devices"):
        Specjax(tiny_pair_dirs[0], tensor_parallel_size="64", data_parallel_size=2)


def test_what_a_task_asks_of_a_generation_is_read():
    pytest.importorskip("lm_eval")
    from infer.lm_eval.model import read_request

    asked = {"until": ["\n", ""], "max_gen_toks": 9, "do_sample": True, "top_p": 0.5}
    assert read_request(asked) == (("\n",), 9, sj.Sampling(1.0, 0, 0.5))
    greedy = {"until": "Q:", "do_sample": False, "temperature": 0.7}
    assert read_request(greedy, 5) == (("Q:",), 5, sj.Sampling())
    with pytest.raises(sj.SpecjaxError, match="num_beams=4: not known"):
        read_request({"num_beams": 4})
