"""A decoding job: settings bound to models, run over one prompt or many."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import operator
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

import specjax as sj
from infer.cli import BAD_LINES
from infer.datasets.table import Source
from infer.loading import load_models, use_compilation_cache
from infer.prompts import Prompt, PromptEncoder, read_prompts, report, stops_of
from infer.run.demo import PROMPT
from infer.run.output import Output, row_object
from infer.run.parts import held
from infer.run.screen import Compiling, Screen, printable
from infer.timing import row_seconds
from specjax._util import processes
from specjax._util.errors import OptionError, SpecjaxError
from specjax._util.program import say
from specjax.registry import MethodSpec, compose, method, usual_rule
from specjax.rewards import Combined, RewardWarning, combine
from specjax.runtime.generate import ALL_ROUNDS
from specjax.runtime.infill import ending_middles

DEMO_GAMMA = 3  # what the embedded pair is fastest with: see the README's table
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how JAX's errors begin where an allocation failed
ROUNDS_PER_PIECE = 2  # of a streamed prompt: often enough to read along
TURNS = 9  # of the demo's method and plain decoding, after one that compiles


def run_job(args: argparse.Namespace) -> int:
    """Decodes what the arguments ask for; returns the exit code.

    Raises:
      SpecjaxError: they cannot be met, another job writes the same file, or memory does not
        suffice.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", RewardWarning)
        warnings.showwarning = lambda message, *_: say("infer.run", message)
        try:
            if args.span:
                processes.join(str(args.span))
            with contextlib.ExitStack() as files:
                processes.raise_everywhere(lambda: files.enter_context(_own_files(args)))
                return _run(args)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and OUT_OF_MEMORY not in str(error):
                raise
            raise SpecjaxError(
                "out of memory; lower --batch-size or --max-new-tokens, or see --plan for what fits"
            ) from None


def _own_files(args: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Keeps others from what this process writes: where a model spans several, the first one."""
    if args.out and processes.leads():
        return held(args.out, args.split)
    return contextlib.nullcontext()


def _run(args: argparse.Namespace) -> int:
    compiles = use_compilation_cache()
    job = processes.raise_everywhere(lambda: make_job(args))
    if args.prompts or args.task:
        return _batch(job)
    prompt = only_prompt(args, job.encoder)
    report("infer.run", [prompt])
    if args.json or args.out:
        job.decode([prompt])
    else:
        job.show(prompt, compiles)
    return 0


def make_job(args: argparse.Namespace) -> Job:
    """Loads models and checks every setting; see :meth:`Job.create`."""
    target, draft = load_models(args, check_method(args), args.mesh)
    if args.prefix is not None:
        target = ending_middles(target)
    return Job.create(args, target, draft)


def _batch(job: Job) -> int:
    """A file of prompts, or a task; bad lines are reported and the rest goes on."""
    args, path = job.args, job.args.prompts or job.args.task
    rewards = (job.reward.parts if job.reward else ()) if args.task else None
    source = Source(args.dataset) if args.dataset else None
    read = functools.partial(read_prompts, path, job.encoder, rewards, source)
    prompts, bad = processes.raise_everywhere(read)
    report("infer.run", prompts, bad, path)
    if source and not args.stop:
        job = dataclasses.replace(
            job, arguments=job.arguments | {"stop": stops_of(p.entry for p in prompts)}
        )
    if any("suffix" in prompt.entry for prompt in prompts):
        job = dataclasses.replace(job, target=ending_middles(job.target))
    job.decode(prompts)
    return BAD_LINES if bad else 0


def only_prompt(args: argparse.Namespace, encoder: PromptEncoder) -> Prompt:
    """``--prompt``, or ``--prefix`` with ``--suffix``, or else the demo's."""
    if args.prefix is not None:
        return Prompt(0, 0, args.prefix, encoder.middle(args.prefix, args.suffix), {})
    text = args.prompt if args.prompt is not None else PROMPT
    tokens, cut = encoder.text(text)
    return Prompt(0, 0, text, tokens, {}, cut=cut)


@dataclasses.dataclass(frozen=True)
class Job:
    """The models and every setting of a run, checked."""

    args: argparse.Namespace
    target: sj.LM
    method: str
    arguments: dict[str, Any]  # of sj.generate
    settings: dict[str, Any]  # what a result file must have been written with
    reward: Combined | None
    encoder: PromptEncoder

    @classmethod
    def create(cls, args: argparse.Namespace, target: sj.LM, draft: sj.LM | None) -> Job:
        """Raises OptionError or PairError for what does not fit, before anything compiles."""
        spec, named = _chosen(args, draft is not None)
        demo = {"gamma": DEMO_GAMMA} if args.target == "demo" and "gamma" in spec.options else {}
        options = spec.resolve(demo | dict(args.set))
        sampling = sj.Sampling(args.temperature, args.top_k, args.top_p)
        reward = _reward(args, spec)
        arguments = named | {
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
            "sampling": dataclasses.asdict(sampling),
            "max_new_tokens": args.max_new_tokens,
            "target": args.target,
            "draft": draft.source if draft else None,
            "stop": args.stop,
            "chat": args.chat,
        }
        if reward:
            settings["reward"] = args.reward or [part.name for part in reward.parts]
        if args.suffix is not None:
            settings["suffix"] = args.suffix
        for name in ("truncate", "quantize", "cache_dtype", "dataset"):
            if vars(args)[name]:
                settings[name] = vars(args)[name]
        settings = json.loads(json.dumps(settings))  # as they read back from a result file
        needed = draft if spec.needs_draft else None
        encoder = PromptEncoder(target, needed, args.max_new_tokens, args.chat, bool(args.truncate))
        return cls(args, target, spec.name, arguments, settings, reward, encoder)

    def show(self, prompt: Prompt, compiles: bool, console: Console | None = None) -> None:
        """Streams one prompt's completions, one after the other; the demo's beside plain decoding.

        ``console``: where to, if not to standard output.
        """
        screen, shown = None, None
        pieces = sj.stream(
            self.target,
            [prompt.tokens],
            rounds_per_piece=ROUNDS_PER_PIECE,
            num_samples=self.args.num_samples,
            batch_size=1,
            **self.arguments,
        )
        with contextlib.closing(Compiling(compiles)) as waiting:
            for piece in pieces:
                waiting.close()
                if piece.generation is not None:
                    screen.summary(piece.generation, self.method)
                    break
                if piece.index != shown:
                    if screen:
                        screen.end()
                    screen, shown = Screen(self.target, console), piece.index
                    screen.prompt(prompt.text)
                screen.piece(piece)
        if self.args.demo and screen.colored:
            with contextlib.closing(Compiling(False, "decoding the same plainly")):
                figures = self._over_plain(prompt)
            screen.beside_plain(*figures)

    def _over_plain(self, prompt: Prompt) -> tuple[float, bool]:
        """Speed over plain decoding of the same prompt, prefill left out; whether tokens agree."""
        plain = self.arguments | {"method": "autoregressive", "draft": None, "options": {}}
        ratios = []
        for _ in range(1 + TURNS):
            own, other = (
                sj.generate(self.target, [prompt.tokens], batch_size=1, **arguments)
                for arguments in (self.arguments, plain)
            )
            speeds = (run.lengths[0] / row_seconds(run, 1)[0] for run in (own, other))
            ratios.append(operator.truediv(*speeds))
        return statistics.median(ratios[1:]), np.array_equal(own.tokens[0], other.tokens[0])

    def decode(self, prompts: Sequence[Prompt]) -> None:
        """Decodes ``--batch-size`` rows at a time; a row is out before the next look at the device.

        A file gets rows as they end, standard output in the order of the prompts. Of several
        processes each takes every COUNT-th prompt, and the last one makes one file of theirs.
        """
        place, samples = self.args.split, range(self.args.num_samples)
        if not self.args.out:
            self._decode(prompts)
            return
        output = processes.raise_everywhere(lambda: Output(self.args.out, self.settings, place))
        own = prompts[place.index :: place.count] if place else prompts
        missing = [p for p in own if not output.done.issuperset((p.index, s) for s in samples)]
        self._agree(missing)
        if missing:
            self._decode(missing, output)
        if not processes.leads():
            return
        if rows := output.join({(p.index, s) for p in prompts for s in samples}):
            said = f"{rows} rows are still to come from other processes: the last of them writes"
            say("infer.run", f"this process has done its part; {said} {self.args.out}")

    def _agree(self, prompts: Sequence[Prompt]) -> None:
        """Where a model spans several processes: that all are about to do the same."""
        if self.args.span:
            names = ("batch_size", "num_samples", "prefixes", "mesh", "pass_width", "dtype")
            processes.agree(
                settings=self.settings,
                arguments={name: vars(self.args)[name] for name in names},
                prompts=[(p.index, [int(token) for token in p.tokens]) for p in prompts],
                jax=jax.__version__,
            )

    def _decode(self, prompts: Sequence[Prompt], output: Output | None = None) -> None:
        """Decodes prompts to an output, but for the rows that it has, or to standard output."""
        samples = self.args.num_samples
        pieces = sj.stream(
            self.target,
            [prompt.tokens for prompt in prompts],
            indices=[prompt.index for prompt in prompts],
            constraints=[prompt.constraints for prompt in prompts],
            num_samples=samples,
            batch_size=self.args.batch_size,
            prefixes=self.args.prefixes,
            rounds_per_piece=ALL_ROUNDS,
            **self.arguments,
        )
        ready, shown = {}, 0
        for piece in pieces:
            if piece.row is None:
                continue
            prompt, sample = prompts[piece.index // samples], piece.index % samples
            head = {"id": prompt.id, "index": prompt.index, "sample": sample}
            head |= {"prompt": prompt.text} | self.settings
            entry = row_object(piece.row, 0, head, self.reward)
            if output is None:
                ready[piece.index] = entry
            elif (prompt.index, sample) not in output.done and processes.leads():
                output.append(entry)
            while shown in ready:
                self._print(ready.pop(shown))
                shown += 1

    def _print(self, entry: dict[str, Any]) -> None:
        print(json.dumps(entry) if self.args.json else printable(entry["text"]), flush=True)


def check_method(args: argparse.Namespace) -> bool:
    """Whether the method asked for needs a draft; wrong names and options raise OptionError.

    Said before models load, which can take minutes.
    """
    if not (args.method or args.drafter or args.rule or args.target_dist):
        return True  # a draft, where there is one, decides
    spec, _ = _chosen(args, has_draft=True)
    spec.resolve(dict(args.set))
    _reward(args, spec)
    if spec.needs_reward and args.temperature:
        raise OptionError(
            f"--temperature {args.temperature}: method {spec.name} is greedy; leave it out"
        )
    return spec.needs_draft


def _chosen(args: argparse.Namespace, has_draft: bool) -> tuple[MethodSpec, dict[str, str]]:
    """The method asked for, and the arguments of ``sj.generate`` that name it or its parts."""
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


def _reward(args: argparse.Namespace, spec: MethodSpec) -> Combined | None:
    """The rewards asked for; a task brings ``lexical`` with it."""
    names = args.reward or (["lexical"] if args.task else [])
    if names:
        return combine(names)
    if spec.needs_reward:
        raise OptionError(f"method {spec.name} needs a reward: give --reward or --task")
    return None
