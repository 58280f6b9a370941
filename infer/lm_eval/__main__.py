"""Run lm-evaluation-harness's tasks with any method.

  python -m infer.lm_eval run --model specjax --tasks gsm8k \\
    --model_args pretrained=DIR,method=speculative,draft=DIR,gamma=4

The arguments are those of lm-eval, which the extra ``lm-eval`` installs. lm-eval reads no entry
points, so this program registers the model ``specjax`` and then starts it. ``--model_args`` are
``pretrained``, ``draft``, ``method``, ``batch_size``, ``max_gen_toks``, ``seed``, ``dtype``,
``quantize``, and the method's options.
"""

import importlib.util

from specjax._util.program import BAD_INPUT, run, say, start

NAME = "infer.lm_eval"


def main() -> int:
    """Runs the program; returns the exit code."""
    if importlib.util.find_spec("lm_eval") is None:
        say(NAME, 'it needs lm-eval: pip install "specjax[lm-eval]"')
        return BAD_INPUT
    return run(NAME, "infer.lm_eval.model:evaluate", None)


if __name__ == "__main__":
    start(main)
