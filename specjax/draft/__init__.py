"""Drafters, one file each."""

from specjax.draft.adaptive import Candidates, ProbePass, SinglePass, VerifyPass
from specjax.draft.beam import Beam
from specjax.draft.chain import STOPS, Chain
from specjax.draft.head import HeadBest, HeadChain, HeadTree
from specjax.draft.lookup import Lookup
from specjax.draft.none import NoDraft
from specjax.draft.suffix import Suffix
from specjax.draft.tree import Tree

__all__ = [
    "STOPS",
    "Beam",
    "Candidates",
    "Chain",
    "HeadBest",
    "HeadChain",
    "HeadTree",
    "Lookup",
    "NoDraft",
    "ProbePass",
    "SinglePass",
    "Suffix",
    "Tree",
    "VerifyPass",
]
