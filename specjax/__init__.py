"""specjax: speculative decoding for JAX. A method is a drafter, a target distribution and an
acceptance rule, joined into one step; one loop runs them all.

Names are imported when they are first used: ``import specjax`` alone loads no JAX. The stub beside
this file says where each one lives; editors and type checkers read it, too.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
