"""Methods that are not one draft and one verification, one file each; the same loop runs them."""

from specjax.search.beam import BeamSearch
from specjax.search.cdsl import ACCEPTS, CDSL
from specjax.search.lookahead import Lookahead
from specjax.search.mtjd import MTJD
from specjax.search.sdsat import TwoStep

__all__ = ["ACCEPTS", "CDSL", "MTJD", "BeamSearch", "Lookahead", "TwoStep"]
