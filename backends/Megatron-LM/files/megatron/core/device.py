"""The current accelerator, asked by the rest of this tree instead of ``torch.cuda``.

On a CUDA machine every function here calls the ``torch.cuda`` function of the same name with the
same arguments and returns its result, so that the tree behaves there as its authors wrote it. For
another chip it is the function of that chip's own module, such as ``torch.npu``. On a CPU each
returns what makes the same code right without a device: one device, one stream that is always in
order, no memory statistics, and the CPU generator as *the* generator.

The choice is made once, on the first call: ``FLAGSCALE_DEVICE`` names the kind of device, ``cpu``,
``cuda`` or one that ``flagscale.accelerators`` knows; otherwise it is CUDA where
``torch.cuda.is_available()``, else the first kind that has devices here.

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

# Asked thousands of times a step; plain globals are traceable.
_type = ""
_module: Any = None


def has_device() -> bool:
    """Whether the current accelerator is a device with memory and streams of its own.

    Raises:
        RuntimeError: ``FLAGSCALE_DEVICE`` names no kind of device, or one that torch finds none of.
    """
    if not _type:
        _choose()
    return _module is not None


def is_cuda() -> bool:
    """Whether it is CUDA, for which the tree was written: of what only CUDA has."""
    return has_device() and _type == "cuda"


def _choose() -> None:
    global _type, _module  # noqa: PLW0603 - see above
    wanted = os.environ.get(_VARIABLE, "").strip().lower()
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"{_VARIABLE}=cuda, but torch {torch.__version__} finds no CUDA device; "
            f"unset {_VARIABLE} to train on the CPU"
        )
    if wanted in ("cpu", "cuda"):
        chosen = wanted
    else:
        chosen = "cuda" if not wanted and torch.cuda.is_available() else _type_of(wanted)
    _module = None if chosen == "cpu" else torch.get_device_module(chosen)
    _type = chosen


def _type_of(kind: str) -> str:
    """What torch calls a kind of device that somebody's package brings; of none in particular, of
    the first that this machine has."""
    try:
        from flagscale.accelerators.registry import AUTO, chosen
    except ImportError:  # the tree by itself
        if kind:
            raise RuntimeError(f"{_VARIABLE}={kind!r}: expected 'cpu' or 'cuda'") from None
        return "cpu"
    from flagscale.errors import ConfigError

    try:
        found = chosen(kind or AUTO)
    except ConfigError as error:
        raise RuntimeError(f"{_VARIABLE}={kind!r}: {error}") from error
    if missing := found.missing():
        raise RuntimeError(f"{_VARIABLE}={kind!r}, but {missing}")
    return str(found.torch_type)


def device_type() -> str:
    """``"cuda"``, ``"cpu"`` or what torch calls another chip: what factory calls and
    ``torch.autocast`` take."""
    return _type if has_device() else "cpu"


def current_device() -> int | torch.device:
    """The current device: its index on CUDA, ``torch.device("cpu")`` on a CPU."""
    return _module.current_device() if has_device() else _CPU


def device_ids() -> list[int] | None:
    """What a barrier takes as ``device_ids``; ``None`` on a CPU, where gloo refuses a list."""
    return [_module.current_device()] if has_device() else None


def set_device(device: Any) -> None:
    """Make ``device`` current; a CPU has only one."""
    if has_device():
        _module.set_device(device)


def device_count() -> int:
    """Number of visible devices; a CPU counts as one."""
    return _module.device_count() if has_device() else 1


def to_device(thing: _T, *args: Any, **kwargs: Any) -> _T:
    """``thing.cuda(*args, **kwargs)`` of a tensor or a module, by the method of that name that it
    has for each chip; the thing itself on a CPU."""
    moved: _T = getattr(thing, _type)(*args, **kwargs) if has_device() else thing
    return moved


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.pin_memory()``; the tensor itself on a CPU, where there is nothing to copy to."""
    return tensor.pin_memory() if has_device() else tensor


def record_stream(tensor: torch.Tensor, used_by: Any) -> None:
    """``tensor.record_stream(used_by)``; a CPU's allocator knows no streams."""
    if has_device():
        tensor.record_stream(used_by)


def holds(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is on the current kind of device: ``tensor.is_cuda`` on CUDA."""
    return tensor.device.type == device_type()


def tensor_type(cuda_name: str) -> str:
    """The name ``Tensor.type()`` gives on this device for ``torch.cuda.<Kind>Tensor``."""
    own = f"torch.{_type}." if has_device() else "torch."
    return cuda_name.replace("torch.cuda.", own, 1)


def group_backend(cuda_backend: str) -> str | None:
    """``cuda_backend`` on CUDA; ``None``, the default group's own backend, elsewhere."""
    return cuda_backend if is_cuda() else None


# --- order of execution -------------------------------------------------------------------


def synchronize(*args: Any, **kwargs: Any) -> None:
    """Wait for the device; a CPU's kernels are done when their call returns."""
    if has_device():
        _module.synchronize(*args, **kwargs)


class HostEvent:
    """A point in a CPU's program: by the time anyone asks, it has happened."""

    def record(self, stream: Any = None) -> None:
        """Nothing to wait for later."""

    def wait(self, stream: Any = None) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """It has happened."""

    def query(self) -> bool:
        """It has happened."""
        return True


class HostStream:
    """A CPU's only stream: the program itself, always in order."""

    def wait_stream(self, other: Any) -> None:
        """Everything before is done."""

    def wait_event(self, event: Any) -> None:
        """Everything before is done."""

    def synchronize(self) -> None:
        """Everything before is done."""

    def query(self) -> bool:
        """Everything before is done."""
        return True

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """A new event, or ``event``, at this point of the program."""
        return event or HostEvent()


_HOST_STREAM = HostStream()


def Stream(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - stands for torch.cuda.Stream
    """A new stream; on a CPU the only one."""
    return _module.Stream(*args, **kwargs) if has_device() else _HOST_STREAM


def Event(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - stands for torch.cuda.Event
    """A new event; on a CPU one that has already happened."""
    return _module.Event(*args, **kwargs) if has_device() else HostEvent()


def current_stream(*args: Any, **kwargs: Any) -> Any:
    """The current stream of the device."""
    return _module.current_stream(*args, **kwargs) if has_device() else _HOST_STREAM


def default_stream(*args: Any, **kwargs: Any) -> Any:
    """The default stream of the device."""
    return _module.default_stream(*args, **kwargs) if has_device() else _HOST_STREAM


def stream(chosen: Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which ``chosen`` is the current stream."""
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
    """A copy of the state of the device's generator (of the CPU generator on a CPU)."""
    return _module.get_rng_state(*args, **kwargs) if has_device() else torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Set the state of the device's generator.

    On a CPU it acts at once. ``torch.cuda.set_rng_state`` there would only queue the call until
    CUDA starts, which never happens, and a forked state would silently never be restored.
    """
    if has_device():
        _module.set_rng_state(new_state, *args, **kwargs)
    else:
        torch.set_rng_state(new_state)


def initial_seed() -> int:
    """The seed the device's generator was given."""
    return _module.initial_seed() if has_device() else torch.initial_seed()


# --- memory -------------------------------------------------------------------------------


def empty_cache() -> None:
    """Give cached device memory back; a CPU's allocator keeps none."""
    if has_device():
        _module.empty_cache()


def memory_stats(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Allocator statistics; on a CPU every figure is 0."""
    return _module.memory_stats(*args, **kwargs) if has_device() else defaultdict(int)


def memory_allocated(*args: Any, **kwargs: Any) -> int:
    """Bytes held by tensors on the device."""
    return _module.memory_allocated(*args, **kwargs) if has_device() else 0


def max_memory_allocated(*args: Any, **kwargs: Any) -> int:
    """Most bytes held by tensors on the device so far."""
    return _module.max_memory_allocated(*args, **kwargs) if has_device() else 0


def memory_reserved(*args: Any, **kwargs: Any) -> int:
    """Bytes the allocator holds on the device."""
    return _module.memory_reserved(*args, **kwargs) if has_device() else 0


def max_memory_reserved(*args: Any, **kwargs: Any) -> int:
    """Most bytes the allocator has held on the device so far."""
    return _module.max_memory_reserved(*args, **kwargs) if has_device() else 0


def device_memory_used(*args: Any, **kwargs: Any) -> int:
    """Bytes in use on the device by all processes."""
    return _module.device_memory_used(*args, **kwargs) if has_device() else 0


def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> None:
    """Start counting peaks anew."""
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
    """Context of a range in an NVIDIA profile."""
    return torch.cuda.nvtx.range(*args, **kwargs) if is_cuda() else contextlib.nullcontext()
