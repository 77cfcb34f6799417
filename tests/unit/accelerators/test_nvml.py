"""Tests of the reading of NVML, with a stand-in for the library, which needs a GPU."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flagscale.accelerators.cuda import _parse_cpu_list
from flagscale.accelerators.nvml import NvmlReader, find_xids, read_gpu

CONSTANTS = {
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "NVML_AGGREGATE_ECC": 1,
    "NVML_CLOCK_SM": 1,
    "NVML_TEMPERATURE_GPU": 0,
    "nvmlClocksEventReasonHwSlowdown": 8,
    "nvmlClocksEventReasonSwThermalSlowdown": 32,
    "nvmlClocksEventReasonHwThermalSlowdown": 64,
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": 128,
    "nvmlClocksEventReasonApplicationsClocksSetting": 2,
}
HEALTHY: dict[str, Any] = {
    "TotalEccErrors": 0,
    "RemappedRows": (0, 0, 0, 0),
    "ClockInfo": 1980,
    "MaxClockInfo": 1980,
    "EnforcedPowerLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
    "CurrentClocksEventReasons": 0,
    "Temperature": 40,
    "CurrPcieLinkGeneration": 5,
    "MaxPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 16,
    "MaxPcieLinkWidth": 16,
    "NvLinkState": 1,
    "ComputeRunningProcesses": [SimpleNamespace(pid=os.getpid())],
}
"""Answers of an H200, as seen on one. A function that is missing raises NotSupported, as
RetiredPagesPendingStatus does there."""


class NVMLError(Exception):
    pass


class StandIn(SimpleNamespace):
    """NVML with fixed answers by function; a callable is called with the arguments."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(NVMLError=NVMLError, **CONSTANTS)
        self.answers = {**HEALTHY, **answers}

    def __getattr__(self, name: str) -> Any:
        prefix, _, function = name.partition("nvmlDeviceGet")
        if prefix or not function:
            raise AttributeError(name)
        if function not in self.answers:
            raise_error: Any = lambda *_: (_ for _ in ()).throw(NVMLError("Not Supported"))  # noqa: E731
            return raise_error
        answer = self.answers[function]
        return lambda _handle, *arguments: answer(*arguments) if callable(answer) else answer


def test_healthy_gpu() -> None:
    reading = NvmlReader(StandIn(), None).read()
    assert (reading.faults, reading.warnings, reading.other_processes) == ({}, {}, ())
    assert reading.widths == {"PCIe generation": 5, "PCIe width": 16, "active NVLinks": 18}
    assert reading.limits == {"maximum SM clock (MHz)": 1980, "power limit (W)": 700}
    assert reading.details["SM clock"] == "1980 of 1980 MHz"


def test_gpu_that_reports_nothing() -> None:
    library = StandIn()
    library.answers = {}
    reading = NvmlReader(library, None).read()
    assert not any((reading.faults, reading.warnings, reading.widths, reading.limits))


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        pytest.param(
            {"TotalEccErrors": lambda kind, period: 3 if (kind, period) == (1, 0) else 0},
            "3 uncorrected ECC error(s) since the driver was loaded",
            id="uncorrected",
        ),
        pytest.param(
            {"RemappedRows": (0, 1, 1, 0)}, "a row remapping is pending: reset the GPU", id="rows"
        ),
        pytest.param(
            {"RemappedRows": (0, 8, 0, 1)}, "a row remapping has failed: replace the GPU", id="lost"
        ),
        pytest.param(
            {"RetiredPagesPendingStatus": 1},
            "a page retirement is pending: reset the GPU",
            id="pages",
        ),
        pytest.param(
            {"CurrentClocksEventReasons": 64, "ClockInfo": 600},
            "Thermal slowdown by the hardware, SM clock 600 MHz",
            id="hot",
        ),
        pytest.param(
            {"CurrentClocksEventReasons": 128, "ClockInfo": 600},
            "Power brake, SM clock 600 MHz",
            id="brake",
        ),
    ],
)
def test_fault(answers: dict[str, Any], fault: str) -> None:
    assert list(NvmlReader(StandIn(**answers), None).read().faults.values()) == [fault]


@pytest.mark.parametrize(
    ("answers", "warning"),
    [
        pytest.param(
            {"EnforcedPowerLimit": 500_000},
            "the power limit is 500 W, by default 700 W",
            id="power",
        ),
        pytest.param(
            {"CurrentClocksEventReasons": 32}, "thermal slowdown, SM clock 1980 MHz", id="warm"
        ),
        pytest.param({"CurrPcieLinkWidth": 8}, "PCIe width is 8 of 16", id="narrow"),
        pytest.param({"CurrentClocksEventReasons": 4}, None, id="power cap under load"),
        pytest.param({"TotalEccErrors": lambda kind, _: 5 * (1 - kind)}, None, id="corrected"),
        pytest.param({"TotalEccErrors": lambda kind, period: kind * period}, None, id="long ago"),
    ],
)
def test_state_that_is_no_fault(answers: dict[str, Any], warning: str | None) -> None:
    reading = NvmlReader(StandIn(**answers), None).read()
    assert reading.faults == {}
    assert list(reading.warnings.values()) == ([warning] if warning else [])


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        pytest.param([os.getpid()], [], id="this one"),
        pytest.param([os.getpid(), 4_000_001], ["pid 4000001"], id="another"),
        pytest.param([4_000_001], [], id="this one by its pid on the host"),
        pytest.param([4_000_001, 4_000_002], ["pid 4000002"], id="two by pids on the host"),
    ],
)
def test_processes_of_others(pids: list[int], others: list[str]) -> None:
    processes = [SimpleNamespace(pid=pid) for pid in pids]
    reading = NvmlReader(StandIn(ComputeRunningProcesses=processes), None).read()
    assert list(reading.other_processes) == others


LOG = """\
4,911,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
4,912,2,-;NVRM: Xid (PCI:0000:3B:00.0): 48, pid=1234, double bit
4,913,3,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, MMU fault of a program
4,914,4,-;NVRM: Xid (PCI:0000:af:00): 74, NVLink
6,915,5,-;usb 1-1: new device
"""


@pytest.mark.parametrize(
    ("bus_id", "numbers"),
    [("00000000:3B:00.0", [48, 79]), ("0000:af:00.0", [74]), ("00000000:01:00.0", [])],
)
def test_xids_of_a_gpu(bus_id: str, numbers: list[int]) -> None:
    assert find_xids(iter(LOG.splitlines()), bus_id) == numbers


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpu("0").unread == "nvidia-ml-py is not installed there"


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("3", {3}), ("0-2,8", {0, 1, 2, 8}), ("4-4", {4})]
)
def test_cpu_list(text: str, cpus: set[int]) -> None:
    assert _parse_cpu_list(text) == cpus
