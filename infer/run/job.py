"""A decoding job: settings bound to models, run over one prompt or a file of prompts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

import specjax as sj
from infer.cli import BAD_LINES, make_directory
from infer.datasets.table import Source
from infer.digests import model_digests, reward_digests
from infer.loading import (
    chosen_sampling,
    load_models,
    saying_rewards,
    use_compilation_cache,
)
from infer.prompts import Prompt, PromptEncoder, read_prompts, report, stops_of
from infer.run.beside_plain import compare_with_plain
from infer.run.demo import PROMPT
from infer.run.output import (
    OPTIONAL,
    PROMPT_DIGEST,
    Output,
    prompt_digest,
    row_object,
)
from infer.run.profile import trace_second_run
from infer.run.screen import Screen, printable
from infer.sampling_options import given_settings
from specjax._util import processes
from specjax._util.errors import OptionError, SpecjaxError
from specjax._util.parts import locked_output
from specjax._util.program import require_output, say
from specjax._util.waiting import WaitMessage, waiting
from specjax.registry import Context, MethodSpec, compose, method, usual_rule
from specjax.rewards import Combined, combine
from specjax.runtime.generate import ALL_ROUNDS
from specjax.runtime.infill import ending_middles

DEMO_GAMMA = 3  # the draft length at which the embedded pair is fastest: see the README's table
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # JAX's errors contain it if an allocation failed
OTHERS_DIED = "start all of them again; the same command goes on after the rows so far"
STOPPED = "terminated; the rows so far are written, and the same command goes on"
STREAM_ROUNDS = 2  # rounds per piece of a streamed completion: often enough to read along


def run_job(args: argparse.Namespace) -> int:
    """Decodes what the arguments ask for; returns the exit code.

    Raises:
      SpecjaxError: an argument is wrong, another job writes the same file, or memory is too small.
    """
    with saying_rewards("infer.run"):
        try:
            if args.span:
                processes.join(
                    str(args.span),
                    "infer.run",
                    OTHERS_DIED,
                    f"--out {args.out}",
                    args.meeting_timeout,
                    STOPPED,
                )
            with contextlib.ExitStack() as stack:
                # If one process cannot lock its file, all must stop.
                processes.raise_everywhere(lambda: stack.enter_context(_lock(args)))
                return _run(args)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and OUT_OF_MEMORY not in str(error):
                raise
            raise SpecjaxError(
                "out of memory; lower --batch-size or --max-new-tokens, or see --plan for what fits"
            ) from None


def _lock(args: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Keeps other jobs from the files that this process writes.

    If one model spans several processes, only the first of them writes.
    """
    if args.out and processes.is_main_process():
        return locked_output(args.out, args.split)
    return contextlib.nullcontext()


def _run(args: argparse.Namespace) -> int:
    if not args.out:
        require_output("--out")
    compiles = use_compilation_cache()
    job = processes.raise_everywhere(lambda: make_job(args))
    if args.prompts or args.task:
        return _decode_file(job)
    prompt = only_prompt(args, job.encoder)
    report("infer.run", [prompt])
    if args.json or args.out or args.profile:
        job.work([prompt])
    else:
        job.show(prompt, compiles)
    return 0


def make_job(args: argparse.Namespace) -> Job:
    """Loads models and checks every setting; see :meth:`Job.create`."""
    target, draft = load_models(args, check_method(args), args.mesh)
    if args.prefix is not None:
        target = ending_middles(target)
    return Job.create(args, target, draft)


def _decode_file(job: Job) -> int:
    """Decodes the prompts of a file or task. Bad lines are reported, and the others decoded."""
    args = job.args
    path = args.prompts or args.task
    rewards = None  # lines of --prompts have no constraints
    if args.task:
        rewards = ()
        if job.reward:
            rewards = job.reward.parts
    source = Source(args.dataset) if args.dataset else None

    option = "--task" if args.task else "--prompts"
    read = functools.partial(read_prompts, path, job.encoder, rewards, source, option=option)
    prompts, bad = processes.raise_everywhere(read)
    report("infer.run", prompts, bad, path)
    if not prompts:
        say("infer.run", f"{path} has no prompt that can be decoded")
        return BAD_LINES

    if source and not args.stop:
        stop = stops_of(prompt.entry for prompt in prompts)
        job = dataclasses.replace(job, arguments=job.arguments | {"stop": stop})
    if any("suffix" in prompt.entry for prompt in prompts):
        job = dataclasses.replace(job, target=ending_middles(job.target))
    job.work(prompts)
    return BAD_LINES if bad else 0


def only_prompt(args: argparse.Namespace, encoder: PromptEncoder) -> Prompt:
    """The prompt of ``--prompt``, or of ``--prefix`` and ``--suffix``, or the demo's."""
    if args.prefix is not None:
        tokens = encoder.middle(args.prefix, args.suffix)
        return Prompt(0, 0, args.prefix, tokens, {})
    text = args.prompt
    if text is None:
        text = PROMPT
    tokens, cut = encoder.text(text)
    return Prompt(0, 0, text, tokens, {}, cut=cut)


@dataclasses.dataclass(frozen=True)
class Job:
    """The models and every setting of a run, checked.

    Args:
      args: the parsed command line.
      method: the method's name, for the summary on the screen.
      arguments: keyword arguments of ``sj.generate``.
      settings: written with every row; a file is resumed only with the same ones.
      reward: scores the completions; None: they are not scored.
    """

    args: argparse.Namespace
    target: sj.LM
    method: str
    arguments: dict[str, Any]
    settings: dict[str, Any]
    reward: Combined | None
    encoder: PromptEncoder

    @classmethod
    def create(cls, args: argparse.Namespace, target: sj.LM, draft: sj.LM | None) -> Job:
        """Checks all settings; nothing is compiled yet.

        Raises:
          OptionError, PairError: an option is wrong, or models and method do not fit.
        """
        spec, method_arguments = chosen_method(args, draft is not None)
        options = {}
        if args.target == "demo" and "gamma" in spec.options:
            options["gamma"] = DEMO_GAMMA
        options = spec.resolve(options | dict(args.set))
        sampling = _sampling(args, spec, options, Context(target, draft))
        reward = _reward(args, spec)

        arguments = method_arguments | {
            "draft": draft,
            "options": options,
            "sampling": sampling,
            "max_new_tokens": args.max_new_tokens,
            "seed": args.seed,
            "stop": tuple(args.stop),
            "logprobs": args.logprobs,
            "reward": reward,
        }
        settings = {
            "method": spec.name,
            "seed": args.seed,
            "options": options,
            "sampling": sampling.as_given,
            "max_new_tokens": args.max_new_tokens,
            "target": args.target,
            "draft": draft.source if draft else None,
            "stop": args.stop,
            "chat": args.chat,
            "dtype": str(target.dtype),
            "logprobs": args.logprobs,
        }
        if args.out or args.span:
            settings |= model_digests(args, target, draft)
            # In float32 the tokens do not depend on these. Below, partial sums are rounded, so rows
            # of another split, or of passes of another width, may differ.
            if settings["dtype"] != "float32":
                settings["model_devices"] = (args.mesh or {"model": 1})["model"]
                settings["pass_width"] = target.pass_width
            settings |= reward_digests(reward)
        settings |= _optional_settings(args, reward)
        settings = json.loads(json.dumps(settings))  # as they read back from a result file

        checked_draft = draft if spec.needs_draft else None
        encoder = PromptEncoder(
            target, checked_draft, args.max_new_tokens, args.chat, bool(args.truncate)
        )
        return cls(args, target, spec.name, arguments, settings, reward, encoder)

    # --- one prompt, on the screen -------------------------------------------------------------

    def show(self, prompt: Prompt, compiles: bool, console: Console | None = None) -> None:
        """Streams one prompt's completions, one after the other.

        With ``--compare``, the speed of plain decoding is shown beside it.

        Args:
          compiles: the cache of compiled programs is empty, so the user is told to wait.
          console: where to write, standard output by default.
        """
        pieces = sj.stream(
            self.target,
            [prompt.tokens],
            rounds_per_piece=STREAM_ROUNDS,
            num_samples=self.args.num_samples,
            batch_size=1,
            **self.arguments,
        )
        screen: Screen | None = None
        shown_row: int | None = None
        with contextlib.closing(WaitMessage(compiles)) as message:
            for piece in _row_after_row(pieces):
                message.close()
                if piece.generation is not None:  # the last piece
                    screen.summary(piece.generation, self.method)
                    break
                if piece.index != shown_row:  # the next completion begins
                    if screen:
                        screen.end()
                    screen = Screen(self.target, prompt.tokens, console)
                    shown_row = piece.index
                    screen.prompt(prompt.text + "\n" * self.args.chat)
                screen.piece(piece)

        if self.args.compare or (self.args.demo and screen.colored):
            with waiting("decoding the same prompt plainly"):
                comparison = compare_with_plain(self.target, prompt.tokens, self.arguments)
            screen.beside_plain(self.method, comparison)

    # --- many prompts, as objects --------------------------------------------------------------

    def work(self, prompts: Sequence[Prompt]) -> None:
        """Decodes prompts as objects, or traces how the first ``--batch-size`` are decoded."""
        if not self.args.profile:
            self.decode(prompts)
            return
        directory = make_directory(self.args.profile, "--profile")
        arguments = self._arguments_for(prompts[: self.args.batch_size])
        trace_second_run(lambda: sj.generate(**arguments), directory)

    def _arguments_for(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The arguments of ``sj.generate`` and ``sj.stream`` for these prompts."""
        return self.arguments | {
            "target": self.target,
            "prompts": [prompt.tokens for prompt in prompts],
            "indices": [prompt.index for prompt in prompts],
            "constraints": [prompt.constraints for prompt in prompts],
            "num_samples": self.args.num_samples,
            "batch_size": self.args.batch_size,
            "prefixes": self.args.prefixes,
        }

    def decode(self, prompts: Sequence[Prompt]) -> None:
        """Decodes all prompts, ``--batch-size`` rows at a time.

        A row is written as soon as it ends, before the device is polled again. A file has rows in
        the order in which they end, standard output in the order of the prompts. If processes
        split the prompts, each decodes every COUNT-th one. The last to end joins their files.
        """
        if not self.args.out:
            self._decode(prompts)
            return

        place = self.args.split
        samples = range(self.args.num_samples)
        digests = {p.index: prompt_digest(p.tokens, p.constraints) for p in prompts}
        output = processes.raise_everywhere(
            lambda: Output(self.args.out, self.settings, digests, place)
        )
        own = prompts
        if place:
            own = prompts[place.index :: place.count]
        missing = [p for p in own if not output.done.issuperset((p.index, s) for s in samples)]
        self._check_agreement(missing)
        if missing:
            self._decode(missing, output)

        if not processes.is_main_process():
            return
        num_missing = output.join({(p.index, s) for p in prompts for s in samples})
        if num_missing:
            say(
                "infer.run",
                f"this process has done its part; {num_missing} rows are still to come from other "
                f"processes: the last of them writes {self.args.out}",
            )

    def _check_agreement(self, prompts: Sequence[Prompt]) -> None:
        """If one model spans several processes: checks that all will run the same programs.

        Otherwise they would wait for each other forever.
        """
        if not self.args.span:
            return
        names = ("batch_size", "num_samples", "prefixes", "mesh", "pass_width", "dtype")
        processes.check_agreement(
            settings=self.settings,
            arguments={name: vars(self.args)[name] for name in names},
            prompts=[(p.index, [int(token) for token in p.tokens]) for p in prompts],
            jax=jax.__version__,
        )

    def _decode(self, prompts: Sequence[Prompt], output: Output | None = None) -> None:
        """Decodes prompts, and writes their rows to ``output``, or to standard output without one.

        All samples of a prompt are decoded. Those that ``output`` has already are not written.
        """
        pieces = sj.stream(**self._arguments_for(prompts), rounds_per_piece=ALL_ROUNDS)
        with contextlib.closing(WaitMessage(False, "decoding")) as message:
            self._write_rows(prompts, pieces, output, message)

    def _write_rows(
        self,
        prompts: Sequence[Prompt],
        pieces: Iterator[sj.Piece],
        output: Output | None,
        message: WaitMessage,
    ) -> None:
        """Writes the row of each piece that ends one, as :meth:`_decode`.

        The message counts the rows of a file. Before the first is printed it is removed.
        """
        samples = self.args.num_samples
        num_ended = 0
        ready: dict[int, dict[str, Any]] = {}  # ended rows, not printed yet
        next_row = 0
        for piece in pieces:
            if piece.row is None:
                continue
            # Rows are numbered by prompt, and then by sample.
            prompt = prompts[piece.index // samples]
            sample = piece.index % samples
            head = {
                "id": prompt.id,
                "index": prompt.index,
                "sample": sample,
                "prompt": prompt.text,
                PROMPT_DIGEST: prompt_digest(prompt.tokens, prompt.constraints),
            }
            entry = row_object(piece.row, 0, head | self.settings, self.reward)

            num_ended += 1
            message.count(num_ended, len(prompts) * samples)
            if output is None:
                message.close()
                ready[piece.index] = entry
            elif (prompt.index, sample) not in output.done and processes.is_main_process():
                output.append(entry)
            while next_row in ready:
                self._print(ready.pop(next_row))
                next_row += 1

    def _print(self, entry: dict[str, Any]) -> None:
        line = printable(entry["text"])
        if self.args.json:
            line = json.dumps(entry)
        print(line, flush=True)


def check_method(args: argparse.Namespace) -> bool:
    """Checks the method and its options; returns whether a draft should be loaded.

    It runs before models load, which can take minutes.

    Raises:
      OptionError: a name or an option is wrong.
    """
    if not (args.method or args.drafter or args.rule or args.target_dist):
        return True  # the method depends on whether there is a draft
    spec, _ = chosen_method(args, has_draft=True)
    spec.resolve(dict(args.set))
    _reward(args, spec)
    if spec.needs_reward and args.temperature:
        raise OptionError(
            f"--temperature {args.temperature}: method {spec.name} is greedy; leave it out"
        )
    return spec.needs_draft


def chosen_method(args: argparse.Namespace, has_draft: bool) -> tuple[MethodSpec, dict[str, str]]:
    """The method, and the arguments of ``sj.generate`` that name it or its parts."""
    if not (args.drafter or args.rule or args.target_dist):
        name = args.method or ("speculative" if has_draft else "autoregressive")
        return method(name), {"method": name}
    drafter = args.drafter or ("chain" if has_draft else "none")
    parts = {
        "drafter": drafter,
        "rule": args.rule or usual_rule(drafter),
        "target_dist": args.target_dist or "warped",
    }
    return compose(**parts), parts


def _sampling(
    args: argparse.Namespace, spec: MethodSpec, options: Mapping[str, Any], context: Context
) -> sj.Sampling:
    """The sampling of the arguments, and of the model where they give none.

    Reward-guided methods are greedy: for them the model's own does not count.
    """
    given = {name: vars(args)[name] for name in ("temperature", "top_k", "top_p")}
    given |= given_settings(args, context.target.tokenizer)
    if spec.needs_reward and given["temperature"] is None:
        given["temperature"] = 0.0
    return sj.Sampling(**chosen_sampling("infer.run", args, context, spec, options, given))


def _row_after_row(pieces: Iterable[sj.Piece]) -> Iterator[sj.Piece]:
    """The pieces of one row, then those of the next. On a mesh several rows run at a time."""
    waiting: dict[int, list[sj.Piece]] = {}
    shown: int | None = None
    for piece in pieces:
        if piece.generation is not None:  # all rows have ended
            yield piece
            return
        waiting.setdefault(piece.index, []).append(piece)
        while waiting:
            if shown is None:
                shown = next(iter(waiting))
            own = waiting.pop(shown, [])
            yield from own
            if not own or own[-1].row is None:  # the shown row goes on
                break
            shown = None


def _reward(args: argparse.Namespace, spec: MethodSpec) -> Combined | None:
    """The rewards of ``--reward`` combined, or None; the default of a task is ``lexical``."""
    names = args.reward
    if args.task and not names:
        names = ["lexical"]
    if names:
        return combine(names)
    if spec.needs_reward:
        raise OptionError(f"method {spec.name} needs a reward: give --reward or --task")
    return None


def _optional_settings(args: argparse.Namespace, reward: Combined | None) -> dict[str, Any]:
    """Settings that a row has only if they were given."""
    settings: dict[str, Any] = {}
    for name in OPTIONAL:
        value = vars(args)[name]
        if value or (name == "suffix" and value is not None):
            settings[name] = value
    if reward:
        settings["reward"] = args.reward or [part.name for part in reward.parts]
    return settings
