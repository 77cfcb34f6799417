"""Weights in shards (fully sharded data parallelism) in checkpoints.

The unsharded weights of one unit of the model at a time are in a device's memory, and each weight
is copied to the host memory of one data-parallel rank only, which writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from flagscale.accelerators.device import current_device
from flagscale.train.checkpoint.gather_plan import choose_owners
from flagscale.train.checkpoint.optimizer_state import choose_replica_ids
from flagscale.train.sharding.bucket import ShardedBucket
from flagscale.train.sharding.data_parallel import ShardedDataParallel
from flagscale.train.sharding.deferred import identify_storage
from flagscale.train.state import unwrap_model


def copy_weights_to_owners(chunks: Iterable[Any], model_state_dict: Mapping[str, Any]) -> None:
    """Replace weights in shards by copies in host memory, in place. Collective.

    Args:
        chunks: model chunks. The weights of others than :class:`ShardedDataParallel` stay.
        model_state_dict: sharded weights by name, one entry per chunk. It must not be needed for
            the optimizer's sharded state dict any more.
    """
    for chunk, weights in zip(chunks, model_state_dict.values(), strict=True):
        if isinstance(chunk, ShardedDataParallel):
            _copy_chunk(chunk, weights)


def iter_writable_weights(chunk: Any, weights: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sharded weights of a model chunk while they can be written to. Collective.

    The data-parallel ranks must write the same and iterate to the end together. Weights in shards
    are yielded one unit of the model at a time, whose unsharded weights are in memory meanwhile.

    Args:
        chunk: model chunk.
        weights: its sharded weights by name.
    """
    if not isinstance(chunk, ShardedDataParallel):
        yield dict(weights)
        return
    names_by_bucket = _sort_by_bucket(chunk, weights)
    sharded_names = {name for names in names_by_bucket.values() for name in names}
    yield {name: weight for name, weight in weights.items() if name not in sharded_names}
    for buckets in chunk.iter_writable():
        yield {name: weights[name] for bucket in buckets for name in names_by_bucket[bucket]}


class DeferredWeights:
    """Weights in shards that are to be read from a checkpoint, one unit of the model at a time."""

    def __init__(self, chunks: Iterable[Any], model_state_dict: Mapping[str, Any]) -> None:
        """Move the weights in shards out of a sharded state dict to load.

        Args:
            chunks: model chunks.
            model_state_dict: sharded weights by name, one entry per chunk; modified in place. It
                must not be needed for the optimizer's sharded state dict any more.
        """
        self._chunks: list[tuple[ShardedDataParallel, dict[ShardedBucket, dict[str, Any]]]] = []
        self.names: set[str] = set()
        for chunk, weights in zip(chunks, model_state_dict.values(), strict=True):
            if isinstance(chunk, ShardedDataParallel):
                by_bucket = {
                    bucket: {name: weights.pop(name) for name in names}
                    for bucket, names in _sort_by_bucket(chunk, weights).items()
                }
                self._chunks.append((chunk, by_bucket))
                self.names.update(name for items in by_bucket.values() for name in items)

    @torch.no_grad()
    def load(self, read: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Read the weights into the model. Collective.

        Args:
            read: fills a sharded state dict from the checkpoint; collective.

        Raises:
            RuntimeError: weights do not fit the model, after all have been read.
        """
        units = sum(chunk.unit_count for chunk, _ in self._chunks)
        count = torch.tensor(units, device=current_device().torch_device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        error: RuntimeError | None = None
        for chunk, by_bucket in self._chunks:
            for buckets in chunk.iter_writable():
                weights = {
                    name: weight for bucket in buckets for name, weight in by_bucket[bucket].items()
                }
                loaded = read(weights)
                try:
                    unwrap_model(chunk).load_state_dict(loaded, strict=False)
                except RuntimeError as problem:
                    error = error or problem  # the other ranks go on reading
        for _ in range(int(count) - units):
            read({})
        if error is not None:
            raise error


def _copy_chunk(chunk: ShardedDataParallel, weights: dict[str, Any]) -> None:
    names_by_bucket = _sort_by_bucket(chunk, weights)
    names_by_group: dict[Any, list[str]] = {}
    for bucket, names in names_by_bucket.items():
        names_by_group.setdefault(bucket.group, []).extend(names)
    owned: dict[str, Any] = {}
    for group, names in names_by_group.items():
        owners = choose_owners([weights[name].data.numel() for name in names], group.size())
        replica_ids = choose_replica_ids(group, [weights[name].replica_id for name in names])
        for name, owner, replica_id in zip(names, owners, replica_ids, strict=True):
            if owner == group.rank():
                owned[name] = replica_id
    for buckets in chunk.iter_unsharded():
        for name in (name for bucket in buckets for name in names_by_bucket[bucket]):
            weight = weights.pop(name)
            if name in owned:
                data = torch.empty_like(weight.data, device="cpu", requires_grad=False)
                data.copy_(weight.data.detach())
                weights[name] = replace(weight, data=data, replica_id=owned[name])


def _sort_by_bucket(
    chunk: ShardedDataParallel, weights: Mapping[str, Any]
) -> dict[ShardedBucket, list[str]]:
    """Return the names of the weights in each bucket. A weight may be a view of a parameter."""
    names_by_bucket: dict[ShardedBucket, list[str]] = {
        bucket: [] for bucket in chunk.iter_buckets()
    }
    buckets = {identify_storage(bucket.param_data): bucket for bucket in names_by_bucket}
    for name, weight in weights.items():
        data = getattr(weight, "data", None)
        if isinstance(data, torch.Tensor):
            bucket = buckets.get(identify_storage(data))
            if bucket is not None:
                names_by_bucket[bucket].append(name)
    return names_by_bucket
