"""Drafters, one file each."""

from specjax.draft.chain import Chain
from specjax.draft.none import NoDraft

__all__ = ["Chain", "NoDraft"]
