"""Optimizer and learning-rate schedule on megatron.core, without Transformer Engine or Apex."""
