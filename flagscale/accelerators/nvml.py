"""State of an NVIDIA GPU as NVML reports it, through the optional package ``nvidia-ml-py``.

A value that a GPU, its driver or a container does not report is left out. Sources: NVIDIA's API
reference of NVML, and "GPU Memory Error Management" for rows and pages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from flagscale.accelerators.health import DeviceReading

PACKAGE = "nvidia-ml-py"
_MAX_NVLINKS = 18
_MIB = 1 << 20
_KERNEL_LOG = Path("/dev/kmsg")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")
HARDWARE_XIDS = {
    48: "double-bit ECC error",
    63: "row remapping",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
}
"""Xid errors that point to hardware, from NVIDIA's "Xid Errors". Most others have their cause in a
program."""
_SLOWDOWNS = {
    "Slowdown by the hardware": "nvmlClocksEventReasonHwSlowdown",
    "Thermal slowdown by the hardware": "nvmlClocksEventReasonHwThermalSlowdown",
    "Power brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
}
"""Reasons for low clocks under load that a sound GPU in a sound host does not have."""
_REDUCTIONS = {
    "thermal slowdown": "nvmlClocksEventReasonSwThermalSlowdown",
    "clocks set by an administrator": "nvmlClocksEventReasonApplicationsClocksSetting",
}


class NvmlReader:
    """Reads the state of one GPU. ``nvml`` is the module ``pynvml``."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._faults: dict[str, str] = {}
        self._warnings: dict[str, str] = {}
        self._widths: dict[str, float] = {}
        self._limits: dict[str, float] = {}
        self._details: dict[str, str] = {}

    def read(self) -> DeviceReading:
        self._read_memory_errors()
        self._read_clocks()
        self._read_links()
        self._read_kernel_log()
        return DeviceReading(
            faults=self._faults,
            warnings=self._warnings,
            widths=self._widths,
            limits=self._limits,
            other_processes=tuple(self._list_other_processes()),
            details=self._details,
        )

    def _get(self, function: str, *arguments: Any) -> Any:
        """Call a function of NVML for this GPU; None if it is not supported here."""
        with suppress(self._nvml.NVMLError, AttributeError):
            return getattr(self._nvml, function)(self._handle, *arguments)
        return None

    def _read_memory_errors(self) -> None:
        nvml = self._nvml
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        for error_type, kind in (
            (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, "corrected"),
            (uncorrected, "uncorrected"),
        ):
            for counter, period in (
                (nvml.NVML_VOLATILE_ECC, "since the driver was loaded"),
                (nvml.NVML_AGGREGATE_ECC, "in its life"),
            ):
                count = self._get("nvmlDeviceGetTotalEccErrors", error_type, counter)
                if count is None:
                    continue
                self._details[f"{kind} ECC errors {period}"] = str(count)
                if error_type == uncorrected and count and counter == nvml.NVML_VOLATILE_ECC:
                    self._faults["ECC"] = f"{count} uncorrected ECC error(s) {period}"
        if (rows := self._get("nvmlDeviceGetRemappedRows")) is not None:
            corrected, remapped, pending, failed = rows
            self._details["remapped rows"] = str(corrected + remapped)
            if pending:
                self._faults["row remapping"] = "a row remapping is pending: reset the GPU"
            if failed:
                self._faults["row remapping"] = "a row remapping has failed: replace the GPU"
        if self._get("nvmlDeviceGetRetiredPagesPendingStatus"):
            self._faults["page retirement"] = "a page retirement is pending: reset the GPU"

    def _read_clocks(self) -> None:
        nvml = self._nvml
        clock = self._get("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
        maximum = self._get("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)
        if clock is not None and maximum is not None:
            self._details["SM clock"] = f"{clock} of {maximum} MHz"
        if maximum is not None:
            self._limits["maximum SM clock (MHz)"] = float(maximum)
        limit = self._get("nvmlDeviceGetEnforcedPowerLimit")
        default = self._get("nvmlDeviceGetPowerManagementDefaultLimit")
        if limit is not None:
            self._limits["power limit (W)"] = round(limit / 1000)
            if default is not None and limit < default:
                self._warnings["power limit"] = (
                    f"the power limit is {limit / 1000:.0f} W, by default {default / 1000:.0f} W"
                )
        reasons = self._get("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._get("nvmlDeviceGetCurrentClocksThrottleReasons")
        for name, bit in _SLOWDOWNS.items() if reasons else ():
            if reasons & getattr(nvml, bit, 0):
                self._faults[name] = f"{name}{f', SM clock {clock} MHz' if clock else ''}"
        for name, bit in _REDUCTIONS.items() if reasons else ():
            if reasons & getattr(nvml, bit, 0):
                self._warnings[name] = f"{name}{f', SM clock {clock} MHz' if clock else ''}"
        temperature = self._get("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        if temperature is not None:
            self._details["temperature"] = f"{temperature} °C"

    def _read_links(self) -> None:
        for function, name in (("LinkGeneration", "PCIe generation"), ("LinkWidth", "PCIe width")):
            current = self._get(f"nvmlDeviceGetCurrPcie{function}")
            maximum = self._get(f"nvmlDeviceGetMaxPcie{function}")
            if not current:
                continue
            self._widths[name] = float(current)
            self._details[name] = f"{current} of {maximum}" if maximum else str(current)
            if maximum and current < maximum:
                self._warnings[name] = f"{name} is {current} of {maximum}"
        states = [self._get("nvmlDeviceGetNvLinkState", link) for link in range(_MAX_NVLINKS)]
        if any(state is not None for state in states):
            active = sum(1 for state in states if state)
            self._widths["active NVLinks"] = float(active)
            self._details["active NVLinks"] = str(active)

    def _read_kernel_log(self) -> None:
        info = self._get("nvmlDeviceGetPciInfo")
        if info is None:
            return
        for number in find_xids(_read_records(_KERNEL_LOG), _decode(info.busId)):
            text = f"Xid {number} since the host was started: {HARDWARE_XIDS[number]}"
            self._warnings[f"Xid {number}"] = text

    def _list_other_processes(self) -> Iterator[str]:
        """Yield the processes on the GPU without this one, which has work on it.

        In a container NVML reports the host's pids, so this process may be among them under another
        pid.
        """
        processes = self._get("nvmlDeviceGetComputeRunningProcesses") or []
        pids = [process.pid for process in processes]
        if os.getpid() in pids:
            pids.remove(os.getpid())
        else:
            pids = pids[1:]
        for pid in pids:
            with suppress(OSError):
                yield f"{Path(f'/proc/{pid}/comm').read_text().strip()} (pid {pid})"
                continue
            yield f"pid {pid}"


def find_xids(lines: Iterator[str], bus_id: str) -> list[int]:
    """Return the distinct numbers of :data:`HARDWARE_XIDS` that lines of a kernel log report for
    the GPU with this PCI address.

    Domains have four or eight digits, and a log omits the function (``.0``).
    """
    wanted = bus_id.lower().partition(".")[0].split(":")[-2:]
    numbers = []
    for line in lines:
        match = _XID.search(line)
        if match is None or int(match[2]) not in HARDWARE_XIDS:
            continue
        if match[1].lower().partition(".")[0].split(":")[-2:] == wanted:
            numbers.append(int(match[2]))
    return sorted(set(numbers))


def _read_records(log: Path) -> Iterator[str]:
    """Yield the records of the kernel's log, one per read; none if this user may not read it."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:
                continue  # overwritten meanwhile
            except OSError:
                return
            if not record:
                return
            yield record.decode(errors="replace")
    finally:
        os.close(descriptor)


def _decode(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


def read_gpu(uuid: str) -> DeviceReading:
    """Read the state of the GPU with this UUID (without the prefix ``GPU-``)."""
    try:
        import pynvml as nvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return DeviceReading(unread=f"{PACKAGE} is not installed there")
    try:
        nvml.nvmlInit()
        handle: Any = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as error:
        return DeviceReading(unread=f"NVML: {error}")
    read: Callable[[], DeviceReading] = NvmlReader(nvml, handle).read
    return read()
