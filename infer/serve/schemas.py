"""What clients may send: OpenAI's fields, and ours. Anything else is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specjax._util.checks import SEED_MAX
from specjax._util.errors import OptionError
from specjax._util.files import parse_json

MOST_CHOICES = 128  # of a prompt
MOST_PROMPTS = 128  # of a request
MOST_STOPS = 16
MOST_TEXT_ALTERNATIVES, MOST_CHAT_ALTERNATIVES = 5, 20  # to a token: OpenAI's bounds
LONGEST_STOP = 256  # characters: so many are held back while they may begin one

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]
Setting = bool | int | float | str | list[int]


class _Strict(BaseModel):
    """No field that is not named, no value of another type, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None


class Body(_Strict):
    """What both kinds of request share. Of what is not supported, the neutral value passes."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=0, le=SEED_MAX)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    frequency_penalty: Literal[0, None] = None
    presence_penalty: Literal[0, None] = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    # Ours: any method and options of it, and who wrote what.
    method: str | None = None
    options: dict[str, Setting] | None = None
    top_k: int | None = Field(None, ge=0, lt=2**31)
    origins: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(Body):
    """``/v1/completions``."""

    prompt: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
    max_tokens: int | None = Field(None, ge=0)  # none: of an echo
    logprobs: int | None = Field(None, ge=0, le=MOST_TEXT_ALTERNATIVES)
    echo: bool | None = None
    best_of: int | None = None
    suffix: Literal[None] = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs if self.logprobs or (self.echo and self.wants_logprobs) else None

    @property
    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As templates read it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatBody(Body):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_CHAT_ALTERNATIVES)
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or None


def read(kind: type[Body], data: bytes) -> Body:
    """The body of a request.

    Raises:
      OptionError: it is no JSON, or not what ``kind`` describes; names the field.
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
