"""Calls of tools: what the parser reads of each family's text, however it is cut, and grammars."""

import itertools
import json
import re

import numpy as np
import pytest
from tokenizers import AddedToken

import specjax as sj
from infer.serve.tools import channel_calls, json_calls, json_object, reader, tag_calls
from infer.serve.tools.families import FAMILIES, family_name, find_family
from infer.serve.tools.grammars import CallGrammar
from infer.serve.tools.reading import call_reader
from specjax.text.grammar import make_matcher
from specjax.text.tokenizer import Tokenizer

A = ("get_weather", '{"city": "Ulm", "days": 2}')
B = ("add", '{"a": {"x": "}\\"{"}, "b": [1, {}]}')
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
QWEN = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n"
    "<parameter=days>\n{}\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
)
NO_VALUE = "<tool_call>f<arg_key>a</arg_key>b"
HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
ENDLESS = "<|channel|>" + "a" * 300
# Family, text, the calls in it, and the text outside of them.
CASES = {
    "hermes": ("hermes", HERMES.format(*A), [A], ""),
    "hermes, two": (
        "hermes",
        f"Let me see.\n{HERMES.format(*A)}\n{HERMES.format(*B)}",
        [A, B],
        "Let me see.",
    ),
    "hermes, text between": (
        "hermes",
        f"One {HERMES.format(*A)} two {HERMES.format(*B)} three",
        [A, B],
        "One two three",
    ),
    "hermes, arguments first": (
        "hermes",
        f'<tool_call>{{"arguments": {A[1]}, "name": "{A[0]}"}}</tool_call>',
        [A],
        "",
    ),
    "hermes, further fields": (
        "hermes",
        f'<tool_call>{{"id": 7, "name": "{A[0]}", "arguments": {A[1]}, "more": {{}}}}</tool_call>',
        [A],
        "",
    ),
    "hermes, a list": (
        "hermes",
        f'<tool_call>[{{"name": "{A[0]}", "arguments": {A[1]}}}]</tool_call>',
        [A],
        "",
    ),
    "hermes, arguments as text": (
        "hermes",
        f'<tool_call>{{"name": "{A[0]}", "arguments": {json.dumps(A[1])}}}</tool_call>',
        [A],
        "",
    ),
    "hermes, without arguments": (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call>',
        [("f", "{}")],
        "",
    ),
    "hermes, no end": ("hermes", HERMES.format(*A).removesuffix("call>"), [A], ""),
    "hermes, cut off": (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "b',
        [("f", '{"a": "b')],
        "",
    ),
    "text alone": ("hermes", " 1 < 2 and <tool \n", [], " 1 < 2 and <tool \n"),
    "no object": ("hermes", "a\n<tool_call>b</tool_call>c", [], "a\n<tool_call>b</tool_call>c"),
    "no name": ("hermes", '<tool_call>{"a": 1}</tool_call>', [], '<tool_call>{"a": 1}</tool_call>'),
    "no JSON": ("hermes", "<tool_call>{f: 1} more", [], "<tool_call>{f: 1} more"),
    "empty": ("hermes", "", [], ""),
    "llama": ("llama3_json", f'{{"name": "{A[0]}", "parameters": {A[1]}}}', [A], ""),
    "llama, marked": (
        "llama3_json",
        f'<|python_tag|>{{"name": "{A[0]}", "parameters": {A[1]}}}',
        [A],
        "",
    ),
    "llama, two": (
        "llama3_json",
        f' {{"name": "{A[0]}", "parameters": {A[1]}}}; {{"name": "{B[0]}", "parameters": {B[1]}}}',
        [A, B],
        "",
    ),
    "llama, an answer of JSON": ("llama3_json", '{"a": {"name": 1}}', [], '{"a": {"name": 1}}'),
    "llama, an answer with a name": (
        "llama3_json",
        '{"name": "Alice", "age": 30}',
        [],
        '{"name": "Alice", "age": 30}',
    ),
    "llama, JSON later": ("llama3_json", 'so {"name": "f"}', [], 'so {"name": "f"}'),
    "mistral": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "{A[0]}", "arguments": {A[1]}}}, '
        f'{{"name": "{B[0]}", "arguments": {B[1]}}}]',
        [A, B],
        "",
    ),
    "mistral, names first": (
        "mistral_args",
        f"Look: [TOOL_CALLS]{A[0]}[ARGS]{A[1]}[TOOL_CALLS]{B[0]}[CALL_ID]a1b2[ARGS] {B[1]}",
        [A, B],
        "Look:",
    ),
    "mistral, no name": ("mistral_args", "[TOOL_CALLS]a b", [], "[TOOL_CALLS]a b"),
    "qwen coder": ("qwen3_coder", QWEN.format("Ulm", 2), [A], ""),
    "qwen coder, two": (
        "qwen3_coder",
        f"So.\n\n{QWEN.format('Ulm', 2)}\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n",
        [A, ("now", "{}")],
        "So.",
    ),
    "qwen coder, lines and what looks like JSON": (
        "qwen3_coder",
        QWEN.format("  12\n<b>\n", '{"a": [1, null]}'),
        [("get_weather", '{"city": "  12\\n<b>\\n", "days": {"a": [1, null]}}')],
        "",
    ),
    "qwen coder, no JSON": (
        "qwen3_coder",
        QWEN.format("", "NaN days"),
        [("get_weather", '{"city": "", "days": "NaN days"}')],
        "",
    ),
    "qwen coder, a key twice": (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        [("f", '{"a": 1}')],
        "",
    ),
    "qwen coder, text in a call": (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>1</parameter>and</function></tool_call>",
        [("f", '{"a": 1}')],
        "and</function></tool_call>",
    ),
    "qwen coder, cut off": (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</param",
        [("f", '{"a": 1')],
        "",
    ),
    "qwen coder, JSON": ("qwen3_coder", HERMES.format(*A), [], HERMES.format(*A)),
    "qwen coder, no name": (
        "qwen3_coder",
        "a <tool_call><function=>b",
        [],
        "a <tool_call><function=>b",
    ),
    "glm": ("glm45", GLM.format("Ulm", 2), [A], ""),
    "glm, on one line": ("glm45", GLM.format("Ulm", 2).replace("\n", ""), [A], ""),
    "glm, two": (
        "glm45",
        f"So.\n{GLM.format('Ulm', 2)}\n<tool_call>now\n</tool_call>\nbye",
        [A, ("now", "{}")],
        "So.\nbye",
    ),
    "glm, no call": ("glm45", "<tool_call>f <b>", [], "<tool_call>f <b>"),
    "glm, no value": ("glm45", NO_VALUE, [], NO_VALUE),
    "glm, a text of digits": (
        "glm45",
        GLM.format("12", "12"),
        [("get_weather", '{"city": "12", "days": 12}')],
        "",
    ),
    "gpt-oss": ("openai", HARMONY.format(*A), [A], ""),
    "gpt-oss, thoughts first": (
        "openai",
        f"<|channel|>analysis<|message|>Hm <b<|end|><|start|>assistant{HARMONY.format(*A)}",
        [A],
        "",
    ),
    "gpt-oss, recipient first": (
        "openai",
        f" to=functions.{A[0]}<|channel|>commentary json<|message|>{A[1]}",
        [A],
        "",
    ),
    "gpt-oss, a preamble": (
        "openai",
        f"<|channel|>commentary<|message|>Let me.<|end|><|start|>assistant{HARMONY.format(*A)}",
        [A],
        "Let me.",
    ),
    "gpt-oss, an answer": (
        "openai",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
        "<|channel|>final<|message|>1 < 2<|return|>",
        [],
        "1 < 2",
    ),
    "gpt-oss, cut off": (
        "openai",
        HARMONY.format(*A).removesuffix("2}<|call|>"),
        [(A[0], A[1].removesuffix("2}"))],
        "",
    ),
    "gpt-oss, text alone": ("openai", "assistants <|chan", [], "assistants <|chan"),
    "gpt-oss, no channel": (
        "openai",
        "<|channel|>!<|message|>a",
        [],
        "<|channel|>!<|message|>a",
    ),
    "gpt-oss, a header without end": ("openai", ENDLESS, [], ENDLESS),
}


def parsed(family, pieces, most=None):
    """The text and calls, whole and put together of the deltas as OpenAI's clients do."""
    answer = call_reader(FAMILIES[family], most, SCHEMAS)
    content = ""
    calls = []
    for number, piece in enumerate(pieces):
        delta = answer.push(piece, last=number == len(pieces) - 1)
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            assert part["index"] in (len(calls) - 1, len(calls))
            if part["index"] == len(calls):
                assert part["type"] == "function" and part["id"]
                calls.append([part["function"]["name"], ""])
            calls[part["index"]][1] += part["function"]["arguments"]
    whole = [(call["function"]["name"], call["function"]["arguments"]) for call in answer.calls]
    assert (answer.content, whole) == (content, [tuple(call) for call in calls])
    return content, whole


@pytest.mark.parametrize("name", CASES)
def test_calls_of_a_text_however_it_is_cut(name):
    family, text, calls, content = CASES[name]
    wanted = (content, calls)
    assert parsed(family, [text]) == wanted
    assert parsed(family, [*text, ""]) == wanted
    for first in range(len(text)):
        for second in range(first, len(text) + 1, 3):
            assert parsed(family, [text[:first], text[first:second], text[second:]]) == wanted


def ignores_quotes(self, mark):
    """``JsonObject._read`` that counts braces inside of texts, too."""
    if mark != '"':
        self._depth += 1 if mark == "{" else -1
        if self._depth == 0:
            self.end = self._seen


MUTANTS = {
    "a marker that is cut is shown as text": (reader, "overlap", lambda text, marker: 0),
    "braces inside of texts count": (json_object.JsonObject, "_read", ignores_quotes),
    "an escaped quote ends a text": (json_object, "MARKS", re.compile(r'[{}"]')),
    "calls in a list are not read": (json_calls, "SEPARATORS", re.compile(r"\s*")),
    "a name that is not written to its end counts": (
        json_calls,
        "ARGS",
        re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*"),
    ),
    "what is no call is lost": (json_calls.JsonCalls, "_drop", lambda self, current: self._leave()),
    "a tag that is cut is no tag": (tag_calls, "_nested", lambda pieces, rest="": ""),
    "a text of digits is a number": (tag_calls, "is_plain_text", lambda schema: False),
    "an end of a message that is cut is text": (channel_calls, "overlap", lambda text, end: 0),
    "a message goes on past the next one's channel": (channel_calls, "ENDS", ("<|return|>",) * 3),
    "thoughts are content": (reader.CallReader, "_think", reader.CallReader._write),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_parser_is_caught(mutant, monkeypatch):
    """Some case, cut somewhere, is then read in another way, or not at all."""
    assert all(read_as_wanted())
    monkeypatch.setattr(*MUTANTS[mutant])
    assert not all(read_as_wanted())


def read_as_wanted():
    """Whether each case, cut at each place, gives its calls and text."""
    seen = []
    for family, text, calls, content in CASES.values():
        for cut in range(len(text)):
            answer = call_reader(FAMILIES[family], schemas=SCHEMAS)
            answer._step = limited(answer._step)
            try:
                seen.append(read_in(answer, [text[:cut], text[cut:]]) == (content, calls))
            except (AssertionError, AttributeError, IndexError, TypeError):
                seen.append(False)
    return seen


def limited(step, most=1000):
    """The step, which fails if it never ends: a mutant may go round in circles."""
    count = itertools.count()

    def run():
        assert next(count) < most
        return step()

    return run


def read_in(answer, pieces):
    for number, piece in enumerate(pieces):
        answer.push(piece, last=number == len(pieces) - 1)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in answer.calls]
    return answer.content, calls


def test_arguments_come_while_they_are_written():
    answer = call_reader(FAMILIES["hermes"])
    begin = '<tool_call>\n{"name": "f", "arguments": '
    assert answer.push(begin) == {}
    (first,) = answer.push('{"a')["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": '{"a'}
    assert answer.push('": 1')["tool_calls"] == [{"index": 0, "function": {"arguments": '": 1'}}]
    assert answer.push("}}")["tool_calls"] == [{"index": 0, "function": {"arguments": "}"}}]
    assert answer.push("\n</tool_call>", last=True) == {}


def test_one_call_at_most():
    family, text, calls, _ = CASES["hermes, two"]
    for pieces in ([text], [*text]):
        assert parsed(family, pieces, most=1) == ("Let me see.", calls[:1])


def test_mistral_s_ids_have_nine_letters_and_digits():
    new_id = FAMILIES["mistral"].new_id()
    assert len(new_id) == 9 and new_id.isalnum()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{{ tools }}{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=f>{% endif %}", "qwen3_coder"),
        ("{% if tools %}<tool_call>f<arg_key>a{% endif %}", "glm45"),
        ("{% if tools %}<|channel|>commentary to={{ tools }}{% endif %}", "openai"),
        ("{% if tools %}[TOOL_CALLS] [{{ tools }}]{% endif %}", "mistral"),
        ("{% if tools %}[TOOL_CALLS]f[ARGS]{{ tools }}{% endif %}", "mistral_args"),
        ('{% if tools %}{"name": "f", "parameters": {}}{% endif %}', "llama3_json"),
        ("<tool_call>", None),
        (None, None),
    ],
)
def test_the_template_tells_the_family(template, name):
    assert family_name(template) == name


def test_a_family_that_is_not_known_is_one_line():
    with pytest.raises(sj.OptionError, match="--tool-call-parser names one of hermes, ") as caught:
        find_family(None)
    assert "\n" not in str(caught.value)


# --- grammars ----------------------------------------------------------------------------------

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer"}},
    },
    "now": None,
}
NOW = ("now", "{}")


def written(family, calls):
    """Calls as the family writes them, by its parts."""
    heads = [
        family.head.replace("NAME", name) + written_arguments(family, arguments)
        for name, arguments in calls
    ]
    return family.before + family.between.join(head + family.tail for head in heads) + family.end


def written_arguments(family, arguments):
    if not family.key:
        return arguments
    return "".join(
        family.key.replace("KEY", key)
        + (value if isinstance(value, str) else json.dumps(value))
        + family.value_end
        for key, value in json.loads(arguments).items()
    )


def may_end(matcher, vocab):
    bits = np.zeros(-(-vocab // 32), np.int32)
    matcher.fill(bits)
    return bool(bits[0] & 1)


def fits(grammar, tokenizer, text):
    """Whether a grammar allows a text, and then its end."""
    matcher = make_matcher(grammar, tokenizer, tokenizer.vocab_size, (0,))
    return all(map(matcher.advance, tokenizer.encode(text, False))) and may_end(
        matcher, tokenizer.vocab_size
    )


@pytest.fixture(scope="module", params=[False, True], ids=["texts", "tokens"])
def tokenizer(request):
    """The demo's, without the families' tokens or with them."""
    backend = sj.load("demo").tokenizer._backend
    backend = type(backend).from_str(backend.to_str())
    if request.param:
        tokens = {token for family in FAMILIES.values() for token in family.tokens}
        backend.add_tokens([AddedToken(token, special="[" in token) for token in sorted(tokens)])
    return Tokenizer(backend)


@pytest.mark.parametrize("name", FAMILIES)
def test_grammars_allow_calls_that_fit_and_no_others(name, tokenizer):
    family = FAMILIES[name]
    marker = "" if family.bare else family.marker
    grammar = CallGrammar(family, SCHEMAS, tokenizer.token_to_id, parallel=True)
    single = CallGrammar(family, SCHEMAS, tokenizer.token_to_id, parallel=False)

    def allowed(text):
        return [
            fits(form, tokenizer, text)
            for form in (
                grammar.required(),
                single.required(),
                grammar.optional(),
                grammar.or_answer({"type": "boolean"}),
            )
        ]

    assert allowed(marker + written(family, [A])) == [True, True, True, True]
    assert parsed(name, [marker + written(family, [A])]) == ("", [A])
    if family.channels:  # an answer has one call
        check_channels(allowed, marker + written(family, [A]))
        return
    assert allowed(marker + written(family, [A, NOW])) == [True, False, True, True]
    assert allowed(marker + written(family, [("get_weather", '{"city": 1}')])) == [False] * 4
    assert allowed(marker + written(family, [("other", "{}")])) == [False] * 4
    assert allowed(marker + written(family, [("now", '{"a": 1}')])) == [False] * 4
    assert allowed("Some text.") == [False, False, True, False]
    assert allowed("true") == [False, False, True, True]
    if not family.bare:
        assert allowed("So: " + marker + written(family, [A])) == [False, False, True, False]
    assert parsed(name, [marker + written(family, [A, NOW])]) == ("", [A, NOW])


def check_channels(allowed, call):
    """Thoughts may come first, and an answer has a channel of its own."""
    thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    assert allowed(thought + call) == [True] * 4
    assert allowed(thought + final + "Some text.") == [False, False, True, False]
    assert allowed(final + "true") == [False, False, True, True]
    assert allowed(call.replace("2}", '"2"}')) == [False] * 4
    assert allowed(call.replace("get_weather", "other")) == [False] * 4


TYPED = {
    "type": "object",
    "properties": {
        "way": {"enum": ["up", "down"]},
        "count": {"type": ["integer", "null"]},
        "note": {"type": "string"},
    },
    "required": ["way", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_tags_fit_the_schemas_of_their_values(name, tokenizer):
    family = FAMILIES[name]
    schemas = {"move": TYPED, "any": {"type": "object"}}
    grammar = CallGrammar(family, schemas, tokenizer.token_to_id, parallel=True).required()

    def allowed(function, **arguments):
        text = written(family, [(function, json.dumps(arguments))])
        return fits(grammar, tokenizer, family.marker + text)

    assert allowed("move", way="up", count=12)
    assert allowed("move", way="down", count=None, note='a "b"\n<c>')
    assert not allowed("move", way="left", count=12)
    assert not allowed("move", way="up", count="many")
    assert not allowed("move", way="up")
    assert not allowed("move", way="up", count=1, other=2)
    assert allowed("any", a="b", c=3)
    assert allowed("any")
