"""The server's OpenAPI document: requests from their own schemas, and what answers look like."""

from __future__ import annotations

import functools
from importlib import metadata
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from infer.serve.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

REFERENCE = "#/components/schemas/{model}"
COMMON_ERRORS = (400, 401, 403, 404, 405, 408, 500, 503)
BODY_ERRORS = (*COMMON_ERRORS, 413, 415, 429)


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer of 400 and above."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Prompt tokens that the prefix cache had."""

    cached_tokens: int


class DecodingUsage(BaseModel):
    """How decoding went."""

    method: str
    seed: int
    acceptance_rate: float | None
    target_passes: int
    draft_passes: int
    drafted: int
    tested: int
    accepted: int
    accepted_emitted: int
    rounds: int
    tokens_per_target_pass: float | None
    seconds: float
    first_token_seconds: float
    tokens_per_second: float | None


class Usage(BaseModel):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    decoding: DecodingUsage


class Acceptance(BaseModel):
    """How the drafts of a completion fared, in vLLM's words."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class RequestMetrics(BaseModel):
    """Numbers of a request; null where nothing was drafted, or for several completions."""

    speculative_decoding: Acceptance | None


class TextLogprobs(BaseModel):
    """Log-probabilities of a completion, in nats."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    origins: list[list[str]] | None = None


class CompletionAnswer(BaseModel):
    """The answer to ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    metrics: RequestMetrics


class ChatToken(BaseModel):
    """A token and its log-probability, in nats."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenWithTop(ChatToken):
    """A token with the most likely ones in its place."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message."""

    content: list[ChatTokenWithTop]


class AnswerFunction(BaseModel):
    """The function of a call, and its arguments as a text of JSON."""

    name: str
    arguments: str


class AnswerCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnswerCall] | None = None


class ChatChoice(BaseModel):
    """One message."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    origins: list[list[str]] | None = None


class ChatAnswer(BaseModel):
    """The answer to ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics


class ModelAnswer(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    method: str
    draft: str | None
    max_model_len: int
    max_prompt_tokens: int
    max_output_tokens: int


class ModelList(BaseModel):
    """The answer to ``/v1/models``."""

    object: Literal["list"]
    data: list[ModelAnswer]


class MethodOption(BaseModel):
    """An option of a method."""

    name: str
    default: str
    help: str


class MethodAnswer(BaseModel):
    """A method, and why the loaded models cannot run it, if they cannot."""

    name: str
    summary: str
    needs: str
    lossless: bool
    options: list[MethodOption]
    refused: str | None


class MethodList(BaseModel):
    """The answer to ``/v1/methods``."""

    object: Literal["list"]
    data: list[MethodAnswer]
    chats: bool  # whether the model has a chat template


class TokenizeAnswer(BaseModel):
    """The answer to ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    """The answer to ``/detokenize``."""

    prompt: str


class VersionAnswer(BaseModel):
    """The answer to ``/version``."""

    version: str


class HealthAnswer(BaseModel):
    """The answer to ``/health``."""

    status: Literal["ok"]


WITH_BODY = {
    "/v1/completions": (CompletionBody, CompletionAnswer),
    "/v1/chat/completions": (ChatBody, ChatAnswer),
    "/tokenize": (TokenizeBody, TokenizeAnswer),
    "/detokenize": (DetokenizeBody, DetokenizeAnswer),
}
WITHOUT_BODY = {
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelAnswer,
    "/v1/methods": MethodList,
    "/version": VersionAnswer,
    "/health": HealthAnswer,
}
TEXTS = {"/metrics": "text/plain", "/": "text/html"}
# One event of a stream. Its data is a chunk as JSON, an error, or [DONE].
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
STREAMS = ("/v1/completions", "/v1/chat/completions")


@functools.cache
def schema_of(model: str) -> dict[str, Any]:
    """The document of a server that has this model, as OpenAPI 3.1 says."""
    answers = [answer for _, answer in WITH_BODY.values()] + list(WITHOUT_BODY.values())
    models = [(body, "validation") for body, _ in WITH_BODY.values()]
    models += [(answer, "serialization") for answer in (*answers, ErrorAnswer)]
    _, definitions = models_json_schema(models, ref_template=REFERENCE)

    paths: dict[str, Any] = {}
    for path, (body, answer) in WITH_BODY.items():
        content = _json(answer)
        if path in STREAMS:
            content["text/event-stream"] = {"schema": EVENT}
        request = {"required": True, "content": _json(body)}
        paths[path] = {"post": _operation(content, BODY_ERRORS) | {"requestBody": request}}
    for path, answer in WITHOUT_BODY.items():
        paths[path] = {"get": _operation(_json(answer), COMMON_ERRORS)}
    for path, media_type in TEXTS.items():
        content = {media_type: {"schema": {"type": "string"}}}
        paths[path] = {"get": _operation(content, COMMON_ERRORS)}
    name = {"name": "name", "in": "path", "required": True, "schema": {"const": model}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name]
    for body, _ in WITH_BODY.values():
        definitions["$defs"][body.__name__]["properties"]["model"] = {"enum": [None, model]}

    return {
        "openapi": "3.1.0",
        "info": {"title": "specjax", "version": metadata.version("specjax")},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


def _json(model: type[BaseModel]) -> dict[str, Any]:
    reference = REFERENCE.format(model=model.__name__)
    return {"application/json": {"schema": {"$ref": reference}}}


def _operation(content: dict[str, Any], errors: tuple[int, ...]) -> dict[str, Any]:
    """What a request is answered with, ``content`` or an error."""
    answers: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for status in errors:
        answers[str(status)] = {"description": "an error", "content": _json(ErrorAnswer)}
    return {"responses": answers}
