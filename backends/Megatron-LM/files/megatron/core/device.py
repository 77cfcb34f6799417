"""The current accelerator, asked by the rest of this tree instead of ``torch.cuda``.

On a CUDA machine every function here calls the ``torch.cuda`` function of the same name with the
same arguments and returns its result, so that the tree behaves there as its authors wrote it. On
a CPU each returns what makes the same code right without a device: one device, one stream that
is always in order, no memory statistics, and the CPU generator as *the* generator.

The choice is made once, on the first call: ``FLAGSCALE_DEVICE=cpu`` or ``cuda`` forces it,
otherwise it is CUDA where ``torch.cuda.is_available()``.

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

_cuda: bool | None = None


def is_cuda() -> bool:
    """Whether the current accelerator is CUDA.

    Raises:
        RuntimeError: ``FLAGSCALE_DEVICE`` is neither ``cpu`` nor ``cuda``, or asks for CUDA
            where torch finds none.
    """
    global _cuda  # noqa: PLW0603 - asked thousands of times a step; a plain global is traceable
    if _cuda is None:
        _cuda = _choose() == "cuda"
    return _cuda


def _choose() -> str:
    wanted = os.environ.get(_VARIABLE, "").strip().lower()
    if wanted not in ("", "cpu", "cuda"):
        raise RuntimeError(f"{_VARIABLE}={wanted!r}: expected 'cpu' or 'cuda'")
    if wanted == "cpu":
        return "cpu"
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise RuntimeError(
            f"{_VARIABLE}=cuda, but torch {torch.__version__} finds no CUDA device; "
            f"unset {_VARIABLE} to train on the CPU"
        )
    return "cuda" if available else "cpu"


def device_type() -> str:
    """``"cuda"`` or ``"cpu"``: what factory calls and ``torch.autocast`` take."""
    return "cuda" if is_cuda() else "cpu"


def current_device() -> int | torch.device:
    """The current device: its index on CUDA, ``torch.device("cpu")`` on a CPU."""
    return torch.cuda.current_device() if is_cuda() else _CPU


def device_ids() -> list[int] | None:
    """What a barrier takes as ``device_ids``; ``None`` on a CPU, where gloo refuses a list."""
    return [torch.cuda.current_device()] if is_cuda() else None


def set_device(device: Any) -> None:
    """Make ``device`` current; a CPU has only one."""
    if is_cuda():
        torch.cuda.set_device(device)


def device_count() -> int:
    """Number of visible devices; a CPU counts as one."""
    return torch.cuda.device_count() if is_cuda() else 1


def to_device(thing: _T, *args: Any, **kwargs: Any) -> _T:
    """``thing.cuda(*args, **kwargs)`` of a tensor or a module; the thing itself on a CPU."""
    return thing.cuda(*args, **kwargs) if is_cuda() else thing  # type: ignore[attr-defined]


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.pin_memory()``; the tensor itself on a CPU, where there is nothing to copy to."""
    return tensor.pin_memory() if is_cuda() else tensor


def record_stream(tensor: torch.Tensor, used_by: Any) -> None:
    """``tensor.record_stream(used_by)``; a CPU's allocator knows no streams."""
    if is_cuda():
        tensor.record_stream(used_by)


def holds(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is on the current kind of device: ``tensor.is_cuda`` on CUDA."""
    return tensor.is_cuda if is_cuda() else tensor.device.type == "cpu"


def tensor_type(cuda_name: str) -> str:
    """The name ``Tensor.type()`` gives on this device for ``torch.cuda.<Kind>Tensor``."""
    return cuda_name if is_cuda() else cuda_name.replace("torch.cuda.", "torch.", 1)


def group_backend(cuda_backend: str) -> str | None:
    """``cuda_backend`` on CUDA; ``None``, the default group's own backend, on a CPU."""
    return cuda_backend if is_cuda() else None


# --- order of execution -------------------------------------------------------------------


def synchronize(*args: Any, **kwargs: Any) -> None:
    """Wait for the device; a CPU's kernels are done when their call returns."""
    if is_cuda():
        torch.cuda.synchronize(*args, **kwargs)


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
    return torch.cuda.Stream(*args, **kwargs) if is_cuda() else _HOST_STREAM  # type: ignore[no-untyped-call]


def Event(*args: Any, **kwargs: Any) -> Any:  # noqa: N802 - stands for torch.cuda.Event
    """A new event; on a CPU one that has already happened."""
    return torch.cuda.Event(*args, **kwargs) if is_cuda() else HostEvent()  # type: ignore[no-untyped-call]


def current_stream(*args: Any, **kwargs: Any) -> Any:
    """The current stream of the device."""
    return torch.cuda.current_stream(*args, **kwargs) if is_cuda() else _HOST_STREAM


def default_stream(*args: Any, **kwargs: Any) -> Any:
    """The default stream of the device."""
    return torch.cuda.default_stream(*args, **kwargs) if is_cuda() else _HOST_STREAM


def stream(chosen: Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which ``chosen`` is the current stream."""
    return torch.cuda.stream(chosen) if is_cuda() else contextlib.nullcontext()


def set_stream(chosen: Any) -> None:
    """Make ``chosen`` the current stream."""
    if is_cuda():
        torch.cuda.set_stream(chosen)


# --- random numbers -----------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    if is_cuda():
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    if is_cuda():
        torch.cuda.manual_seed_all(seed)
    else:
        torch.default_generator.manual_seed(seed)


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """A copy of the state of the device's generator (of the CPU generator on a CPU)."""
    return torch.cuda.get_rng_state(*args, **kwargs) if is_cuda() else torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Set the state of the device's generator.

    On a CPU it acts at once. ``torch.cuda.set_rng_state`` there would only queue the call until
    CUDA starts, which never happens, and a forked state would silently never be restored.
    """
    if is_cuda():
        torch.cuda.set_rng_state(new_state, *args, **kwargs)
    else:
        torch.set_rng_state(new_state)


def initial_seed() -> int:
    """The seed the device's generator was given."""
    return torch.cuda.initial_seed() if is_cuda() else torch.initial_seed()


# --- memory -------------------------------------------------------------------------------


def empty_cache() -> None:
    """Give cached device memory back; a CPU's allocator keeps none."""
    if is_cuda():
        torch.cuda.empty_cache()


def memory_stats(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Allocator statistics; on a CPU every figure is 0."""
    return torch.cuda.memory_stats(*args, **kwargs) if is_cuda() else defaultdict(int)


def memory_allocated(*args: Any, **kwargs: Any) -> int:
    """Bytes held by tensors on the device."""
    return torch.cuda.memory_allocated(*args, **kwargs) if is_cuda() else 0


def max_memory_allocated(*args: Any, **kwargs: Any) -> int:
    """Most bytes held by tensors on the device so far."""
    return torch.cuda.max_memory_allocated(*args, **kwargs) if is_cuda() else 0


def memory_reserved(*args: Any, **kwargs: Any) -> int:
    """Bytes the allocator holds on the device."""
    return torch.cuda.memory_reserved(*args, **kwargs) if is_cuda() else 0


def max_memory_reserved(*args: Any, **kwargs: Any) -> int:
    """Most bytes the allocator has held on the device so far."""
    return torch.cuda.max_memory_reserved(*args, **kwargs) if is_cuda() else 0


def device_memory_used(*args: Any, **kwargs: Any) -> int:
    """Bytes in use on the device by all processes."""
    return torch.cuda.device_memory_used(*args, **kwargs) if is_cuda() else 0


def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> None:
    """Start counting peaks anew."""
    if is_cuda():
        torch.cuda.reset_peak_memory_stats(*args, **kwargs)


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
