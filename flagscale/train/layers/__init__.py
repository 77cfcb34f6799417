"""Optimized layers for megatron.core's transformer, with the same parameters and outputs.

megatron.core's models, TransformerLayer, schedules, data parallelism and optimizer stay unchanged.
These are replaced:

- linear layers and the embedding, which add weight gradients directly to their fp32 accumulators
  (:mod:`linear`, :mod:`embedding`);
- the loss, which stores 16-bit logits only (:mod:`cross_entropy`);
- rotary positions, which come from a table (:mod:`rotary`);
- on CUDA, each layer by its compiled version (:mod:`layer_compilation`).

Checkpoints are the same as without these layers.
"""
