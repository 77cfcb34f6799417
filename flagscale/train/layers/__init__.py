"""A faster build of megatron.core's transformer, of the same parameters and the same function.

megatron.core's GPTModel, TransformerLayer, schedules, data parallelism and optimizer stay as they
are. What is exchanged: the linear layers and the embedding add a weight's gradient to its fp32
accumulator themselves (:mod:`linear`, :mod:`embedding`), the loss keeps 16-bit logits
(:mod:`loss`), rotary positions come from a table (:mod:`rotary`), and on CUDA each layer is
compiled whole (:mod:`compiling`). Checkpoints are those of the plain build.
"""
