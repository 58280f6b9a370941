"""Writes the golden logits with transformers; needs torch: python tests/golden/make.py"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import variants  # noqa: E402


def model(name: str):
    """The variant in transformers, float32, with our weights."""
    settings = dict(variants.config(name))
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for key, value in made.named_parameters():
            value.copy_(torch.from_numpy(variants.weights(key, tuple(value.shape))))
    return made


def logits(made, rows: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return made(torch.from_numpy(rows.astype(np.int64))).logits.numpy()


def arrays(name: str) -> dict[str, np.ndarray]:
    """Expected logits: whole rows, and the last token of every path of the tree."""
    made = model(name)
    rows = variants.tokens()
    prefix = rows[0, : variants.PREFIX].tolist()
    paths = [
        logits(made, np.array([prefix + [variants.TREE_TOKENS[i] for i in path]]))[0, -1]
        for path in variants.tree_paths()
    ]
    return {"logits": logits(made, rows), "tree": np.stack(paths)}


if __name__ == "__main__":
    for name in variants.VARIANTS:
        np.savez_compressed(HERE / f"{name}.npz", **arrays(name))
