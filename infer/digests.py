"""Digests of what rows depend on. Stored rows count only with the same ones."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence

from infer.prompts import Prompt
from specjax.lm import LM, model_digest

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


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """A digest of prompts in their order, with all that their lines say."""
    content = [[prompt.index, list(map(int, prompt.tokens)), prompt.entry] for prompt in prompts]
    # Values of a Parquet file may be none of JSON's, such as dates.
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:SHOWN_DIGITS]
