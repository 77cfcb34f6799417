"""Training program on megatron.core: arguments, models, training loop, data and checkpoints."""
