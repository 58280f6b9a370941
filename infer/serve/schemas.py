"""The fields of a request: OpenAI's, vLLM's and ours. Unknown fields are refused by name.

Three kinds of fields are not ours and mean nothing here. A field of :func:`_neutral` passes with
the values that ask for nothing, such as ``"tools": []``, and is refused with any other. A field
like ``store`` or ``metadata`` passes with every value of its type, since it changes no answer.
:data:`UNSUPPORTED` are names that get a clear refusal.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from infer.serve.field_errors import MARK, UNSUPPORTED_TYPE, describe
from infer.serve.refusals import naming
from specjax._util.errors import OptionError
from specjax._util.files import parse_json
from specjax._util.sampling_checks import JSON, LARK, REGEX, SCHEMA
from specjax.text.conversations import with_object

MAX_CHOICES = 128  # completions of a prompt
MAX_PROMPTS = 128  # of a request
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_WORDS = 128
MAX_MESSAGES = 4096  # of a chat
MAX_TOOLS = 128  # of a request, as OpenAI limits them; and calls of a message
MAX_OPTIONS = 64
# Alternatives to a token, as OpenAI limits them.
MAX_COMPLETION_ALTERNATIVES = 5
MAX_CHAT_ALTERNATIVES = 20
# Characters of a stop string. A stream delays text that may be the beginning of one.
MAX_STOP_LENGTH = 256


def _neutral(*values: Any) -> Any:
    """The type of an unsupported field: null and these values ask for nothing, and become None."""

    def check(value: Any) -> None:
        for allowed in values:
            # True and 1 are equal in Python, but not in JSON.
            if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
                return None
        if value is None:
            return None
        raise PydanticCustomError(UNSUPPORTED_TYPE, "not supported")

    schema = {"enum": [None, *values]}
    return Annotated[Any, PlainValidator(check), WithJsonSchema(schema)]


def _one_of_kinds(expected: str, kind_of: Any) -> Discriminator:
    """Chooses the branch of a union by ``kind_of``, so that errors are about that branch alone."""
    return Discriminator(kind_of, custom_error_type="no_such_kind", custom_error_message=expected)


def _text_or_list(value: Any) -> str | None:
    """The tag of a text or a list, None of anything else."""
    if isinstance(value, str):
        return f"{MARK}text"
    if isinstance(value, list):
        return f"{MARK}list"
    return None


def _prompt_kind(value: Any) -> str | None:
    """The tag of a text, a list of token ids, or a list of prompts."""
    kind = _text_or_list(value)
    # An empty list counts as one prompt without tokens.
    if isinstance(value, list) and (not value or _is_id(value[0])):
        return f"{MARK}ids"
    return kind


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_setting(value: Any) -> Any:
    """The value of a method's option, as JSON says it."""
    values = value if isinstance(value, list) else [value]
    kinds = (int, float) if isinstance(value, list) else (bool, int, float, str)
    if not all(isinstance(item, kinds) for item in values):
        expected = "expected a number, a text, true, false, or a list of numbers"
        raise PydanticCustomError("no_such_kind", expected)
    return value


_NUMBER = {"type": "number"}
_SETTING_SCHEMA = {
    "anyOf": [
        {"type": "boolean"},
        _NUMBER,
        {"type": "string"},
        {"type": "array", "items": _NUMBER},
    ]
}
Setting = Annotated[Any, PlainValidator(_check_setting), WithJsonSchema(_SETTING_SCHEMA)]

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = Annotated[
    Annotated[StopText, Tag(f"{MARK}text")]
    | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag(f"{MARK}list")],
    _one_of_kinds("expected a text or a list of texts", _text_or_list),
]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]  # OpenAI's range
Ids = Annotated[list[Id], Tag(f"{MARK}ids")]
Prompt = Annotated[
    Annotated[str, Tag(f"{MARK}text")] | Ids,
    _one_of_kinds("expected a text or a list of token ids", _prompt_kind),
]
Prompts = Annotated[
    Annotated[str, Tag(f"{MARK}text")]
    | Ids
    | Annotated[list[Prompt], Field(max_length=MAX_PROMPTS), Tag(f"{MARK}list")],
    _one_of_kinds("expected a text, a list of token ids, or a list of either", _prompt_kind),
]


LengthDecay = Annotated[list[float], Field(min_length=2, max_length=2)]  # a start, a factor
# The value is checked and not kept: it may be as large as a body, and a request may wait for long.
UNUSED = AfterValidator(lambda value: None)


class _Strict(BaseModel):
    """Refuses unknown fields, values of another type, and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: each chunk has the usage so far
    include_obfuscation: bool | None = None  # OpenAI's padding of chunks, which we never send


class _Unsupported(_Strict):
    """Fields of OpenAI and vLLM that pass with values that ask for nothing."""

    length_penalty: _neutral(1) = None
    use_beam_search: _neutral(False) = None
    include_stop_str_in_output: _neutral(False) = None
    skip_special_tokens: _neutral(True) = None
    spaces_between_special_tokens: _neutral(True) = None
    functions: _neutral([]) = None
    function_call: _neutral("none", "auto") = None
    modalities: _neutral(["text"]) = None
    priority: _neutral(0) = None
    detokenize: _neutral(True) = None
    reasoning_effort: _neutral("none") = None
    # These change no answer, whatever their value.
    user: Annotated[str | None, UNUSED] = None
    store: Annotated[bool | None, UNUSED] = None
    metadata: Annotated[dict[str, str] | None, UNUSED] = None
    service_tier: Annotated[str | None, UNUSED] = None
    safety_identifier: Annotated[str | None, UNUSED] = None
    prompt_cache_key: Annotated[str | None, UNUSED] = None
    prompt_cache_retention: Annotated[str | None, UNUSED] = None


class SamplingFields(_Strict):
    """How tokens are drawn, by vLLM's names; :class:`specjax.Sampling` says what they do."""

    temperature: float | None = Field(None, ge=0, le=1e38)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)  # 0 and vLLM's -1: off
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    epsilon_cutoff: float | None = Field(None, ge=0, lt=1)
    eta_cutoff: float | None = Field(None, ge=0, lt=1)
    top_n_sigma: float | None = Field(None, ge=0, le=1e30)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=1e30)
    no_repeat_ngram_size: int | None = Field(None, ge=0, lt=2**31)
    dry_multiplier: float | None = Field(None, ge=0, le=1e30)
    dry_base: float | None = Field(None, ge=1, le=1e30)
    dry_allowed_length: int | None = Field(None, ge=0, lt=2**31)
    dry_sequence_breakers: Annotated[list[Id], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[list[Id], Field(min_length=1)] | None = None
    suppress_tokens: Annotated[list[Id], Field(max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_WORDS)] | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    exponential_decay_length_penalty: LengthDecay | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=MAX_STOPS)] | None = None


class SchemaFormat(_Strict):
    """The ``json_schema`` of a response format; ``strict`` always holds here."""

    name: str
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's: any text, a JSON object, or what fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @property
    def grammar(self) -> str:
        """The grammar, as :class:`specjax.Sampling` takes it; empty if every text fits."""
        if self.type == "text":
            return ""
        if self.type == "json_object":
            return JSON
        if self.json_schema is None:
            raise OptionError("response_format.json_schema is missing")
        return SCHEMA + json.dumps(self.json_schema.json_schema)


def _schema_kind(value: Any) -> str | None:
    """The tag of a schema as an object or as a text, None of anything else."""
    if isinstance(value, dict):
        return f"{MARK}object"
    return f"{MARK}text" if isinstance(value, str) else None


Schema = Annotated[
    Annotated[dict[str, Any], Tag(f"{MARK}object")] | Annotated[str, Tag(f"{MARK}text")],
    _one_of_kinds("expected an object or a text of JSON", _schema_kind),
]


class StructuredOutputs(_Strict):
    """vLLM's: exactly one of these."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[StopText], Field(min_length=1)] | None = None
    grammar_: str | None = Field(None, alias="grammar")

    @property
    def grammar(self) -> str:
        """As :attr:`ResponseFormat.grammar`."""
        forms = []
        if self.json_ is not None:
            schema = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            forms.append(SCHEMA + schema)
        if self.json_object:
            forms.append(JSON)
        if self.regex is not None:
            forms.append(REGEX + self.regex)
        if self.choice is not None:
            forms.append(REGEX + "|".join(map(re.escape, self.choice)))
        if self.grammar_ is not None:
            forms.append(LARK + self.grammar_)
        if len(forms) != 1:
            raise OptionError(
                f"structured_outputs: {len(forms)} kinds; expected one of json, json_object, "
                "regex, choice or grammar"
            )
        return forms[0]


class Body(SamplingFields, _Unsupported):
    """The fields of both kinds of request."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    parallel_tool_calls: bool | None = None
    # Ours. ``origins``: say for each text whether the draft or the target wrote it.
    method: str | None = None
    options: Annotated[dict[str, Setting], Field(max_length=MAX_OPTIONS)] | None = None
    origins: bool | None = None

    @property
    def grammar(self) -> tuple[str, str]:
        """The field that asks for a grammar, and the grammar; both empty if none does.

        Raises:
          OptionError: the field is not complete, or both are given.
        """
        asked = [name for name in ("response_format", "structured_outputs") if getattr(self, name)]
        if not asked:
            return "", ""
        with naming(asked[0]):
            if len(asked) > 1:
                raise OptionError("response_format and structured_outputs: expected one of them")
            return asked[0], getattr(self, asked[0]).grammar

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())

    @property
    def whole_seed(self) -> int | None:
        """The seed from 0 on; −1 is the largest of 64 bits."""
        return None if self.seed is None else self.seed % 2**64


class CompletionBody(Body):
    """``/v1/completions``."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)  # 0: an echo alone
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_ALTERNATIVES)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)
    suffix: _neutral("") = None
    tools: _neutral([]) = None
    tool_choice: _neutral("none", "auto") = None
    add_special_tokens: _neutral(True) = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def alternatives(self) -> int | None:
        """Alternatives per token; None if scores are not needed. An echo needs them even for 0."""
        if self.logprobs or (self.echo and self.wants_logprobs):
            return self.logprobs
        return None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, where ``prompt`` may be one text, one list of ids, or a list of either."""
        if _prompt_kind(self.prompt) == f"{MARK}list":
            return self.prompt
        return [self.prompt]


class Part(_Strict):
    """A part of a message. Only texts are supported, and a refusal that is sent back."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def content(self) -> str:
        return self.text or self.refusal or ""


def _check_part(value: Any) -> Part:
    """A text or a refusal; other kinds of parts are refused by their name."""
    kind = value.get("type") if isinstance(value, dict) else None
    fields = {"text": "text", "refusal": "refusal"}
    if isinstance(kind, str) and kind not in fields:
        raise PydanticCustomError(UNSUPPORTED_TYPE, "not supported", {"what": f"type {kind!r}"})
    if not isinstance(kind, str) or not isinstance(value.get(fields[kind]), str):
        expected = 'expected {"type": "text", "text": "…"}'
        raise PydanticCustomError("no_such_kind", expected)
    return Part(type=kind, **{fields[kind]: value[fields[kind]]})


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
TextPart = Annotated[Any, PlainValidator(_check_part), WithJsonSchema(_PART_SCHEMA)]
Content = Annotated[
    Annotated[str, Tag(f"{MARK}text")] | Annotated[list[TextPart], Tag(f"{MARK}list")],
    _one_of_kinds("expected a text or a list of parts", _text_or_list),
]


class CalledFunction(_Strict):
    """A function that was called; ``arguments`` is a text of JSON."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # what OpenAI's client adds


class Call(_Strict):
    """A call in a message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # where a client has put it together from a stream

    def plain(self) -> dict[str, Any]:
        """The call as chat templates read it, with its arguments as an object."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        call = {"type": self.type, "function": function}
        if self.id:
            call["id"] = self.id
        return with_object(call)


class Message(_Strict):
    """A message, such as this server has answered: clients send those back as they came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_TOOLS)] | None = None
    parsed: Any = None  # what OpenAI's client adds
    function_call: _neutral() = None
    audio: _neutral() = None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates read it, with its content as one text."""
        text = self.content
        if isinstance(text, list):
            text = "".join(part.content for part in text)
        message: dict[str, Any] = {"role": self.role, "content": text or self.refusal or ""}
        for field in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, field)
            if value:
                message[field] = value
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        return message


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class Function(_Strict):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool of a request."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates read it; they know no ``strict``."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        if self.function.parameters is not None:
            function["parameters"] = self.function.parameters
        return {"type": self.type, "function": function}


class FunctionName(_Strict):
    """Names one of the request's functions."""

    name: str


class NamedTool(_Strict):
    """A tool that must be called."""

    type: Literal["function"]
    function: FunctionName


def _choice_kind(value: Any) -> str | None:
    """The tag of a text or an object, None of anything else."""
    if isinstance(value, dict):
        return f"{MARK}named"
    return f"{MARK}mode" if isinstance(value, str) else None


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(f"{MARK}mode")]
    | Annotated[NamedTool, Tag(f"{MARK}named")],
    _one_of_kinds("expected 'none', 'auto', 'required' or a function's name", _choice_kind),
]


class ChatBody(Body):
    """``/v1/chat/completions``."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_CHAT_ALTERNATIVES)
    chat_template_kwargs: dict[str, Any] | None = None
    echo: _neutral(False) = None
    add_generation_prompt: _neutral(True) = None
    continue_final_message: _neutral(False) = None
    add_special_tokens: _neutral(False) = None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        if self.tool_choice == "none":
            return []
        return self.tools or []

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def alternatives(self) -> int | None:
        """Alternatives per token; None if there are none to give."""
        return self.top_logprobs or None


class TokenizeBody(_Strict):
    """``/tokenize``, of a text or of a chat, as vLLM has it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # default: true of a text, false of a chat
    add_generation_prompt: _neutral(True) = None
    continue_final_message: _neutral(False) = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Strict):
    """``/detokenize``, as vLLM has it."""

    model: str | None = None
    tokens: list[Id]


AnyBody = Body | TokenizeBody | DetokenizeBody
# Fields of OpenAI and vLLM that ask for nothing with null, false, and empty values alone.
UNSUPPORTED = frozenset(
    [
        "audio",
        "prediction",
        "verbosity",
        "web_search_options",
        "moderation",
        "documents",
        "chat_template",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "logits_processors",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "mm_processor_kwargs",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "prompt_embeds",
        "kv_transfer_params",
        "vllm_xargs",
        "prompt_cache_options",
    ]
)


def _asks_for_nothing(value: Any) -> bool:
    """Null, false, or an empty text, list or object; a number may mean something, even 0."""
    return value is None or value is False or value in ("", [], {})


def read(kind: type[AnyBody], data: bytes | bytearray) -> Any:
    """Parses and checks the body of a request.

    Raises:
      OptionError: it is not JSON, or a field is wrong; the message names the field.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        raise OptionError(f"the body is {error}") from None
    if isinstance(value, dict):
        for name in UNSUPPORTED:
            if _asks_for_nothing(value.get(name)):
                value.pop(name, None)

    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param, message = describe(first, kind.model_fields, UNSUPPORTED)
        with naming(param):
            raise OptionError(message) from None
    except RecursionError:
        raise OptionError("the body is nested too deeply") from None

    if isinstance(body, Body) and body.stream_options is not None and not body.stream:
        with naming("stream_options"):
            raise OptionError("stream_options needs stream")
    return body
