"""What is asked: conversations of files, without their answers, or openings for the model.

Questions are numbered from 0 in the order in which they are read. The number fixes the random keys
and the temperature of a question, and the process that answers it.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax.text.conversations import ASSISTANT, Message, read_conversation
from train.data.corpus import source_files
from train.data.reading import Intake, TextPiece, records


@dataclasses.dataclass(frozen=True)
class Asked:
    """A conversation to be answered.

    Attributes:
      index: its number.
      name: where it comes from.
      turns: the messages before each answer, since the answer before it.
      tools: the functions that the assistant may call; None: there are none.
      opening: how the model begins what the user says; None: the user's turns are given.
      temperature: of the answers.
    """

    index: int
    name: str
    turns: tuple[tuple[Message, ...], ...]
    tools: list[Any] | None = None
    opening: str | None = None
    temperature: float = 0.0


@dataclasses.dataclass(frozen=True)
class TemperatureChoice:
    """Temperatures, and how often each is drawn.

    Attributes:
      shares: by temperature, each above 0.
      seed: decides, with a question's number, which one is drawn.
    """

    shares: Mapping[float, float]
    seed: int

    def temperature(self, index: int) -> float:
        """The temperature of question number ``index``."""
        ends = list(itertools.accumulate(self.shares.values()))
        place = random.Random(f"{self.seed} {index}").random() * ends[-1]
        return list(self.shares)[bisect.bisect_right(ends, place)]


def file_questions(
    files: Sequence[str], mixture: TemperatureChoice, intake: Intake
) -> Iterator[Asked]:
    """The conversations of files, one at a time; what is none is counted by the intake.

    Raises:
      InputError: a file cannot be read.
    """
    index = 0
    for piece in itertools.chain.from_iterable(source_files((), files, intake)):
        for number, record in records(piece, intake):
            question = _question(piece, number, record, index, mixture, intake)
            if question is not None:
                yield question
                index += 1


def _question(
    piece: TextPiece,
    number: int,
    record: Any,
    index: int,
    mixture: TemperatureChoice,
    intake: Intake,
) -> Asked | None:
    """A record as a question; None if it is none."""
    name = f"{piece.name}#{number}"
    try:
        conversation = read_conversation(_with_answer(record)) if isinstance(record, dict) else None
        if conversation is None:
            raise ValueError("no conversation")
        turns = split_turns(conversation.messages)
        if not turns:
            raise ValueError("no turn to answer")
    except ValueError as error:
        intake.refuse(str(error), name)
        return None
    return Asked(index, name, turns, conversation.tools, None, mixture.temperature(index))


def _with_answer(record: dict[str, Any]) -> dict[str, Any]:
    """The record with an empty answer where a form has one and the record does not."""
    for asked, answer in (("prompt", "completion"), ("instruction", "output")):
        if record.get(asked) is not None and record.get(answer) is None:
            record = record | {answer: ""}
    return record


def is_answer(message: Message) -> bool:
    """Whether the model writes this message: it is the assistant's, and calls no tool."""
    return message["role"] == ASSISTANT and not message.get("tool_calls")


def split_turns(messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """The messages before each answer, since the answer before it.

    Calls of tools stay as they are given: what the tools returned belongs to them.
    """
    turns = []
    turn: list[Message] = []
    for message in messages:
        if is_answer(message):
            if turn:
                turns.append(tuple(turn))
            turn = []
        else:
            turn.append(message)
    if turn and turn[-1]["role"] in ("user", "tool"):
        turns.append(tuple(turn))
    return tuple(turns)


def own_questions(
    count: int, openings: Sequence[str], mixture: TemperatureChoice
) -> Iterator[Asked]:
    """Questions that the model writes itself, each after an opening."""
    for index in range(count):
        opening = random.Random(f"opening {mixture.seed} {index}").choice(openings)
        temperature = mixture.temperature(index)
        yield Asked(index, f"own#{index}", (), None, opening, temperature)
