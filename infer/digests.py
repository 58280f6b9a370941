"""Digests of what rows depend on. Stored rows count only with the same ones."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from infer.prompts import Prompt
from specjax.lm import LM, model_digest
from specjax.rewards import Combined, OfFunction
from specjax.rewards.classifier import Classifier

DIGEST = "_digest"  # ends the names of digests
SHOWN_DIGITS = 16  # of a digest in a row


def model_digests(args: argparse.Namespace, target: LM, draft: LM | None) -> dict[str, str]:
    """Digests of the models and of the tokenizer, by the name that a row has them under.

    A file is resumed with the same ones, and processes that share a model have the same ones.
    """
    digests = {"target": model_digest(args.target, args.base)}
    if draft is not None:
        digests["draft"] = model_digest(draft.source, args.base)
    if target.tokenizer is not None:
        digests["tokenizer"] = target.tokenizer.fingerprint
    return {name + DIGEST: digest[:SHOWN_DIGITS] for name, digest in digests.items()}


def reward_digests(reward: Combined | None) -> dict[str, str]:
    """A digest of the functions and the classifiers among rewards; empty without any.

    Of a function it is the module's file: what that imports does not count. The other rewards are
    what their names say.
    """
    parts = [] if reward is None else reward.parts
    digests = []
    for part in parts:
        if isinstance(part, OfFunction):
            digests.append(_code_digest(part))
        elif isinstance(part, Classifier):
            digests.append(model_digest(str(part.directory)))
    if not digests:
        return {}
    return {"reward" + DIGEST: hashlib.sha256(repr(digests).encode()).hexdigest()[:SHOWN_DIGITS]}


def _code_digest(reward: OfFunction) -> str:
    """A digest of the modules in which a function is named and defined."""
    names = (reward.name.partition(":")[0], getattr(reward.function, "__module__", None))
    digest = hashlib.sha256()
    for name in names:
        file = getattr(sys.modules.get(name or ""), "__file__", None)  # builtins have none
        if file is not None:
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """A digest of prompts in their order, with all that their lines say."""
    content = [[prompt.index, list(map(int, prompt.tokens)), prompt.entry] for prompt in prompts]
    # Values of a Parquet file may be none of JSON's, such as dates.
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:SHOWN_DIGITS]
