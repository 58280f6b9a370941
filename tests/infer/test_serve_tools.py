"""``python -m infer.serve``: tools, from the request to calls in the answer, by OpenAI's client."""

import json
from typing import Literal

import openai
import pydantic
import pytest
from test_serve import LIMITS

from support.schemas import validate
from support.scripted import ids_of, strip_tokenizer, writer
from support.serving import openai_client, served_models, serving

TEMPLATE = (
    "{% if tools %}<tools>{{ tools|tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function|tojson }}</tool_call>"
    "{% endfor %}{% endfor %}<assistant>"
)
USER = {"role": "user", "content": "a"}
MOVE = {
    "type": "object",
    "properties": {
        "way": {"enum": ["up", "down"]},
        "steps": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["way", "steps"],
    "additionalProperties": False,
}
STOP = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"move": MOVE, "stop": STOP}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "move"}}
ASKED = {"model": "tiny", "messages": [USER], "max_tokens": 200}


@pytest.fixture(scope="module")
def server(tiny_pair_dirs, tmp_path_factory):
    home = tmp_path_factory.mktemp("served") / "target"
    with serving(*served_models(tiny_pair_dirs, home, TEMPLATE), *LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai_client(server)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": ["way"]}, "parameters.properties: expected an object"),
        ({"properties": {}, "required": 3}, "parameters.required: expected a list of names"),
        ({"properties": {"way": {"enum": 5}}}, "parameters.properties.way.enum: expected a list"),
    ],
)
def test_a_schema_of_other_types_is_refused(server, schema, says):
    tool = {"type": "function", "function": {"name": "move", "parameters": schema}}
    status, answer, _ = server.ask("POST", "/v1/chat/completions", ASKED | {"tools": [tool]})
    assert status == 400 and says in answer["error"]["message"]


def test_arguments_that_nest_too_deep_are_a_text(server):
    call = {"id": "a", "type": "function", "function": {"name": "move", "arguments": "[" * 10**5}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    status, answer, _ = server.ask("POST", "/v1/chat/completions", ASKED | {"messages": messages})
    assert status == 400 and "at most" in answer["error"]["message"]


def check_calls(calls):
    """The names of an answer's calls, which must fit their schemas."""
    assert len({call.id for call in calls}) == len(calls) > 0
    for call in calls:
        validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


@pytest.mark.parametrize(
    "method",
    [
        "speculative",
        pytest.param("lookup", marks=pytest.mark.slow),
        pytest.param("autoregressive", marks=pytest.mark.slow),
    ],
)
def test_required_calls_parse_and_fit(client, method):
    asked = ASKED | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    extra = {"method": method}
    answer = client.chat.completions.create(**asked, n=3, seed=1, extra_body=extra)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert len(check_calls(choice.message.tool_calls)) == 1


def test_the_named_function_is_called(client):
    asked = ASKED | {"tools": TOOLS, "tool_choice": NAMED, "temperature": 0}
    (choice,) = client.chat.completions.create(**asked).choices
    assert check_calls(choice.message.tool_calls) == ["move"]
    assert choice.finish_reason == "tool_calls"


def test_a_stream_is_the_calls_in_pieces(client):
    """OpenAI's client puts the deltas together."""
    asked = ASKED | {"tools": TOOLS, "tool_choice": NAMED, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as events:
        chunks = [event.chunk for event in events if event.type == "chunk"]
        streamed = events.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert [
        (call.type, call.function.name, call.function.arguments)
        for call in streamed.message.tool_calls
    ] == [(call.type, call.function.name, call.function.arguments) for call in whole.tool_calls]
    assert chunks[0].choices[0].delta.role == "assistant"
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert len(parts) > len(whole.tool_calls)  # arguments come in pieces
    assert all(bool(part.id) == bool(part.function.name) for part in parts)


class Move(pydantic.BaseModel):
    """Moves."""

    way: Literal["up", "down"]
    steps: Literal[1, 2, 3]


@pytest.mark.slow
def test_openai_s_client_parses_tools_and_answers(client):
    tool = openai.pydantic_function_tool(Move)
    choice = {"type": "function", "function": {"name": "Move"}}
    answer = client.chat.completions.parse(**ASKED, tools=[tool], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Move)
    # With a strict tool and a format, what the client parses is one of both.
    for bias in ({"{": 100, "<": -100}, {"{": -100, "<": 100}):
        ids = {client_id(client, text): value for text, value in bias.items()}
        answer = client.chat.completions.parse(
            **ASKED,
            tools=[tool],
            parallel_tool_calls=False,
            response_format=Move,
            logit_bias=ids,
        )
        message = answer.choices[0].message
        parsed = message.parsed or message.tool_calls[0].function.parsed_arguments
        assert isinstance(parsed, Move)
        assert (message.parsed is None) == (bias["<"] > 0)


def client_id(client, text):
    """The id of a text that is one token."""
    body = {"prompt": text, "add_special_tokens": False}
    url = client.base_url.copy_with(path="/tokenize")
    (token,) = client.post(str(url), body=body, cast_to=dict)["tokens"]
    return token


def test_results_go_back_to_the_model(server, client):
    asked = ASKED | {"tools": TOOLS, "tool_choice": NAMED}
    said = client.chat.completions.create(**asked).choices[0].message
    call = said.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    for message in (said, said.model_dump(), said.model_dump(exclude_none=True)):
        messages = [USER, message, result]
        answer = client.chat.completions.create(**(asked | {"messages": messages}))
        assert check_calls(answer.choices[0].message.tool_calls) == ["move"]
    body = {"messages": [USER, said.model_dump(), result], "tools": TOOLS}
    _, counted, _ = server.ask("POST", "/tokenize", body)
    arguments = json.loads(call.function.arguments)
    function = json.dumps({"name": "move", "arguments": arguments})
    assert server.target.tokenizer.decode(counted["tokens"]) == (
        f"<tools>{json.dumps(TOOLS)}</tools><user>a<assistant>"
        f"<tool_call>{function}</tool_call><tool>done<assistant>"
    )


@pytest.mark.slow
def test_without_a_choice_of_tools_the_text_is_as_ever(client):
    asked = ASKED | {"temperature": 0, "max_tokens": 9}
    plain = client.chat.completions.create(**asked).choices[0]
    none = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none").choices[0]
    assert none.message == plain.message
    strict = [{"type": "function", "function": {"name": "f", "parameters": MOVE, "strict": True}}]
    for tools in (TOOLS, strict):
        (auto,) = client.chat.completions.create(**asked, tools=tools).choices
        assert (auto.finish_reason, auto.message.tool_calls) == ("length", None)
        assert auto.message.content


TOO_LONG = {"type": "function", "function": {"name": "f" * 65}}
IMPOSSIBLE = {"allOf": [{"type": "string"}, {"type": "integer"}]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": 5}, "tools", "tools=5: expected a list"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "expected one of 'function'"),
        ({"tools": [TOO_LONG]}, "tools[0].function.name", "expected a text that fits"),
        ({"tools": [TOOLS[0]] * 2}, "tools", "tools[1].function.name='move': expected another"),
        ({"tools": [TOOLS[0]] * 129}, "tools", "at most 128 entries"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "expected one of 'none', 'auto' o"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "or a function's name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "tool_choice.function.name='g': expected one of move, stop",
        ),
        (
            {"tools": TOOLS, "structured_outputs": {"regex": "a"}},
            "tools",
            "tools and structured_outputs: expected one of them",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": IMPOSSIBLE}}
                ],
                "tool_choice": "required",
            },
            "tools",
            "Unsatisfiable schema",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "method": "beam", "temperature": 0},
            "tools",
            "this method does not support grammars",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[1].tool_calls[0].function.name",
            "is missing",
        ),
    ],
)
def test_what_is_wrong_is_one_line(server, fields, param, says):
    body = ASKED | fields
    status, answer, _ = server.ask("POST", "/v1/chat/completions", body)
    error = answer["error"]
    assert (status, error["param"]) == (400, param)
    assert says in error["message"] and "\n" not in error["message"]


# --- a model that writes calls by itself ------------------------------------------------------

PIECES = ("Go:", "▁[", '{"name":', '▁"move",', '▁"arguments":', '▁{"way":', '▁"up"}', "}", "]")
SPECIAL = ("<s>", "</s>", "<go>", "[TOOL_CALLS]")


@pytest.fixture(scope="module")
def calling():
    """A server of a model that answers each chat with a text and a call, in Mistral's form."""
    tokenizer = strip_tokenizer(*PIECES, special=SPECIAL)
    tokenizer._chat_template = tokenizer._tool_template = (
        "{% if tools %}[TOOL_CALLS]{% endif %}{{ messages[0].content }}<go>"
    )
    ids = ids_of(tokenizer, "<go>", "Go:", "[TOOL_CALLS]", *PIECES[1:])
    with serving(writer(tokenizer, ids, 1), None, "--max-output", "40") as running:
        yield running


def test_special_tokens_begin_calls(calling):
    client = openai_client(calling)
    asked = {"model": "tiny", "messages": [USER], "tools": TOOLS, "temperature": 0}
    (choice,) = client.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Go:")
    assert (call.function.name, call.function.arguments) == ("move", '{"way": "up"}')
    assert len(call.id) == 9
    with client.chat.completions.stream(**asked) as events:
        (streamed,) = events.get_final_completion().choices
    assert streamed.message.content == "Go:" and streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls[0].function.arguments == '{"way": "up"}'
    (cut,) = client.chat.completions.create(**asked, max_tokens=7).choices
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls[0].function.arguments == '{"way":'
    (none,) = client.chat.completions.create(**asked, tool_choice="none").choices
    assert none.message.tool_calls is None and none.message.content.startswith("Go: [{")


def test_a_call_in_a_channel_ends_an_answer_of_gpt_oss():
    """``<|call|>`` is an end of sequence there, and its arguments are whole without it."""
    special = ("<s>", "<|call|>", "<go>", "<|channel|>", "<|constrain|>", "<|message|>")
    pieces = ("comm", "entary", "▁to=functions.", "move", "▁", "json", '{"way":', '▁"up"}')
    tokenizer = strip_tokenizer(*pieces, special=special)
    tokenizer._chat_template = tokenizer._tool_template = (
        "{% if tools %}<|channel|>{% endif %}{{ messages[0].content }}<go>"
    )
    begin = "<go>", "<|channel|>", *pieces[:5], "<|constrain|>", "json", "<|message|>"
    ids = ids_of(tokenizer, *begin, *pieces[6:])
    with serving(writer(tokenizer, ids, 1), None, "--max-output", "40") as running:
        client = openai_client(running)
        asked = {"model": "tiny", "messages": [USER], "tools": TOOLS, "temperature": 0}
        (choice,) = client.chat.completions.create(**asked).choices
        with client.chat.completions.stream(**asked) as events:
            (streamed,) = events.get_final_completion().choices
    for one in (choice, streamed):
        (call,) = one.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("move", '{"way": "up"}')
        assert (one.finish_reason, one.message.content or None) == ("tool_calls", None)


def test_a_model_without_tools_says_so(tiny_pair_dirs, tmp_path):
    with serving(*served_models(tiny_pair_dirs, tmp_path / "target"), *LIMITS) as running:
        status, answer, _ = running.ask("POST", "/v1/chat/completions", ASKED | {"tools": TOOLS})
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "chat template has no tools" in answer["error"]["message"]
