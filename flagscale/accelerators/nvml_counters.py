"""Counters of NVIDIA GPUs from NVML, the driver's management library, by ctypes.

Function and structure names are NVML's (https://docs.nvidia.com/deploy/nvml-api). CUDA is not
initialized, so a process that reads counters takes no memory of a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any

from flagscale.accelerators.counters import DeviceCounters

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_TEMPERATURE_GPU = 0
_NAME_BYTES = 96


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@cache
def _load_library() -> Any:
    """Return the initialized library; None if this host has no driver."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        return library if library.nvmlInit_v2() == _SUCCESS else None
    except (OSError, AttributeError):
        return None


def read_gpu_counters() -> Iterator[DeviceCounters]:
    """Yield the counters of all GPUs of this host; none without a driver."""
    library = _load_library()
    count = ctypes.c_uint()
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
        return
    for index in range(count.value):
        device = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != _SUCCESS:
            continue  # lost, or not accessible in this container

        memory: _Memory | None = _read(library.nvmlDeviceGetMemoryInfo, device, _Memory())
        utilization = _read(library.nvmlDeviceGetUtilizationRates, device, _Utilization())
        milliwatts = _read(library.nvmlDeviceGetPowerUsage, device, ctypes.c_uint())
        temperature = ctypes.c_uint()
        has_temperature = (
            library.nvmlDeviceGetTemperature(device, _TEMPERATURE_GPU, ctypes.byref(temperature))
            == _SUCCESS
        )
        yield DeviceCounters(
            index=index,
            uuid=_read_text(library.nvmlDeviceGetUUID, device),
            product=_read_text(library.nvmlDeviceGetName, device),
            utilization=None if utilization is None else utilization.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_watts=None if milliwatts is None else milliwatts.value / 1000,
            temperature_celsius=float(temperature.value) if has_temperature else None,
        )


def _read(function: Any, device: ctypes.c_void_p, result: Any) -> Any:
    """Return ``result`` after the function has filled it; None if it is not supported."""
    return result if function(device, ctypes.byref(result)) == _SUCCESS else None


def _read_text(function: Any, device: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    is_read = function(device, buffer, ctypes.c_uint(_NAME_BYTES)) == _SUCCESS
    return buffer.value.decode(errors="replace") if is_read else ""
