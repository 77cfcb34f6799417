"""Further ``auto_tune`` trials in the processes of an earlier one, which saves their start.

After the last step of a trial, rank 0 waits for the next request of the search: a JSON file in the
directory that ``FLAGSCALE_TRIALS`` names. It has the arguments of the next trial, or null to end.

Every trial must find the same free memory. If one has left more allocated than libraries keep for
good, the processes end, and the search starts new ones.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from flagscale.errors import ConfigError
from flagscale.files import read_json
from flagscale.status import BETWEEN_TRIALS, STARTING, TRIALS_VARIABLE, StatusWriter
from flagscale.train.device import Device, compile_disabled
from flagscale.train.distributed import RankIdentity, gather_from_ranks

_REQUEST_TIMEOUT_SECONDS = 30.0
"""Seconds without a request after which the ranks end: the search may have been killed."""
_POLL_SECONDS = 0.02
_KEPT_FRACTION = 0.01
"""Fraction of a trial's memory that may stay allocated, for what grows with the model."""
_KEPT_BYTES = 1 << 20
"""Bytes that may stay allocated in addition, after a trial of any size."""
_WORKSPACE_BYTES = 64 << 20
"""Bytes that may stay allocated on a device in addition: libraries keep their workspaces, such as
the 32 MiB per stream of cuBLAS on an H100, for all models of a process.
"""
GROUP_ARGUMENTS = (
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
"""Resolved arguments that determine the process groups, which a process cannot replace.

The search reuses processes by a longer list, ``layout_choices.ARGUMENTS_OF_GROUPS``: arguments as a
user writes them, and also those of the optimizer. This list is the check of the ranks themselves.
"""


class TrialSeries:
    """Trials that the same processes run, seen from one of them.

    Created before the first model is built: memory that is allocated then belongs to no trial.
    """

    def __init__(self, directory: Path, identity: RankIdentity, device: Device) -> None:
        self._directory, self._identity, self._device = directory, identity, device
        self._bytes_at_start = self._count_bytes()
        self._finished_trials = 0

    @classmethod
    def from_environment(cls, identity: RankIdentity, device: Device) -> TrialSeries | None:
        """Return the series of this process; None outside a search."""
        directory = os.environ.get(TRIALS_VARIABLE)
        return cls(Path(directory), identity, device) if directory else None

    def prepare_next_trial(self, status: StatusWriter) -> list[str] | None:
        """Free the memory of the last trial, and wait for the arguments of the next one.

        All ranks call it, when nothing refers to the model any more. While they wait, SIGTERM ends
        them at once.

        Returns:
            The arguments; None if the processes must end. Then a rank has memory left of the last
            trial, or the search has asked for the end, or it has sent no request in time.
        """
        self._finished_trials += 1
        is_free = self._free_memory()
        if not all(gather_from_ranks(is_free)):
            return None
        # The search counts on the number, by which it knows that this trial is over.
        status.write_progress(self._finished_trials, BETWEEN_TRIALS)
        with _end_on_sigterm():
            arguments = self._await_request() if self._identity.rank == 0 else None
            arguments_of_rank_0 = [arguments]
            dist.broadcast_object_list(arguments_of_rank_0, src=0)
        if arguments_of_rank_0[0] is not None:
            status.write_progress(0, STARTING)
        return arguments_of_rank_0[0]

    def _await_request(self) -> list[str] | None:
        """Return the arguments of the next request; None if it asks for the end, or is missing."""
        path = self._directory / f"{self._finished_trials + 1}.json"
        deadline = time.monotonic() + _REQUEST_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if (request := read_json(path)) is not None:
                arguments: list[str] | None = request.get("arguments")
                return arguments
            time.sleep(_POLL_SECONDS)
        return None

    def _free_memory(self) -> bool:
        """Free the memory of the last trial. Return whether no more is left than may stay."""
        from megatron.core import parallel_state

        # Cycles of references keep the model in memory until garbage is collected. Had it been
        # freed already, less would be allowed to stay.
        bytes_of_trial = self._count_bytes()
        parallel_state.get_global_memory_buffer().buffer.clear()
        _clear_result_caches("megatron.core")
        if not compile_disabled():
            torch.compiler.reset()
        gc.collect()
        accelerator = self._device.accelerator
        accelerator.empty_cache()
        accelerator.reset_peak_memory(self._device.torch_device)
        allowed_bytes = int(_KEPT_BYTES + _KEPT_FRACTION * bytes_of_trial)
        if self._counts_device_memory:
            allowed_bytes += _WORKSPACE_BYTES
        kept_bytes = self._count_bytes() - self._bytes_at_start
        if kept_bytes <= allowed_bytes:
            return True
        print(
            f"rank {self._identity.rank}: a trial has left {kept_bytes / 2**20:.1f} MiB allocated, "
            f"more than {allowed_bytes / 2**20:.1f} MiB: the next one needs new processes",
            flush=True,
        )
        return False

    def _count_bytes(self) -> int:
        """Return the bytes of all tensors on the device. A CPU does not count them; then it is the
        bytes of the tensors that Python's garbage collector tracks.
        """
        bytes_on_device = self._read_device_bytes()
        return count_tensor_bytes() if bytes_on_device is None else bytes_on_device

    @property
    def _counts_device_memory(self) -> bool:
        return self._read_device_bytes() is not None

    def _read_device_bytes(self) -> int | None:
        return self._device.accelerator.allocated_memory(self._device.torch_device)


@contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """Return a context manager in which SIGTERM ends the process.

    Training's own handler only sets a flag, which the next step reads. A process that waits has no
    next step.
    """
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        # None stands for a handler that was not installed by Python and cannot be put back by it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def _clear_result_caches(package: str) -> None:
    """Forget the results that functions of a package cache (``functools.lru_cache``).

    The cache of a method also refers to the object that it belongs to. That of a rotary embedding
    keeps the whole model in memory if hooks of the embedding refer to it, as those of
    ``overlap_param_gather`` do.
    """
    for value in gc.get_objects():
        if type(value) is functools._lru_cache_wrapper and str(value.__module__).startswith(
            package
        ):
            value.cache_clear()


def count_tensor_bytes() -> int:
    """Return the bytes of the storages of all tensors that Python's garbage collector tracks.

    A storage that several tensors share counts once.
    """
    # Unlike isinstance(), issubclass() does not run code of objects that imitate another class.
    tensors = (value for value in gc.get_objects() if issubclass(type(value), torch.Tensor))
    bytes_by_address = {}
    for tensor in tensors:
        # Sparse tensors have no storage of their own. The storages of tensors by which torch
        # compiles are on the device "meta", and have no memory.
        if torch._C._has_storage(tensor):
            storage = tensor.untyped_storage()
            if storage.device.type != "meta":
                bytes_by_address[storage.data_ptr()] = storage.nbytes()
    return sum(bytes_by_address.values())


def require_same_groups(args: argparse.Namespace, previous: argparse.Namespace) -> None:
    """Check that a trial uses the process groups of the previous one.

    Raises:
        ConfigError: An argument of the groups differs.
    """
    names = [name for name in GROUP_ARGUMENTS if getattr(args, name) != getattr(previous, name)]
    if names:
        raise ConfigError(
            f"a trial in the processes of another one cannot change {', '.join(names)}",
            hint="run it in new processes",
        )
