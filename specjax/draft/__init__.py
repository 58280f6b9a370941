"""Drafters, one file each."""

from specjax.draft.chain import Chain
from specjax.draft.lookup import Lookup
from specjax.draft.none import NoDraft

__all__ = ["Chain", "Lookup", "NoDraft"]
