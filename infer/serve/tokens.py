"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Any

from infer.serve.admission import Admission
from infer.serve.refusals import TooLong, naming
from infer.serve.schemas import DetokenizeBody, TokenizeBody, read
from specjax._util.errors import OptionError


def tokenize(admission: Admission, data: bytes | bytearray) -> dict[str, Any]:
    """The answer to ``/tokenize``: the token ids of a text, or of a chat by the model's template.

    Raises:
      SpecjaxError: a field is wrong, or the text is too long.
    """
    body = read(TokenizeBody, data)
    admission.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        with naming("prompt"):
            raise OptionError("expected prompt or messages, and not both")

    tokenizer = admission.target.tokenizer
    if body.messages is None:
        field = "prompt"
        text = body.prompt
        special = body.add_special_tokens is not False
    else:
        field = "messages"
        with naming(field):
            text = admission.chat_text(body.messages, body.tools or (), body.chat_template_kwargs)
        special = bool(body.add_special_tokens)  # a template writes them itself
    with naming(field):
        tokens = admission.text_ids(text, field, special)

    strings = None
    if body.return_token_strs:
        strings = [tokenizer.id_to_token(token) for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": admission.target.config.max_position,
        "tokens": tokens,
        "token_strs": strings,
    }


def detokenize(admission: Admission, data: bytes | bytearray) -> dict[str, Any]:
    """The answer to ``/detokenize``: the text of token ids, special tokens included.

    Raises:
      SpecjaxError: a field is wrong, an id does not exist, or there are too many.
    """
    body = read(DetokenizeBody, data)
    admission.check_model(body.model)
    tokenizer = admission.target.tokenizer
    context = admission.target.config.max_position
    with naming("tokens"):
        if len(body.tokens) > context:
            raise TooLong(f"tokens has {len(body.tokens)} ids: at most {context}")
        if max(body.tokens, default=0) >= tokenizer.vocab_size:
            raise OptionError(f"token ids must be from 0 to {tokenizer.vocab_size - 1}")
    return {"prompt": tokenizer.decode_with_special(body.tokens)}
