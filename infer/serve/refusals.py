"""Error answers in OpenAI's form, and which error of ours becomes which."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import Response
from starlette.exceptions import HTTPException

from specjax._util.errors import OptionError, SpecjaxError, one_line

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class NoSuchModel(OptionError):
    """The request names another model than the served one."""


class TooLong(OptionError):
    """A prompt exceeds the server's limit or the model's context."""


class Refusal(Exception):
    """An error answer; ``headers`` are HTTP headers with _ for -.

    ``param`` is the field that the error is about, as ``messages[0].role``.
    """

    def __init__(
        self,
        status: int,
        message: object,
        code: str | None = None,
        param: str | None = None,
        **headers: str,
    ):
        self.status = status
        self.message = one_line(message)
        self.code = code
        self.param = param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def object(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": ERROR_TYPES.get(self.status, default),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.object, self.status, self.headers)


def refusal_of(error: Exception, private: Mapping[str, str]) -> Refusal:
    """The answer to an error, without the paths in ``private`` (:func:`public`)."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):
        # A 405 has the header Allow.
        headers = {name.replace("-", "_"): value for name, value in (error.headers or {}).items()}
        return Refusal(error.status_code, error.detail, **headers)
    if not isinstance(error, SpecjaxError):
        return Refusal(500, "something failed; the server's log says what")

    message = public(str(error), private)
    param = getattr(error, "param", None)
    if isinstance(error, NoSuchModel):
        return Refusal(404, message, "model_not_found", param)
    if isinstance(error, TooLong):
        return Refusal(400, message, "context_length_exceeded", param)
    return Refusal(400, message, "invalid_value", param)


def public(text: str, private: Mapping[str, str]) -> str:
    """A text with what ``private`` has for each of its paths.

    Clients need not know where a model's directory lies.
    """
    for path in sorted(private, key=len, reverse=True):  # one may begin another
        text = text.replace(path, private[path])
    return text


@contextlib.contextmanager
def naming(param: str) -> Iterator[None]:
    """Errors raised inside are about the field ``param``, unless they name one themselves.

    An empty ``param`` is the whole body.
    """
    try:
        yield
    except SpecjaxError as error:
        error.param = getattr(error, "param", None) or param or None
        raise


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON in ASCII: a request may hold half of a surrogate pair, which UTF-8 cannot encode."""
    data = json.dumps(value).encode()
    return Response(data, status, headers, media_type="application/json")
