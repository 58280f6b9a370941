"""What a step of SDSAT computes: floating-point operations, and a run's hours by them."""

from __future__ import annotations

from specjax.models import ModelConfig, num_params
from train.config import SDSATConfig
from train.engine.metrics import TERAFLOPS
from train.sdsat.insertion import appended_slots


def forward_flops(model: ModelConfig, loss: str, window: int, rate: float, seq_len: int) -> float:
    """Floating-point operations of one row's forward pass, ``seq_len`` clean tokens long.

    Two per parameter and token, and attention as it runs: scores and values over every key of
    the sequence, those that the mask hides included. Backward takes twice as many.
    """
    appended = appended_slots(window, rate, seq_len) if loss == "isolated" else 0
    sequences, tokens = (2 if loss == "improved" else 1), seq_len + appended
    lookups = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    products = 2 * (num_params(model) - lookups) * tokens
    attention = 4 * tokens**2 * model.num_heads * model.head_dim * model.num_layers
    return float(sequences * (products + attention))


def useful_operations(cfg: SDSATConfig, model: ModelConfig) -> float:
    """Of a step, per token of a batch: :func:`forward_flops` without the scores that masks hide."""
    section, length = cfg.sdsat, cfg.data.seq_len
    forward = forward_flops(model, section.loss, section.window, section.start_rate, length)
    sequences, tokens = (2 if section.loss == "improved" else 1), row_tokens(cfg)
    seen = (sequences * length + tokens - length) * length / 2
    masked = sequences * tokens**2 - seen
    operations = forward - 4 * masked * model.num_heads * model.head_dim * model.num_layers
    return 3 * operations / tokens


def row_tokens(cfg: SDSATConfig) -> int:
    """Of a row of a batch: clean ones, and with loss ``isolated`` its windows'."""
    section, length = cfg.sdsat, cfg.data.seq_len
    isolated = section.loss == "isolated"
    return length + isolated * appended_slots(section.window, section.start_rate, length)


def run_hours(cfg: SDSATConfig, model: ModelConfig, kind: str, devices: int) -> dict[str, float]:
    """All steps' at half of what so many devices can do, where their ``kind`` is known."""
    if kind not in TERAFLOPS:
        return {}
    rows = cfg.optim.batch_size * cfg.optim.accumulate * cfg.optim.total_steps
    operations = rows * row_tokens(cfg) * useful_operations(cfg, model)
    seconds = operations / (devices * TERAFLOPS[kind] * 1e12 / 2)
    return {"hours_at_half_the_peak": round(seconds / 3600, 2)}
