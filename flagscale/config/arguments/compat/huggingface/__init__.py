"""Conversion between the arguments of a model and a config.json of Hugging Face.

No torch: before anything starts, the launcher fills in arguments that a YAML leaves out from the
config.json of ``pretrained_checkpoint``, and rejects arguments that contradict it. Models that
megatron.core does not support are rejected with the reason.
"""
