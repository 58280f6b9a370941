"""GGUF files: a model of llama.cpp in one file.

``header`` reads metadata and the places of tensors. ``config`` makes an architecture of the
metadata, and ``names`` maps tensor names. ``blocks`` takes quantized blocks apart, ``read`` loads
the weights. ``packages`` finds models that are installed as packages. The tokenizer is read in
:mod:`specjax.text.gguf_tokenizer`.
"""
