"""Drafters, one file each."""

from specjax.draft.adaptive import CHAIN, MOST, TREE, Answering, Asking, Candidates, SinglePass
from specjax.draft.beam import Beam
from specjax.draft.chain import Chain
from specjax.draft.lookup import Lookup
from specjax.draft.none import NoDraft
from specjax.draft.tree import Tree

__all__ = [
    "CHAIN",
    "MOST",
    "TREE",
    "Answering",
    "Asking",
    "Beam",
    "Candidates",
    "Chain",
    "Lookup",
    "NoDraft",
    "SinglePass",
    "Tree",
]
