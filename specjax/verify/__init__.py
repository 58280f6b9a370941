"""Acceptance rules, one file each. Every rule is a pure function and usable alone.

A rule compares p, the target distribution, with q, the distribution that the draft was drawn from.
It accepts a part of the draft and draws one more token after it.
"""

from specjax.verify.bild_rollback import bild
from specjax.verify.block_verification import block
from specjax.verify.joint_threshold import joint
from specjax.verify.match_target import match
from specjax.verify.mentored_decoding import mentored
from specjax.verify.specinfer_siblings import specinfer
from specjax.verify.spectr_kseq import spectr
from specjax.verify.speculative_sampling import speculative

__all__ = ["bild", "block", "joint", "match", "mentored", "specinfer", "spectr", "speculative"]
