"""Text in and out: tokenizers and chat templates.

Names are imported when they are first used: programs read conversations before they load JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"tokenizer": ["IncrementalDecoder", "Tokenizer"]}
)
