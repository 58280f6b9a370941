"""Acceptance rules, one file each; every rule is a pure function usable alone."""

from specjax.verify.block import block
from specjax.verify.speculative import speculative

__all__ = ["block", "speculative"]
