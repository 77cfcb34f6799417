"""Registration of fsccl with torch, and creation of its groups."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from flagscale.comm.fsccl import flight_recorder, generation, native
from flagscale.comm.fsccl.build import load_extension
from flagscale.errors import ConfigError

BACKEND_NAME = "fsccl"


def register() -> None:
    """Register ``fsccl`` with ``torch.distributed`` for CPU and CUDA tensors. Idempotent."""
    if BACKEND_NAME.upper() in dist.Backend._plugins:
        return
    # One name for both devices: of two plug-ins, torch would use the first for both.
    dist.Backend.register_backend(
        BACKEND_NAME, _create_backend, extended_api=True, devices=["cpu", "cuda"]
    )
    flight_recorder.extend_torch_dumps()


def _create_backend(options: Any, backend_options: Any) -> Any:
    """Create the backend of a group. torch calls it for every new group.

    Args:
        options: torch's ``DistributedBackendOptions``: store, rank, size, timeout, name.
        backend_options: the user's ``pg_options``: fsccl's options; NCCL's, if this rank's native
            library is NCCL; or None.

    Raises:
        ConfigError: an environment variable has an invalid value.
        TypeError: ``backend_options`` has another type.
        BuildError: the extension cannot be compiled or loaded.
        DistBackendError: a rank did not come within the group's timeout.
    """
    extension = load_extension()
    native_library = native.detect_native_library()
    if options.group_size > 1:
        native.prepare_native_library(native_library)
    is_library_options = native.accepts_options(native_library, backend_options)
    if not (
        backend_options is None
        or is_library_options
        or isinstance(backend_options, extension.Options)
    ):
        raise TypeError(
            f"pg_options for fsccl must be {extension.Options.__qualname__} or None, "
            f"found {type(backend_options).__name__}"
        )
    _register_shutdown(extension.shutdown_all)
    fsccl_options = None if is_library_options else backend_options
    global_ranks = list(options.global_ranks_in_group)
    try:
        # before this rank waits for others
        extension.Backend.check_settings(
            options.group_rank, options.group_size, global_ranks, fsccl_options
        )
        store, generation_name = generation.get_store(options, extension)
        make_native = native.native_backend_factory(
            native_library,
            extension,
            options,
            store,
            backend_options if is_library_options else None,
        )
        return extension.Backend(
            store=store,
            generation=generation_name,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout,
            name=options.group_id,
            global_ranks=global_ranks,
            options=fsccl_options,
            native=native_library.as_strings(),
            make_native=make_native,
        )
    except ValueError as error:  # an environment variable set by the user
        raise ConfigError(str(error).removeprefix("fsccl: ")) from None


@functools.cache
def _register_shutdown(shut_down: Callable[[], None]) -> None:
    """Register ``shut_down`` to run at exit, once per process. Threads of groups that are still
    alive must end before the process does.
    """
    atexit.register(shut_down)
