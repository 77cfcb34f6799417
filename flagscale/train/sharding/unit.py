"""Units: parts of a model chunk whose weights are all-gathered and released together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flagscale.train.sharding.bucket import ShardedBucket


class GradientMemory:
    """Memory for unsharded gradients that several units use in turn.

    Attributes:
        unit: the unit whose gradients are in it, or None.
    """

    def __init__(self) -> None:
        self.unit: ShardedUnit | None = None


class ShardedUnit:
    """Buckets of a part of the model, such as a transformer layer.

    All data-parallel ranks call the methods that start communication in the same order.
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        gradient_memory: GradientMemory,
        *,
        shards_weights: bool,
    ) -> None:
        """Create the unit.

        Args:
            buckets: its buckets, possibly none.
            gradient_memory: memory of its unsharded gradients.
            shards_weights: whether the buckets can release their unsharded weights.
        """
        self.buckets, self.gradient_memory = list(buckets), gradient_memory
        self._shards_weights = shards_weights
        self._is_unsharded = not shards_weights
        self._all_gathers: list[Any] | None = None
        self._reduce_scatters: list[Any] | None = None
        self._all_reduces: list[Any] | None = None
        self._has_gradients = False

    @property
    def has_unreduced_gradients(self) -> bool:
        """True if gradients of a micro-batch wait for their reduce-scatter to start."""
        return self._has_gradients and self._reduce_scatters is None

    def start_all_gather(self) -> None:
        """Start to all-gather the weights unless they are unsharded or being gathered already."""
        if not self._is_unsharded and self._all_gathers is None:
            self._all_gathers = [bucket.start_all_gather() for bucket in self.buckets]

    def all_gather(self) -> None:
        """All-gather the weights; kernels that are launched afterwards can read them."""
        self.start_all_gather()
        if self._all_gathers is not None:
            _wait_all(self._all_gathers)
            for bucket in self.buckets:
                bucket.finish_all_gather()
            self._all_gathers, self._is_unsharded = None, True

    def prepare_backward(self) -> None:
        """All-gather the weights for a backward pass; they may be gathered for a forward pass."""
        self.all_gather()
        for bucket in self.buckets:
            bucket.prepare_backward()

    def all_gather_weights(self) -> None:
        """All-gather the weights themselves, where layers compute with something else, until they
        are released.
        """
        if not self._shards_weights:
            self.all_gather()
            return
        self.release()
        _wait_all([bucket.start_all_gather_weights() for bucket in self.buckets])
        self._is_unsharded = True

    def release(self) -> None:
        """Free the unsharded weights if there are shards of them."""
        if self._all_gathers is not None:
            self.all_gather()
        if self._is_unsharded and self._shards_weights:
            for bucket in self.buckets:
                bucket.release_weights()
            self._is_unsharded = False

    def invalidate(self, *, only_trained: bool) -> None:
        """Require an all-gather before the next use, because the shards of the weights changed.

        ``only_trained`` tells that those of frozen weights did not.
        """
        self.release()
        self._is_unsharded = False
        for bucket in self.buckets:
            bucket.invalidate(only_trained=only_trained)

    def update_shards(self) -> None:
        """Copy this rank's parts of the unsharded weights, which were written to, to its shards.

        The weights must be gathered.
        """
        for bucket in self.buckets:
            bucket.update_shard()

    def prepare_gradients(self) -> None:
        """Prepare for the gradients of a micro-batch unless that has been done."""
        self.finish_reduce_scatter()
        if self._has_gradients or not self.buckets:
            return
        previous_unit = self.gradient_memory.unit
        if previous_unit is not None:
            assert not previous_unit.has_unreduced_gradients
            previous_unit.finish_reduce_scatter()
        self.gradient_memory.unit = self
        for bucket in self.buckets:
            bucket.prepare_gradients()
        self._has_gradients = True

    def zero_unwritten_gradients(self) -> None:
        """Set to zero what no layer has written of gradients that wait for their reduce-scatter."""
        if self.has_unreduced_gradients:
            for bucket in self.buckets:
                bucket.zero_unwritten_gradients()

    def start_reduce_scatter(self) -> None:
        """Start to reduce-scatter the gradients of a micro-batch, if there are any."""
        if self.has_unreduced_gradients:
            self._reduce_scatters = [bucket.start_reduce_scatter() for bucket in self.buckets]

    def finish_reduce_scatter(self) -> bool:
        """Wait until the gradients that are being reduced are in the shards.

        Returns:
            False if none are being reduced.
        """
        if self._reduce_scatters is None:
            return False
        _wait_all(self._reduce_scatters)
        self._reduce_scatters, self._has_gradients = None, False
        self.gradient_memory.unit = None
        return True

    def start_all_reduce(self) -> None:
        """Start to sum the gradients of a step over the replicas of this rank's shards.

        The reduce-scatter of the last micro-batch must have finished.
        """
        if self._all_reduces is None:
            self._all_reduces = [bucket.start_all_reduce() for bucket in self.buckets]

    def finish_all_reduce(self) -> None:
        """Wait for the gradients of the other replicas."""
        self.start_all_reduce()
        assert self._all_reduces is not None
        _wait_all(self._all_reduces)
        self._all_reduces = None


def _wait_all(handles: Sequence[Any]) -> None:
    for handle in handles:
        if handle is not None:
            handle.wait()
