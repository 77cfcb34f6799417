"""Further trials of a search for the fastest layout in the processes of a trial.

``action=auto_tune`` may measure layouts that have the same process groups one after the other,
which saves the start of processes. After its last step, rank 0 waits for an order of the search, a
file in the directory that ``FLAGSCALE_TRIALS`` names. The ranks then train with the arguments of
the order. They do so only if the trial before has left no memory behind.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from flagscale.errors import ConfigError
from flagscale.files import read_json
from flagscale.status import BETWEEN_TRIALS, TRIALS_VARIABLE, StatusWriter
from flagscale.train.device import Device, compile_disabled
from flagscale.train.distributed import RankIdentity, gather_from_ranks

_WAIT_SECONDS = 30.0
"""Seconds without an order after which the ranks end."""
_POLL_SECONDS = 0.02
_LEFT_SHARE = 0.01
_LEFT_BYTES = 1 << 20
"""Share of a trial's memory, and bytes, that it may leave behind: megatron.core keeps tables."""
_WORKSPACE_BYTES = 64 << 20
"""Device memory that libraries keep for all models of a process."""
_GROUP_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
    "distributed_backend",
)
"""Resolved arguments that determine the process groups."""


class TrialSeries:
    """Trials of one process. Created before the first model is built."""

    def __init__(self, directory: Path, rank: RankIdentity, device: Device) -> None:
        self._directory, self._rank, self._device = directory, rank, device
        self._bytes_at_start = self._count_bytes()
        self._trials = 0

    @classmethod
    def from_environment(cls, rank: RankIdentity, device: Device) -> TrialSeries | None:
        """Return the series of this process; None outside a search."""
        directory = os.environ.get(TRIALS_VARIABLE)
        return cls(Path(directory), rank, device) if directory else None

    def await_arguments(self, status: StatusWriter) -> list[str] | None:
        """Release the memory of a trial, and return the arguments of the next one; None if there is
        none. All ranks call it, when nothing refers to the model any more.
        """
        self._trials += 1
        is_clean = self._release()
        if not all(gather_from_ranks(is_clean)):
            return None
        status.write_progress(self._trials, BETWEEN_TRIALS)
        # Training would only take note of the signal, until its next step.
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        orders = [self._read_order() if self._rank.rank == 0 else None]
        dist.broadcast_object_list(orders, src=0)
        signal.signal(signal.SIGTERM, handler)
        status.write_progress(0, "starting")
        return orders[0]

    def _read_order(self) -> list[str] | None:
        path = self._directory / f"{self._trials + 1}.json"
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            if (order := read_json(path)) is not None:
                arguments: list[str] | None = order.get("arguments")
                return arguments
            time.sleep(_POLL_SECONDS)
        return None

    def _release(self) -> bool:
        """Free the memory of a trial; return whether nothing of it is left."""
        from megatron.core import parallel_state

        bytes_in_use = self._count_bytes()
        parallel_state.get_global_memory_buffer().buffer.clear()
        if not compile_disabled():
            torch.compiler.reset()
        gc.collect()
        accelerator = self._device.accelerator
        accelerator.empty_cache()
        accelerator.reset_peak_memory(self._device.torch_device)
        allowed = _LEFT_BYTES + _LEFT_SHARE * bytes_in_use
        if self._allocated_bytes is not None:
            allowed += _WORKSPACE_BYTES
        return self._count_bytes() <= self._bytes_at_start + allowed

    def _count_bytes(self) -> int:
        """Return the bytes of tensors: of the device, or of Python if it does not count them."""
        allocated = self._allocated_bytes
        return count_tensor_bytes() if allocated is None else allocated

    @property
    def _allocated_bytes(self) -> int | None:
        return self._device.accelerator.allocated_memory(self._device.torch_device)


def count_tensor_bytes() -> int:
    """Return the bytes of the storages of all tensors that Python objects refer to."""
    tensors = (value for value in gc.get_objects() if issubclass(type(value), torch.Tensor))
    storages = {}
    for tensor in tensors:
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def require_same_groups(args: argparse.Namespace, earlier: argparse.Namespace) -> None:
    """Raise an error if a trial needs other process groups than the one before.

    Raises:
        ConfigError: It does.
    """
    names = [n for n in _GROUP_ARGUMENTS if getattr(args, n) != getattr(earlier, n)]
    if names:
        raise ConfigError(f"a further trial cannot change {', '.join(names)}: start it anew")
