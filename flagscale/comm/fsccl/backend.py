"""Registers fsccl with torch and makes its groups."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from flagscale.comm.fsccl import native
from flagscale.comm.fsccl.build import load_extension
from flagscale.errors import ConfigError

NAME = "fsccl"


def register() -> None:
    """Make ``fsccl`` known to ``torch.distributed``, for CPU and CUDA tensors. Idempotent."""
    if NAME.upper() in dist.Backend._plugins:
        return
    # One name for both devices: a plug-in for each would be taken for the first of them.
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    """Called by torch for every new group.

    Args:
        options: torch's ``DistributedBackendOptions``: store, rank, size, timeout, name.
        backend_options: what the user gave as ``pg_options``; ours, those of NCCL for the
            clusters of CUDA ranks, or None.
    """
    extension = load_extension()
    own = native.of_this_rank()
    if options.group_size > 1:
        native.prepare(own)
    for_library = native.has_options(own, backend_options)
    if not (
        backend_options is None or for_library or isinstance(backend_options, extension.Options)
    ):
        raise TypeError(
            f"pg_options for fsccl must be {extension.Options.__qualname__} or None, "
            f"found {type(backend_options).__name__}"
        )
    _at_exit(extension.shutdown_all)
    make_native = native.maker(own, extension, options, backend_options if for_library else None)
    try:
        return extension.Backend(
            store=options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout,
            name=options.group_id,
            global_ranks=list(options.global_ranks_in_group),
            options=None if for_library else backend_options,
            native=own.told(),
            make_native=make_native,
        )
    except ValueError as error:  # a variable that the user has set
        raise ConfigError(str(error).removeprefix("fsccl: ")) from None


@functools.cache
def _at_exit(shut_down: Callable[[], None]) -> None:
    """Once: the threads of groups that the program leaves alive must end before it does."""
    atexit.register(shut_down)
