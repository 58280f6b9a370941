"""What runs on the device: one round, the loop around it, and the arithmetic they share."""

import lazy_loader

# `sj.core.types` and the others work without an import of their own.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules={
        "commit",
        "loop",
        "mesh",
        "net",
        "probs",
        "protocols",
        "round",
        "scoring",
        "stepping",
        "tree",
        "types",
        "warp",
    },
)
