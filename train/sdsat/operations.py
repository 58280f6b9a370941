"""What a step of SDSAT computes: floating-point operations, and a run's hours by them."""

from __future__ import annotations

from specjax.models import ModelConfig
from train.config import Adaptive, SDSATConfig
from train.engine.metrics import TERAFLOPS
from train.engine.operations import forward_operations
from train.sdsat.insertion import appended_slots


def forward_flops(model: ModelConfig, section: Adaptive, seq_len: int) -> float:
    """Floating-point operations of one row's forward pass, ``seq_len`` clean tokens long.

    Attention as it runs: over every key of the sequence, those that the mask hides included.
    """
    sequences, tokens = sequences_of(section), row_tokens(section, seq_len)
    return forward_operations(model, sequences * tokens, sequences * tokens**2)


def useful_operations(cfg: SDSATConfig, model: ModelConfig) -> float:
    """Of a step, per token of a batch: without the pairs that masks hide."""
    sequences, length = sequences_of(cfg.sdsat), cfg.data.seq_len
    tokens = row_tokens(cfg.sdsat, length)
    seen = (sequences * length + tokens - length) * length / 2
    return 3 * forward_operations(model, sequences * tokens, seen) / tokens


def sequences_of(section: Adaptive) -> int:
    """Passed for each row of a batch: with loss ``improved`` the clean one and the mixed one."""
    return 2 if section.loss == "improved" else 1


def row_tokens(section: Adaptive, seq_len: int) -> int:
    """Of a row of a batch: clean ones, and with loss ``isolated`` its windows'."""
    isolated = section.loss == "isolated"
    return seq_len + isolated * appended_slots(section.window, section.start_rate, seq_len)


def run_hours(cfg: SDSATConfig, model: ModelConfig, kind: str, devices: int) -> dict[str, float]:
    """All steps' at half of what so many devices can do, where their ``kind`` is known."""
    if kind not in TERAFLOPS:
        return {}
    rows = cfg.optim.batch_size * cfg.optim.accumulate * cfg.optim.total_steps
    operations = rows * row_tokens(cfg.sdsat, cfg.data.seq_len) * useful_operations(cfg, model)
    seconds = operations / (devices * TERAFLOPS[kind] * 1e12 / 2)
    return {"hours_at_half_the_peak": round(seconds / 3600, 2)}
