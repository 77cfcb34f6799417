"""The device a rank trains on: choosing it, and the few operations that differ between kinds.

megatron.core is written for CUDA. Its adapted source tree (``tools/patch/unpatch.py``) follows
``FLAGSCALE_DEVICE``; the wheel as published works on CUDA alone. So :func:`choose` must run before
the first import of ``megatron.core``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

from flagscale.accelerators.device import Device, select
from flagscale.accelerators.registry import AUTO
from flagscale.errors import ConfigError

__all__ = ["DEVICE_VARIABLE", "Device", "choose", "uncompiled"]

DEVICE_VARIABLE = "FLAGSCALE_DEVICE"
_UNCOMPILED = "TORCHDYNAMO_DISABLE"
_CORES_OWN = "cuda"
"""What megatron.core is written for."""


def choose(wanted: str, local_rank: int) -> Device:
    """The device of the rank ``local_rank`` of its host, made current.

    ``wanted`` is a kind that :mod:`flagscale.accelerators` knows, or ``auto``, which
    ``FLAGSCALE_DEVICE`` overrides.

    Raises:
        ConfigError: no kind is called so, there are no such devices or fewer than ranks, or
            megatron.core is the published wheel, which runs on CUDA alone.
    """
    if wanted == AUTO:
        wanted = os.environ.get(DEVICE_VARIABLE) or AUTO
    device = select(wanted, local_rank)
    os.environ[DEVICE_VARIABLE] = device.kind
    if not device.compiles:
        # Compiling the fused elementwise functions costs 12 s at the first step and gains nothing.
        os.environ.setdefault(_UNCOMPILED, "1")
    if device.kind != _CORES_OWN:
        _require_adapted_core(device)
    return device


def uncompiled() -> bool:
    """Whether ``torch.compile`` leaves functions as they are in this process."""
    return os.environ.get(_UNCOMPILED) == "1"


@contextlib.contextmanager
def _compiler_unloaded() -> Iterator[None]:
    """Context for the first import of ``megatron.core``, which hands functions to
    ``torch.compile``. Where nothing is compiled they stay as they are: torch would load its
    compiler for them, which takes as long as the rest."""
    if not uncompiled():
        yield
        return
    import torch

    def as_it_is(function: Any = None, **_: Any) -> Any:
        return as_it_is if function is None else function

    own: Any = torch.compile
    torch.compile = as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = own


def _require_adapted_core(device: Device) -> None:
    try:
        with _compiler_unloaded():  # looking for a module imports its package
            core = importlib.util.find_spec("megatron.core")
            adapted = importlib.util.find_spec("megatron.core.device")
    except ModuleNotFoundError:
        core = adapted = None
    if core is None:
        raise ConfigError(
            "megatron.core is not installed",
            hint="run: python tools/patch/unpatch.py --backend Megatron-LM",
        )
    if adapted is None:
        raise ConfigError(
            f"megatron.core in {core.origin} is the published one, which trains on CUDA only, "
            f"and the training device is the {device.accelerator.shown}",
            hint="run: python tools/patch/unpatch.py --backend Megatron-LM, and start training "
            "with third_party/Megatron-LM first in PYTHONPATH (the launcher does that)",
        )
