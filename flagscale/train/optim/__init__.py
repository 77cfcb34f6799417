"""The optimizer and its schedule on megatron.core, without Transformer Engine or Apex."""
