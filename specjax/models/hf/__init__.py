"""Hugging Face model directories.

``config`` reads ``config.json`` and ``names`` maps tensor names. ``files`` opens the files of a
directory, ``read`` loads a model from them, ``write`` saves one. ``codes`` stores quantized
weights, ``delta`` adapters, and ``pickles`` reads old PyTorch files.
"""
