"""Checkpoints of other programs, read and written a tensor at a time.

``tensors`` has tensors that are read when they are asked for, a region at a time; ``tables`` says
which of one program's tensors make which of the other's; ``huggingface`` and ``distributed`` are
the formats; ``convert`` goes from one to the other, ``pretrained`` into a model to be trained.
"""
