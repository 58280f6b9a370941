"""What a chat request with tools asks for, and the grammar that its answer must follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer.serve.refusals import naming
from infer.serve.schemas import ChatBody, NamedTool
from infer.serve.tools.families import ToolFamily
from infer.serve.tools.grammars import ANY_OBJECT, CallGrammar
from specjax._util.errors import OptionError
from specjax.text.tokenizer import Tokenizer


def check_tools(body: ChatBody) -> None:
    """Refuses fields that contradict each other.

    Raises:
      OptionError: names the field.
    """
    names = [tool.function.name for tool in body.tools or ()]
    with naming("tools"):
        for number, name in enumerate(names):
            if name in names[:number]:
                raise OptionError(f"tools[{number}].function.name={name!r}: expected another name")
        for number, tool in enumerate(body.tools or ()):
            _check_schema(f"tools[{number}].function.parameters", tool.function.parameters or {})
        if names and body.structured_outputs:
            raise OptionError("tools and structured_outputs: expected one of them")
    choice = body.tool_choice
    with naming("tool_choice"):
        if choice in (None, "none", "auto"):
            return
        if not names:
            raise OptionError("tool_choice needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise OptionError(
                f"tool_choice.function.name={choice.function.name!r}: "
                f"expected one of {', '.join(names)}"
            )


def _check_schema(name: str, schema: Mapping[str, Any]) -> None:
    """Refuses a function's schema whose fields have other types than JSON schema gives them.

    Raises:
      OptionError: names the field.
    """
    properties = schema.get("properties") or {}  # null stands for none
    if not isinstance(properties, dict):
        raise OptionError(f"{name}.properties: expected an object")
    if not isinstance(schema.get("required") or [], list):
        raise OptionError(f"{name}.required: expected a list of names")
    for key, value in properties.items():
        if isinstance(value, dict) and not isinstance(value.get("enum", []), list):
            raise OptionError(f"{name}.properties.{key}.enum: expected a list")


def grammar_of_calls(body: ChatBody, family: ToolFamily, tokenizer: Tokenizer) -> str:
    """What the answer must follow, as :class:`specjax.Sampling` takes it; empty: nothing.

    Calls that are required or named fit their schemas. Where the model may choose, those of
    functions with ``strict`` do.
    """
    choice = body.tool_choice or "auto"
    functions = {tool.function.name: tool.function for tool in body.offered_tools}
    if isinstance(choice, NamedTool):
        functions = {choice.function.name: functions[choice.function.name]}
    schemas = {name: function.parameters for name, function in functions.items()}
    form = body.response_format
    if choice == "auto" and not (form and form.grammar):
        if not any(function.strict for function in functions.values()):
            return ""
        for name, function in functions.items():
            if not function.strict:
                schemas[name] = ANY_OBJECT

    parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    grammar = CallGrammar(family, schemas, tokenizer.token_to_id, parallel)
    if choice != "auto":
        return grammar.required()
    if form and form.grammar:
        return grammar.or_answer(form.json_schema.json_schema if form.json_schema else ANY_OBJECT)
    return grammar.optional()
