"""Selection of the device that a rank trains on.

megatron.core is written for CUDA. The patched source tree that ``tools/patch/unpatch.py`` creates
supports other devices and reads ``FLAGSCALE_DEVICE`` when it is imported; the published wheel
supports CUDA only. Therefore :func:`choose_device` must run before the first import of
``megatron.core``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from flagscale.accelerators.device import Device, select_device
from flagscale.accelerators.registry import AUTO
from flagscale.errors import ConfigError

__all__ = ["DEVICE_VARIABLE", "Device", "choose_device", "compile_disabled"]

DEVICE_VARIABLE = "FLAGSCALE_DEVICE"
_COMPILE_DISABLED_VARIABLE = "TORCHDYNAMO_DISABLE"
_HUGE_PAGES_VARIABLE = "THP_MEM_ALLOC_ENABLE"
_UNPATCHED_CORE_DEVICE = "cuda"
"""The device kind that unmodified megatron.core supports."""


def choose_device(kind: str, local_rank: int) -> Device:
    """Select the device of a rank and make it the current device.

    Args:
        kind: a device kind registered in :mod:`flagscale.accelerators`, or ``auto``, which
            ``FLAGSCALE_DEVICE`` overrides.
        local_rank: rank within the host, used as the device index.

    Raises:
        ConfigError: the kind is not registered, the host has no such device or fewer than ranks, or
            megatron.core is the published wheel and the device is not CUDA.
    """
    if kind == AUTO:
        kind = os.environ.get(DEVICE_VARIABLE) or AUTO
    device = select_device(kind, local_rank)
    os.environ[DEVICE_VARIABLE] = device.kind
    if not device.compiles:
        # Compiling the fused elementwise functions costs 12 s at the first step and gains nothing.
        os.environ.setdefault(_COMPILE_DISABLED_VARIABLE, "1")
    if device.torch_device.type == "cpu":
        # A fork that saves a checkpoint copies page tables, which takes a fifth of the time with
        # huge pages. torch reads the variable at its first allocation.
        os.environ.setdefault(_HUGE_PAGES_VARIABLE, "1")
    if device.kind != _UNPATCHED_CORE_DEVICE:
        _require_patched_core(device)
    return device


def compile_disabled() -> bool:
    """Return whether ``torch.compile`` is disabled in this process."""
    return os.environ.get(_COMPILE_DISABLED_VARIABLE) == "1"


@contextlib.contextmanager
def _without_torch_compile() -> Iterator[None]:
    """Replace ``torch.compile`` by the identity during the first import of ``megatron.core``.

    megatron.core decorates functions with ``torch.compile``. If compilation is disabled, loading
    torch's compiler for them would take as long as the rest of the import.
    """
    if not compile_disabled():
        yield
        return
    import torch

    def identity(function: Any = None, **_: Any) -> Any:
        return identity if function is None else function

    torch_compile: Any = torch.compile
    torch.compile = identity  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = torch_compile


def _require_patched_core(device: Device) -> None:
    try:
        with _without_torch_compile():  # looking for a module imports its package
            core = importlib.util.find_spec("megatron.core")
            patched = importlib.util.find_spec("megatron.core.device")
    except ModuleNotFoundError:
        core = patched = None
    if core is None:
        raise ConfigError(
            "megatron.core is not installed",
            hint="run: python tools/patch/unpatch.py --backend Megatron-LM",
        )
    if patched is None:
        raise ConfigError(
            f"megatron.core in {core.origin} is the published one, which trains on CUDA only, "
            f"and the training device is the {device.accelerator.display_name}",
            hint="run: python tools/patch/unpatch.py --backend Megatron-LM, and start training "
            "with third_party/Megatron-LM first in PYTHONPATH (the launcher does that)",
        )
