"""Makes one method for the loaded models, from names or objects that the user gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax._util.arguments import METHOD
from specjax._util.checks import Check
from specjax._util.errors import OptionError, PairError
from specjax.core.mesh import check_context
from specjax.core.protocols import Drafter, Method, Rule, TargetDist
from specjax.core.round import DraftVerify
from specjax.lm import LM
from specjax.registry.method_spec import MethodSpec, Settings
from specjax.registry.parts import Context
from specjax.registry.table import compose, method, usual_rule


def choose(
    name: str | MethodSpec | Method | None,
    drafter: str | Drafter | None,
    rule: str | Rule | None,
    target_dist: str | TargetDist | None,
    has_draft: bool,
) -> MethodSpec | Method:
    """The method with that name, the one composed of the given parts, or the object itself.

    If one part is given, the others have defaults. The drafter is ``chain`` with a draft model and
    ``none`` without one. The rule is the drafter's :func:`usual_rule`. The target distribution is
    ``warped``. Without any, the method is ``speculative`` with a draft model, else
    ``autoregressive``.

    Raises:
      OptionError: an unknown name, an object of another kind, or parts besides a method.
    """
    target_dist = "warped" if target_dist is None else target_dist
    parts_given = drafter is not None or rule is not None or target_dist != "warped"
    if parts_given:
        if name is not None:
            raise OptionError(
                "method= has its parts: leave it out, or drafter=, rule= and target_dist="
            )
        if drafter is None:
            drafter = "chain" if has_draft else "none"
        if rule is None:
            rule = usual_rule(drafter)
        return compose(drafter, rule, target_dist)

    if name is None:
        name = "speculative" if has_draft else "autoregressive"
    # A plain DraftVerify is taken apart, so that its options are checked and have defaults.
    # A subclass may step in another way: it stays as it is.
    if type(name) is DraftVerify:
        return compose(name.drafter, name.rule, name.target)
    if isinstance(name, str):
        return method(name)
    if isinstance(name, MethodSpec):
        return name
    return METHOD.parse("method", name)


def bind(
    chosen: MethodSpec | Method, context: Context, options: Mapping[str, Any], has_reward: bool
) -> tuple[Method, Settings]:
    """The method for these models, and the settings of its loop. Nothing is compiled yet.

    ``has_reward`` says whether there is one to be guided by.

    Raises:
      OptionError, PairError: a value, a model or a reward that does not fit.
    """
    check_context(context.target.mesh)
    if context.draft is not None:
        check_models(context.target, context.draft)
    if not isinstance(chosen, MethodSpec):
        number = Check(float)
        return chosen, {name: number.parse(name, value) for name, value in options.items()}
    if chosen.needs_reward and not has_reward:
        raise OptionError(f"method {chosen.name} needs a reward: give --reward (or reward=)")
    return chosen.build(context, options)


def check_models(target: LM, draft: LM) -> None:
    """Checks that the draft model is on the target's devices and has its tokenizer.

    Vocabularies may be padded to different sizes: ids beyond the tokenizer have probability 0.

    Raises:
      PairError: says how they differ.
    """
    if target.mesh != draft.mesh:
        raise PairError(
            f"target {target.source} and draft {draft.source} are on different "
            "devices; load both with the same mesh"
        )
    if draft.is_head:
        return  # specjax.lm.attach has compared its vocabulary
    if target.tokenizer is None or draft.tokenizer is None:
        target_size = target.config.vocab_size
        draft_size = draft.config.vocab_size
        if target_size != draft_size:
            raise PairError(
                f"target has {target_size} ids and draft {draft_size}, and without tokenizers "
                "there is no telling whether they mean the same: give both a tokenizer"
            )
        return
    difference = target.tokenizer.difference(draft.tokenizer)
    if difference:
        raise PairError(
            f"target {target.source} and draft {draft.source} have different tokenizers "
            f"({difference}); a draft must share the target's vocabulary"
        )
