"""Which drafter, target distribution, rule and models fit together; checked before compiling."""

from __future__ import annotations

from specjax.errors import PairError
from specjax.lm import LM
from specjax.protocols import Drafter, Rule, TargetDist


def check_pair(drafter: Drafter, target: TargetDist, rule: Rule) -> None:
    """Refuses a rule that is not made for the drafter's law or shape.

    Raises:
      PairError: says what the rule needs and what the drafter offers.
    """
    if drafter.law not in rule.laws:
        raise PairError(
            f"rule {rule.name} needs drafts of law {' or '.join(sorted(rule.laws))}, but drafter "
            f"{drafter.name} makes {drafter.law} ones; choose another --rule or --drafter"
        )
    if rule.chain_only and not drafter.shape.is_chain:
        raise PairError(
            f"rule {rule.name} verifies a chain, but drafter {drafter.name} makes a tree; choose a "
            "tree rule or a chain drafter"
        )
    if target.needs_draft_logits and not drafter.keep_logits:
        raise PairError(
            f"target distribution {type(target).__name__.lower()} needs the draft's logits at "
            f"every node, which drafter {drafter.name} does not give"
        )


def check_models(target: LM, draft: LM) -> None:
    """Refuses a draft model on other devices, or whose tokenizer is not the target's.

    Vocabularies padded to different sizes are fine: ids beyond the tokenizer have mass 0.

    Raises:
      PairError: says how they differ.
    """
    if target.mesh != draft.mesh:
        raise PairError(
            f"target {target.source} and draft {draft.source} lie on different "
            "devices; load both with the same mesh"
        )
    if target.tokenizer is None or draft.tokenizer is None:
        if target.config.vocab_size != draft.config.vocab_size:
            raise PairError(
                f"target has {target.config.vocab_size} ids and draft {draft.config.vocab_size}, "
                "and without tokenizers there is no telling whether they mean the same"
            )
        return
    difference = target.tokenizer.difference(draft.tokenizer)
    if difference:
        raise PairError(
            f"target {target.source} and draft {draft.source} have different tokenizers "
            f"({difference}); a draft must share the target's vocabulary"
        )
