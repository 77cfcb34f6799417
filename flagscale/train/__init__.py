"""Training on megatron.core: arguments, model, loop, data and checkpoints."""
