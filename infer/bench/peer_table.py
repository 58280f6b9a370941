"""The peers of ``infer.bench --peer``: one table. Nothing here imports JAX or a peer."""

from __future__ import annotations

from typing import NamedTuple


class PeerSpec(NamedTuple):
    """Another library that decodes the same prompts with the same weights.

    Attributes:
      package: the module that must be installed.
      install: what pip installs for it.
      program: the module that runs in the peer's process.
      modes: its ways of decoding, each with the method of ours that it is compared with.
      reads_gguf: it reads GGUF files. The others read Hugging Face directories.
    """

    package: str
    install: str
    program: str
    modes: tuple[tuple[str, str], ...] = (("generate", "autoregressive"),)
    reads_gguf: bool = False


PEERS = {
    "transformers": PeerSpec(
        package="torch",
        install='"specjax[torch]"',
        program="infer.bench.peer_transformers",
        modes=(
            ("generate", "autoregressive"),
            ("assisted", "speculative"),
            ("assisted-default", "speculative"),
        ),
    ),
    "llama.cpp": PeerSpec(
        package="llama_cpp",
        install='llama-cpp-python "specjax[gguf]"',
        program="infer.bench.peer_llama_cpp",
        reads_gguf=True,
    ),
    "vllm": PeerSpec(package="vllm", install="vllm", program="infer.bench.peer_vllm"),
}
