"""Acceptance rules, one file each; every rule is a pure function usable alone."""

from specjax.verify.bild import bild
from specjax.verify.block import block
from specjax.verify.joint import joint
from specjax.verify.match import match
from specjax.verify.mentored import mentored
from specjax.verify.specinfer import specinfer
from specjax.verify.spectr import spectr
from specjax.verify.speculative import speculative

__all__ = ["bild", "block", "joint", "match", "mentored", "specinfer", "spectr", "speculative"]
