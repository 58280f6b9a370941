"""Loads the models that the arguments name, and sets up the cache of compiled programs."""

from __future__ import annotations

import argparse
import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from specjax import lm
from specjax._util.checks import format_value
from specjax._util.compilation_cache import use_compilation_cache  # noqa: F401
from specjax._util.errors import ModelError, ModelWarning, OptionError
from specjax._util.platform import platform
from specjax._util.program import say
from specjax._util.waiting import waiting
from specjax.core.mesh import make_mesh
from specjax.core.protocols import Method
from specjax.core.sampling import TRUNCATION, Sampling
from specjax.lm import LM
from specjax.models.cpu_kernels import narrow_product
from specjax.models.hf.generation import FILE as GENERATION_CONFIG
from specjax.models.loading import has_others_codes
from specjax.registry import Context, MethodSpec
from specjax.rewards import RewardWarning

DEMO_DRAFT = "demo-draft"
CGROUPS = Path("/sys/fs/cgroup")
MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of cgroups' versions 2 and 1


def draft_name(args: argparse.Namespace, want_draft: bool) -> str | None:
    """The model of ``--draft``. The demo target has its own, used if a draft is wanted."""
    demo_pair = args.draft is None and args.target == "demo" and want_draft
    if args.draft == "demo" or demo_pair:
        return DEMO_DRAFT
    return args.draft


def load_models(
    args: argparse.Namespace, want_draft: bool, mesh: dict[str, int] | None = None
) -> tuple[LM, LM | None]:
    """The target, and the draft or None.

    On a mesh the target is split. A draft that cannot be split is whole on each device, and a line
    on stderr says so. With ``--draft-whole`` it always is.

    Raises:
      ModelError: one of them cannot be loaded.
      OptionError: the mesh needs more devices than there are.
    """
    draft = draft_name(args, want_draft)
    options = {
        "dtype": args.dtype,
        "pickles": args.pickles,
        "mesh": make_mesh(**mesh) if mesh else None,
        "pass_width": args.pass_width,
        "quantize": args.quantize,
        "cache_dtype": args.cache_dtype,
    }
    bases = bases_of(args, draft)
    with _saying_warnings(), _waiting(args.target):
        target = lm.load(args.target, base=bases["target"], **options)
    target = lm.TARGET.parse("target", target)
    _say_slow_codes(args)
    if not target.eos_ids:
        say(
            "infer",
            f"{args.target} names no end-of-sequence token: completions use up their budget",
        )
    if draft is None:
        return target, None
    base = bases["target" if draft.startswith(lm.SELF) else "draft"]
    with _saying_warnings(), _waiting(draft):
        return target, lm.load_draft(draft, target, whole=args.draft_whole, base=base, **options)


def _waiting(name: str) -> contextlib.AbstractContextManager:
    """Shows on a terminal that a model is loaded. Downloads have bars of their own."""
    if not (Path(name).exists() or name.startswith(lm.SELF)):
        return contextlib.nullcontext()
    return waiting(f"loading {name}")


def _say_slow_codes(args: argparse.Namespace) -> None:
    """Says how to decode faster on a CPU without our kernel, where XLA dequantizes all codes."""
    if args.quantize is not None or not platform().dense_groups:
        return
    problem = narrow_product.problem()
    if problem is None:
        return
    path = lm.locate(args.target)
    if not lm.is_delta(args.target) and has_others_codes(path):
        say(
            "infer",
            f"{args.target} keeps the codes of its weights; without our kernel ({problem}) a CPU "
            "decodes faster with --quantize none, which takes more memory",
        )


def bases_of(args: argparse.Namespace, draft: str | None) -> dict[str, str | None]:
    """The base that ``--base`` names, for each of ``target`` and ``draft`` that is a delta.

    Raises:
      ModelError: neither is one.
    """
    bases: dict[str, str | None] = {"target": None, "draft": None}
    if args.base is None:
        return bases
    names = {"target": args.target, "draft": draft}
    for role, name in names.items():
        if name is not None and not name.startswith(lm.SELF) and lm.is_delta(name):
            bases[role] = args.base
    if not any(bases.values()):
        raise ModelError(
            f"--base {args.base}: neither the target nor the draft is a delta; leave it out"
        )
    return bases


@contextlib.contextmanager
def _saying_warnings() -> Iterator[None]:
    """Makes one line on stderr of each thing that the library warns of inside."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ModelWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, ModelWarning):
            say("infer", warning.message)
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


@contextlib.contextmanager
def saying_rewards(program: str) -> Iterator[None]:
    """Makes one line on stderr of each thing that rewards warn of inside, however often."""
    said = set()

    def show(message: Warning | str, *_: Any) -> None:
        if str(message) not in said:
            said.add(str(message))
            say(program, message)

    with warnings.catch_warnings():
        warnings.simplefilter("always", RewardWarning)
        warnings.showwarning = show
        yield


def chosen_sampling(
    program: str,
    args: argparse.Namespace,
    context: Context,
    spec: MethodSpec,
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    otherwise: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of ``sj.Sampling``: those ``given``, and the model's own where there is None.

    One line on stderr says what is taken from the model's generation_config.json, what of it has
    no effect, and what the method does not take. ``--ignore-generation-config`` takes nothing.
    ``otherwise`` has the defaults where neither gives a value.
    """
    target = context.target
    chosen = {name: value for name, value in given.items() if value is not None}
    if args.ignore_generation_config:
        return chosen
    own = target.generation_defaults
    # Truncation has no effect on greedy decoding.
    idle = TRUNCATION if chosen.get("temperature") == 0 else ()
    offered = {name: value for name, value in own.sampling.items() if name not in (*chosen, *idle)}
    taken = left = {}
    if offered:
        method, _ = spec.build(context, options)
        taken, left = split_by_method(method, offered, {**(otherwise or {}), **chosen})
    parts = []
    for verb, settings in (
        ("takes", taken),
        ("does not take", own.not_taken),
        (f"method {spec.name} leaves out", left),
    ):
        if settings:
            listed = (f"{name}={format_value(value)}" for name, value in settings.items())
            parts.append(f"{verb} {', '.join(listed)}")
    if parts:
        text = f"{GENERATION_CONFIG} of {target.source}: {'; '.join(parts)}"
        say(program, f"{text} (--ignore-generation-config: nothing)")
    return taken | chosen


def split_by_method(
    method: Method, own: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of a model's ``own`` settings that a method takes beside those ``given``, and the rest.

    The temperature is always taken: without it the method would be greedy. If the method refuses
    what is given, it goes on to, so that the user hears of it.
    """
    if not _refuses(method, {**given, **own}):
        return dict(own), {}
    taken: dict[str, Any] = {}
    left: dict[str, Any] = {}
    for name, value in own.items():
        takes = name == "temperature" or not _refuses(method, {**given, **taken, name: value})
        (taken if takes else left)[name] = value
    return taken, left


def _refuses(method: Method, settings: Mapping[str, Any]) -> bool:
    try:
        method.check_sampling(Sampling(**settings))
    except OptionError:
        return True
    return False


def device_memory() -> int:
    """Bytes of the first device's memory; those of the host if the device does not report them."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or host_memory()


def host_memory(cgroups: Path = CGROUPS) -> int:
    """Bytes of memory that this process may use: the machine's, or fewer in a container.

    ``cgroups`` is where Linux shows a container's limits.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in MEMORY_LIMITS:
        # Not all systems have these files. The word "max" stands for no limit.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((cgroups / name).read_text()))
    return min(limits)
