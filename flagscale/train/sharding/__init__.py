"""Data parallelism that shards gradients and weights besides the optimizer state (ZeRO-2 and 3)."""
