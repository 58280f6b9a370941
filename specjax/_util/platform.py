"""What each kind of device wants of the programs that run on it: this file is the only place.

The results of a program never depend on it, except for rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import jax

# Results are rounded to their dtype everywhere. By default XLA skips the rounding inside a fusion.
# Then bfloat16 logits would depend on the program that computes them.
ROUNDED = {"xla_allow_excess_precision": False}

# A CUDA graph then holds a whole loop of rounds, its conditionals included, so that no round waits
# for the host. XLA's own choice has no loops and no conditionals. XLA drops what the driver cannot
# do: loops and conditionals need CUDA 12.3. A graph may have any size, because a loop's condition
# is often a single kernel.
GRAPHS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES,"
        "WHILE,CONDITIONAL"
    ),
    "xla_gpu_graph_min_graph_size": 1,
}
# XLA would lay codes of 4 bits along the inputs, over which products sum. Each call of a program
# would then copy all of a model's codes.
CODES_AS_STORED = {"xla_gpu_experimental_pack_dot_operands_along_k_dimension": False}
# Set a variable to 0 to run a GPU's kernels one by one, as a profiler or a debugger wants them, and
# to use XLA's kernels alone, on a GPU or on a CPU.
GRAPHS_VARIABLE = "SPECJAX_GPU_GRAPHS"
KERNELS_VARIABLE = "SPECJAX_GPU_KERNELS"
CPU_KERNELS_VARIABLE = "SPECJAX_CPU_KERNELS"


@dataclasses.dataclass(frozen=True)
class Platform:
    """Choices that depend on the kind of device. The defaults are those of an unknown accelerator.

    Attributes:
      dtype: default dtype of weights and activations.
      pass_width: default number of tokens per row to which narrow passes are padded.
      prefill_chunk: the largest prefill chunk, in tokens of a row. On a CPU a wider chunk costs a
        little less per token, but more of the last one is padding. Accelerators need wide ones.
      free_tokens: a pass costs as much as so many tokens more than it has: the weights are read.
      unrolled_rows: up to this many rows, each row's cache write is an operation of its own.
      writes_neighbor: whether a single cache entry is written together with its neighbor.
      weights_first: whether narrow products are computed as ``weight @ x.T``.
      dense_groups: whether weights quantized in groups are made dense before every product.
      largest_logits: top-k and top-p first look at this many of the largest logits; 0: they
        search the whole vocabulary at once.
      top_k_kernel: the most largest values of a long row that a kernel finds without sorting it.
      sort_block: for more of them, the number of values that are sorted together.
      vocab_blocks: in how many blocks a sum over the vocabulary is made. XLA for GPUs makes such
        sums in two kernels: one for all blocks, then one for each sum. With blocks of our own,
        one second kernel serves several sums.
      halves_search: whether that search halves its range, rather than splits it into many parts.
      attention_block: tokens of the largest block of attention to long sequences.
      splash_attention: whether JAX's splash attention kernels run.
      head_queries: the least queries of a key head in a product with its cache. A TPU makes no
        matrix product of a single one. It takes three times as long, and copies short caches.
      scores_one_by_one: up to this many queries of a key head, each is multiplied with the cache
        by itself. A CPU's product of several transposes the whole cache first.
      orders_trees: whether padded passes give a tree's nodes the bits of plain decoding. By the TPU
        compiler's model the order takes 4 % of a layer with one row, and more with more rows.
      decode_kernel: whether narrow passes attend by our Pallas kernel.
      range_kernel: whether wide passes and long sequences do, by another one.
      gathers_experts: whether few tokens gather the weights of their experts. Where a gather is not
        part of the product that reads it, it costs two more passes over those weights.
      expert_kernel: whether few tokens run their experts by our Pallas kernel.
      ragged_products: whether grouped products read each group's weights alone.
      grouped_kernels: whether JAX's Pallas kernels run those.
      kernel_rows: products of up to this many rows are computed by our kernel for CPUs.
    """

    dtype: str = "bfloat16"
    pass_width: int = 8  # the rows of a matrix unit's tile
    prefill_chunk: int = 512
    free_tokens: int = 256
    unrolled_rows: int = 32
    writes_neighbor: bool = False
    weights_first: bool = False
    dense_groups: bool = False
    largest_logits: int = 64
    top_k_kernel: int = 1 << 30  # any number
    sort_block: int = 2048
    vocab_blocks: int = 1
    halves_search: bool = False
    attention_block: int = 512
    splash_attention: bool = False
    head_queries: int = 1
    scores_one_by_one: int = 1
    orders_trees: bool = False
    decode_kernel: bool = False
    range_kernel: bool = False
    gathers_experts: bool = True
    expert_kernel: bool = False
    ragged_products: bool = True
    grouped_kernels: bool = False
    kernel_rows: int = 0


CPU = Platform(
    dtype="float32",
    pass_width=1,
    prefill_chunk=128,
    free_tokens=16,
    writes_neighbor=True,
    weights_first=True,
    dense_groups=True,
    gathers_experts=False,
    ragged_products=False,
    halves_search=True,
    scores_one_by_one=8,
    orders_trees=True,
    kernel_rows=128,
)
# Finding the largest logits costs a TPU more than the search. Before a gather it transposes the
# weights of all experts. For a scatter it copies the caches.
TPU = Platform(
    unrolled_rows=64,
    largest_logits=0,
    attention_block=1024,
    splash_attention=True,
    head_queries=2,
    gathers_experts=False,
    expert_kernel=True,
    grouped_kernels=True,
)
# XLA's kernel for the largest values finds 16 at most. For more it sorts the whole row, and 128,256
# tokens take 40 kernels. A scatter is one kernel for all rows, and a write per row is one each.
# A gather of experts is a part of the kernel that multiplies; a grouped product reads all of them.
GPU = Platform(
    largest_logits=0,
    unrolled_rows=1,
    top_k_kernel=16,
    vocab_blocks=256,
    decode_kernel=True,
    range_kernel=True,
    ragged_products=False,
)

PLATFORMS = {"cpu": CPU, "tpu": TPU, "gpu": GPU}


def platform() -> Platform:
    """The choices for JAX's default backend."""
    chosen = PLATFORMS.get(jax.default_backend(), Platform())
    if chosen.decode_kernel and os.environ.get(KERNELS_VARIABLE) == "0":
        return dataclasses.replace(chosen, decode_kernel=False, range_kernel=False)
    if chosen.kernel_rows and not _has_cpu_kernels():
        return dataclasses.replace(chosen, kernel_rows=0)
    return chosen


def usable_cores() -> int:
    """The CPU's cores that this process may run on, which taskset or a container can limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_cpu_kernels() -> bool:
    """Whether our kernel for CPUs may run: on one device, because XLA does not split its calls."""
    return os.environ.get(CPU_KERNELS_VARIABLE) != "0" and jax.device_count() == 1


def compiler_options() -> dict[str, str | int | bool]:
    """XLA's options for every program of decoding on JAX's default backend."""
    options: dict[str, str | int | bool] = dict(ROUNDED)
    if jax.default_backend() != "gpu":
        return options
    if os.environ.get(GRAPHS_VARIABLE) != "0":
        options |= GRAPHS
    if _takes(*CODES_AS_STORED):
        options |= CODES_AS_STORED
    return options


@functools.cache
def _takes(*names: str) -> bool:
    """Whether this version of XLA has these options. Experimental ones may go."""
    probe = jax.jit(lambda: 0, compiler_options=dict.fromkeys(names, False))
    try:
        probe.lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
