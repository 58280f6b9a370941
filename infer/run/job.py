"""A decoding job: settings bound to models, run over one prompt or many."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from typing import Any

import specjax as sj
from infer.prompts import Output, read_prompts
from infer.run.record import record
from infer.run.screen import Compiling, Screen, printable
from specjax.errors import OptionError
from specjax.infill import ending_middles
from specjax.methods import MethodSpec, compose, method
from specjax.rewards import Combined, combine

DEMO_GAMMA = 3  # what the embedded pair is fastest with: see the README's table
ROUNDS_PER_PIECE = 2  # of a streamed prompt: often enough to read along


@dataclasses.dataclass(frozen=True)
class Job:
    """The models and every setting of a run, checked."""

    target: sj.LM
    draft: sj.LM | None
    name: str
    arguments: dict[str, Any]
    chat: bool
    as_json: bool
    samples: int
    batch_size: int
    settings: dict[str, Any]  # what a result file must have been written with
    reward: Combined | None

    @classmethod
    def create(cls, args: argparse.Namespace, target: sj.LM, draft: sj.LM | None) -> Job:
        """Raises OptionError or PairError for what does not fit, before anything compiles."""
        name = args.method or ("speculative" if draft else "autoregressive")
        parts = _parts(args, draft is not None)
        spec = compose(**parts) if parts else method(name)
        options = spec.resolve(_demo_options(args, spec) | args.options)
        sampling = sj.Sampling(args.temperature, args.top_k, args.top_p)
        arguments = parts | {
            "method": name,
            "draft": draft,
            "options": options,
            "sampling": sampling,
            "max_new_tokens": args.max_new_tokens,
            "seed": args.seed,
            "stop": tuple(args.stop),
            "logprobs": args.logprobs,
        }
        settings = {
            "method": spec.name,
            "seed": args.seed,
            "options": options,
            "sampling": dataclasses.asdict(sampling),
            "max_new_tokens": args.max_new_tokens,
            "target": args.target,
            "draft": draft.source if draft else None,
            "stop": list(args.stop),
            "chat": args.chat,
        }
        reward = _reward(args, spec)
        if reward:
            arguments["reward"] = reward
            settings["reward"] = args.reward or [part.name for part in reward.parts]
        settings |= {} if args.suffix is None else {"suffix": args.suffix}
        settings = json.loads(json.dumps(settings))  # as they read back from a result file
        return cls(
            target,
            draft,
            spec.name,
            arguments,
            args.chat,
            args.json,
            args.num_samples,
            args.batch_size,
            settings,
            reward,
        )

    def show(self, text: str, tokens: list[int], compiles: bool) -> int:
        """Streams one prompt's completions, one after the other; arguments as in `objects`."""
        waiting, screen, shown = Compiling(compiles), None, None
        pieces = sj.stream(
            self.target,
            [tokens],
            rounds_per_piece=ROUNDS_PER_PIECE,
            num_samples=self.samples,
            batch_size=1,
            **self.arguments,
        )
        for piece in pieces:
            waiting.done()
            if piece.generation is not None:
                screen.summary(piece.generation, self.name)
                break
            if piece.index != shown:
                if screen:
                    screen.end()
                screen, shown = Screen(self.target, self.arguments["stop"]), piece.index
                screen.prompt(text)
            screen.piece(piece)
        return 0

    def objects(self, text: str, tokens: list[int], out: str | None) -> int:
        """One prompt's completions as JSON objects; ``text`` is shown, ``tokens`` are decoded."""
        output = Output(out, self.settings) if out else None
        self._decode([(0, 0, text, tokens, {})], output)
        return 0

    def batch(self, path: str, out: str | None, task: bool = False) -> int:
        """A file of prompts, or a task; bad lines are reported and the rest goes on."""
        rewards = (self.reward.parts if self.reward else ()) if task else None
        prompts, bad = read_prompts(path, self.target, self.chat, rewards)
        for line in bad:
            print(f"infer.run: {path} line {line.number}: {line.reason}", file=sys.stderr)
        output = Output(out, self.settings) if out else None
        if any("suffix" in p.entry for p in prompts):
            self = dataclasses.replace(self, target=ending_middles(self.target))
        self._decode([(p.index, p.id, p.text, p.tokens, p.constraints) for p in prompts], output)
        return 3 if bad else 0

    def _decode(self, rows: list[tuple], output: Output | None) -> None:
        """Decodes in batches of ``batch_size`` rows; each batch is on disk before the next."""
        if output:
            wanted = range(self.samples)
            rows = [r for r in rows if not all((r[0], s) in output.done for s in wanted)]
        per_batch = max(1, self.batch_size // self.samples)
        for first in range(0, len(rows), per_batch):
            part = rows[first : first + per_batch]
            generation = sj.generate(
                self.target,
                [tokens for *_, tokens, _ in part],
                indices=[index for index, *_ in part],
                constraints=[constraints for *_, constraints in part],
                num_samples=self.samples,
                batch_size=min(per_batch * self.samples, self.batch_size),
                **self.arguments,
            )
            for i in range(len(part) * self.samples):
                (index, name, text, *_), sample = part[i // self.samples], i % self.samples
                head = {"id": name, "index": index, "sample": sample, "prompt": text}
                entry = record(generation, i, **head, **self.settings)
                entry |= self._rewards(generation, i)
                if output is None:
                    self._print(entry)
                elif (index, sample) not in output.done:
                    output.append(entry)

    def _rewards(self, generation: sj.Generation, row: int) -> dict[str, Any]:
        """Each reward of a row, and whether all are satisfied."""
        if self.reward is None:
            return {}
        scores = generation.rewards[row].tolist()
        # JSON has no infinity: null is a reward that failed.
        said = [score if math.isfinite(score) else None for score in scores]
        names = [part.name for part in self.reward.parts]
        return {
            "rewards": [{"name": n, "score": s} for n, s in zip(names, said, strict=True)],
            "satisfied": self.reward.satisfied(scores),
        }

    def _print(self, entry: dict[str, Any]) -> None:
        print(json.dumps(entry) if self.as_json else printable(entry["text"]), flush=True)


def check_method(args: argparse.Namespace) -> bool:
    """Whether the method asked for needs a draft; wrong names and options raise OptionError.

    Said before models load, which can take minutes.
    """
    parts = _parts(args, has_draft=True)
    if not parts and args.method is None:
        return True
    spec = compose(**parts) if parts else method(args.method)
    spec.resolve(args.options)
    _reward(args, spec)
    if spec.needs_reward and args.temperature:
        raise OptionError(
            f"--temperature {args.temperature}: method {spec.name} is greedy; leave it out"
        )
    return spec.needs_draft


def _reward(args: argparse.Namespace, spec: MethodSpec) -> Combined | None:
    """The rewards asked for; a task brings ``lexical`` with it."""
    names = args.reward or (["lexical"] if args.task else [])
    if names:
        return combine(names)
    if spec.needs_reward:
        raise OptionError(f"method {spec.name} needs a reward: give --reward or --task")
    return None


def _parts(args: argparse.Namespace, has_draft: bool) -> dict[str, str]:
    """The parts a method is composed of by name; none where ``--method`` names it."""
    if not (args.drafter or args.rule or args.target_dist):
        return {}
    return {
        "drafter": args.drafter or ("chain" if has_draft else "none"),
        "rule": args.rule or "speculative",
        "target_dist": args.target_dist or "warped",
    }


def _demo_options(args: argparse.Namespace, spec: MethodSpec) -> dict[str, Any]:
    return {"gamma": DEMO_GAMMA} if args.target == "demo" and "gamma" in spec.options else {}
