"""The current accelerator, used by the rest of this tree instead of ``torch.cuda``.

On a CUDA machine every function calls the ``torch.cuda`` function of the same name with the same
arguments and returns its result, so that the tree behaves there as its authors wrote it. On another
accelerator it calls the function of that accelerator's module, such as ``torch.npu``. On a CPU each
function returns a value with which the same code is correct without a device: one device, one
stream that is always in order, no memory statistics, and the CPU generator as the device generator.

The device is selected once, on the first call. ``FLAGSCALE_DEVICE`` names the kind of device:
``cpu``, ``cuda`` or one that ``flagscale.accelerators`` supports. By default it is CUDA if
``torch.cuda.is_available()``, else the first kind with devices on this host.

This file was written into the tree by ``tools/patch/unpatch.py``; it is not part of the
original source.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_VARIABLE = "FLAGSCALE_DEVICE"

# Read thousands of times per step; torch.compile can trace plain globals.
_type = ""
_module: Any = None


def has_device() -> bool:
    """Return whether the current accelerator is a device with its own memory and streams.

    Raises:
        RuntimeError: ``FLAGSCALE_DEVICE`` names an unknown kind of device, or torch finds no such
            device.
    """
    if not _type:
        _choose_device_type()
    return _module is not None


def is_cuda() -> bool:
    """Return whether the accelerator is CUDA, for features that only CUDA has."""
    return has_device() and _type == "cuda"


def _choose_device_type() -> None:
    global _type, _module  # noqa: PLW0603 - see above
    kind = os.environ.get(_VARIABLE, "").strip().lower()
    if kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"{_VARIABLE}=cuda, but torch {torch.__version__} finds no CUDA device; "
            f"unset {_VARIABLE} to train on the CPU"
        )
    if kind in ("cpu", "cuda"):
        chosen = kind
    else:
        chosen = "cuda" if not kind and torch.cuda.is_available() else _torch_type_of(kind)
    _module = None if chosen == "cpu" else torch.get_device_module(chosen)
    _type = chosen


def _torch_type_of(kind: str) -> str:
    """Return torch's name of a device kind; of the first with devices here if ``kind`` is empty."""
    try:
        from flagscale.accelerators.registry import AUTO, choose_accelerator
    except ImportError:  # the tree is used without flagscale
        if kind:
            raise RuntimeError(f"{_VARIABLE}={kind!r}: expected 'cpu' or 'cuda'") from None
        return "cpu"
    from flagscale.errors import ConfigError

    try:
        accelerator = choose_accelerator(kind or AUTO)
    except ConfigError as error:
        raise RuntimeError(f"{_VARIABLE}={kind!r}: {error}") from error
    if problem := accelerator.explain_unavailable():
        raise RuntimeError(f"{_VARIABLE}={kind!r}, but {problem}")
    return str(accelerator.torch_type)


def device_type() -> str:
    """Return the device type for factory functions and ``torch.autocast``, such as ``"cuda"``."""
    return _type if has_device() else "cpu"


def current_device() -> int | torch.device:
    """Return the current device: its index, or ``torch.device("cpu")`` on a CPU."""
    return _module.current_device() if has_device() else _CPU


def device_ids() -> list[int] | None:
    """Return the ``device_ids`` of a barrier; None on a CPU, because gloo rejects a list."""
    return [_module.current_device()] if has_device() else None


def set_device(device: Any) -> None:
    """Make ``device`` the current device; no effect on a CPU."""
    if has_device():
        _module.set_device(device)


def device_count() -> int:
    """Return the number of visible devices; 1 on a CPU."""
    return _module.device_count() if has_device() else 1


def to_device(thing: _T, *args: Any, **kwargs: Any) -> _T:
    """Move a tensor or module, as ``thing.cuda(*args, **kwargs)`` or the method of another device.

    Returns the argument itself on a CPU.
    """
    moved: _T = getattr(thing, _type)(*args, **kwargs) if has_device() else thing
    return moved


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.pin_memory()``; the tensor itself on a CPU."""
    return tensor.pin_memory() if has_device() else tensor


def record_stream(tensor: torch.Tensor, used_by: Any) -> None:
    """Call ``tensor.record_stream(used_by)``; no effect on a CPU."""
    if has_device():
        tensor.record_stream(used_by)


def holds(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is on the current kind of device (``tensor.is_cuda`` on CUDA)."""
    return tensor.device.type == device_type()


def tensor_type(cuda_name: str) -> str:
    """Return the name of ``torch.cuda.<Kind>Tensor`` on this device, as in ``Tensor.type()``."""
    prefix = f"torch.{_type}." if has_device() else "torch."
    return cuda_name.replace("torch.cuda.", prefix, 1)


def group_backend(cuda_backend: str) -> str | None:
    """Return ``cuda_backend`` on CUDA; elsewhere None, for the default group's backend."""
    return cuda_backend if is_cuda() else None


# --- order of execution -------------------------------------------------------------------


def synchronize(*args: Any, **kwargs: Any) -> None:
    """Wait for the device; no effect on a CPU, whose kernels are synchronous."""
    if has_device():
        _module.synchronize(*args, **kwargs)


class HostEvent:
    """Event on a CPU, which has always occurred."""

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True."""
        return True


class HostStream:
    """The only stream of a CPU: the program itself, always in order."""

    def wait_stream(self, other: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True."""
        return True

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Return ``event``, or a new event."""
        return event or HostEvent()


_HOST_STREAM = HostStream()


def Stream(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - stands for torch.cuda.Stream
    """Return a new stream; on a CPU the only one."""
    return _module.Stream(*args, **kwargs) if has_device() else _HOST_STREAM


def Event(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - stands for torch.cuda.Event
    """Return a new event; on a CPU one that has already occurred."""
    return _module.Event(*args, **kwargs) if has_device() else HostEvent()


def current_stream(*args: Any, **kwargs: Any) -> Any:
    """Return the current stream of the device."""
    return _module.current_stream(*args, **kwargs) if has_device() else _HOST_STREAM


def default_stream(*args: Any, **kwargs: Any) -> Any:
    """Return the default stream of the device."""
    return _module.default_stream(*args, **kwargs) if has_device() else _HOST_STREAM


def stream(chosen: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which ``chosen`` is the current stream."""
    return _module.stream(chosen) if has_device() else contextlib.nullcontext()


def set_stream(chosen: Any) -> None:
    """Make ``chosen`` the current stream."""
    if has_device():
        _module.set_stream(chosen)


# --- random numbers -----------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    if has_device():
        _module.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    if has_device():
        _module.manual_seed_all(seed)
    else:
        torch.default_generator.manual_seed(seed)


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a copy of the state of the device's generator (on a CPU the CPU generator)."""
    return _module.get_rng_state(*args, **kwargs) if has_device() else torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Set the state of the device's generator.

    On a CPU the effect is immediate. ``torch.cuda.set_rng_state`` would queue the call until CUDA
    is initialized, which never happens, and a forked state would silently not be restored.
    """
    if has_device():
        _module.set_rng_state(new_state, *args, **kwargs)
    else:
        torch.set_rng_state(new_state)


def initial_seed() -> int:
    """Return the initial seed of the device's generator."""
    return _module.initial_seed() if has_device() else torch.initial_seed()


# --- memory -------------------------------------------------------------------------------


def empty_cache() -> None:
    """Release cached device memory; a CPU's allocator has none."""
    if has_device():
        _module.empty_cache()


def memory_stats(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return allocator statistics; all are 0 on a CPU."""
    return _module.memory_stats(*args, **kwargs) if has_device() else defaultdict(int)


def memory_allocated(*args: Any, **kwargs: Any) -> int:
    """Return the bytes held by tensors on the device."""
    return _module.memory_allocated(*args, **kwargs) if has_device() else 0


def max_memory_allocated(*args: Any, **kwargs: Any) -> int:
    """Return the peak of bytes held by tensors on the device."""
    return _module.max_memory_allocated(*args, **kwargs) if has_device() else 0


def memory_reserved(*args: Any, **kwargs: Any) -> int:
    """Return the bytes that the allocator holds on the device."""
    return _module.memory_reserved(*args, **kwargs) if has_device() else 0


def max_memory_reserved(*args: Any, **kwargs: Any) -> int:
    """Return the peak of bytes that the allocator has held on the device."""
    return _module.max_memory_reserved(*args, **kwargs) if has_device() else 0


def device_memory_used(*args: Any, **kwargs: Any) -> int:
    """Return the bytes in use on the device by all processes."""
    return _module.device_memory_used(*args, **kwargs) if has_device() else 0


def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> None:
    """Reset the peak statistics."""
    if has_device():
        _module.reset_peak_memory_stats(*args, **kwargs)


# --- profiler ranges ----------------------------------------------------------------------


def nvtx_range_push(*args: Any, **kwargs: Any) -> Any:
    """Open a range in an NVIDIA profile."""
    return torch.cuda.nvtx.range_push(*args, **kwargs) if is_cuda() else None  # type: ignore[no-untyped-call]


def nvtx_range_pop() -> Any:
    """Close the innermost range of an NVIDIA profile."""
    return torch.cuda.nvtx.range_pop() if is_cuda() else None  # type: ignore[no-untyped-call]


def nvtx_range(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager of a range in an NVIDIA profile."""
    return torch.cuda.nvtx.range(*args, **kwargs) if is_cuda() else contextlib.nullcontext()
