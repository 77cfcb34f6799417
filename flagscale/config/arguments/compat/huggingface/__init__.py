"""Conversion between a model's arguments and a config.json of Hugging Face.

No torch: the launcher fills in what a YAML leaves out, and refuses what disagrees, before anything
starts. What megatron.core cannot express is refused with the reason.
"""
