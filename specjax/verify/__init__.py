"""Acceptance rules, one file each; every rule is a pure function usable alone."""

from specjax.verify.bild_rollback import bild
from specjax.verify.block_verification import block
from specjax.verify.joint_threshold import joint
from specjax.verify.match_target import match
from specjax.verify.mentored_decoding import mentored
from specjax.verify.specinfer_siblings import specinfer
from specjax.verify.spectr_kseq import spectr
from specjax.verify.speculative_sampling import speculative

__all__ = ["bild", "block", "joint", "match", "mentored", "specinfer", "spectr", "speculative"]
