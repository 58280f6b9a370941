"""Chat templates, a tokenizer for them, conversations, and a reader that knows no template."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer

from support.training import code
from train.data.chats import ChatFormat
from train.data.tokenizer import train_tokenizer

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"),
    *("<bos>", "<turn>", "</turn>"),
)

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}"
    "{%- else %}{{ m.content + '<|im_end|>' }}{%- endif %}{{ '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
HEADERS = (
    "{{ '<|begin|>' }}{%- for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\n\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content|trim + '<|eot|>' }}"
    "{% endgeneration %}{%- else %}{{ m.content|trim + '<|eot|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{%- endif %}"
)
MODEL_TURNS = (
    "{{ '<bos>' }}{%- for m in messages %}"
    "{%- set role = 'model' if m.role == 'assistant' else m.role %}"
    "{%- if m.role == 'system' %}{{ raise_exception('no system turn') }}{%- endif %}"
    "{{ '<turn>' + role + '\n' + m.content|trim + '</turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<turn>model\n' }}{%- endif %}"
)
# Thinking stays only in the answers after the last turn of the user.
THINKING = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '[think]' + m.reasoning_content + '[/think]\n' }}{%- endif %}"
    "{{ m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\n' + tools|tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{ '[call]' + call.function.name + ' ' + call.function.arguments|tojson + '[/call]' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
# Writes an answer that does not begin as its generation prompt.
NEITHER = (
    "{%- for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant: [think]' }}{%- endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, ("<|im_start|>", "assistant", "\n"), "<|im_end|>"),
    "headers": (HEADERS, ("<|head|>", "assistant", "<|/head|>", "\n\n"), "<|eot|>"),
    "model turns": (MODEL_TURNS, ("<turn>", "model", "\n"), "</turn>"),
    "thinking": (THINKING, ("<|im_start|>", "assistant", "\n"), "<|im_end|>"),
    "tools": (TOOLS, ("<|im_start|>", "assistant", "\n"), "<|im_end|>"),
}


def chat_tokenizer(path) -> Tokenizer:
    """A byte-level tokenizer of code, with the special tokens of the templates."""
    tokenizer = train_tokenizer(code(), 400, path)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(path))
    return tokenizer


def chat_format(tokenizer: Tokenizer, template: str, **options) -> ChatFormat:
    return ChatFormat(tokenizer.to_str(), template, {}, "the tests", **options)


def turns(*contents: str) -> list[dict]:
    """Messages of the user and the assistant, in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def conversation(number: int) -> dict:
    """A conversation of two to six turns, whose answers think."""
    messages = turns(
        *[
            f"what is {number} + {i}?"
            if i % 2 == 0
            else f"it is {number + i}." + " ok" * (number * i % 7)
            for i in range(2 * (number % 3 + 1))
        ]
    )
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            message["reasoning_content"] = f"let me add {i}"
    return {"messages": messages}


def read_by_tokens(tokenizer: Tokenizer, ids, header, end: str) -> list[bool]:
    """Which ids are an answer's: those between a header and ``end``, which belongs to it."""
    begins = [tokenizer.encode(part, add_special_tokens=False).ids for part in header]
    begin = [i for part in begins for i in part]
    stop = tokenizer.token_to_id(end)
    inside = False
    mask = []
    for place, token in enumerate(ids):
        if not inside and list(ids[max(0, place - len(begin)) : place]) == begin:
            inside = True
        mask.append(inside)
        if token == stop:
            inside = False
    return mask
