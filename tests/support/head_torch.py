"""A head on hidden states, made of transformers' Llama parts with a wider attention input.

Params are those of a checkpoint in speculators' names. Axis legend: T pairs, P layers of the
target, D hidden size, v draft vocabulary.
"""

import numpy as np
import torch
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.configuration_llama import LlamaConfig

from specjax.models.families.head_config import HeadConfig
from specjax.models.families.head_layouts import D2T, T2D


class Head(torch.nn.Module):
    """Maps T pairs to their logits ``[T, v]``; has a place for every weight of a checkpoint."""

    def __init__(self, cfg: HeadConfig, tensors: dict[str, np.ndarray]):
        super().__init__()
        self.cfg, width = cfg, cfg.hidden_size
        config = LlamaConfig(
            hidden_size=width,
            num_attention_heads=cfg.num_heads,
            num_key_value_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            intermediate_size=cfg.intermediate_size,
            rms_norm_eps=cfg.norm_eps,
            rope_theta=cfg.rope.theta,
            attn_implementation="eager",
        )
        layer = llama.LlamaDecoderLayer(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, torch.nn.Linear(2 * width, size, bias=False))
        layer.hidden_norm = self._norm(width)
        self.layers, self.rotary = torch.nn.ModuleList([layer]), llama.LlamaRotaryEmbedding(config)
        self.fc = torch.nn.Linear(cfg.parts * cfg.target_size, width, bias=False)
        if cfg.norm_before_fc:
            self.input_norm = self._norm(cfg.parts * cfg.target_size)
        if cfg.fc_norm:
            norms = [self._norm(cfg.target_size) for _ in range(cfg.parts)]
            self.fc_norm = torch.nn.ModuleList(norms)
        self.norm, self.embed_tokens = self._norm(width), torch.nn.Embedding(cfg.vocab_size, width)
        self.lm_head = torch.nn.Linear(width, cfg.draft_size, bias=False)
        weights = {n: torch.tensor(x) for n, x in tensors.items() if n not in (D2T, T2D)}
        self.load_state_dict(weights)

    def _norm(self, width: int) -> torch.nn.Module:
        return llama.LlamaRMSNorm(width, self.cfg.norm_eps)

    def forward(self, tokens: np.ndarray, states: np.ndarray) -> np.ndarray:
        """``tokens [T]`` with the states of those before, ``[T, P, D]``."""
        states, (layer,) = torch.tensor(np.array(states)), self.layers
        if self.cfg.fc_norm:
            parts = [norm(states[:, i]) for i, norm in enumerate(self.fc_norm)]
            states = torch.stack(parts, dim=1)
        joined = states.flatten(1)
        if self.cfg.norm_before_fc:
            joined = self.input_norm(joined)
        features = self.fc(joined)[None]
        normed = layer.hidden_norm(features)
        embedded = layer.input_layernorm(self.embed_tokens(torch.tensor(tokens)[None]))
        both = torch.cat([embedded, normed], dim=-1)
        turns = self.rotary(both, torch.arange(len(tokens))[None])
        unseen = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        mixed = layer.self_attn(both, position_embeddings=turns, attention_mask=unseen)[0]
        x = mixed + (normed if self.cfg.norm_before_residual else features)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.lm_head(self.norm(x))[0].numpy()
