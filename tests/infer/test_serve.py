"""``python -m infer.serve``: OpenAI's protocol, generate's tokens, and 4xx for wrong requests."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import openai
import pytest

import specjax as sj
from infer import scoring
from infer.serve import bodies, commands, variants
from infer.serve.admission import MAX_ROUND_TOKENS
from infer.serve.log import REQUESTS
from infer.serve.schemas import CompletionBody
from infer.serve.server import _decode_one
from infer.serve.variants import VariantQueue
from specjax._util.errors import OptionError
from specjax.models.cache import bucket, row_bytes
from support.serving import TIMEOUT, Running, openai_client, served_models, serving, until
from support.tools import load

make_page = load("make_page")

TEXT = "import jax\n\n\ndef step("
CODE = "from __future__"
PATHS = {"v1/models", "v1/methods", "v1/completions", "v1/chat/completions"}
LIMITS = ["--batch-size", "4", "--max-prompt", "600", "--max-output", "400", "--queue", "40"]


@pytest.fixture(scope="module")
def models(tiny_pair_dirs, tmp_path_factory):
    return served_models(tiny_pair_dirs, tmp_path_factory.mktemp("served") / "target")


@pytest.fixture(scope="module")
def server(models):
    with serving(*models, *LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai_client(server)


def generated(server, prompt=TEXT, method="speculative", **kw):
    """The output of generate with the server's models; its first row is the server's answer.

    Four rows, as many as the server has batch slots: so both run the same compiled programs.
    """
    given = {"method": method, "draft": server.draft, "num_samples": 4}
    return sj.generate(server.target, [prompt], **given | kw)


# --- echo and alternatives ---------------------------------------------------------------------


def test_an_echo_scores_the_prompt(server):
    """As lm-eval's local-completions asks. The scores equal those of a pass without a cache."""
    ids = server.target.tokenizer.encode(TEXT)
    assert len(ids) > 3
    asked = {"prompt": [ids, ids[:2]], "max_tokens": 1, "temperature": 0, "logprobs": 1}
    answer = server.complete(**asked, echo=True)
    log_p = np.asarray(jax.nn.log_softmax(server.target.net.rescore(np.array([ids]))[0]))
    for choice, length in zip(answer["choices"], (len(ids), 2), strict=True):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(found["text_offset"]) == length + 1
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        want = log_p[range(length - 1), ids[1:length]]
        np.testing.assert_allclose(found["token_logprobs"][1:-1], want, atol=1e-4)
        tops = [max(top.values()) for top in found["top_logprobs"][1:]]
        np.testing.assert_allclose(tops[:-1], log_p[: length - 1].max(-1), atol=1e-4)
        assert found["token_logprobs"][-1] == tops[-1], "a greedy token is the most likely one"
    assert answer["choices"][0]["text"].startswith(server.target.tokenizer.decode(ids))
    assert answer["usage"]["completion_tokens"] == 2


def test_an_echo_of_nothing_more_is_the_prompt(server):
    answer = server.complete(prompt=TEXT, max_tokens=0, logprobs=0, echo=True)
    (choice,) = answer["choices"]
    assert choice["text"] == TEXT and choice["finish_reason"] == "length"
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == TEXT
    # With no alternatives there is an entry for each token itself.
    assert found["top_logprobs"][0] is None and {len(x) for x in found["top_logprobs"][1:]} == {1}
    assert answer["usage"]["completion_tokens"] == 0
    plain = server.complete(prompt=TEXT, max_tokens=0, echo=True)["choices"][0]
    assert plain["text"] == TEXT and plain["logprobs"] is None


def test_logprobs_of_0_are_those_of_the_tokens_alone(server):
    """OpenAI's answer has an entry for each token all the same."""
    body = {"prompt": TEXT, "max_tokens": 4, "temperature": 0}
    (choice,) = server.complete(**body, logprobs=0)["choices"]
    found = choice["logprobs"]
    for token, value, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert list(top.values()) == [value] and (token in top or not token)
    (two,) = server.complete(**body, logprobs=2)["choices"]
    assert two["logprobs"]["token_logprobs"] == pytest.approx(found["token_logprobs"], abs=1e-4)


def test_alternatives_of_a_chat_stream(server, client):
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0, "model": "tiny"}
    asked = body | {"logprobs": True, "top_logprobs": 3}
    (whole,) = client.chat.completions.create(**asked).choices
    chunks = client.chat.completions.create(**asked, stream=True)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    found = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in found] == [x.token for x in whole.logprobs.content]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content
    for streamed, entry in zip(found, whole.logprobs.content, strict=True):
        assert [top.token for top in streamed.top_logprobs] == [
            top.token for top in entry.top_logprobs
        ]
        assert len(streamed.top_logprobs) == 3


def test_alternatives_are_those_of_the_written_tokens(server, client):
    out = generated(server, max_new_tokens=6, logprobs=True)
    asked = {"model": "tiny", "prompt": TEXT, "temperature": 0, "max_tokens": 6}
    choice = client.completions.create(**asked, logprobs=3).choices[0]
    assert choice.text == out.text[0]
    values = choice.logprobs.token_logprobs
    np.testing.assert_allclose(values, out.logprobs[0], atol=1e-4)
    for value, top in zip(values, choice.logprobs.top_logprobs, strict=True):
        assert 1 <= len(top) <= 3 and max(top.values()) == value
    messages = [{"role": "user", "content": "x"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=3, logprobs=True, top_logprobs=7, temperature=1
    )
    for entry in answer.choices[0].logprobs.content:
        others = [other.logprob for other in entry.top_logprobs]
        assert len(others) == 7 and others == sorted(others, reverse=True)


def test_alternatives_and_an_echo_stream(server, client):
    """A row's last chunk has its log-probabilities; the first one has the prompt."""
    body = {"prompt": TEXT, "max_tokens": 5, "temperature": 0, "logprobs": 3, "echo": True}
    (whole,) = server.complete(**body)["choices"]
    stream = client.completions.create(model="tiny", stream=True, **body)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == whole["text"]
    assert chunks[0].text.startswith(TEXT)
    assert [chunk.logprobs is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    found = chunks[-1].logprobs
    assert found.tokens == whole["logprobs"]["tokens"]
    assert found.text_offset == whole["logprobs"]["text_offset"]
    values = whole["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(found.token_logprobs[1:], values[1:], atol=1e-5)
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"]
    tops = whole["logprobs"]["top_logprobs"][1:]
    assert {len(top) for top in tops} <= {3, 4} and tops


def test_a_token_s_bytes_are_its_own_and_the_texts_join(server):
    """A character of several tokens is the text of its last one; each has its own bytes."""
    asked = {"temperature": 2, "seed": 4, "max_tokens": 40}  # many bytes that are no characters
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    _, answer, _ = server.ask("POST", "/v1/chat/completions", asked | chat)
    (choice,) = answer["choices"]
    entries = choice["logprobs"]["content"]
    content = choice["message"]["content"]
    assert "".join(entry["token"] for entry in entries) == content
    differ = [entry for entry in entries if entry["token"].encode() != bytes(entry["bytes"])]
    assert any(not entry["token"] for entry in differ)
    written = bytes(byte for entry in entries for byte in entry["bytes"])
    assert written.decode(errors="replace") == content
    for top in (top for entry in entries for top in entry["top_logprobs"]):
        named = bytes(top["bytes"]).decode(errors="replace")
        assert top["token"] == named or top["token"].startswith(("bytes:", "<|"))
        assert bool(top["bytes"]) != top["token"].startswith("<|"), "special tokens have no text"

    for prefix, more in (("", {}), (TEXT, {"echo": True})):
        body = {"prompt": TEXT, "logprobs": 1} | asked | more
        (choice,) = server.complete(**body)["choices"]
        found = choice["logprobs"]
        assert choice["text"].startswith(prefix) and "".join(found["tokens"]) == choice["text"]
        lengths = [len(token) for token in found["tokens"]]
        assert 0 in lengths and len(set(lengths)) > 2
        assert found["text_offset"] == [0, *itertools.accumulate(lengths[:-1])]


def test_a_row_that_is_scored_can_leave(server):
    """A cancelled request gets no more output, and the engine drops its scoring."""
    told = []
    body = CompletionBody(prompt=TEXT, max_tokens=1, echo=True, logprobs=1)
    submission = server.admission.make_submission(body, lambda *piece: told.append(piece))
    server.engine.submit(submission)
    server.engine.cancel(submission)
    until(lambda: not server.engine._owners and not server.engine._scorings)
    assert server.complete(prompt=TEXT, max_tokens=1)["choices"]


def test_a_scored_row_can_leave_after_its_scheduler(models, monkeypatch):
    """With one scheduler, a request of another method closes that of a row that is being scored."""
    began, may_end = threading.Event(), threading.Event()
    passes = scoring.passes

    def slow_passes(*given):
        began.set()
        may_end.wait(TIMEOUT)
        yield from passes(*given)

    monkeypatch.setattr(scoring, "passes", slow_passes)
    with serving(*models, *LIMITS, "--max-methods", "1") as server:
        gone = open_request(server, n=1, max_tokens=2, logprobs=2)
        assert began.wait(TIMEOUT)
        server.complete(prompt=TEXT, method="lookup", max_tokens=2)
        gone.close()
        until(lambda: server.engine.num_running == 0)
        may_end.set()
        assert server.complete(prompt=TEXT, max_tokens=2)["choices"]


def test_requests_are_made_before_they_are_queued(server, monkeypatch):
    """Whoever queues a request holds a lock that every other client needs."""
    ended = threading.Event()
    body = CompletionBody(prompt=TEXT, max_tokens=2, n=3)
    submission = server.admission.make_submission(body, lambda *_: ended.set())
    monkeypatch.setattr(variants, "make_rows", None)
    server.engine.submit(submission)
    assert ended.wait(TIMEOUT)


def test_values_that_are_equal_are_checked_one_by_one(server):
    """1 and True are equal, and only one of them is a number of tokens."""
    assert server.complete(prompt=TEXT, max_tokens=1, options={"gamma": 1})["choices"]
    body = {"prompt": TEXT, "max_tokens": 1, "options": {"gamma": True}}
    status, answer, _ = server.ask("POST", "/v1/completions", body)
    assert status == 400 and "gamma" in answer["error"]["message"]


@pytest.mark.parametrize("most", [1, 8])
def test_a_small_output_limit_holds_for_requests_that_name_none(models, most):
    with serving(*models, *LIMITS, "--max-output", str(most)) as server:
        _decode_one(server.admission, server.engine)
        usage = server.complete(prompt=TEXT, ignore_eos=True)["usage"]
        assert usage["completion_tokens"] == most


def test_a_method_keeps_as_many_prompts_as_memory_allows(server):
    def variant(memory):
        admission = dataclasses.replace(server.admission, memory=memory)
        return admission.make_submission(CompletionBody(prompt=TEXT), lambda *_: None).variant

    engine = variant(2**40).engine
    needed = server.admission._needed(engine)
    row = server.admission._bytes(engine, 1)
    with pytest.raises(OptionError, match=r"needs \S+ GiB for 4 rows"):
        variant(needed - 1)
    assert [variant(needed + extra * row).prefixes for extra in (0, 2, 99)] == [0, 2, 4]


def test_a_kept_prompt_takes_no_more_than_a_row(server):
    body = CompletionBody(prompt=20 * TEXT, max_tokens=1)
    submission = server.admission.make_submission(body, lambda *_: None)
    queue = VariantQueue(submission.variant, 0)
    queue.open(server.admission.size, server.admission.bounds)
    waiting = submission.requests(0)
    while waiting or queue.running:
        queue.poll(lambda _: waiting.pop() if waiting else None)
    [(_, state)] = queue.scheduler._prefill.prefix_cache._entries
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert 0 < size <= server.admission._bytes(submission.variant.engine, 1)


# --- the tokens of generate ------------------------------------------------------------------


def test_openai_client_gets_what_generate_gives(server, client):
    out = sj.generate(
        server.target,
        [TEXT, CODE],
        method="speculative",
        draft=server.draft,
        sampling=sj.Sampling(0.8, 0, 0.9),
        seed=7,
        num_samples=2,
        max_new_tokens=11,
        logprobs=True,
        options={"gamma": 4},
    )
    answer = client.completions.create(
        model="tiny",
        prompt=[TEXT, CODE],
        temperature=0.8,
        top_p=0.9,
        seed=7,
        n=2,
        max_tokens=11,
        logprobs=0,
        extra_body={"method": "speculative", "options": {"gamma": 4}},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == out.text
    for choice, logprobs, reason in zip(
        answer.choices, out.logprobs, out.finish_reasons, strict=True
    ):
        np.testing.assert_allclose(choice.logprobs.token_logprobs, logprobs, atol=1e-5)
        assert choice.finish_reason == {"eos": "stop"}.get(reason, reason)
    usage = answer.usage
    assert usage.completion_tokens == out.lengths.sum()
    assert usage.prompt_tokens == out.prompt_tokens[0] + out.prompt_tokens[2]
    decoding, counted = usage.decoding, {n: int(v.sum()) for n, v in out.stats.items()}
    assert decoding["target_passes"] == counted["target_calls"]
    assert decoding["accepted"] == counted["accepted"]
    assert decoding["acceptance_rate"] == counted["accepted"] / counted["tested"]
    assert decoding["tokens_per_target_pass"] == counted["emitted"] / counted["target_calls"]
    assert (decoding["seed"], decoding["method"]) == (7, "speculative")


def test_settings_side_by_side_are_each_their_own(server):
    """Requests of one batch keep their own temperature, top-k, top-p, stop strings and seed."""
    greedy = generated(server, sampling=sj.Sampling(), max_new_tokens=40).text[0]
    stops = ((), (greedy[9:12], "zz"), (greedy[20:22],))
    asked = [
        {
            "temperature": (0, 0.7, 1.3)[i % 3],
            "top_p": (1.0, 0.8)[i % 2],
            "top_k": (0, 5, 40)[i // 2 % 3],
            "stop": list(stops[i // 3 % 3]),
            "seed": i,
            "max_tokens": 5 + 7 * (i % 5),
        }
        for i in range(12)
    ]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda body: server.complete(prompt=TEXT, **body), asked))
    for body, answer in zip(asked, answers, strict=True):
        sampling = sj.Sampling(body["temperature"], body["top_k"], body["top_p"])
        settings = {"seed": body["seed"], "stop": body["stop"]}
        out = generated(server, sampling=sampling, max_new_tokens=body["max_tokens"], **settings)
        assert answer["choices"][0]["text"] == out.text[0], body
        assert answer["usage"]["completion_tokens"] == out.lengths[0]
    assert server.engine.num_running == server.engine.num_waiting == 0


def test_methods_take_turns(models):
    """One scheduler, and requests of three variants: each ends, with its own tokens."""
    variants = (("autoregressive", None), ("speculative", None), ("speculative", 0))
    with serving(*models, *LIMITS, "--max-methods", "1") as server:

        def ask(i):
            name, logprobs = variants[i % 3]
            body = {"method": name, "logprobs": logprobs, "temperature": 0, "max_tokens": 6 + i}
            return server.complete(prompt=CODE, **body), server.engine.num_schedulers

        with concurrent.futures.ThreadPoolExecutor(18) as pool:
            answers = list(pool.map(ask, range(18)))
        for i, (answer, schedulers) in enumerate(answers):
            out = generated(server, CODE, variants[i % 3][0], max_new_tokens=6 + i)
            assert answer["choices"][0]["text"] == out.text[0] and schedulers <= 1
            assert answer["usage"]["decoding"]["method"] == variants[i % 3][0]


# --- the protocol ------------------------------------------------------------------------------


def test_a_stream_is_the_answer_in_pieces(server, client):
    body = {"prompt": TEXT, "temperature": 0.9, "seed": 5, "n": 2, "max_tokens": 20, "logprobs": 0}
    whole = server.complete(**body, origins=True)
    chunks = list(
        client.completions.create(
            model="tiny",
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"origins": True},
            **body,
        )
    )
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 40
    same = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert all(getattr(chunks[-1].usage, n) == whole["usage"][n] for n in same)
    authors = set()
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice["index"]]
        assert len(mine) > 3 and "".join(c.text for c in mine) == choice["text"]
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["length"]
        for field in ("tokens", "token_logprobs", "text_offset"):
            joined = [x for c in mine for x in getattr(c.logprobs, field)]
            assert joined == pytest.approx(choice["logprobs"][field])
        runs = [run for c in mine for run in c.origins]
        assert "".join(text for text, _ in runs) == choice["text"]
        assert "".join(text for text, _ in choice["origins"]) == choice["text"]
        authors |= {author for _, author in runs}
    assert authors == {"draft", "target"}


def test_a_stop_text_cuts_the_log_probabilities_of_a_stream_too(server, client):
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 40, "logprobs": 0}
    text = server.complete(**body)["choices"][0]["text"]
    body["stop"] = [text[len(text) // 2]]
    (whole,) = server.complete(**body)["choices"]
    chunks = client.completions.create(model="tiny", stream=True, **body)
    found = [chunk.choices[0].logprobs for chunk in chunks]
    tokens = [token for logprobs in found if logprobs for token in logprobs.tokens]
    assert tokens == whole["logprobs"]["tokens"] and "".join(tokens) == whole["text"]


def test_a_stop_text_that_ends_with_the_budget_is_the_reason(server, client):
    """In a round that ends both ways, as in one that ends in one: stream and answer agree."""
    body = {"prompt": TEXT, "temperature": 0, "options": {"gamma": 6}}
    (choice,) = server.complete(**body, max_tokens=40, logprobs=0)["choices"]
    texts = choice["logprobs"]["tokens"]
    before = ["".join(texts[:place]) for place in range(len(texts))]
    # The last token whose text has not been written before, so that it can be the stop.
    new = [i for i in range(1, 38) if texts[i] and texts[i] not in before[i] + texts[i][:-1]]
    at = new[-1]
    body["stop"] = [texts[at]]
    for budget, reason in ((at, "length"), (at + 1, "stop"), (at + 2, "stop"), (40, "stop")):
        (whole,) = server.complete(**body, max_tokens=budget)["choices"]
        assert (whole["finish_reason"], whole["text"]) == (reason, before[at])
        extra = {"options": body["options"]}
        asked = {"prompt": TEXT, "temperature": 0, "stop": body["stop"], "max_tokens": budget}
        stream = client.completions.create(model="tiny", stream=True, extra_body=extra, **asked)
        chunks = [chunk.choices[0] for chunk in stream]
        assert chunks[-1].finish_reason == reason
        assert "".join(chunk.text for chunk in chunks) == before[at]


def test_a_stream_without_new_tokens_has_no_origins(server):
    body = {"prompt": TEXT, "max_tokens": 0, "echo": True, "stream": True, "origins": True}
    _, page, _ = server.ask("POST", "/v1/completions", body)
    lines = [line for line in page.decode().splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert all(choice["origins"] == [] for chunk in chunks for choice in chunk["choices"])
    assert any(chunk["choices"] for chunk in chunks)


def test_chats_go_through_the_template(server, client):
    messages = [
        {"role": "system", "content": "be"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "im"}, {"type": "text", "text": "p"}],
        },
    ]
    for options, prompt in (({}, "<system>be<user>imp<assistant>"), ({"loud": True}, None)):
        prompt = prompt or "<system>be<user>impLOUD<assistant>"
        ids = server.target.tokenizer.encode(prompt, False)
        out = generated(server, ids, max_new_tokens=9, logprobs=True)
        asked = {"model": "tiny", "messages": messages, "temperature": 0, "logprobs": True}
        extra = {"chat_template_kwargs": options}
        answer = client.chat.completions.create(**asked, max_tokens=9, extra_body=extra)
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", out.text[0])
        values = [entry.logprob for entry in choice.logprobs.content]
        np.testing.assert_allclose(values, out.logprobs[0], atol=1e-5)
        stream = client.chat.completions.create(
            **asked, max_completion_tokens=9, stream=True, extra_body=extra
        )
        deltas = [chunk.choices[0].delta for chunk in stream]
        assert deltas[0].role == "assistant" and deltas[-1].role is None
        assert "".join(delta.content for delta in deltas) == out.text[0]


def test_what_is_left_out(server):
    """OpenAI's defaults: 16 tokens, temperature 1, and a seed that the answer contains."""
    answer = server.complete(prompt=TEXT)
    seed = answer["usage"]["decoding"]["seed"]
    out = generated(server, sampling=sj.Sampling(1.0), max_new_tokens=16, seed=seed)
    assert answer["choices"][0]["text"] == out.text[0]
    assert answer["choices"][0]["logprobs"] is None and answer["model"] == "tiny"
    again = server.complete(prompt=TEXT, seed=seed, user="me", frequency_penalty=0, best_of=None)
    assert again["choices"][0]["text"] == out.text[0]


def test_models_health_metrics(server, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert server.ask("GET", "/health")[:2] == (200, {"status": "ok"})
    server.complete(prompt=TEXT, max_tokens=3, method="autoregressive")
    page = server.ask("GET", "/metrics")[1].decode()
    counted = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
    assert float(counted['specjax_written_tokens_total{method="autoregressive"}']) >= 3
    assert counted["specjax_rows_in_flight"] == counted["specjax_rows_waiting"] == "0.0"
    admission = server.admission
    row = row_bytes(server.target.config, bucket(admission.bounds.total), "float32")
    assert float(counted["specjax_kv_cache_max_bytes"]) > admission.size * row


def counters(server):
    """The values of /metrics by their names with labels."""
    page = server.ask("GET", "/metrics")[1].decode()
    pairs = (line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
    return {name: float(value) for name, value in pairs}


def test_accepted_tokens_that_are_cut_off_are_counted_apart(models, caplog):
    """The target drafts for itself: of ten accepted tokens a budget of five keeps five."""
    with serving(models[0], models[0]) as server, caplog.at_level("INFO", REQUESTS.name):
        answer = server.complete(
            prompt=TEXT, max_tokens=5, temperature=0, method="speculative", options={"gamma": 10}
        )
        counted = counters(server)
    decoding = answer["usage"]["decoding"]
    assert (decoding["accepted"], decoding["accepted_emitted"]) == (10, 5)
    label = '_total{method="speculative"}'
    assert counted[f"specjax_accepted_tokens{label}"] == 10
    assert counted[f"specjax_accepted_emitted_tokens{label}"] == 5
    # vLLM's scheduler counts before it cuts, and its other numbers are of whole rounds, too.
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 10
    (fields,) = (record.fields for record in caplog.records if record.message == "completion")
    assert (fields["accepted"], fields["accepted_emitted"]) == (10, 5)


def test_metrics_under_vllm_s_names_count_what_generate_counts(server):
    labels = 'engine="0",model_name="tiny"'
    before = counters(server)
    server.complete(prompt=TEXT, max_tokens=16, temperature=0, method="speculative")
    after = counters(server)

    def new(name, more=""):
        key = f"vllm:{name}{{{labels}{more}}}"
        return after[key] - before.get(key, 0)

    out = generated(server, max_new_tokens=16)
    stats = {name: values[0] for name, values in out.stats.items() if name != "passes"}
    assert new("generation_tokens_total") == len(out.tokens[0])
    assert new("prompt_tokens_total") == out.prompt_tokens[0]
    assert new("spec_decode_num_drafts_total") == stats["rounds"]
    assert new("spec_decode_num_draft_tokens_total") == stats["drafted"]
    assert new("spec_decode_num_accepted_tokens_total") == stats["accepted"] > 0
    depth = len(stats["accepted_hist"]) - 1
    accepted = [
        new("spec_decode_num_accepted_tokens_per_pos_total", f',position="{i}"')
        for i in range(depth)
    ]
    assert sum(accepted) == stats["accepted"] and accepted == sorted(accepted, reverse=True)
    assert new("e2e_request_latency_seconds_count") == 1
    ended = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'
    assert after[ended] - before.get(ended, 0) == 1

    # The same numbers are in the answer, also in that of a stream.
    body = {"prompt": TEXT, "max_tokens": 16, "temperature": 0, "method": "speculative"}
    drafts = server.complete(**body)["metrics"]["speculative_decoding"]
    assert drafts["num_spec_steps"] == stats["rounds"] == sum(drafts["acceptance_histogram"])
    assert drafts["num_draft_tokens"] == stats["drafted"]
    assert drafts["num_accepted_draft_tokens"] == stats["accepted"]
    assert drafts["num_spec_tokens"] == depth
    assert drafts["mean_acceptance_length"] == 1 + stats["accepted"] / stats["rounds"]
    assert server.complete(**body, n=2)["metrics"] == {"speculative_decoding": None}
    plain = server.complete(prompt=TEXT, max_tokens=3, method="autoregressive")
    assert plain["metrics"] == {"speculative_decoding": None}
    streamed = openai_client(server).completions.create(
        model="tiny",
        prompt=TEXT,
        max_tokens=16,
        temperature=0,
        extra_body={"method": "speculative"},
        stream=True,
        stream_options={"include_usage": True},
    )
    *_, last = streamed
    assert last.metrics["speculative_decoding"] == drafts

    before = counters(server)
    server.complete(prompt=TEXT, max_tokens=3, method="autoregressive")
    after = counters(server)
    assert new("spec_decode_num_drafts_total") == 0 and new("generation_tokens_total") == 3


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_curl(server):
    def curl(*arguments):
        command = ["curl", "-sN", "-m", str(TIMEOUT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = {"prompt": CODE, "max_tokens": 8, "temperature": 0}
    headers = ["-H", "Content-Type: application/json"]
    url = f"{server.url}/v1/completions"
    (choice,) = json.loads(curl(*headers, "-d", json.dumps(body), url))["choices"]
    assert choice["text"] == generated(server, CODE, max_new_tokens=8).text[0]
    lines = curl(*headers, "-d", json.dumps(body | {"stream": True}), url).splitlines()
    assert lines[-2:] == ["data: [DONE]", ""] and lines[1::2] == [""] * (len(lines) // 2)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2:2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


# --- what is refused -----------------------------------------------------------------------------

REFUSED = [
    ({"prompt": TEXT, "foo": 1}, 400, "foo"),
    ({}, 400, "prompt is missing"),
    ({"prompt": 7}, 400, "prompt"),
    ({"prompt": []}, 400, "empty"),
    ({"prompt": [10**6]}, 400, "token ids must be from 0 to"),
    ({"prompt": "\ud800"}, 400, "surrogate"),
    ({"prompt": TEXT * 100}, 400, "at most 600"),
    ({"prompt": TEXT, "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": TEXT, "max_tokens": 401}, 400, "max_tokens=401: at most 400"),
    ({"prompt": TEXT, "max_tokens": 10**30}, 400, "max_tokens"),
    ({"prompt": TEXT, "temperature": -1}, 400, "temperature"),
    ({"prompt": TEXT, "temperature": float("nan")}, 400, "temperature"),
    ({"prompt": TEXT, "temperature": float("inf")}, 400, "temperature"),
    ({"prompt": TEXT, "temperature": 1e300}, 400, "temperature"),
    ({"prompt": TEXT, "temperature": "1"}, 400, "temperature"),
    ({"prompt": TEXT, "top_p": 0}, 400, "top_p"),
    ({"prompt": TEXT, "n": 1000}, 400, "n=1000: expected at most 128"),
    ({"prompt": TEXT, "n": 21}, 400, "21 completions at once: at most 20"),
    ({"prompt": TEXT, "seed": 2**64}, 400, "seed"),
    ({"prompt": TEXT, "stop": [""]}, 400, "stop"),
    ({"prompt": TEXT, "stop": ["a"] * 17}, 400, "stop"),
    ({"prompt": TEXT, "logprobs": 6}, 400, "logprobs"),
    ({"prompt": TEXT, "max_tokens": 0}, 400, "needs echo"),
    ({"prompt": TEXT, "max_tokens": -1, "echo": True}, 400, "max_tokens"),
    ({"prompt": TEXT, "best_of": 4}, 400, "best_of=4"),
    ({"prompt": TEXT, "model": "gpt"}, 404, "this server has 'tiny'"),
    ({"prompt": TEXT, "method": "speculativ"}, 400, "did you mean 'speculative'"),
    ({"prompt": TEXT, "method": "cdsl"}, 400, "needs a reward"),
    ({"prompt": TEXT, "method": "sdsat"}, 400, ""),
    ({"prompt": TEXT, "options": {"gama": 4}}, 400, "did you mean 'gamma'"),
    ({"prompt": TEXT, "options": {"gamma": 0}}, 400, "gamma=0"),
    ({"prompt": TEXT, "options": {"gamma": {"a": 1}}}, 400, "options"),
    (
        {"prompt": TEXT, "method": "specinfer", "options": {"branching": [8, 8, 8]}},
        400,
        f"at most {MAX_ROUND_TOKENS}",
    ),
    ({"prompt": TEXT, "response_format": 5}, 400, "response_format=5: expected an object"),
    ({"prompt": TEXT, "response_format": {}}, 400, "response_format.type is missing"),
    ({"prompt": TEXT, "response_format": {"type": "x"}}, 400, "response_format.type='x'"),
    (
        {"prompt": TEXT, "response_format": {"type": "text", "model": 1}},
        400,
        "response_format.model: there is no such field; leave it out",
    ),
    (
        {"prompt": TEXT, "response_format": {"type": "json_schema", "json_schema": {"name": 1}}},
        400,
        "response_format.json_schema.name=1: expected a text",
    ),
    (
        {"prompt": TEXT, "structured_outputs": {"json": 5}},
        400,
        "structured_outputs.json=5: expected an object or a text of JSON",
    ),
    ({"prompt": TEXT, "structured_outputs": {"json": []}}, 400, "structured_outputs.json=[]"),
    ({"prompt": TEXT, "structured_outputs": {"regex": 5}}, 400, "structured_outputs.regex=5"),
    ({"prompt": TEXT, "structured_outputs": {"choice": [5]}}, 400, "structured_outputs.choice[0]"),
    (
        {"prompt": TEXT, "structured_outputs": {"x": 5}},
        400,
        "structured_outputs.x: there is no such field; leave it out",
    ),
    ({"prompt": TEXT, "stream_options": {"usage": True}}, 400, "stream_options.usage: there is"),
    ({"prompt": TEXT, "tools": [{"type": "function"}]}, 400, "tools: not supported"),
    (b"", 400, "not JSON"),
    (b"{", 400, "not JSON"),
    (b"\xff", 400, "not UTF-8"),
    (b"[" * 100_000, 400, "depth"),
    (b'{"prompt": ' + b"9" * 10_000 + b"}", 400, "reasonable integers"),
    (b'"a"', 400, "the body"),
    (b" " * (10 * 2**20), 413, "larger than 1048576 bytes"),
]


@pytest.mark.parametrize("body, status, says", REFUSED)
def test_refused_in_openai_s_form(server, body, status, says):
    got, answer, _ = server.ask("POST", "/v1/completions", body)
    assert got == status and says in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert len(answer["error"]["message"]) <= 600 and "Traceback" not in json.dumps(answer)


def test_other_refusals(server, client):
    with pytest.raises(openai.NotFoundError, match="this server has"):
        client.completions.create(model="other", prompt=TEXT)
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.role='x': expected one of"):
        client.chat.completions.create(model="tiny", messages=[{"role": "x", "content": "y"}])
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/../../etc/passwd", 404),
    ):
        got, answer, _ = server.ask(method, path)
        assert got == status and answer["error"]["message"]
    assert server.ask("POST", "/v1/completions", b"{}", Content_Type="text/plain")[0] == 415


def test_a_body_that_does_not_come(server, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 20) as slow:
        slow.sendall(head + b"Content-Length: 50\r\n\r\n{")
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_who_has_no_key(models):
    with serving(*models, keys=["secret"]) as server:
        for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Bearer s\xe9"}):
            for path in ("/v1/models", "/metrics"):
                status, answer, _ = server.ask("GET", path, **headers)
                assert status == 401 and answer["error"]["type"] == "authentication_error"
            assert server.ask("POST", "/v1/completions", b"{", **headers)[0] == 401
        assert server.ask("GET", "/v1/models", Authorization="Bearer secret")[0] == 200
        assert server.ask("GET", "/health")[0] == server.ask("GET", "/")[0] == 200


def test_max_methods_has_a_former_name():
    for option in ("--max-methods", "--flights"):
        assert commands.parser().parse_args([option, "2"]).max_methods == 2


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--method", "speculativ"], "did you mean 'speculative'"),
        (["--set", "gama=3", "--method", "block"], "did you mean 'gamma'"),
        (["--port", "70000"], "a whole number from 0 to 65535"),
        (["--host", "192.0.2.1", "--port", "0"], "--host 192.0.2.1 --port 0: "),
    ],
)
def test_wrong_arguments_are_one_line(capsys, argv, says):
    with contextlib.suppress(SystemExit):
        assert commands.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m infer.serve: " if "70000" in said else "infer.serve: ")
    assert says in said and said.count("\n") == 1


def test_without_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(commands, "REQUIRED", ("json", "no_such_module"))
    with pytest.raises(SystemExit, match="2"):
        commands.main([])
    assert "no_such_module is not installed: pip install" in capsys.readouterr().err


def fuzzed(rng):
    """A random body, mostly wrong: any JSON, or not even JSON."""
    values = [None, True, -1, 0, 1, 2**31, 2**64, -(10**40), 1e308, float("nan"), float("-inf")]
    values += ["", "a", "\ud800", "\0", "é" * 50, [], [[]], [1, "a"], {}, {"a": []}, [2**40]]
    fields = [
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
        "seed",
        "stop",
        "stream",
    ]
    fields += ["logprobs", "echo", "method", "options", "messages", "model", "stream_options", "x"]
    body = {"prompt": "a", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    for field in rng.sample(fields, rng.randrange(1, 5)):
        body[field] = rng.choice(values)
    if rng.random() < 0.5:
        body.pop(rng.choice(("messages", "prompt")), None)
    data = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.9).encode(errors="replace"))
    if rng.random() < 0.3:
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return bytes(data)


def fuzz(server, count, seed):
    """Sends ``count`` random bodies; returns how often each status came."""
    rng, statuses = random.Random(seed), {}
    for i in range(count):
        path = rng.choice(("/v1/completions", "/v1/chat/completions"))
        data = b"[" * 10 * 2**20 if i % 500 == 499 else fuzzed(rng)
        status, answer, _ = server.ask("POST", path, data)
        statuses[status] = statuses.get(status, 0) + 1
        assert status == 200 or (400 <= status < 500 and answer["error"]["message"]), data
    until(lambda: server.engine.num_running == server.engine.num_waiting == 0)
    return statuses


def test_fuzzed_requests_get_4xx(server):
    statuses = fuzz(server, 300, seed=0)
    assert statuses[400] > 200


@pytest.mark.slow
def test_many_fuzzed_requests_get_4xx(server):
    assert fuzz(server, 10_000, seed=1)[413] == 20


# --- clients that leave, and full queues ---------------------------------------------------------

LONG = {"prompt": TEXT, "max_tokens": 100, "temperature": 0.3, "n": 4, "seed": 1}


@pytest.fixture
def slowly(monkeypatch):
    """Makes rounds as slow as a larger model's."""
    poll = VariantQueue.poll

    def slow(self, next_request):
        time.sleep(0.03)
        return poll(self, next_request)

    monkeypatch.setattr(VariantQueue, "poll", slow)


def open_request(server, **body):
    data = json.dumps(LONG | body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), TIMEOUT)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows(server, slowly, stream):
    engine = server.engine
    gone = open_request(server, stream=stream)
    until(lambda: engine.num_running == 4)
    waits = open_request(server, stream=stream)
    until(lambda: engine.num_waiting == 4)
    waits.close()
    until(lambda: engine.num_waiting == 0)
    gone.close()
    until(lambda: engine.num_running == 0)
    page = server.ask("GET", "/metrics")[1].decode()
    assert float(re.search(r"^specjax_rows_left_total (\S+)$", page, re.M)[1]) >= 8
    out = generated(server, sampling=sj.Sampling(), max_new_tokens=12)
    answer = server.complete(prompt=TEXT, temperature=0, max_tokens=12)
    assert answer["choices"][0]["text"] == out.text[0]


def test_a_full_queue_says_so(server, slowly):
    first = open_request(server, stream=True)
    until(lambda: server.engine.num_running == 4)
    second = open_request(server, n=20, stream=True)
    until(lambda: server.engine.num_waiting == 20)
    status, answer, headers = server.ask("POST", "/v1/completions", {"prompt": TEXT})
    assert status == 429 and answer["error"]["code"] == "queue_full"
    assert headers["retry-after"] == "1"
    first.close()
    second.close()
    until(lambda: server.engine.num_running == server.engine.num_waiting == 0)
    assert server.complete(prompt=TEXT, max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_failure_ends_its_requests_alone(server, monkeypatch, caplog):
    """The log gets the device's error, the client one line, and the next client an answer."""

    def broken(self, next_request):
        if not self.waiting:
            return []
        monkeypatch.undo()
        raise RuntimeError("RESOURCE_EXHAUSTED: secret")

    until(lambda: not any(queue.busy for queue in server.engine._queues.values()))
    monkeypatch.setattr(VariantQueue, "poll", broken)
    status, answer, _ = server.ask("POST", "/v1/completions", {"prompt": TEXT})
    assert status == 500 and answer["error"]["code"] == "decoding_failed"
    assert "secret" not in json.dumps(answer) and "secret" in caplog.text
    assert server.complete(prompt=TEXT, max_tokens=2)["choices"]
    assert server.engine.num_running == server.engine.num_waiting == 0


@pytest.mark.slow
def test_64_clients_some_of_whom_leave(server):
    """No errors occur, no row is left over, and every answer equals that of generate."""
    rng = random.Random(0)
    asked = []
    for _ in range(192):
        settings = {"temperature": rng.choice((0, 0.9)), "seed": rng.randrange(3)}
        asked.append((settings | {"max_tokens": rng.choice((3, 17, 40))}, rng.random()))

    def one(body, chance):
        if chance < 1 / 3:
            connection = open_request(server, n=1, stream=chance < 1 / 6, **body)
            time.sleep(chance)
            connection.close()
            return None
        while True:  # the queue holds 40
            status, answer, _ = server.ask("POST", "/v1/completions", {"prompt": CODE} | body)
            if status != 429:
                assert status == 200, answer
                return answer["choices"][0]["text"]
            time.sleep(0.1)

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(lambda given: one(*given), asked))
    until(lambda: server.engine.num_running == server.engine.num_waiting == 0)
    wanted = {}
    for (body, _), text in zip(asked, texts, strict=True):
        kind = tuple(body.values())
        if text is not None and kind not in wanted:
            sampling = sj.Sampling(body["temperature"])
            settings = {"seed": body["seed"], "max_new_tokens": body["max_tokens"]}
            wanted[kind] = generated(server, CODE, sampling=sampling, **settings).text[0]
        assert text in (None, wanted.get(kind))
    assert texts.count(None) > 40 and len(wanted) == 18


@pytest.mark.slow
def test_sigterm_under_load_loses_no_request(tiny_pair_dirs):
    target, draft = tiny_pair_dirs
    command = [sys.executable, "-m", "infer.serve", "--target", target, "--draft", draft]
    command += ["--port", "0", "--batch-size", "4"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    port = int(re.search(r"http://127.0.0.1:(\d+)$", process.stderr.readline())[1])
    running = Running(*map(sj.load, tiny_pair_dirs), engine=None, admission=None, port=port)
    bodies = [
        {"prompt": TEXT, "temperature": 0.9, "seed": i, "max_tokens": 150, "stream": i % 2 == 1}
        for i in range(16)
    ]

    def came():
        page = running.ask("GET", "/metrics")[1].decode()
        rows = re.findall(r"^specjax_rows_(?:waiting|in_flight) (\S+)$", page, re.M)
        return sum(map(float, rows))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        asks = [pool.submit(running.ask, "POST", "/v1/completions", body) for body in bodies]
        until(lambda: came() == 16)
        process.send_signal(signal.SIGTERM)
        answers = [ask.result() for ask in asks]
    for body, (status, answer, _) in zip(bodies, answers, strict=True):
        want = {"sampling": sj.Sampling(0.9), "max_new_tokens": 150, "seed": body["seed"]}
        assert status == 200 and text_of(answer) == generated(running, **want).text[0]
    assert process.wait(TIMEOUT) == 0 and not process.stderr.read()
    with pytest.raises(ConnectionRefusedError):
        running.ask("GET", "/health")


def text_of(answer):
    """The text of an answer with one choice, whole or streamed."""
    if isinstance(answer, dict):
        return answer["choices"][0]["text"]
    *events, done, end = answer.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


# --- the page ----------------------------------------------------------------------------------


def test_the_page_loads_nothing_else(server):
    status, page, headers = server.ask("GET", "/")
    page = page.decode()
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    assert not re.findall(r"\b(?:src|href)=|@import|url\(|//\w+\.", page)
    asked = set(re.findall(r'\bat\("([\w-]+)"\)', page))
    assert asked and asked <= set(re.findall(r'\bid="([\w-]+)"', page))
    assert set(re.findall(r'fetch\("([^"]+)"', page)) == PATHS


def run_script(server, tmp_path, mode):
    """What the page's script shows of ``TEXT``, run with a stub of the browser's document."""
    script = re.search("<script>(.*)</script>", server.ask("GET", "/")[1].decode(), re.S)[1]
    support = Path(__file__).parents[1] / "support" / "page.js"
    file = tmp_path / "page.js"
    file.write_text(support.read_text().replace("SCRIPT;", script))
    command = ["node", str(file), server.url, TEXT, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_the_page_s_script_sends_chats_through_the_template(server, tmp_path):
    """A turn is asked of the chat's endpoint, and its answer is shown in the authors' colors."""
    shown = run_script(server, tmp_path, "chat")
    assert not shown["error"] and shown["text"][0] == [f"user: {TEXT}\n", "prompt"]
    written = "".join(text for text, author in shown["text"] if author != "prompt")
    assert written and shown["same"] == "the same"


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_the_page_s_script(server, tmp_path):
    """It shows what generate gives, and the counters."""
    shown = run_script(server, tmp_path, "text")
    assert not shown["error"]
    out = generated(server, max_new_tokens=24, options={"gamma": 4})
    written = [[text, author] for text, author in shown["text"] if author != "prompt"]
    assert shown["text"][0] == [TEXT, "prompt"]
    assert "".join(text for text, _ in written) == out.text[0]
    assert {author for _, author in written} == {"draft", "target"}
    assert "".join(text for text, author in shown["plain"] if author == "target") == out.text[0]
    stats = {name: values[0] for name, values in out.stats.items()}
    assert shown["per-pass"] == f"{stats['emitted'] / stats['target_calls']:.2f}"
    share = f"{100 * stats['accepted'] / stats['tested']:.0f}"
    assert shown["accepted"] == f"{share} % of {stats['tested']}"
    assert shown["same"] == "the same" and shown["ratio"].endswith("×") and not shown["error"]


@pytest.mark.slow
@pytest.mark.skipif(not make_page.chromium(), reason="needs chromium")
def test_the_page_in_a_browser(server):
    """It shows a completion, colors and figures, and cannot reach another site."""

    async def use():
        async with make_page.opened(server.url + "/") as page:
            await page.until("document.readyState === 'complete' && at('model').textContent")
            await page.evaluate("at('mode').value = 'text'")
            await page.evaluate(f"at('prompt').value = {json.dumps(TEXT)}; at('tokens').value = 24")
            await page.evaluate("at('run').click()")
            await page.until(make_page.DONE)
            shown = await page.evaluate(
                "JSON.stringify(Object.fromEntries(RESULTS.map((id) => [id, at(id).textContent])))"
            )
            colors = "new Set([...at('text').children].map((s) => getComputedStyle(s).color)).size"
            refused = "fetch('https://127.0.0.1:1/').catch((e) => { window.refused = e.name; })"
            await page.evaluate(refused)
            hidden = await page.evaluate("at('keyed').offsetParent === null")
            await page.until("window.refused")
            return json.loads(shown), hidden, await page.evaluate(colors), await page.picture()

    shown, hidden, colors, picture = asyncio.run(use())
    out = generated(server, max_new_tokens=24)
    assert shown["text"] == shown["plain"] == TEXT + out.text[0]
    assert shown["same"] == "the same" and shown["ratio"].endswith("×") and not shown["error"]
    assert hidden and colors == 3 and picture.startswith(b"\x89PNG")
