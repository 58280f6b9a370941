"""The job of ``train.answers``: questions in blocks, answered turn by turn, written as they end."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import specjax as sj
from specjax import lm
from specjax._util.compilation_cache import use_compilation_cache
from specjax._util.errors import InputError, SpecjaxError
from specjax._util.parts import locked_output, part_files
from specjax._util.program import Place, say
from specjax._util.waiting import waiting
from specjax.core.mesh import make_mesh
from specjax.registry import method
from specjax.runtime.generate import ALL_ROUNDS
from train.answers.dialogue import Dialogue, Writer, Written
from train.answers.journal import COMPLETE, AnswerJournal
from train.answers.openings import OPENINGS, read_openings
from train.answers.questions import Asked, TemperatureChoice, file_questions, own_questions
from train.data.chats import ChatFormat, read_template
from train.data.corpus import source_files
from train.data.hub import hub_revision, is_on_hub
from train.data.reading import Intake, unreadable
from train.data.shards.files import file_digest

NAME = "train.answers"
BLOCK = 64  # conversations in memory, for each batch slot
TURNS = 64  # random keys of a conversation: its own turn of the user, then its answers
USER_TOKENS = 128  # of a turn that the model writes for the user
USER_TEMPERATURE = 1.0
LINE_SECONDS = 30.0  # between lines of progress


def answer(args: argparse.Namespace) -> int:
    """The program; returns the exit code."""
    use_compilation_cache()
    place = args.distributed or Place("", 1, 0)
    _make_directory(args.out.parent)
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked_output(str(args.out), place))
        if args.out.exists() and not part_files(str(args.out)):
            raise InputError(f"{args.out} {COMPLETE}")
        job = make_job(args, place)
        count = job.run()
        sums = job.journal.join(count)
    _report(args, count, sums, job.intake)
    return 0


def _make_directory(path: Path) -> None:
    """Makes the directory of the output."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: give another name") from None


def make_job(args: argparse.Namespace, place: Place) -> AnswerJob:
    """Loads the models and opens what is there already.

    Raises:
      InputError, ModelError: an argument is wrong, or does not fit.
    """
    _require_lossless(args)
    mesh = make_mesh(**args.mesh) if args.mesh else None
    common = {
        "dtype": args.dtype,
        "quantize": args.quantize,
        "cache_dtype": args.cache_dtype,
        "pass_width": args.pass_width,
        "pickles": args.pickles,
        "mesh": mesh,
    }
    base = args.base if lm.is_delta(args.target) else None
    with waiting(f"loading {args.target}"):
        target = lm.TARGET.parse("target", lm.load(args.target, base=base, **common))
    draft = None
    if args.draft is not None:
        named = args.target if args.draft.startswith(lm.SELF) else args.draft
        base = args.base if lm.is_delta(named) else None
        draft = lm.load_draft(args.draft, target, whole=args.draft_whole, base=base, **common)
    writer = Writer(_chats(args, target), target.tokenizer, args.repeats == "drop")
    arguments = {
        "draft": draft,
        "method": args.method,
        "options": dict(args.set),
        "batch_size": args.batch_size,
        "seed": args.seed,
    }
    journal = AnswerJournal(args.out, _settings(args, target, writer), place)
    return AnswerJob(args, target, writer, arguments, journal, place, Intake(strict=False))


def _require_lossless(args: argparse.Namespace) -> None:
    """Raises OptionError or InputError if the method is unknown, or changes what is written."""
    if args.method is None:
        return
    if not method(args.method).lossless:
        raise InputError(
            f"--method {args.method} changes what the target writes: choose a lossless one "
            "(python -m infer.run --list-methods)"
        )


def _chats(args: argparse.Namespace, target: lm.LM) -> ChatFormat:
    """How conversations are written down for the target."""
    tokenizer = target.tokenizer
    if tokenizer is None or not (tokenizer.chats or args.chat_template):
        raise InputError(f"{args.target} has no chat template: give --chat-template")
    settings = tokenizer.settings()
    template = settings.pop("chat_template", None)
    if args.chat_template:
        template = read_template(args.chat_template, "--chat-template")
    return ChatFormat(tokenizer.to_json(), template, settings, args.target)


def _settings(args: argparse.Namespace, target: lm.LM, writer: Writer) -> dict[str, Any]:
    """What the answers depend on. The method is not among it: each gives the target's law."""
    return {
        "target": lm.model_digest(args.target, args.base),
        "template": writer.chats.fingerprint,
        "questions": _questions_digest(args),
        "dtype": str(target.dtype),
        "quantize": args.quantize,
        "cache_dtype": args.cache_dtype,
        "temperature": sorted(args.temperature.items()),
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "repeats": args.repeats,
    }


def _questions_digest(args: argparse.Namespace) -> str:
    """What tells whether a job has the questions that it began with."""
    openings = args.openings and _content_digest(args.openings)
    digest = hashlib.sha256(repr((args.own, openings)).encode())
    for piece in itertools.chain.from_iterable(source_files((), args.files, Intake())):
        if is_on_hub(piece.path):
            content = hub_revision(piece.path)
        else:
            content = _content_digest(piece.path)
        digest.update(f"\0{piece.name}\0{content}".encode())
    return digest.hexdigest()


def _content_digest(path: str) -> str:
    try:
        return file_digest(Path(path))
    except OSError as error:
        raise unreadable(path, error) from None


@dataclasses.dataclass
class AnswerJob:
    """A run of the program.

    Attributes:
      arguments: of ``sj.stream``, but those of a batch.
      place: which of the questions this process answers.
      intake: counts what is no question.
    """

    args: argparse.Namespace
    target: lm.LM
    writer: Writer
    arguments: dict[str, Any]
    journal: AnswerJournal
    place: Place
    intake: Intake

    def run(self) -> int:
        """Answers all questions of this process; returns how many questions there are in all."""
        progress = SpeedLog()
        count = 0
        block: list[Asked] = []
        for question in self._questions():
            count = question.index + 1
            is_own = question.index % self.place.count == self.place.index
            if is_own and question.index not in self.journal.complete:
                block.append(question)
            if len(block) == BLOCK * self.args.batch_size:
                self._answer_block(block, progress)
                block = []
        self._answer_block(block, progress)
        if not count:
            raise _no_question(self.args.files, self.intake)
        return count

    def _questions(self) -> Iterator[Asked]:
        args = self.args
        mixture = TemperatureChoice(args.temperature, args.seed)
        if args.own is None:
            return file_questions(args.files, mixture, self.intake)
        openings = read_openings(args.openings) if args.openings else OPENINGS
        return own_questions(args.own, openings, mixture)

    def _answer_block(self, block: Sequence[Asked], progress: SpeedLog) -> None:
        """Answers some questions: one turn of all of them, then the next."""
        open_ones = [self._resumed(question) for question in block]
        while open_ones := self._without_complete(open_ones):
            waiting = [(dialogue, self._prompt(dialogue)) for dialogue in open_ones]
            by_temperature: dict[float, list[tuple[Dialogue, list[int]]]]
            by_temperature = collections.defaultdict(list)
            for dialogue, prompt in waiting:
                if prompt is not None:
                    by_temperature[_temperature(dialogue)].append((dialogue, prompt))
            for temperature, batch in sorted(by_temperature.items()):
                for dialogue, written in self._decode(batch, temperature):
                    self.journal.add(dialogue.question.index, written)
                    dialogue.add(written)
                    progress.add(len(written.tokens), dialogue.is_complete())

    def _resumed(self, question: Asked) -> Dialogue:
        """A dialogue with the answers that are on disk already."""
        dialogue = Dialogue(self.writer, question)
        for written in self.journal.answers.get(question.index, ()):
            dialogue.prompt()
            dialogue.add(written)
        return dialogue

    def _without_complete(self, dialogues: Iterable[Dialogue]) -> list[Dialogue]:
        """Those that go on; the others are noted as complete."""
        going = []
        for dialogue in dialogues:
            if not dialogue.is_complete():
                going.append(dialogue)
                continue
            lines = dialogue.lines()
            counts = {"lines": len(lines), "answers": dialogue.answers}
            counts["tokens"] = sum(sum(line["loss_mask"]) for line in lines)
            counts["cut by the limit"] = dialogue.finish.count("length")
            counts["repeat themselves"] = dialogue.repeats
            if dialogue.ended:
                counts[f"conversations ended: {dialogue.ended}"] = 1
            self.journal.finish(dialogue.question.index, lines, counts)
        return going

    def _prompt(self, dialogue: Dialogue) -> list[int] | None:
        """The next prompt of a dialogue; None if it ends here instead."""
        try:
            prompt = dialogue.prompt()
        except SpecjaxError as error:
            dialogue.end(f"cannot be written down: {error}")
            return None
        if len(prompt) + self._limit(dialogue) > self._context():
            dialogue.end("longer than the context")
            return None
        return prompt

    def _context(self) -> int:
        """The most tokens of a prompt and its answer."""
        context = self.target.config.max_position
        draft = self.arguments["draft"]
        return min(context, draft.config.max_position) if isinstance(draft, lm.LM) else context

    def _limit(self, dialogue: Dialogue) -> int:
        return USER_TOKENS if dialogue.writes_user() else self.args.max_new_tokens

    def _decode(
        self, batch: Sequence[tuple[Dialogue, list[int]]], temperature: float
    ) -> Iterator[tuple[Dialogue, Written]]:
        """Decodes one turn of each dialogue, and yields what was written as it ends."""
        pieces = sj.stream(
            self.target,
            [prompt for _, prompt in batch],
            indices=[_key(dialogue) for dialogue, _ in batch],
            max_new_tokens=[self._limit(dialogue) for dialogue, _ in batch],
            sampling=sj.Sampling(temperature),
            rounds_per_piece=ALL_ROUNDS,
            **self.arguments,
        )
        for piece in pieces:
            if piece.row is not None:
                dialogue, _ = batch[piece.index]
                yield dialogue, Written(piece.row.tokens[0].tolist(), piece.row.finish_reasons[0])


def _temperature(dialogue: Dialogue) -> float:
    return USER_TEMPERATURE if dialogue.writes_user() else dialogue.question.temperature


def _key(dialogue: Dialogue) -> int:
    """What fixes the random keys of the next turn: the question, and the number of the turn."""
    turn = 0 if dialogue.writes_user() else dialogue.answers % (TURNS - 1) + 1
    return (dialogue.question.index * TURNS + turn) % 2**31


def _no_question(files: Sequence[str], intake: Intake) -> InputError:
    reasons = [
        f"{entry['count']}: {reason} (such as {entry['examples'][0]})"
        for reason, entry in intake.skipped.items()
    ]
    return InputError(f"{', '.join(files)}: no conversation to answer; {'; '.join(reasons)}")


class SpeedLog:
    """A line on stderr now and then: conversations, tokens and tokens per second."""

    def __init__(self):
        self._start = time.perf_counter()
        self._last = self._start
        self._tokens = 0
        self._conversations = 0

    def add(self, tokens: int, is_complete: bool) -> None:
        self._tokens += tokens
        self._conversations += is_complete
        now = time.perf_counter()
        if now - self._last >= LINE_SECONDS:
            self._last = now
            rate = self._tokens / (now - self._start)
            say(
                NAME,
                f"{self._conversations:,} conversations, {self._tokens:,} tokens, {rate:.0f} "
                "tokens/s",
            )


def _report(
    args: argparse.Namespace, count: int, sums: dict[str, int] | None, intake: Intake
) -> None:
    """Prints what was made, what was left out, and the next command."""
    for reason, entry in intake.skipped.items():
        examples = ", ".join(entry["examples"])
        say(NAME, f"left out, {reason}: {entry['count']:,} (such as {examples})")
    if sums is None:
        say(NAME, f"this process has done its part; the last of all writes {args.out}")
        return
    listed = ", ".join(f"{name}: {value:,}" for name, value in sums.items() if value)
    print(f"{args.out}: {count:,} conversations; {listed}")
    files = json.dumps([str(args.out)])
    print(
        f"next: python -m train.head configs/chat_head.toml --set model.init_from={args.target} "
        f"--set 'data.files={files}'"
    )
