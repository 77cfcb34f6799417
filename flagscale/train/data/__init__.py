"""Data pipeline: tokenizers, preprocessing, datasets and samplers.

Only the dataset modules and the writing half of preprocessing import torch. Tokenizers, index
checks and an up-to-date quickstart therefore start quickly.
"""
