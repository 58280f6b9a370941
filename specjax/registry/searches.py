"""The searches by name: methods that are not made of a drafter, a target and a rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from specjax import search
from specjax.registry.drafters import BEAM_WIDTH, JOINT, JOINT_CHOICES
from specjax.registry.options import Option
from specjax.registry.parts import Context, PartSpec
from specjax.rewards.combined import COMBINATIONS
from specjax.search.beam import EARLY_STOPPING, SAMPLED


def _mtjd(context: Context, block: int, width: int, joint: str) -> search.MTJD:
    return search.MTJD.over(context.target.config.vocab_size, block, width, joint)


def _guided(make: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """The maker of a search that is guided by the context's reward.

    The option ``combine`` is dropped: the reward has been combined before.
    """

    def make_with_reward(context: Context, combine: str, **options: Any) -> Any:
        return make(context.reward, **options, **fixed)

    return make_with_reward


LOOKAHEAD_OPTIONS = {
    "k": Option(
        int,
        3,
        "number of candidates for the next token, each with a lookahead",
        low=1,
        high=64,
        within_vocabulary=True,
    ),
    "d": Option(int, 3, "number of tokens in a lookahead", low=1, high=64),
    "combine": Option(
        str, "sum", "how several rewards become one: sum or product", choices=COMBINATIONS
    ),
}
CDSL_OPTIONS = LOOKAHEAD_OPTIONS | {
    "b": Option(
        int,
        1,
        "if too little of a draft is accepted, try up to this many greedy target tokens",
        low=0,
        high=16,
    ),
    "a_t": Option(
        float,
        0.3,
        "accept the draft if at least this share of its tokens is accepted",
        low=0,
        high=1,
    ),
    "r_t": Option(float, 0.3, "a reward of at least this is good", low=-1e9, high=1e9),
    "accept": Option(
        str,
        "hard",
        "verify a draft token by the target's argmax (hard), with probability min(1, p/q) (ratio) "
        "or with probability p (exact)",
        choices=search.ACCEPTS,
    ),
    "keep_verified": Option(
        bool, True, "keep the verified tokens of a draft whose share or reward is too low"
    ),
}

SEARCHES: dict[str, PartSpec] = {
    "beam": PartSpec(
        search.BeamSearch,
        "the W most probable hypotheses, extended in parallel",
        {
            "beams": dataclasses.replace(BEAM_WIDTH, default=4, help="number of hypotheses W"),
            "joint": Option(
                str,
                "raw",
                f"{JOINT.help}; transformers: sample as transformers does",
                choices=SAMPLED,
            ),
            "length_penalty": Option(
                float,
                1.0,
                "the score of n tokens is their log-probability / n ** length_penalty: above 0 "
                "favors long texts, below 0 short ones",
                low=-100,
                high=100,
            ),
            "early_stopping": Option(
                bool,
                False,
                "true: end with W finished hypotheses; false: once no running one is better; "
                "never: once none can become better",
                words=EARLY_STOPPING.words,
            ),
            "num_return_sequences": Option(
                int,
                1,
                "number of hypotheses to return, best first; at most beams",
                low=1,
                high=64,
            ),
        },
    ),
    "mtjd": PartSpec(
        _mtjd,
        "blocks of K tokens from the target's joint distribution",
        {
            "block": Option(int, 4, "number of tokens K in a block", low=1, high=16),
            "width": dataclasses.replace(
                BEAM_WIDTH,
                help="number of beams, or of drawn blocks, that stand for the joint distribution",
            ),
            "joint": dataclasses.replace(
                JOINT, default="raw", help=f"what a block is drawn from; {JOINT_CHOICES}"
            ),
        },
        needs_context=True,
    ),
    "lookahead": PartSpec(
        _guided(search.Lookahead),
        "each token by the reward of a greedy lookahead of the target",
        LOOKAHEAD_OPTIONS,
        needs_reward=True,
        needs_context=True,
    ),
    "draft-lookahead": PartSpec(
        _guided(search.Lookahead, drafts=True),
        "each token by the reward of a greedy lookahead of the draft model",
        LOOKAHEAD_OPTIONS,
        needs_draft=True,
        needs_reward=True,
        needs_context=True,
    ),
    "cdsl": PartSpec(
        _guided(search.CDSL),
        "verified drafts while their reward is good, else single tokens by lookahead",
        CDSL_OPTIONS,
        needs_draft=True,
        needs_reward=True,
        needs_context=True,
    ),
}
