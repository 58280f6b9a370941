"""Rewards: how good a completion is, as a number. Lookahead searches ask while it is generated.

A reward runs in one of two places:

- On the device, inside the jitted loop: ``lexical``, ``forbidden`` and ``length``. Such a reward is
  a :class:`Fold`. It is computed token by token, like ``functools.reduce``, from a state of fixed
  size. :class:`Data` are its arrays, and :class:`Together` is the sum or product of several.
- On the host, between device passes: ``regex``, ``json``, ``python``, ``classifier``, and Python
  functions. These read the completion's text, so the search is host-driven.

:class:`Combined` is the sum or product of any rewards. :class:`RewardScorer` is a
:class:`Combined` bound to the requests of one job; the decoding loop asks it for scores.
"""

from specjax.rewards.combined import COMBINATIONS, PRODUCT, Combined, RewardScorer
from specjax.rewards.folding import Data, Fold, Together
from specjax.rewards.length import Length
from specjax.rewards.lexical import Forbidden, Lexical, inflections, regular_inflections
from specjax.rewards.protocol import DeviceReward, Reward, RewardWarning, Sample
from specjax.rewards.table import REWARDS, combine, make_reward
from specjax.rewards.text import Json, OfFunction, Python, Regex

OnDevice = DeviceReward  # its former name
Judge = RewardScorer  # its former name

__all__ = [
    "COMBINATIONS",
    "PRODUCT",
    "REWARDS",
    "Combined",
    "Data",
    "DeviceReward",
    "Fold",
    "Forbidden",
    "Json",
    "Judge",
    "Length",
    "Lexical",
    "OfFunction",
    "OnDevice",
    "Python",
    "Regex",
    "Reward",
    "RewardScorer",
    "RewardWarning",
    "Sample",
    "Together",
    "combine",
    "inflections",
    "make_reward",
    "regular_inflections",
]
