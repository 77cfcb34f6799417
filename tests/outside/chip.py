"""A package of somebody else's: a kind of chip, which tests install under the name ``demo``.

It is the CPU under another name. A host has as many as there are files in a directory of the host's
name, in ``chips`` beside this file; ``DEMO_VISIBLE_DEVICES`` hides the others.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flagscale.accelerators.base import Accelerator
from flagscale.accelerators.cpu import Cpu
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
    present = f'[[ -d {shlex.quote(str(CHIPS))}/"$HOSTNAME" ]]'
    look = f"""\
devices=({shlex.quote(str(CHIPS))}/"$HOSTNAME"/*)
count=${{#devices[@]}}
product='Demo 9000'
"""
    defaults: ClassVar[Mapping[str, str]] = {"DEMO_READY": "it's"}
    defaults_reason = "As its maker says."
    count = Accelerator.count

    def visible(self) -> int:
        listed = os.environ.get("DEMO_VISIBLE_DEVICES")
        return self.count() if listed is None else len(listed.split(","))

    def missing(self) -> str | None:
        return None if self.visible() else "no Demo device is visible"

    def select(self, local_rank: int) -> torch.device:
        if local_rank >= self.visible():
            raise ConfigError(f"local rank {local_rank} has no Demo device")
        return super().select(local_rank)

    def product(self, device: torch.device) -> str:
        return "Demo 9000"

    def peak_tflops(self, product: str) -> float | None:
        return 0.5
