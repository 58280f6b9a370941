"""The losses of ``train.head`` beside each other, for the figures of docs/pages/train-head.md.

  python -m train.demo.signatures runs/signatures.jsonl --num 400
  python -m train.answers runs/signatures.jsonl runs/continuations.jsonl --target demo \
      --chat-template configs/plain.jinja --max-new-tokens 96 --temperature 0=3,1=1
  python docs/tools/measure_head_losses.py runs/continuations.jsonl

It trains short heads for the embedded target: by default, with ``head.drop_outside`` and with
``head.mean_per_step``. Runs of one seed start from the same weights and see the same
tokens in the same order. It prints what each head does on held-out rows and prompts. ± is half of
the 95 % interval over the seeds (Student's t). Differences are paired by seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from scipy import stats

from specjax._util.files import markdown_table
from train.head.__main__ import main as train_head

CONFIG = Path(__file__).parents[2] / "configs" / "head_demo.toml"
LOSSES = {
    "the default": (),
    "`drop_outside`": ("head.drop_outside=true",),
    "`mean_per_step`": ("head.mean_per_step=true",),
}
COLUMNS = ("loss", "tokens per round", "difference", "first draft accepted", "difference")


def measured(loss: str, seed: int, args: argparse.Namespace) -> tuple[float, float]:
    """Tokens per round of the trained head, and the share of first drafts that are accepted."""
    with tempfile.TemporaryDirectory() as home:
        directory = Path(home) / "run"
        settings = [
            *LOSSES[loss],
            f"data.files={json.dumps([args.corpus])}",
            *("data.seq_len=256", f"head.draft_vocab={args.draft_vocab}"),
            *(f"optim.total_steps={args.steps}", f"run.eval_every={args.steps}"),
            *(f"run.checkpoint_every={args.steps}", f"run.log_every={args.steps}"),
            *(f"run.dir={directory}", f"run.seed={seed}"),
        ]
        options = [word for setting in settings for word in ("--set", setting)]
        if train_head([str(CONFIG), *options]):
            raise SystemExit(f"the run with {loss} failed")
        lines = (directory / "metrics.jsonl").read_text().splitlines()

    (last,) = (record for record in map(json.loads, lines) if "valid_loss" in record)
    return last["valid_decode_tokens_per_round"], last["valid_decode_acceptance"][0]


def said(values: np.ndarray) -> str:
    """The mean ± half of its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{values.mean():.3f} ± {half:.3f}"


def main() -> None:
    """Prints one line per loss."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", help="a JSON lines file of what the target writes")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--draft-vocab", type=int, default=512)
    args = parser.parse_args()

    found = np.zeros((len(LOSSES), args.seeds, 2))
    for seed in range(args.seeds):
        for number, loss in enumerate(LOSSES):
            found[number, seed] = measured(loss, seed, args)
            print(f"seed {seed}, {loss}: {found[number, seed]}", flush=True)

    rows = []
    for number, loss in enumerate(LOSSES):
        cells = [loss]
        for figure in range(2):
            values = found[number, :, figure]
            cells += [said(values), said(values - found[0, :, figure]) if number else ""]
        rows.append(cells)
    print(markdown_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
