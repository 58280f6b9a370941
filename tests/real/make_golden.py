"""Writes tests/golden/real.json: what transformers computes of the packaged models.

  python tests/real/make_golden.py        needs torch, and takes about five minutes

For each model the greedy continuations of the forty prompts, and some logits after three of them.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from specjax.lm import read_tokenizer  # noqa: E402
from specjax.models.gguf.packages import packaged_file  # noqa: E402
from support.real_prompts import prompts_of  # noqa: E402

NEW_TOKENS = 8
LOGITS = 64  # of each kept row: every id of a step over the vocabulary


def golden(name: str, count: int | None) -> dict:
    """The reference of one model, for its first ``count`` prompts and the long one."""
    path = packaged_file(name)
    tokenizer = read_tokenizer(path)
    # transformers reads the file by its own mapping; from_pretrained would need accelerate, too.
    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    assert left.missing_keys in ([], ["lm_head.weight"]) and not left.unexpected_keys, left
    model.tie_weights()
    rows = prompts_of(tokenizer)
    if count is not None:
        rows = rows[:count]
    tokens = []
    logits = []
    with torch.no_grad():
        for i, row in enumerate(rows):
            ids = torch.tensor([row])
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            tokens.append(made[0, len(row) :].tolist())
            if i < 3:
                last = model(ids).logits[0, -1]
                step = len(last) // LOGITS
                logits.append([round(float(x), 4) for x in last[::step][:LOGITS]])
    return {"prompts": [row[:8] for row in rows], "tokens": tokens, "logits": logits}


def main() -> None:
    """Writes the file."""
    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
    made = {"smollm2": golden("smollm2", None), "gemma3-270m": golden("gemma3-270m", 6)}
    path = ROOT / "tests" / "golden" / "real.json"
    path.write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
