"""The GPT model: megatron.core's local layers with this project's norm, attention and weights."""
