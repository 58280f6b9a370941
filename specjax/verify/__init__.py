"""Acceptance rules, one file each; every rule is a pure function usable alone."""

from specjax.verify.speculative import speculative

__all__ = ["speculative"]
