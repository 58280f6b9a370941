"""The fields of a request: OpenAI's, and ours. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specjax._util.checks import SEED_MAX
from specjax._util.errors import OptionError
from specjax._util.files import parse_json

MAX_CHOICES = 128  # completions of a prompt
MAX_PROMPTS = 128  # of a request
MAX_STOPS = 16
# Alternatives to a token, as OpenAI limits them.
MAX_COMPLETION_ALTERNATIVES = 5
MAX_CHAT_ALTERNATIVES = 20
# Characters of a stop string. A stream delays text that may be the beginning of one.
MAX_STOP_LENGTH = 256

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]
Setting = bool | int | float | str | list[int]


class _Strict(BaseModel):
    """Refuses unknown fields, values of another type, and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None


class Body(_Strict):
    """The fields of both kinds of request.

    Unsupported fields, such as penalties, are accepted only with the value that has no effect.
    """

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=0, le=SEED_MAX)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    frequency_penalty: Literal[0, None] = None
    presence_penalty: Literal[0, None] = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    # Ours. ``origins``: say for each text whether the draft or the target wrote it.
    method: str | None = None
    options: dict[str, Setting] | None = None
    top_k: int | None = Field(None, ge=0, lt=2**31)
    origins: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())


class CompletionBody(Body):
    """``/v1/completions``."""

    prompt: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    max_tokens: int | None = Field(None, ge=0)  # 0: an echo alone
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_ALTERNATIVES)
    echo: bool | None = None
    best_of: int | None = None
    suffix: Literal[None] = None

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
        if isinstance(self.prompt, str):
            return [self.prompt]
        # An empty list counts as one prompt without tokens.
        is_ids = not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_ids else self.prompt


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message as chat templates read it, with its content as one text."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        message = {"role": self.role, "content": text}
        if self.name:
            message["name"] = self.name
        return message


class ChatBody(Body):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_CHAT_ALTERNATIVES)
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def alternatives(self) -> int | None:
        """Alternatives per token; None if there are none to give."""
        return self.top_logprobs or None


def read(kind: type[Body], data: bytes) -> Body:
    """Parses and checks the body of a request.

    Raises:
      OptionError: it is not JSON, or a field is wrong; the message names the field.
    """
    try:
        value = parse_json(data)
    except ValueError as error:
        raise OptionError(f"the body is {error}") from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise OptionError(f"{where}: {first['msg']}") from None
    except RecursionError:
        raise OptionError("the body is nested too deeply") from None
