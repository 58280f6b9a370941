"""From what a user names, or hands over as objects, to one method bound to its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax._util.arguments import METHOD, ArgSpec
from specjax._util.errors import OptionError, PairError
from specjax.core.protocols import Drafter, Method, Rule, TargetDist
from specjax.core.round import DraftVerify
from specjax.lm import LM
from specjax.registry.parts import Context
from specjax.registry.table import MethodSpec, compose, method, usual_rule


def choose(
    name: str | Method,
    drafter: str | Drafter | None,
    rule: str | Rule | None,
    target_dist: str | TargetDist | None,
    has_draft: bool,
) -> MethodSpec | Method:
    """The method of that name, the one composed of the parts given, or the object itself.

    Left out, a drafter is ``chain`` where there is a draft model and else ``none``, a rule
    that of :func:`usual_rule`, a target distribution ``warped``.

    Raises:
      OptionError: an unknown name, no such object, or parts beside a method object.
    """
    named = isinstance(name, str)
    if drafter is not None or rule is not None or target_dist not in (None, "warped"):
        if not named:
            raise OptionError(
                "a method object has its parts: leave drafter=, rule=, target_dist= out"
            )
        drafter = drafter if drafter is not None else "chain" if has_draft else "none"
        rule = rule if rule is not None else usual_rule(drafter)
        return compose(drafter, rule, "warped" if target_dist is None else target_dist)
    if type(name) is DraftVerify:  # as its parts: their options are checked, and have defaults
        return compose(name.drafter, name.rule, name.target)
    if named or isinstance(name, MethodSpec):
        return method(name) if named else name
    return METHOD.parse("method", name)


def bind(
    chosen: MethodSpec | Method, context: Context, options: Mapping[str, Any], guided: bool
) -> tuple[Method, dict[str, float]]:
    """The method for these models, and its float settings; nothing is compiled yet.

    ``guided``: there is a reward.

    Raises:
      OptionError, PairError: a value, a model or a reward that does not fit.
    """
    if context.draft is not None:
        check_models(context.target, context.draft)
    if not isinstance(chosen, MethodSpec):
        return chosen, {name: ArgSpec(float).parse(name, value) for name, value in options.items()}
    if chosen.needs_reward and not guided:
        raise OptionError(f"method {chosen.name} needs a reward: give --reward (or reward=)")
    return chosen.build(context, options)


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
    if draft.is_head:
        return  # specjax.lm.attach has looked at it
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
