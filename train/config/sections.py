"""The sections of the training configs, and one config of sections for each program.

Each section is a frozen dataclass. A field's annotation is its type and the check that a value must
pass; :mod:`train.config.reading` reads both.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal

from specjax._util.checks import (
    FROM_0,
    INT32_MAX,
    POSITIVE,
    number,
    satisfying,
    whole,
)
from specjax._util.errors import InputError

PositiveInt = Annotated[int, whole()]
PositiveFloat = Annotated[float, POSITIVE]
NotNegativeInt = Annotated[int, whole(0)]
NotNegativeFloat = Annotated[float, FROM_0]
BelowOne = Annotated[float, number(0, 1, below=True)]
Fraction = Annotated[float, number(0, 1)]
Layers = Annotated[int, whole(1, 4096)]
Width = Annotated[int, whole(1, 2**20)]
Vocabulary = Annotated[int, whole(261, 2**20)]  # 256 bytes and train.data.tokenizer's special ids
Seed = Annotated[int, whole(0, 2**32 - 1)]  # NumPy and JAX take it
# A text that must not be empty. Where a plain str may be, its comment says what that means.
Name = Annotated[str, satisfying("a text that is not empty", bool)]
# Empty: no topology.
Topology = Annotated[
    str,
    satisfying(
        "KIND:AxB or KIND:AxBxC, e.g. v5e:2x4",
        lambda text: bool(re.fullmatch(r"|[^:]+:[1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){1,2}", text)),
    ),
]
Matrix = Literal["q", "k", "v", "out", "gate", "up", "down"]
ComputeDtype = Literal["float32", "bfloat16"]
Remat = bool | Literal["attention"]


@dataclasses.dataclass(frozen=True)
class Model:
    """The model to pre-train: its sizes, or a checkpoint to continue from."""

    # A Hugging Face directory, a hub id, or an embedded model; empty: random weights.
    init_from: str = ""
    hidden_size: Width = 320
    num_layers: Layers = 6
    num_heads: Width = 5
    num_kv_heads: NotNegativeInt = 0  # 0: as num_heads
    intermediate_size: Width = 864
    max_position: PositiveInt = 2048
    rope_theta: PositiveFloat = 10000.0
    tie_embeddings: bool = True
    compute_dtype: ComputeDtype = "float32"  # of the forward pass; master weights are float32
    remat: Remat = False  # recompute blocks in the backward pass, as Tuned.remat
    router_aux_loss: NotNegativeFloat = 0.0  # of a mixture of experts, as Tuned.router_aux_loss


@dataclasses.dataclass(frozen=True)
class DataSection:
    """The corpus, and how it is cut into rows."""

    corpora: tuple[Name, ...] = ()  # stdlib, installed, specjax: sources on this machine
    files: tuple[Name, ...] = ()
    shards: str = ""  # a directory for tokenized shards; empty: the whole corpus is in memory
    weights: tuple[PositiveFloat, ...] = ()  # sampling weight of each corpus, then of each file
    # Files to evaluate on, as in files. Then all of the corpora and files is trained on. Empty: one
    # document in 20 of them is held out.
    eval: tuple[Name, ...] = ()
    # The least characters of a document. The default leaves out package stubs and license headers.
    min_chars: NotNegativeInt = 200
    seq_len: Width = 512
    # Of conversations. The template: a Jinja file; empty: the target's own.
    chat_template: str = ""
    # Further variables of the template, such as enable_thinking.
    template_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    train_on: Literal["assistant", "last", "all"] = "assistant"  # all answers, the last, all tokens


@dataclasses.dataclass(frozen=True)
class TokenizerSection:
    """A tokenizer.json to reuse, or the size of the one to train."""

    path: str = ""  # empty: the checkpoint's own; for a new model it is trained
    vocab_size: Vocabulary = 4096
    eos: str = ""  # the token that ends a document; empty: as the tokenizer's files say


@dataclasses.dataclass(frozen=True)
class Optim:
    """The optimizer and the learning rate schedule.

    The learning rate depends on the step alone. So ``--resume`` with another ``total_steps``
    anneals a run early or extends it.
    """

    optimizer: Literal["adamw", "muon", "adafactor"] = "adamw"
    moments: Literal["float32", "bfloat16"] = "float32"  # dtype of first moments; adafactor: none
    # Of all parameters that Muon does not train. A config that has none takes it from RATES.
    learning_rate: PositiveFloat = 3e-3
    muon_learning_rate: PositiveFloat = 2e-2  # of the matrices inside the blocks
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: PositiveFloat = 1e-8  # of AdamW: added to the root of the second moment
    muon_momentum: BelowOne = 0.95
    weight_decay: NotNegativeFloat = 0.1  # on matrices only
    clip_norm: NotNegativeFloat = 1.0  # the largest norm of all gradients; 0: not clipped
    schedule: Literal["wsd", "cosine"] = "wsd"
    warmup_steps: NotNegativeInt = 50
    decay_fraction: Fraction = 0.3  # wsd: the share of steps that anneal
    final_fraction: Fraction = 0.02  # learning rate after the last step, as a share of the peak
    total_steps: PositiveInt = 1000
    num_epochs: NotNegativeFloat = 0.0  # if above 0: so many epochs, instead of total_steps
    batch_size: PositiveInt = 16  # rows per micro-batch
    accumulate: PositiveInt = 1  # micro-batches per optimizer step (gradient accumulation)


# (learning_rate, muon_learning_rate) where a config has none, by what is trained. Tuning takes the
# usual rates of AdamW: those of TRL for models and for LoRA, and that of SpecForge for heads. Those
# of Muon were tried (docs/training.md).
RATES = {
    "new": (3e-3, 2e-2),
    "full": (2e-5, 2e-3),
    "embeddings": (1e-3, 1e-3),
    "lora": (2e-4, 1e-3),
    "gated-lora": (2e-4, 1e-3),
    "head": (1e-4, 2e-2),
}
BY_WHAT_IS_TRAINED = Optim(learning_rate=0.0, muon_learning_rate=0.0)  # 0: not given


@dataclasses.dataclass(frozen=True)
class Distill:
    """Distillation from a teacher; off if ``teacher`` is empty."""

    teacher: str = ""  # a Hugging Face directory, a hub id, or an embedded model
    alpha: Fraction = 1.0  # weight of KL(teacher ‖ student); the rest is cross-entropy on the data
    temperature: PositiveFloat = 1.0
    # Held-out prompts that each evaluation continues greedily, with the teacher as the target.
    decode_prompts: NotNegativeInt = 0
    decode_tokens: PositiveInt = 64  # new tokens per prompt
    decode_length: Annotated[int, whole(1, 64)] = 4  # draft tokens of a round


@dataclasses.dataclass(frozen=True)
class Run:
    """The run's directory, and how often the run logs, evaluates and saves."""

    dir: Name = "runs/lm"
    seed: Seed = 0
    log_every: PositiveInt = 10
    eval_every: PositiveInt = 200
    eval_batches: NotNegativeInt = 8
    checkpoint_every: PositiveInt = 100
    checkpoint_minutes: NotNegativeFloat = 0.0  # also save after so many minutes; 0: steps alone
    keep: PositiveInt = 2
    # Also keep the checkpoint of the best evaluation, and export it instead of the last one.
    # "loss": by held-out loss; "accepted": by accepted length, where evaluations decode.
    keep_best: Literal["", "loss", "accepted"] = ""
    patience: NotNegativeInt = 0  # evaluations without a better one that end the run; 0: none do
    # train.lm: new tokens of a held-out text that each evaluation continues; 0: none. The other
    # programs decode anyway.
    sample_tokens: NotNegativeInt = 0
    export_dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32"  # int8: of a delta
    tensorboard: bool = False  # also write event files into dir/events
    wandb: str = ""  # also report to this project of Weights & Biases, through its client


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """The devices of a run. All of them take part; the rows of a batch are split over them."""

    fsdp: PositiveInt = 1  # devices that share one copy of the params and the optimizer state
    model: PositiveInt = 1  # devices that share each layer's heads and columns, and the vocabulary
    sequence: PositiveInt = 1  # devices that share each row, for rows too long for one
    devices: NotNegativeInt = 0  # devices that the run needs and --dry-run plans for; 0: all here
    topology: Topology = ""  # TPU topology that --dry-run compiles for, e.g. v5e:2x4
    memory_gib: NotNegativeFloat = 0.0  # of one device, for --dry-run; 0: as the device reports


DATA = DataSection()


@dataclasses.dataclass(frozen=True)
class LMConfig:
    """The config of ``python -m train.lm``."""

    model: Model = Model()
    data: DataSection = DATA
    tokenizer: TokenizerSection = TokenizerSection()
    optim: Optim = BY_WHAT_IS_TRAINED
    distill: Distill = Distill()
    mesh: MeshSection = MeshSection()
    run: Run = Run()

    def __post_init__(self):
        _set_rates(self, "full" if self.model.init_from else "new")
        _check_batch(self)
        _check_export(self.run, is_delta=False)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The checkpoint to fine-tune, and which of its parameters are trained."""

    init_from: str = ""  # a Hugging Face directory, an embedded model, or a delta to train on
    base: str = ""  # the model that a delta in init_from is for; empty: the one that it names
    tokenizer: str = ""  # a tokenizer.json; empty: the checkpoint's own
    # gated-lora: low-rank updates at adaptive tokens only, exported as a delta to the checkpoint
    train: Literal["full", "embeddings", "lora", "gated-lora"] = "full"
    lora_rank: Width = 16
    lora_alpha: PositiveFloat = 32.0
    lora_matrices: tuple[Matrix, ...] = ()  # of each block; empty: all of them
    compute_dtype: ComputeDtype = "float32"  # of the forward pass; master weights are float32
    # Recompute each block in the backward pass. "attention": keep the attention outputs of long
    # sequences, recompute the rest.
    remat: Remat = False
    scan: bool = False  # compile one block and scan over the layers: deep models compile faster
    # Of a mixture: weight of the load-balancing loss of the experts, as router_aux_loss_coef of
    # transformers.
    router_aux_loss: NotNegativeFloat = 0.0


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """SDSAT: the adaptive token ids, where they are inserted, and what they learn."""

    window: Annotated[int, whole(1, 1024)] = 5  # L
    ids: tuple[NotNegativeInt, ...] = ()  # empty: unused vocabulary, or else new rows
    distinct: bool = False  # one id per place of the window, instead of one id for all
    start_rate: BelowOne = 0.1  # 0 with loss basic: plain continued training, for comparison
    loss: Literal["basic", "improved", "isolated"] = "isolated"
    adaptive_targets: Literal["data", "self", "mix"] = "self"
    mix: Fraction = 0.5  # share of self targets in "mix"
    weight: NotNegativeFloat = 1.0  # w, of the adaptive loss
    probe_length: Annotated[int, whole(0, 1024)] = (
        0  # adaptive tokens of a held-out window; 0: as window
    )
    decode_prompts: NotNegativeInt = 16  # held-out prompts that each evaluation continues greedily
    decode_tokens: PositiveInt = 64  # new tokens per prompt
    fim_rate: Fraction = 0.0  # share of documents rearranged for infilling; needs the sentinels

    @property
    def held_out_window(self) -> int:
        """k, the adaptive tokens of a held-out window."""
        return self.probe_length or self.window


@dataclasses.dataclass(frozen=True)
class SDSATConfig:
    """The config of ``python -m train.sdsat``."""

    model: Tuned = Tuned()
    data: DataSection = DATA
    sdsat: Adaptive = Adaptive()
    optim: Optim = BY_WHAT_IS_TRAINED
    mesh: MeshSection = MeshSection()
    run: Run = Run(dir="runs/sdsat")

    def __post_init__(self):
        _set_rates(self, self.model.train)
        _check_batch(self)
        is_delta = self.model.train == "gated-lora"
        _check_export(self.run, is_delta)
        # The held-out loss is that of tokens without adapters.
        if is_delta and self.run.keep_best == "loss":
            raise InputError(
                'run.keep_best="loss" with model.train="gated-lora": adapters never change the '
                'held-out loss; set run.keep_best="accepted" and sdsat.decode_prompts above 0'
            )


@dataclasses.dataclass(frozen=True)
class HeadTarget:
    """The target whose hidden states a head reads; its parameters never change."""

    init_from: str = ""  # a Hugging Face directory, or the name of an embedded model
    tokenizer: str = ""  # a tokenizer.json; empty: the target's own
    compute_dtype: ComputeDtype = "float32"  # of the forward pass
    remat: bool = False  # recompute each step of the head in the backward pass


@dataclasses.dataclass(frozen=True)
class HeadSection:
    """EAGLE-3: the head's sizes, and how many draft steps each token trains."""

    # A head to start from: a directory, a hub id or an embedded one; empty: random weights. Its
    # sizes, layers and draft vocabulary then hold; one that is set here must be the same.
    init_from: str = ""
    # A directory of the target's hidden states (python -m train.states); empty: each step computes
    # them. With it, only the target's embedding and LM head are loaded, and no evaluation decodes.
    states: str = ""
    draft_vocab: NotNegativeInt = 0  # draft only this many most frequent ids of the corpus; 0: all
    layers: tuple[
        NotNegativeInt, ...
    ] = ()  # of the target, read as aux_layers; (): 2, n // 2, n − 3
    num_kv_heads: NotNegativeInt = 0  # 0: as the target
    intermediate_size: NotNegativeInt = 0  # 0: as the target
    norm_before_residual: bool = False
    steps: Annotated[int, whole(1, 16)] = 7  # K
    decay: Annotated[float, number(0, 1, above=True)] = 0.8  # β: step k has the weight β^(k − 1)
    drop_outside: bool = False  # leave out tokens whose likeliest id is not drafted (SafeAILab)
    mean_per_step: bool = False  # each step's loss is a mean over its own tokens (speculators)
    decode_prompts: NotNegativeInt = 16  # held-out prompts that each evaluation continues greedily
    decode_tokens: PositiveInt = 64  # new tokens per prompt


@dataclasses.dataclass(frozen=True)
class HeadRunConfig:
    """The config of ``python -m train.head``."""

    model: HeadTarget = HeadTarget()
    data: DataSection = DATA
    head: HeadSection = HeadSection()
    optim: Optim = BY_WHAT_IS_TRAINED
    mesh: MeshSection = MeshSection()
    run: Run = Run(dir="runs/head")

    def __post_init__(self):
        if self.head.mean_per_step and self.optim.accumulate > 1:
            raise InputError(
                f"head.mean_per_step and optim.accumulate={self.optim.accumulate}: the means would "
                "be those of parts of a batch; give optim.accumulate=1"
            )
        if self.head.states and self.run.keep_best == "accepted":
            raise InputError(
                f'run.keep_best="accepted" with head.states={self.head.states!r}: no evaluation '
                'decodes, because the target is not loaded; use "loss", or leave head.states out'
            )
        _set_rates(self, "head")
        _check_batch(self)
        _check_export(self.run, is_delta=False)


def _set_rates(cfg: LMConfig | SDSATConfig | HeadRunConfig, trained: str) -> None:
    """Sets the learning rates that are not given to those of what is ``trained``."""
    optim = cfg.optim
    if optim.learning_rate and optim.muon_learning_rate:
        return
    rate, muon_rate = RATES[trained]
    optim = dataclasses.replace(
        optim,
        learning_rate=optim.learning_rate or rate,
        muon_learning_rate=optim.muon_learning_rate or muon_rate,
    )
    object.__setattr__(cfg, "optim", optim)  # the only change of a config: it is being made


def _check_batch(cfg: LMConfig | SDSATConfig | HeadRunConfig) -> None:
    """Raises InputError if a step has more tokens than an int32 counts, or rows cannot be split."""
    optim = cfg.optim
    tokens = optim.accumulate * optim.batch_size * cfg.data.seq_len
    if tokens > INT32_MAX:
        raise InputError(
            f"optim.accumulate={optim.accumulate} × optim.batch_size={optim.batch_size} rows of "
            f"data.seq_len={cfg.data.seq_len} are {tokens} tokens, more than {INT32_MAX}: lower one"
        )
    if cfg.data.seq_len % cfg.mesh.sequence:
        raise InputError(
            f"data.seq_len={cfg.data.seq_len} does not divide among mesh.sequence="
            f"{cfg.mesh.sequence} devices: make it a multiple"
        )


def _check_export(run: Run, is_delta: bool) -> None:
    """Raises InputError if the export cannot have the dtype."""
    if run.export_dtype == "int8" and not is_delta:
        raise InputError(
            'run.export_dtype="int8" is for the adapters of model.train="gated-lora": export '
            "float16, and quantize the export with infer.convert"
        )
