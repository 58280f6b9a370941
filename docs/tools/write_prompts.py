"""Prompts for SmolLM2's head and its figures: python docs/tools/write_prompts.py DIR

It writes DIR/chat.jsonl, DIR/code.jsonl and DIR/rewriting.jsonl, 40 prompts each, for infer.bench
with --chat. The questions of chat are below. Code asks to complete functions of Python's standard
library, and rewriting asks to change a little in one. Functions are read from the interpreter that
runs this, those that specjax/demo/heldout.json lists. DIR/training.jsonl has as many prompts about
functions of files that are not held out, for train.answers.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from specjax.demo.heldout import HeldOut, held_out_functions, parse_functions
from train.data.corpus import is_held_out, load_corpus

COUNT = 40
TRAINING = 160  # prompts of code, and as many of rewriting
CHARS = 500  # of a function, at most
CHAT = (
    "What is the capital of Australia, and what is it known for?",
    "How do plants make food from sunlight?",
    "Give me three tips for sleeping better.",
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper and a whale.",
    "Explain what inflation is to a ten-year-old.",
    "How do I cook rice without a rice cooker?",
    "What should I pack for a week in the mountains?",
    "Write a poem about the first snow.",
    "What is the difference between a virus and a bacterium?",
    "How can I learn to play the guitar as an adult?",
    "Summarize the plot of Romeo and Juliet.",
    "Suggest five names for a small bakery.",
    "How does a refrigerator work?",
    "Write an email that asks my landlord to repair the heating.",
    "What are the advantages of public transport?",
    "Tell me about the history of the bicycle.",
    "How do I remove a coffee stain from a shirt?",
    "What makes a good leader?",
    "Explain how a bill becomes law in the United States.",
    "Describe a sunset over the sea.",
    "What is machine learning?",
    "How much water should a person drink each day?",
    "Plan a birthday party for eight children.",
    "Why do cats purr?",
    "Give me a recipe for pancakes.",
    "How can a small shop find new customers?",
    "What causes earthquakes?",
    "Write a dialogue between a robot and a gardener.",
    "What is the best way to prepare for a job interview?",
    "How do vaccines work?",
    "Name some books that teach courage, and say why.",
    "What was the Silk Road?",
    "How do I start running if I have never done sport?",
    "Explain the rules of chess in a few sentences.",
    "What are black holes?",
    "How can I save money on groceries?",
    "Tell me a joke and explain why it is funny.",
    "What is the purpose of the United Nations?",
    "Give advice to somebody who moves to a new city.",
)
CODE = "Complete this Python function:\n\n```python\n{}\n```"
REWRITING = "Rename the function `{}` to `{}_2`, and write all of it again:\n\n```python\n{}\n```"


def about_functions(functions: Iterable[HeldOut], count: int) -> tuple[list[str], list[str]]:
    """``count`` prompts of code and ``count`` of rewriting, each about another short function."""
    short = [one for one in functions if len(one.source) <= CHARS]
    code = [CODE.format(one.prompt[-CHARS:]) for one in short[:count]]
    rewriting = []
    for one in short[count : 2 * count]:
        name = one.name.rpartition(".")[2]
        rewriting.append(REWRITING.format(name, name, one.source))
    return code, rewriting


def training_functions() -> Iterator[HeldOut]:
    """Functions of the standard library's files that are not held out, in random order."""
    documents = load_corpus(["stdlib"])
    random.Random(0).shuffle(documents)
    for document in documents:
        if not is_held_out(document.name):
            yield from list(parse_functions(document.text, document.name))[:4]


def prompts() -> dict[str, list[str]]:
    """The prompts of each kind."""
    code, rewriting = about_functions(held_out_functions()[0], COUNT)
    for_code, for_rewriting = about_functions(training_functions(), TRAINING)
    training = for_code + for_rewriting
    return {"chat": list(CHAT), "code": code, "rewriting": rewriting, "training": training}


def lines(texts: Sequence[str]) -> Iterator[str]:
    """A line of a prompts file for each text."""
    for text in texts:
        yield json.dumps({"prompt": text}) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for kind, texts in prompts().items():
        (directory / f"{kind}.jsonl").write_text("".join(lines(texts)))


if __name__ == "__main__":
    main()
