"""Methods that are not draft-then-verify, one file each; the same loop runs them."""

from specjax.search.beam import BeamSearch
from specjax.search.mtjd import MTJD

__all__ = ["MTJD", "BeamSearch"]
