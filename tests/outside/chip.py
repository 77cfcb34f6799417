"""A third-party package with a device type, which tests install under the name ``demo``.

The device is the CPU under another name. A host has one device per file in a directory with the
host's name, in ``chips`` next to this file; ``DEMO_VISIBLE_DEVICES`` hides devices. A file that is
not empty has the device's rate and its fault as JSON, for checks of the hardware.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flagscale.accelerators.base import Accelerator
from flagscale.accelerators.cpu import Cpu
from flagscale.accelerators.health import DeviceReading, Rate
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    import torch

CHIPS = Path(__file__).with_name("chips")


class Demo(Cpu):
    name = "demo"
    title = "Demo"
    torch_type = "cpu"
    visible_variable = "DEMO_VISIBLE_DEVICES"
    host_types = ("Demo-9000",)
    presence_condition = f'[[ -d {shlex.quote(str(CHIPS))}/"$HOSTNAME" ]]'
    count_script = f"""\
devices=({shlex.quote(str(CHIPS))}/"$HOSTNAME"/*)
count=${{#devices[@]}}
product='Demo 9000'
"""
    default_variables: ClassVar[Mapping[str, str]] = {"DEMO_READY": "it's"}
    default_variables_reason = "As its maker says."
    count_devices = Accelerator.count_devices

    def count_visible(self) -> int:
        visible_devices = os.environ.get("DEMO_VISIBLE_DEVICES")
        return self.count_devices() if visible_devices is None else len(visible_devices.split(","))

    def explain_unavailable(self) -> str | None:
        return None if self.count_visible() else "no Demo device is visible"

    def select(self, local_rank: int) -> torch.device:
        if local_rank >= self.count_visible():
            raise ConfigError(f"local rank {local_rank} has no Demo device")
        self._selected = local_rank
        return super().select(local_rank)

    def product_name(self, device: torch.device) -> str:
        return "Demo 9000"

    def _read_chip(self) -> dict[str, object]:
        files = sorted((CHIPS / socket.gethostname()).iterdir())
        return dict(json.loads(files[self._selected].read_text() or "{}"))

    def read_health(self, device: torch.device) -> DeviceReading:
        fault = self._read_chip().get("fault")
        return DeviceReading(faults={"defect": str(fault)} if fault else {})

    def measure_rates(
        self, device: torch.device, seconds: float, while_busy: Callable[[], object]
    ) -> Sequence[Rate]:
        while_busy()
        return [Rate("demo product", float(str(self._read_chip()["rate"])), "TFLOP/s")]

    def peak_tflops(self, product: str) -> float | None:
        return 0.5
