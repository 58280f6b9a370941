"""The target distributions by name."""

from __future__ import annotations

from specjax._util.checks import format_value
from specjax._util.errors import PairError
from specjax.registry.options import Option
from specjax.registry.parts import MODEL_OR_HEAD, Context, PartSpec
from specjax.target import IMPROVED, ORIGINAL, VARIANTS, Contrastive, Guided, Warped

# Yuan et al. 2024. alpha and beta are Table 2's; its alpha serves both variants. The variant is
# the better one of Table 1. In Appendix A.2 the amateur draws at temperature 1.
SCD_TASKS = {
    "wikitext": {"variant": ORIGINAL, "alpha": 0.1, "beta": 0.5, "draft_warp": False},
    "alpacaeval": {"variant": IMPROVED, "alpha": 0.5, "beta": 0.5, "draft_warp": False},
    "gsm8k": {"variant": IMPROVED, "alpha": 0.5, "beta": 1.0, "draft_warp": False},
    "humaneval": {"variant": ORIGINAL, "alpha": 0.5, "beta": 0.5, "draft_warp": False},
}


def _guided(context: Context, negative_prompt: str) -> Guided:
    """Guidance away from a text, in the target's tokens.

    Raises:
      PairError: the target has no tokenizer for it.
    """
    if not negative_prompt:
        return Guided()
    target = context.target
    if target.tokenizer is None:
        raise PairError(
            f"target {target.source} has no tokenizer for negative_prompt="
            f"{format_value(negative_prompt)}: give target_dist=specjax.Guided(token ids)"
        )
    return Guided(tuple(target.tokenizer.encode(negative_prompt)))


TARGET_DISTS: dict[str, PartSpec] = {
    "warped": PartSpec(
        Warped, "the target model's distribution under temperature, top-k and top-p"
    ),
    "contrastive": PartSpec(
        Contrastive,
        "the target model's logits (expert) against the draft model's (amateur)",
        {
            "preset": Option.preset("the options that the SCD paper used for a task", SCD_TASKS),
            "variant": Option(
                str,
                IMPROVED,
                "the score of a token; original: log p_expert − log p_amateur; "
                "improved: (1 + beta) expert logit − beta amateur logit",
                choices=VARIANTS,
            ),
            "alpha": Option(
                float,
                0.5,
                "keep tokens with at least alpha times the expert's top probability",
                above=0,
                high=1,
            ),
            "beta": Option(
                float, 0.5, "weight of the amateur's logits; only with variant=improved", low=0
            ),
        },
        needs_draft=True,
        draft_kinds=MODEL_OR_HEAD,
    ),
    "guided": PartSpec(
        _guided,
        "the target model after the prompt, away from what it says without it "
        "(classifier-free guidance)",
        {
            "guidance_scale": Option(
                float,
                1.5,
                "weight of the prompt: 1 is off, above 1 the text keeps closer to the prompt",
                low=0,
            ),
            "negative_prompt": Option(
                str,
                "",
                "a text in place of the prompt, to keep away from; by default the prompt's last "
                "token alone",
            ),
        },
        needs_context=True,
    ),
}
