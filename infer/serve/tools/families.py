"""The forms in which models write calls of tools. Each belongs to a family of chat templates.

Calls in a text look like this, each part as the model was trained to write it::

    marker before head arguments tail between head arguments tail end
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
}
# What a template says in which a family writes calls, in the order of trial.
SIGNS = (
    ("mistral_args", r"\[ARGS\]"),
    ("mistral", r"\[TOOL_CALLS\]"),
    ("hermes", r"<tool_call>(?![\s\S]*(<function=|<arg_key>))"),  # neither XML nor GLM's pairs
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
