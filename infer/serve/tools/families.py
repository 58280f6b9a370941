"""The forms in which models write calls of tools. Each belongs to a family of chat templates.

Calls in a text look like this, each part as the model was trained to write it::

    marker before head arguments tail between head arguments tail end

Arguments are an object of JSON, or a list of ``key value value_end`` where a family has keys.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import string
from collections.abc import Callable

from specjax._util.errors import OptionError


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates refuse ids other than nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclasses.dataclass(frozen=True)
class ToolFamily:
    """How one family of templates writes calls.

    Attributes:
      marker: begins calls. It may be a special token.
      before, between, end: around and between the calls of a text.
      head, tail: around the arguments of a call; ``NAME`` stands for the function's name.
      tokens: the parts that may be special tokens.
      bare: calls may begin a text without the marker.
      key, value_end: around the value of one argument; ``KEY`` stands for its name. Values that
        are texts have no quotes. Empty: arguments are JSON.
      channels: every text of the answer is a message in a channel, and so is a call.
      new_id: makes the id of a call.
    """

    marker: str
    before: str
    head: str
    tail: str
    between: str
    end: str
    tokens: tuple[str, ...]
    bare: bool = False
    key: str = ""
    value_end: str = ""
    channels: bool = False
    new_id: Callable[[], str] = _call_id

    @property
    def name_first(self) -> bool:
        """Whether the name stands before the arguments, and not in one object with them."""
        return self.head.startswith("NAME")


FAMILIES = {
    # Hermes, Qwen 2.5 and 3, SmolLM3 and others.
    "hermes": ToolFamily(
        marker="<tool_call>",
        before="\n",
        head='{"name": "NAME", "arguments": ',
        tail="}",
        between="\n</tool_call>\n<tool_call>\n",
        end="\n</tool_call>",
        tokens=("<tool_call>", "</tool_call>"),
    ),
    # Llama 3.1 to 3.3.
    "llama3_json": ToolFamily(
        marker="<|python_tag|>",
        before="",
        head='{"name": "NAME", "parameters": ',
        tail="}",
        between="; ",
        end="",
        tokens=("<|python_tag|>",),
        bare=True,
    ),
    # Mistral's models, up to Small 3.1 and Large 2.
    "mistral": ToolFamily(
        marker="[TOOL_CALLS]",
        before="[",
        head='{"name": "NAME", "arguments": ',
        tail="}",
        between=", ",
        end="]",
        tokens=("[TOOL_CALLS]",),
        new_id=_short_id,
    ),
    # Mistral's models since Small 3.2.
    "mistral_args": ToolFamily(
        marker="[TOOL_CALLS]",
        before="",
        head="NAME[ARGS]",
        tail="",
        between="[TOOL_CALLS]",
        end="",
        tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        new_id=_short_id,
    ),
    # Qwen3-Coder and Qwen 3.5.
    "qwen3_coder": ToolFamily(
        marker="<tool_call>",
        before="\n",
        head="<function=NAME>\n",
        tail="</function>",
        between="\n</tool_call>\n<tool_call>\n",
        end="\n</tool_call>",
        tokens=("<tool_call>", "</tool_call>"),
        key="<parameter=KEY>\n",
        value_end="\n</parameter>\n",
    ),
    # GLM since 4.5.
    "glm45": ToolFamily(
        marker="<tool_call>",
        before="",
        head="NAME\n",
        tail="",
        between="</tool_call>\n<tool_call>",
        end="</tool_call>",
        tokens=(
            *("<tool_call>", "</tool_call>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        key="<arg_key>KEY</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
    ),
    # gpt-oss: OpenAI's Harmony. A call ends the answer, for <|call|> is an end of sequence.
    "openai": ToolFamily(
        marker="<|channel|>commentary to=functions.",
        before="",
        head="NAME <|constrain|>json<|message|>",
        tail="",
        between="",
        end="",
        tokens=(
            *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
            *("<|end|>", "<|call|>", "<|return|>"),
        ),
        channels=True,
    ),
}
# What a template says in which a family writes calls, in the order of trial.
SIGNS = (
    ("mistral_args", r"\[ARGS\]"),
    ("mistral", r"\[TOOL_CALLS\]"),
    ("openai", r"<\|channel\|>"),
    ("qwen3_coder", r"<tool_call>[\s\S]*<function="),
    ("glm45", r"<tool_call>[\s\S]*<arg_key>"),
    ("hermes", r"<tool_call>"),
    ("llama3_json", r'<\|python_tag\|>|"parameters":'),
)


def family_name(template: str | None) -> str | None:
    """The name of the family that a chat template belongs to; None: it is none of these."""
    if not template or not re.search(r"\btools\b", template):
        return None
    for name, sign in SIGNS:
        if re.search(sign, template):
            return name
    return None


def find_family(name: str | None) -> ToolFamily:
    """The family of a name.

    Raises:
      OptionError: there is none.
    """
    if name is None:
        raise OptionError(
            "the model's chat template has no tools, or writes calls in a form that is not known; "
            f"--tool-call-parser names one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]
