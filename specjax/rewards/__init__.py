"""Rewards that guide constrained decoding: what a completion is worth, asked while it grows.

``lexical``, ``forbidden`` and ``length`` are folds over tokens and run inside the device loop;
``regex``, ``json``, ``python``, ``classifier`` and Python functions read text and run in a
host-driven loop over the same stages.
"""

from specjax.rewards.combined import COMBINATIONS, PRODUCT, Combined, Judge, RewardWarning
from specjax.rewards.folding import Data, Fold, Together
from specjax.rewards.length import Length
from specjax.rewards.lexical import Forbidden, Lexical, inflections
from specjax.rewards.protocol import DeviceReward, Reward, Sample
from specjax.rewards.table import REWARDS, combine, make_reward
from specjax.rewards.text import Json, OfFunction, Python, Regex

OnDevice = DeviceReward  # its former name

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
    "RewardWarning",
    "Sample",
    "Together",
    "combine",
    "inflections",
    "make_reward",
]
