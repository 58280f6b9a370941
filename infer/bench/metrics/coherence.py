"""``coherence:DIR``: how close a completion stays to its prompt, by sentence embeddings.

DIR is a local directory; nothing is downloaded. It is either a model of sentence-transformers,
which embeds as it says itself, or an encoder of transformers. An encoder's last hidden states are
pooled: by default their mean, with ``cls:DIR`` the first token's, and with ``pooler:DIR`` its
pooler's output (for SimCSE's supervised models).

Axis legend: D embedding size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from infer.bench.metrics.protocol import Completion, PerCompletion, library
from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError, errors_as, silence_stderr
from specjax._util.files import check_entries, expand_user
from specjax.rewards.classifier import most_positions

MEAN = "mean"
CLS = "cls"
POOLER = "pooler"
BATCH = 32  # texts of a pass
DEFAULT_POSITIONS = 512  # of an encoder whose config has no number
Embed = Callable[[Sequence[str]], np.ndarray]  # from texts to ``[texts, D]``


class Coherence(PerCompletion):
    """``cos(e(prompt), e(completion))`` (SCD, appendix A.1); None for an empty completion."""

    columns = {"coherence": "coherence"}  # noqa: RUF012

    def __init__(self, embed: Embed):
        self._embed = embed

    def check(self, prompts: Sequence[Completion]) -> None:
        with errors_as("--metric coherence: the model cannot embed a text", OptionError):
            self._embed(["a"])

    def scores(self, completions: Sequence[Completion]) -> list[list[float | None]]:
        # Each text is embedded once: a prompt has several completions.
        texts = list(dict.fromkeys(t for one in completions for t in (one.prompt, one.text)))
        embeddings = dict(zip(texts, self._embed(texts), strict=True))
        scores: list[list[float | None]] = []
        for one in completions:
            if one.text.strip():
                scores.append([cosine(embeddings[one.prompt], embeddings[one.text])])
            else:
                scores.append([None])
        return scores


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of two vectors, ``[D]`` both."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def of_sentence_transformers(directory: Path) -> Embed:
    """Embeds with a model of sentence-transformers."""
    models = library("sentence_transformers", "coherence")
    model = models.SentenceTransformer(str(directory), local_files_only=True, device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)


def of_transformers(directory: Path, pooling: str) -> Embed:
    """Embeds with an encoder of transformers, whose last hidden states are pooled."""
    torch = library("torch", "coherence", "torch")
    transformers = library("transformers", "coherence")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModel.from_pretrained(directory, local_files_only=True).eval()
    positions = most_positions(model) or DEFAULT_POSITIONS
    max_length = min(tokenizer.model_max_length, positions)

    def pooled(texts: Sequence[str]) -> np.ndarray:
        rows = tokenizer(
            list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt"
        )
        with torch.inference_mode():
            out = model(**rows)
        if pooling == POOLER:
            return out.pooler_output.float().numpy()
        if pooling == CLS:
            return out.last_hidden_state[:, 0].float().numpy()
        mask = rows["attention_mask"][..., None].float()
        return ((out.last_hidden_state.float() * mask).sum(1) / mask.sum(1)).numpy()

    def embed(texts: Sequence[str]) -> np.ndarray:
        batches = range(0, len(texts), BATCH)
        return np.concatenate([pooled(texts[first : first + BATCH]) for first in batches])

    return embed


def make(argument: str, settings: Settings) -> Coherence:
    """The metric; ``argument`` is the directory, optionally after a pooling and a colon.

    Raises:
      OptionError: there is no such directory, it cannot embed, or a library is missing.
    """
    pooling, colon, name = argument.partition(":")
    if not colon or pooling not in (MEAN, CLS, POOLER):
        pooling = ""
        name = argument
    home = expand_user(name)
    if not os.path.isdir(home):
        raise OptionError(f"--metric coherence: {name} is no directory")
    with errors_as(f"--metric coherence: {name} cannot be loaded", OptionError), silence_stderr():
        check_entries(home)
        # A given pooling overrides what a directory of sentence-transformers says.
        if (home / "modules.json").is_file() and not pooling:
            embed = of_sentence_transformers(home)
        else:
            embed = of_transformers(home, pooling or MEAN)
    return Coherence(embed)
