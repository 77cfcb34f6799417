"""Measurements of one host, by its worker. Imports torch."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from itertools import count

from flagscale.accelerators.health import Rate
from flagscale.accelerators.registry import CPU, get_accelerator, list_device_accelerators
from flagscale.accelerators.visible import choose_visible_kind, count_automatic_ranks
from flagscale.health.messages import (
    DeviceMeasurement,
    HealthCommand,
    HealthEvent,
    PairMeasurement,
    PairRound,
    WorkerSettings,
)
from flagscale.health.names import ALL_REDUCE
from flagscale.health.ranks import ExchangeJob, HostCopyJob, MeasureJob, Problem, RankProcesses
from flagscale.hosts import probe

_CPU_RANKS = 2
"""Ranks on a host without devices, so that they can exchange data."""
_MEASURE_SECONDS = 45.0
"""Longest measurement of the devices, apart from its windows. The first call of a library may load
its kernels from a slow disk."""
_MEET_SECONDS = 15.0
"""Longest rendezvous of ranks."""
_WINDOWS_PER_JOB = 20
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class HostMeter:
    """The ranks of this host, and what they measure."""

    def __init__(self, settings: WorkerSettings) -> None:
        kind, ranks = _choose_ranks(settings.device)
        cores = len(os.sched_getaffinity(0))
        accelerator = get_accelerator(kind)
        self._kind = kind
        self._unit = accelerator.unit
        for name, value in accelerator.default_variables.items():
            os.environ.setdefault(name, value)
        self._address = _find_address(settings)
        _set_interface(self._address)
        self._count = ranks
        self._ranks = RankProcesses(kind, ranks, max(1, cores // ranks))
        self._groups = count()

    def describe(self) -> HealthEvent:
        """Return the event ``ready``."""
        return HealthEvent(
            "ready",
            device=self._kind,
            address=self._address,
            port=self._ranks.port,
            ranks=self._count,
        )

    def execute(self, command: HealthCommand) -> HealthEvent:
        """Execute a command, and return its event."""
        if command.pair is None:
            return HealthEvent("measured", devices=self._measure(command.seconds))
        return HealthEvent("paired", pairs=(self._exchange(command.pair, command.seconds),))

    def _measure(self, seconds: float) -> tuple[DeviceMeasurement, ...]:
        limit = _MEASURE_SECONDS + _WINDOWS_PER_JOB * seconds
        replies = self._ranks.run([MeasureJob(seconds)] * self._count, limit)
        measurements = [
            DeviceMeasurement(f"{self._unit} {number}", product="", problem=reply.reason)
            if isinstance(reply, Problem)
            else reply
            for number, reply in enumerate(replies)
        ]
        for number, device in enumerate(measurements):
            if not device.problem:
                measurements[number] = self._add_host_copies(number, device, seconds)
        if self._count > 1 and not any(device.problem for device in measurements):
            measurements = self._add_all_reduce(measurements, seconds)
        return tuple(measurements)

    def _add_host_copies(
        self, number: int, device: DeviceMeasurement, seconds: float
    ) -> DeviceMeasurement:
        limit = _MEASURE_SECONDS + _WINDOWS_PER_JOB * seconds
        (reply,) = self._ranks.run_on({number: HostCopyJob(seconds)}, limit)
        if isinstance(reply, Problem):
            return replace(device, problem=reply.reason)
        return replace(device, rates=(*device.rates, *reply))

    def _add_all_reduce(
        self, measurements: list[DeviceMeasurement], seconds: float
    ) -> list[DeviceMeasurement]:
        name = f"local/{next(self._groups)}"
        jobs = [
            ExchangeJob(
                "all_reduce",
                name,
                "localhost",
                self._ranks.port,
                rank,
                self._count,
                seconds,
                _MEET_SECONDS,
            )
            for rank in range(self._count)
        ]
        replies = self._ranks.run(jobs, 2 * _MEET_SECONDS + _WINDOWS_PER_JOB * seconds)
        if problem := next((r.reason for r in replies if isinstance(r, Problem)), ""):
            return [replace(device, problem=f"{ALL_REDUCE}: {problem}") for device in measurements]
        return [
            replace(device, rates=(*device.rates, Rate(ALL_REDUCE, rate, "GB/s")))
            for device, rate in zip(measurements, replies, strict=True)
        ]

    def _exchange(self, pair: PairRound, seconds: float) -> PairMeasurement:
        first = 0 if pair.leads else pair.ranks
        jobs = [
            ExchangeJob(
                "exchange",
                pair.name,
                pair.address,
                pair.port,
                first + number,
                2 * pair.ranks,
                seconds,
                _MEET_SECONDS,
            )
            for number in range(pair.ranks)
        ]
        replies = self._ranks.run(jobs, 2 * _MEET_SECONDS + _WINDOWS_PER_JOB * seconds)
        problem = next((r.reason for r in replies if isinstance(r, Problem)), "")
        rates = () if problem else tuple(replies)
        return PairMeasurement(pair.partner, rates, problem)


def _choose_ranks(configured_kind: str) -> tuple[str, int]:
    """Return the kind of device and the number of ranks."""
    devices = {adapter.name: adapter.count_devices() for adapter in list_device_accelerators()}
    devices = {kind: number for kind, number in devices.items() if number}
    kind = choose_visible_kind(configured_kind, devices, os.environ)
    if kind == CPU:
        return kind, _CPU_RANKS
    return kind, count_automatic_ranks(os.environ, devices, kind)


def _find_address(settings: WorkerSettings) -> str:
    """Return this host's address for other hosts: the configured one, or that from which packets
    to another host leave. Empty if there is none.
    """
    if settings.address or not settings.other_hosts:
        return settings.address
    for name in settings.other_hosts:
        try:
            candidates = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError):
            continue
        for family, kind, protocol, _, address in candidates:
            with socket.socket(family, kind, protocol) as udp:
                try:
                    udp.connect(address)
                except OSError:
                    continue
                own_address = str(udp.getsockname()[0])
            if not own_address.startswith("127.") and own_address != "::1":
                return own_address
    return ""


def _set_interface(address: str) -> None:
    """Let libraries use the interface of ``address``, unless the user has chosen another."""
    interface = probe.find_interface(address) if address else "lo"
    for variable in _INTERFACE_VARIABLES if interface else ():
        os.environ.setdefault(variable, interface)
