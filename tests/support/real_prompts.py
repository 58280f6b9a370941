"""Forty prompts for pretrained models: chat, code, prose, other scripts, and a long one."""

from pathlib import Path

LICENSE = Path(__file__).parents[2] / "LICENSE"
LONG_TOKENS = 1500

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Why is the sky blue?",
    "How many days has a leap year?",
    "Write a haiku about the sea.",
    "What does HTTP stand for?",
    "Translate 'good morning' into Spanish.",
    "Explain gravity to a child.",
    "What is 12 times 12?",
    "Give me a recipe for pancakes.",
)
CODE = (
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef softmax(x):\n",
    "class Stack:\n    def __init__(self):\n",
    "for (int i = 0; i < n; i++) {\n",
    "SELECT name, COUNT(*) FROM users\nWHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    "const add = (a, b) =>",
    "fn main() {\n    let mut total = 0;\n",
    "<!DOCTYPE html>\n<html>\n<head>\n",
    "git commit -m",
)
PROSE = (
    "Once upon a time, in a village by the sea,",
    "The history of the Roman Empire begins with",
    "Water boils at one hundred degrees because",
    "It was a dark and stormy night;",
    "In economics, supply and demand",
    "The three laws of motion state that",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondrion is the",
    "To be, or not to be, that is",
    "1, 2, 3, 5, 8, 13,",
)
SCRIPTS = (
    "La Révolution française a commencé en",
    "Die Würde des Menschen ist",
    "Москва является столицей",
    "日本の首都は",
    "人工智能是",
    "الذكاء الاصطناعي هو",
    "Η Αθήνα είναι",
    "대한민국의 수도는",
    "🙂🙃 emoji: 👩‍👩‍👧",
)


def prompts_of(tokenizer) -> list[list[int]]:
    """The token ids of all forty; the questions are chats where the model has a template."""
    texts = (*CODE, *PROSE, *SCRIPTS)
    rows = [tokenizer.encode(text) for text in texts]
    if tokenizer.chats:
        rows += [tokenizer.encode_chat(question) for question in QUESTIONS]
    else:
        rows += [tokenizer.encode(question) for question in QUESTIONS]
    rows.append(tokenizer.encode(LICENSE.read_text())[:LONG_TOKENS])
    return rows
