"""Parts of a model chunk whose weights are gathered and released together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flagscale.train.sharding.bucket import ShardedBucket


class GradientSlot:
    """Memory for the whole gradients of one unit at a time.

    Attributes:
        user: the unit whose gradients are in it, or None.
    """

    def __init__(self) -> None:
        self.user: ShardedUnit | None = None


class ShardedUnit:
    """Buckets of a part of the model, such as a transformer layer.

    All data-parallel ranks call the methods that start communication in the same order.
    """

    def __init__(
        self, buckets: Sequence[ShardedBucket], slot: GradientSlot, *, keeps_weights: bool
    ) -> None:
        """Create the unit.

        Args:
            buckets: its buckets, possibly none.
            slot: memory of its whole gradients.
            keeps_weights: whether the buckets keep their whole weights.
        """
        self.buckets, self.slot = list(buckets), slot
        self._keeps_weights = keeps_weights
        self._is_current = keeps_weights
        self._gathers: list[Any] | None = None
        self._reduces: list[Any] | None = None
        self._has_gradients = False

    @property
    def has_unreduced_gradients(self) -> bool:
        """True if gradients of a micro-batch wait for their reduction to start."""
        return self._has_gradients and self._reduces is None

    def start_gather(self) -> None:
        """Start to gather the weights unless they are there already or on their way."""
        if not self._is_current and self._gathers is None:
            self._gathers = [bucket.start_gather() for bucket in self.buckets]

    def gather(self) -> None:
        """Gather the weights; kernels that are launched afterwards can read them."""
        self.start_gather()
        if self._gathers is not None:
            _wait_all(self._gathers)
            self._gathers, self._is_current = None, True

    def release(self) -> None:
        """Free the weights unless they are kept."""
        if self._gathers is not None:
            self.gather()
        if self._is_current and not self._keeps_weights:
            for bucket in self.buckets:
                bucket.release_weights()
            self._is_current = False

    def mark_updated(self) -> None:
        """Take note that the shards of the weights have changed, so that the whole ones are old."""
        self.release()
        self._is_current = False

    def update_shards(self) -> None:
        """Copy this rank's parts of the whole weights, which have been written to, to its shards.

        The weights must be gathered.
        """
        for bucket in self.buckets:
            bucket.update_shard()

    def expect_gradients(self) -> None:
        """Prepare for the gradients of a micro-batch unless that has been done."""
        self.finish_reduce()
        if self._has_gradients or not self.buckets:
            return
        if self.slot.user is not None:
            assert not self.slot.user.has_unreduced_gradients
            self.slot.user.finish_reduce()
        self.slot.user = self
        for bucket in self.buckets:
            bucket.expect_gradients()
        self._has_gradients = True

    def complete_gradients(self) -> None:
        """Fill in what no layer has written of gradients that wait for their reduction."""
        if self.has_unreduced_gradients:
            for bucket in self.buckets:
                bucket.complete_gradients()

    def start_reduce(self) -> None:
        """Start to reduce the gradients of a micro-batch, if there are any."""
        if self.has_unreduced_gradients:
            self._reduces = [bucket.start_reduce() for bucket in self.buckets]

    def finish_reduce(self) -> None:
        """Wait until the gradients that are being reduced, if any, are in the shards."""
        if self._reduces is not None:
            _wait_all(self._reduces)
            self._reduces, self._has_gradients, self.slot.user = None, False, None


def _wait_all(handles: Sequence[Any]) -> None:
    for handle in handles:
        if handle is not None:
            handle.wait()
