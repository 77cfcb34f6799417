"""Models of Hugging Face in the words of our arguments, and ours in the words of a config.json.

No torch: the launcher fills in what a YAML leaves out, and refuses what disagrees, before anything
starts. What megatron.core cannot express is refused with the reason.
"""
