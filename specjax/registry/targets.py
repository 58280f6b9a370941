"""The target distributions by name."""

from __future__ import annotations

from specjax.registry.options import Option
from specjax.registry.parts import MODEL_OR_HEAD, PartSpec
from specjax.target import IMPROVED, ORIGINAL, VARIANTS, Contrastive, Warped

# Yuan et al. 2024. alpha and beta are Table 2's; its alpha serves both variants. The variant is
# the better one of Table 1. In Appendix A.2 the amateur draws at temperature 1.
SCD_TASKS = {
    "wikitext": {"variant": ORIGINAL, "alpha": 0.1, "beta": 0.5, "draft_warp": False},
    "alpacaeval": {"variant": IMPROVED, "alpha": 0.5, "beta": 0.5, "draft_warp": False},
    "gsm8k": {"variant": IMPROVED, "alpha": 0.5, "beta": 1.0, "draft_warp": False},
    "humaneval": {"variant": ORIGINAL, "alpha": 0.5, "beta": 0.5, "draft_warp": False},
}

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
}
