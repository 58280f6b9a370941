"""``coherence:DIR``: how close a completion stays to its prompt, by sentence embeddings.

DIR is a directory on this machine: of sentence-transformers, which then embeds as it says, or of a
transformers encoder, whose last hidden states are pooled: the mean by default, ``cls:DIR`` (the
first token's) or ``pooler:DIR`` (its pooler's output, SimCSE's supervised models). Nothing is
downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from infer.bench.metrics.protocol import Completion, PerCompletion, library
from infer.bench.metrics.settings import Settings
from specjax._util.errors import OptionError, foreign, silent
from specjax._util.files import check_entries

MEAN, CLS, POOLER = "mean", "cls", "pooler"
BATCH = 32  # texts of a pass
Embed = Callable[[Sequence[str]], np.ndarray]


class Coherence(PerCompletion):
    """``cos(e(prompt), e(completion))`` (SCD, appendix A.1). An empty completion has none."""

    columns = {"coherence": "coherence"}  # noqa: RUF012

    def __init__(self, embed: Embed):
        self._embed = embed

    def check(self, prompts: Sequence[Completion]) -> None:
        with foreign("--metric coherence: the model cannot embed a text", OptionError):
            self._embed(["a"])

    def scores(self, done: Sequence[Completion]) -> list[list[float | None]]:
        texts = list(dict.fromkeys(text for one in done for text in (one.prompt, one.text)))
        known = dict(zip(texts, self._embed(texts), strict=True))
        return [
            [cosine(known[one.prompt], known[one.text]) if one.text.strip() else None]
            for one in done
        ]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two vectors, ``[D]`` both."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def of_sentence_transformers(directory: Path) -> Embed:
    """Embeds as the directory says."""
    models = library("sentence_transformers", "coherence")
    model = models.SentenceTransformer(str(directory), local_files_only=True, device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)


def of_transformers(directory: Path, pooling: str) -> Embed:
    """Pools an encoder's last hidden states."""
    torch = library("torch", "coherence", "torch")
    transformers = library("transformers", "coherence")
    there = {"local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **there)
    model = transformers.AutoModel.from_pretrained(directory, **there).eval()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    positions = getattr(model.config, "max_position_embeddings", None) or 512
    most = min(tokenizer.model_max_length, positions)

    def pooled(texts: Sequence[str]) -> np.ndarray:
        rows = tokenizer(
            list(texts), padding=True, truncation=True, max_length=most, return_tensors="pt"
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
    """The metric; ``argument`` is the directory, maybe after its pooling and a colon.

    Raises:
      OptionError: no such directory, nothing in it that embeds, or a library is missing.
    """
    pooling, colon, name = argument.partition(":")
    if not colon or pooling not in (MEAN, CLS, POOLER):
        pooling, name = "", argument
    home = Path(name).expanduser()
    if not home.is_dir():
        raise OptionError(f"--metric coherence: {name} is no directory")
    with foreign(f"--metric coherence: {name} cannot be loaded", OptionError), silent():
        check_entries(home)
        own = (home / "modules.json").is_file() and not pooling
        embed = of_sentence_transformers(home) if own else of_transformers(home, pooling or MEAN)
    return Coherence(embed)
