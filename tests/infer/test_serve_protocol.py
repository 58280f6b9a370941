"""``python -m infer.serve``: fields that clients of other servers send, and what errors say."""

import collections
import re

import hypothesis
import pytest
import schemathesis
from schemathesis.specs.openapi import checks as openapi_checks
from test_serve import LIMITS, REFUSED

import specjax as sj
from infer.serve.openapi import WITH_BODY
from infer.serve.schemas import UNSUPPORTED, ChatBody, CompletionBody
from support.serving import TIMEOUT, openai_client, served_models, serving

TEXT = "import jax"
# What each answer is held against. A schema cannot say which requests are good: how many tokens
# a text is, or which options a method has.
CONFORMANCE = ("status_code", "content_type", "response_schema", "response_headers")
USER = {"role": "user", "content": "a"}
CHAT = {"messages": [USER], "max_tokens": 2, "temperature": 0}
# What means nothing here, with a value that passes and one that does not.
NEUTRAL = {
    "skip_special_tokens": (True, False),
    "tools": ([], [{"type": "function"}]),
    "tool_choice": ("none", "required"),
    "functions": ([], [{}]),
    "modalities": (["text"], ["text", "audio"]),
    "detokenize": (True, False),
    "reasoning_effort": ("none", "low"),
    "documents": ([], [{"text": "a"}]),
    "return_token_ids": (False, True),
    "prompt_logprobs": (None, 0),
}
# Sampling settings: a value that is used, one that is refused, and what the refusal says.
SETTINGS = {
    "frequency_penalty": (0.5, 3, "at most 2"),
    "presence_penalty": (-1, -2.5, "at least -2"),
    "repetition_penalty": (1.1, 0, "more than 0"),
    "min_p": (0.1, 2, "at most 1"),
    "typical_p": (0.9, 0, "more than 0"),
    "min_tokens": (1, 3, "at most max_tokens=2"),
    "logit_bias": ({"5": 1}, {"99999": 1}, "token id 99999 is beyond the vocabulary"),
    "allowed_token_ids": ([5, 6], [99999], "token id 99999 is beyond the vocabulary"),
    "stop_token_ids": ([1], ["a"], "a whole number"),
    "bad_words": (["import"], [""], "at least 1 character"),
    "ignore_eos": (True, 1, "true or false"),
    "no_repeat_ngram_size": (2, -1, "at least 0"),
    "exponential_decay_length_penalty": ([1, 1.1], [1], "at least 2"),
}
PYDANTIC = re.compile(r"Input should|Extra inputs|Field required|valid|<|pydantic|dict\[|\bstr\b")
HARMLESS = {
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "user": "me",
    "safety_identifier": "me",
    "top_k": -1,
    "min_p": 0,
    "response_format": {"type": "text"},
    "stream_options": None,
    "reasoning_effort": None,
    "audio": None,
}


@pytest.fixture(scope="module")
def server(tiny_pair_dirs, tmp_path_factory):
    models = served_models(tiny_pair_dirs, tmp_path_factory.mktemp("served") / "target")
    with serving(*models, *LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai_client(server)


def asked(server, body, path="/v1/completions"):
    """The status and the error, or the answer."""
    status, answer, _ = server.ask("POST", path, body)
    return status, answer.get("error", answer)


# --- fields ------------------------------------------------------------------------------------


def test_what_changes_no_answer_is_not_kept():
    """Such a text may be as large as a body, and a request may wait for long."""
    body = CompletionBody(prompt="a", user="a" * 10**5, metadata={"a": "b"}, store=True)
    assert (body.user, body.metadata, body.store) == (None, None, None)


def test_fields_that_ask_for_nothing_pass(server):
    fields = HARMLESS | {name: passes for name, (passes, _) in NEUTRAL.items()}
    nulls = dict.fromkeys([*fields, *UNSUPPORTED])
    empty = [dict.fromkeys(UNSUPPORTED, value) for value in (False, "", [], {})]
    for path, plain in (
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 2, "temperature": 0}),
        ("/v1/chat/completions", CHAT),
    ):
        wanted = asked(server, plain, path)[1]["choices"]
        for more in (fields, nulls, *empty):
            status, answer = asked(server, plain | more, path)
            assert status == 200, answer
            assert answer["choices"] == wanted


@pytest.mark.parametrize("name", SETTINGS)
def test_sampling_settings_are_used_and_wrong_ones_are_refused(server, name):
    used, wrong, says = SETTINGS[name]
    body = {"prompt": TEXT, "max_tokens": 2}
    status, _ = asked(server, body | {name: used})
    assert status == 200
    status, error = asked(server, body | {name: wrong})
    assert (status, error["param"].partition(".")[0].partition("[")[0]) == (400, name)
    assert says in error["message"]


@pytest.mark.parametrize("name", [*NEUTRAL, "audio", "prediction", "guided_json", "suffix"])
def test_what_is_not_supported_says_so(server, name):
    value = NEUTRAL[name][1] if name in NEUTRAL else "x"
    status, error = asked(server, {"prompt": TEXT, name: value})
    assert status == 400 and error["param"] == name
    assert error["message"].startswith(f"{name}: not supported")


def test_seeds_of_64_bits(server):
    def seed(value):
        answer = server.complete(prompt=TEXT, max_tokens=8, seed=value)
        again = server.complete(prompt=TEXT, max_tokens=8, seed=answer["usage"]["decoding"]["seed"])
        assert again["choices"] == answer["choices"]
        return answer["usage"]["decoding"]["seed"]

    used = [seed(value) for value in (0, 2**32, -1, 2**64 - 1)]
    assert used == [0, 2**32, 2**64 - 1, 2**64 - 1]


def test_stream_options_need_a_stream(server):
    options = {"include_usage": True}
    status, error = asked(server, {"prompt": TEXT, "stream_options": options})
    assert (status, error["param"]) == (400, "stream_options")
    assert error["message"] == "stream_options needs stream"


def test_usage_in_every_chunk(client):
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=TEXT,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 12
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


# --- messages ----------------------------------------------------------------------------------


def test_an_answer_is_a_message_again(server, client):
    first = client.chat.completions.create(model="tiny", messages=[USER], max_tokens=3)
    message = first.choices[0].message
    raw = asked(server, CHAT, "/v1/chat/completions")[1]["choices"][0]["message"]
    for said in (message.model_dump(), message.model_dump(exclude_none=True), message, raw):
        answer = client.chat.completions.create(
            model="tiny", messages=[USER, said, USER], max_tokens=2
        )
        assert answer.choices[0].message.role == "assistant"


def test_messages_as_other_servers_write_them(server):
    said = {"role": "assistant", "content": None, "tool_calls": [], "reasoning_content": None}
    said |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "name"))
    tool = {"role": "tool", "content": "4", "tool_call_id": "call_1"}
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    body = CHAT | {"messages": [USER, said, tool, {"role": "user", "content": parts}]}
    assert asked(server, body, "/v1/chat/completions")[0] == 200
    status, counted = asked(server, {"messages": body["messages"]}, "/tokenize")
    text = server.target.tokenizer.decode(counted["tokens"])
    assert status == 200 and text == "<user>a<assistant><tool>4<user>ab<assistant>"


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({}, "prompt", "prompt is missing"),
        ({"prompt": 7}, "prompt", "prompt=7: expected a text, a list of token ids, or a list of e"),
        ({"prompt": [1, "a"]}, "prompt[1]", "prompt[1]='a': expected a whole number"),
        ({"prompt": ["a", 1]}, "prompt[1]", "prompt[1]=1: expected a text or a list of token ids"),
        ({"prompt": ["a", [1, -1]]}, "prompt[1][1]", "prompt[1][1]=-1: expected at least 0"),
        ({"prompt": [10**6]}, "prompt", "token ids must be from 0 to"),
        ({"prompt": TEXT, "stop": 5}, "stop", "stop=5: expected a text or a list of texts"),
        ({"prompt": TEXT, "stop": ["a", 5]}, "stop[1]", "stop[1]=5: expected a text"),
        ({"prompt": TEXT, "n": "2"}, "n", "n='2': expected a whole number"),
        ({"prompt": TEXT, "top_p": 0}, "top_p", "top_p=0: expected more than 0"),
        ({"prompt": TEXT, "echo": 1}, "echo", "echo=1: expected true or false"),
        ({"prompt": TEXT, "temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"prompt": TEXT, "max_tokens": 401}, "max_tokens", "max_tokens=401: at most 400"),
        ({"prompt": TEXT, "max_tokens": 0}, "max_tokens", "needs echo"),
        ({"prompt": TEXT, "best_of": 4}, "best_of", "best_of=4: expected n"),
        ({"prompt": TEXT, "model": "gpt"}, "model", "this server has 'tiny'"),
        ({"prompt": TEXT, "method": "speculativ"}, "method", "did you mean 'speculative'"),
        ({"prompt": TEXT, "options": {"gama": 4}}, "options", "did you mean 'gamma'"),
        ({"prompt": TEXT, "options": {"gamma": {}}}, "options.gamma", "expected a number, a text"),
        ({"prompt": TEXT, "n": 21}, "n", "21 completions at once: at most 20"),
        ({"prompt": TEXT, "stream_options": 5}, "stream_options", "expected an object"),
        ("a", None, "the body='a': expected an object"),
    ],
)
def test_errors_name_their_field(server, body, param, message):
    status, error = asked(server, body)
    assert status in (400, 404) and error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    "messages, param, message",
    [
        ([], "messages", "messages=[]: expected at least 1 entry"),
        ([5], "messages[0]", "messages[0]=5: expected an object"),
        ([USER, {"role": "x"}], "messages[1].role", "expected one of 'system'"),
        ([{"role": "user", "content": 5}], "messages[0].content", "a text or a list of parts"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0]",
            "not supported type 'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0]",
            'expected {"type": "text", "text": "…"}',
        ),
        (
            [{"role": "user", "content": [{"type": 5}]}],
            "messages[0].content[0]",
            'expected {"type": "text", "text": "…"}',
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls[0].function",
            "is missing",
        ),
    ],
)
def test_errors_of_messages_name_their_part(server, messages, param, message):
    status, error = asked(server, {"messages": messages}, "/v1/chat/completions")
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"tools": 5}, "tools", "tools=5: expected a list"),
        ({"tools": [5]}, "tools[0]", "tools[0]=5: expected an object"),
        ({"tools": [{"type": "x"}]}, "tools[0].type", "tools[0].type='x': expected one of"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
            "tools[0].function.parameters",
            "=5: expected an object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "tools": 5}}]},
            "tools[0].function.tools",
            "there is no such field; leave it out",
        ),
        ({"tool_choice": 5}, "tool_choice", "tool_choice=5: expected 'none', 'auto', 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "an object or a text"),
    ],
)
def test_errors_of_tools_name_their_part(server, fields, param, message):
    status, error = asked(server, CHAT | fields, "/v1/chat/completions")
    assert (status, error["param"]) == (400, param)
    assert message in error["message"] and not PYDANTIC.search(error["message"])


def test_no_error_speaks_pydantic(server):
    for body, *_ in REFUSED:
        error = server.ask("POST", "/v1/completions", body)[1]["error"]
        assert not PYDANTIC.search(f"{error['message']} {error['param']}")


# --- other paths -------------------------------------------------------------------------------


def test_version_and_tokens(server):
    assert server.ask("GET", "/version")[1] == {"version": sj.__version__}
    tokenizer = server.target.tokenizer
    status, answer = asked(server, {"prompt": TEXT, "return_token_strs": True}, "/tokenize")
    ids = tokenizer.encode(TEXT)
    assert status == 200 and answer["tokens"] == ids and answer["count"] == len(ids)
    assert answer["max_model_len"] == server.target.config.max_position
    assert len(answer["token_strs"]) == len(ids)
    body = {"prompt": TEXT, "add_special_tokens": False, "model": "tiny"}
    assert asked(server, body, "/tokenize")[1]["tokens"] == tokenizer.encode(TEXT, False)
    status, answer = asked(server, {"tokens": tokenizer.encode(TEXT, False)}, "/detokenize")
    assert (status, answer) == (200, {"prompt": TEXT})
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "b"}, "model"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [0] * 10**5}, "tokens"),
    ):
        status, error = asked(server, body, path)
        assert status in (400, 404) and error["param"] == param


def test_the_schema_has_every_field_and_path(server):
    schema = server.ask("GET", "/openapi.json")[1]
    assert set(WITH_BODY) < set(schema["paths"])
    for kind in (CompletionBody, ChatBody):
        assert set(schema["components"]["schemas"][kind.__name__]["properties"]) == set(
            kind.model_fields
        )


@pytest.mark.slow
def test_requests_made_of_the_schema(server):
    """Whatever the schema allows, and what it does not: no 500, and each answer fits the schema."""
    checks = [schemathesis.checks.not_a_server_error]
    checks += [getattr(openapi_checks, f"{name}_conformance") for name in CONFORMANCE]
    schema = schemathesis.openapi.from_dict(server.ask("GET", "/openapi.json")[1])
    statuses = collections.Counter()
    # Of what the schema allows, half of the requests have values that are refused.
    requests = {
        schemathesis.GenerationMode.POSITIVE: 100,
        schemathesis.GenerationMode.NEGATIVE: 40,
    }

    def test_of(operation, mode):
        @hypothesis.settings(
            max_examples=requests[mode],
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def test(case):
            answer = case.call(base_url=server.url, timeout=TIMEOUT)
            statuses[answer.status_code] += 1
            case.validate_response(answer, checks=checks)

        return test

    for result in schema.get_all_operations():
        operation = result.ok()
        test_of(operation, schemathesis.GenerationMode.POSITIVE)()
        if operation.body:  # without one, nothing can be wrong
            test_of(operation, schemathesis.GenerationMode.NEGATIVE)()
    print(statuses)
    assert 500 not in statuses and statuses[200] > 100 and statuses[400] > 100
