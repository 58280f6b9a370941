"""Products of a few rows with a model's weights on a CPU, by a kernel of our own.

:mod:`~specjax.models.cpu_kernels.building` compiles ``product.cc`` on the user's machine, once.
:mod:`~specjax.models.cpu_kernels.narrow_product` says which products it computes, and calls it.
"""
