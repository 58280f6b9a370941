"""Writes the golden logits with transformers; needs torch: python tests/golden/make.py [NAME...]"""

import copy
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from specjax.models import save_pretrained  # noqa: E402
from specjax.models.families import FAMILIES  # noqa: E402
from support import stack_variants, variants  # noqa: E402
from support.variant_models import build  # noqa: E402

torch.set_num_threads(1)  # waiting for a second thread costs more than these products


def model(name: str):
    """The variant in transformers, float32, with our weights."""
    settings = dict(variants.config(name))
    names = FAMILIES[settings["model_type"]].names
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    with torch.no_grad():
        for key, value in made.named_parameters():
            made_up = variants.weights(names.full(key), tuple(value.shape), variants.std(name))
            value.copy_(torch.from_numpy(made_up))
    return made


def stack_model(name: str):
    """A variant of support.stack_variants in transformers, from a checkpoint that specjax wrote.

    Its config is the variant's own, not what specjax made of it.
    """
    cfg, params, _ = build(name)
    config = variants.config(name)
    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(directory, cfg, params)
        stored = AutoConfig.for_model(**copy.deepcopy(config))
        made, info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=stored,
            dtype=torch.float32,
            output_loading_info=True,
            attn_implementation="eager",
        )
    assert not any(info.values()), info
    return made.eval()


def stack_arrays(name: str) -> dict[str, np.ndarray]:
    """Expected logits of the last tokens of both rows, and greedy tokens."""
    made = stack_model(name)
    last = logits(made, variants.tokens())[:, -variants.LAST :]
    return {f"{name}/logits": last, f"{name}/greedy": greedy(made)}


def logits(made, rows: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return made(torch.from_numpy(rows.astype(np.int64))).logits.numpy()


def tree_logits(made) -> np.ndarray:
    """float32 ``[rows, nodes, V]``: logits after each root-to-node path as its own sequence.

    The sequences run in one batch, padded on the right, which causal attention never reads.
    """
    rows = variants.tokens()
    nodes = [(row, node) for row, tree in enumerate(variants.TREES) for node in range(len(tree))]
    batch, ends = np.zeros((len(nodes), rows.shape[1]), np.int32), []
    for i, (row, node) in enumerate(nodes):
        prefix = rows[row, : variants.PREFIXES[row]].tolist()
        ids = prefix + [variants.TREE_TOKENS[row][j] for j in variants.path(row, node)]
        batch[i, : len(ids)] = ids
        ends.append(len(ids) - 1)
    last = logits(made, batch)[np.arange(len(nodes)), ends]
    return last.reshape(len(variants.TREES), -1, last.shape[-1])


def greedy(made) -> np.ndarray:
    """int32 ``[rows, GREEDY_TOKENS]``: the likeliest tokens after each row's first ones.

    Every step runs the whole sequence, so no cache is involved.
    """
    rows = variants.tokens()[:, : variants.GREEDY_PROMPT]
    for _ in range(variants.GREEDY_TOKENS):
        rows = np.concatenate([rows, logits(made, rows)[:, -1:].argmax(-1)], axis=1)
    return rows[:, variants.GREEDY_PROMPT :].astype(np.int32)


def arrays(name: str) -> dict[str, np.ndarray]:
    """Expected logits: of whole rows, and after every path of the trees; greedy tokens."""
    made = model(name)
    out = {"logits": logits(made, variants.tokens()), "tree": tree_logits(made)}
    return out | {"greedy": greedy(made)} if name in variants.FAMILIES else out


if __name__ == "__main__":
    names = sys.argv[1:] or (*variants.VARIANTS, *variants.FAMILIES, *stack_variants.ALL)
    stacks = {}
    if (HERE / "stacks.npz").exists():
        with np.load(HERE / "stacks.npz") as stored:
            kept = {key: stored[key] for key in stored if key.split("/")[0] in stack_variants.ALL}
        stacks |= kept
    for name in names:
        if name in stack_variants.ALL:
            stacks |= stack_arrays(name)
        else:
            np.savez_compressed(HERE / f"{name}.npz", **arrays(name))
    np.savez_compressed(HERE / "stacks.npz", **stacks)
