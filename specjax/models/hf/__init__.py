"""Hugging Face model directories.

``config`` reads ``config.json`` and ``names`` maps tensor names; ``kinds`` says what is no model.
``files`` opens the files of a directory, ``read`` loads a model from them, ``write`` saves one.
``generation`` reads how the authors would decode it. ``codes`` stores quantized weights, ``delta``
adapters, and ``pickles`` reads old PyTorch files.
"""
