"""llama-cpp-python as far as a peer uses it. It decodes with our own code."""

from collections.abc import Iterator

import specjax as sj
from specjax.models.gguf.read import load_gguf

GGML_TYPE_F32 = 0


class Llama:
    """A model of a GGUF file."""

    def __init__(self, path, n_ctx, n_threads, n_threads_batch, n_gpu_layers, **settings):
        assert n_threads == n_threads_batch > 0 and n_gpu_layers == 0
        assert settings == {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32, "verbose": False}
        self.context = n_ctx
        self.model = sj.from_params(*load_gguf(path))
        self.is_reset = False

    def reset(self) -> None:
        self.is_reset = True

    def generate(self, tokens, temp, repeat_penalty) -> Iterator[int]:
        assert self.is_reset and (temp, repeat_penalty) == (0.0, 1.0)
        self.is_reset = False
        # It goes on after an end of sequence and after the budget, as llama.cpp does.
        count = self.context - len(tokens) + 4
        yield from sj.generate(self.model, [tokens], max_new_tokens=count).tokens[0].tolist()
