"""Access to all unsharded weights at once, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def count_unsharded_weights(chunks: list[Any]) -> int:
    """Return the number of weights that have memory on this rank, except for shards."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return sum(weight.numel() for weight in parameters if weight.untyped_storage().size())


@contextmanager
def unsharded_parameters(args: Any, chunks: list[Any]) -> Iterator[None]:
    """Return a context manager in which each rank holds all weights of its chunks.

    What is written to them is kept; all data-parallel ranks must write the same.
    """
    from flagscale.train.sharding.data_parallel import ShardedDataParallel
    from flagscale.train.step import gathered_parameters

    sharded_chunks = [chunk for chunk in chunks if isinstance(chunk, ShardedDataParallel)]
    buckets = [bucket for chunk in sharded_chunks for bucket in chunk.iter_buckets()]
    with gathered_parameters(args, chunks):
        for bucket in buckets:
            if handle := bucket.start_all_gather_weights():
                handle.wait()
        yield
        for bucket in buckets:
            bucket.update_shard()
            bucket.release_weights()
