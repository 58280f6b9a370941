"""Floating-point operations (FLOPs) of an SDSAT step, and the hours of a run."""

from __future__ import annotations

from specjax.models import ModelConfig
from train.config import Adaptive, SDSATConfig
from train.engine.metrics import TERAFLOPS
from train.engine.operations import forward_operations
from train.sdsat.insertion import appended_slots


def forward_flops(model: ModelConfig, section: Adaptive, seq_len: int) -> float:
    """FLOPs of the forward pass of one row of ``seq_len`` clean tokens.

    Attention counts every key of the sequence, as it runs: also those that the mask hides.
    """
    sequences = sequences_of(section)
    tokens = row_tokens(section, seq_len)
    return forward_operations(model, sequences * tokens, sequences * tokens**2)


def useful_operations(cfg: SDSATConfig, model: ModelConfig) -> float:
    """FLOPs of a step per clean token, forward and backward, without attention that is masked."""
    sequences = sequences_of(cfg.sdsat)
    length = cfg.data.seq_len
    tokens = row_tokens(cfg.sdsat, length)
    # Every query, of the sequences and of appended windows, sees half of a row on average.
    pairs = (sequences * length + tokens - length) * length / 2
    return 3 * forward_operations(model, sequences * tokens, pairs) / length


def sequences_of(section: Adaptive) -> int:
    """Sequences per row in the forward pass: for loss ``improved`` a clean and a mixed one."""
    return 2 if section.loss == "improved" else 1


def row_tokens(section: Adaptive, seq_len: int) -> int:
    """Tokens of a row: the clean ones, and for loss ``isolated`` the appended ones."""
    if section.loss != "isolated":
        return seq_len
    return seq_len + appended_slots(section.window, section.start_rate, seq_len)


def run_hours(cfg: SDSATConfig, model: ModelConfig, kind: str, devices: int) -> dict[str, float]:
    """Hours of all steps at half of the devices' peak; empty for an unknown ``kind``."""
    if kind not in TERAFLOPS:
        return {}
    rows = cfg.optim.batch_size * cfg.optim.accumulate * cfg.optim.total_steps
    operations = rows * cfg.data.seq_len * useful_operations(cfg, model)
    seconds = operations / (devices * TERAFLOPS[kind] * 1e12 / 2)
    return {"hours_at_half_the_peak": round(seconds / 3600, 2)}
