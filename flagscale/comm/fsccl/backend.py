"""Registers fsccl with torch and makes its groups."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

import torch.distributed as dist

from flagscale.comm.fsccl.build import load_extension

NAME = "fsccl"

# Groups that live. Their threads must end before the interpreter does.
_live: weakref.WeakSet[Any] = weakref.WeakSet()


def register() -> None:
    """Make ``fsccl`` known to ``torch.distributed``, for CPU and CUDA tensors. Idempotent."""
    if NAME.upper() in dist.Backend._plugins:
        return
    # One name for both devices: a plug-in for each would be taken for the first of them.
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    atexit.register(_shut_down)


def _create(options: Any, backend_options: Any) -> Any:
    """Called by torch for every new group.

    Args:
        options: torch's ``DistributedBackendOptions``: store, rank, size, timeout, name.
        backend_options: what the user gave as ``pg_options``; ours or None.
    """
    extension = load_extension()
    if backend_options is not None and not isinstance(backend_options, extension.Options):
        raise TypeError(
            f"pg_options for fsccl must be {extension.Options.__qualname__} or None, "
            f"found {type(backend_options).__name__}"
        )
    backend = extension.Backend(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout,
        name=options.group_id,
        global_ranks=list(options.global_ranks_in_group),
    )
    _live.add(backend)
    return backend


def _shut_down() -> None:
    for backend in list(_live):
        backend.shutdown()
