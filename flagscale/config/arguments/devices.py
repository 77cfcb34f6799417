"""The rule of the kind of device to train on."""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.accelerators.registry import unusable
from flagscale.config.arguments.precision import Broken, Values


def known(values: Values) -> Iterator[Broken]:
    """The kind has an adapter, and that loads. Whether a host has such devices is the host's to
    say."""
    if complaint := unusable(values["device"]):
        yield "device", complaint
