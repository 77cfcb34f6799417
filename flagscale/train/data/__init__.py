"""Text to tokens to micro-batches: tokenizers, preprocessing, data sets, samplers.

Only :mod:`flagscale.train.data.datasets` and the writing half of preprocessing import torch, so
that tokenizers, index checks and the quickstart's "already there" answer at once.
"""
