"""specjax: speculative decoding for JAX. A method is a drafter, a target distribution and an
acceptance rule, joined into one step; one loop runs them all."""

from specjax import draft, probs, rewards, verify
from specjax.decode import DraftVerify, draft_verify
from specjax.errors import ModelError, OptionError, PairError, SpecjaxError
from specjax.generate import Generation, Piece, generate, stream
from specjax.lm import LM, from_params, load, on_mesh
from specjax.mesh import make_mesh
from specjax.methods import compose, method, methods
from specjax.protocols import Rule, rule
from specjax.target import Contrastive, Warped
from specjax.types import DecodeState, Draft, Inputs, Stats, TreeShape, Verdict
from specjax.warp import Sampling

__version__ = "0.1.0"

__all__ = [
    "LM",
    "Contrastive",
    "DecodeState",
    "Draft",
    "DraftVerify",
    "Generation",
    "Inputs",
    "ModelError",
    "OptionError",
    "PairError",
    "Piece",
    "Rule",
    "Sampling",
    "SpecjaxError",
    "Stats",
    "TreeShape",
    "Verdict",
    "Warped",
    "compose",
    "draft",
    "draft_verify",
    "from_params",
    "generate",
    "load",
    "make_mesh",
    "method",
    "methods",
    "on_mesh",
    "probs",
    "rewards",
    "rule",
    "stream",
    "verify",
]
