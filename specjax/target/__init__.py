"""Target distributions, one file each: the p that a draft is verified against."""

from specjax.target.contrastive import IMPROVED, ORIGINAL, VARIANTS, Contrastive
from specjax.target.guided import Guided
from specjax.target.warped import Warped

__all__ = ["IMPROVED", "ORIGINAL", "VARIANTS", "Contrastive", "Guided", "Warped"]
