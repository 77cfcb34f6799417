"""Order of the commands of a hardware check, whoever sends them to the hosts. Pure.

A caller iterates over batches of commands, and sends the replies into the generator. Over SSH that
is :mod:`.session`; in a run whose job has failed it is the coordinator of the agents.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from itertools import chain, zip_longest
from typing import NamedTuple

from flagscale.health.judgement import Judgement, judge_passes
from flagscale.health.measurements import HostMeasurement, Measurements
from flagscale.health.messages import HealthCommand, HealthEvent, PairMeasurement, PairRound
from flagscale.health.pairing import pair_hosts

READY_SECONDS = 90.0
"""Longest start of a worker: torch may be on a slow file system."""
_MEASURE_SECONDS = 240.0
"""Longest measurement of a host, whose worker gives up hung devices earlier."""
_PAIR_SECONDS = 60.0
_QUICK_WINDOW = 0.3
_FULL_WINDOW = 2.0
_MOST_PASSES = 5
_PAIR_SHARE = 0.5
"""Window of an exchange between hosts as a fraction of that of a matrix product."""


class Batch(NamedTuple):
    """Commands that hosts execute at the same time, by the host's number."""

    commands: Mapping[int, HealthCommand]
    timeout: float
    """Seconds until a host without a reply has failed."""


class Passes(NamedTuple):
    """Measurements of all passes, and what they mean."""

    measurements: tuple[Measurements, ...]
    judgement: Judgement


PassSteps = Generator[Batch, Mapping[int, HealthEvent], Passes]
"""Yields batches, receives the replies by host, and returns the result."""


def measure_in_passes(
    ready: Mapping[int, HealthEvent],
    failures: Mapping[int, str],
    name: str,
    *,
    full: bool = False,
) -> PassSteps:
    """Measure hosts, and again as long as that may change the judgement.

    Args:
        ready: the event ``ready`` of each host.
        failures: reasons why hosts take no further part; the caller adds to it.
        name: name of this check, different from those of other checks of the same workers.
        full: measure longer, and at least twice.
    """
    check = _Check(ready, failures, name, _FULL_WINDOW if full else _QUICK_WINDOW)
    passes: list[Measurements] = []
    while True:
        passes.append((yield from check.measure(len(passes))))
        judgement = judge_passes(passes)
        may_change = judgement.is_open or (full and len(passes) == 1)
        if not may_change or len(passes) == _MOST_PASSES:
            return Passes(tuple(passes), judgement)


class _Check(NamedTuple):
    ready: Mapping[int, HealthEvent]
    failures: Mapping[int, str]
    name: str
    window: float

    def measure(self, number: int) -> Generator[Batch, Mapping[int, HealthEvent], Measurements]:
        """Measure all hosts, and then their connections in pairs, which differ from those of the
        passes before this one.
        """
        commands = {host: HealthCommand(self.window) for host in self._usable()}
        measured = yield Batch(commands, _MEASURE_SECONDS)
        hosts = {index: HostMeasurement(event.devices) for index, event in measured.items()}
        pairs: dict[int, list[PairMeasurement]] = {}
        for batch in self._pair_hosts(number):
            for index, event in (yield batch).items():
                pairs.setdefault(index, []).extend(event.pairs)
        for index in hosts.keys() & pairs.keys():
            hosts[index] = replace(hosts[index], pairs=tuple(pairs[index]))
        if len(self.ready) > 1:
            for index in self._usable():
                if index in hosts and not self.ready[index].address:
                    hosts[index] = replace(hosts[index], has_address=False)
        return Measurements(hosts, dict(self.failures))

    def _usable(self) -> list[int]:
        return [index for index in self.ready if index not in self.failures]

    def _pair_hosts(self, number: int) -> Iterator[Batch]:
        """Yield rounds of pairs. Different kinds of devices have no backend in common."""
        by_kind: dict[str, list[int]] = {}
        for index in self._usable():
            if self.ready[index].address:
                by_kind.setdefault(self.ready[index].device, []).append(index)
        rounds_by_kind = [
            [[(members[first], members[second]) for first, second in pairs] for pairs in rounds]
            for members in by_kind.values()
            for rounds in [pair_hosts(len(members), number)]
        ]
        for round_number, parts in enumerate(zip_longest(*rounds_by_kind, fillvalue=())):
            commands: dict[int, HealthCommand] = {}
            for leader, follower in chain.from_iterable(parts):
                name = f"{self.name}/{number}/{round_number}/{leader}"
                commands |= self._pair(leader, follower, name)
            yield Batch(commands, _PAIR_SECONDS)

    def _pair(self, leader: int, follower: int, name: str) -> dict[int, HealthCommand]:
        if leader in self.failures or follower in self.failures:
            return {}
        ranks = min(self.ready[leader].ranks, self.ready[follower].ranks)
        address, port = self.ready[leader].address, self.ready[leader].port
        commands = {}
        for index, partner in ((leader, follower), (follower, leader)):
            pair = PairRound(name, partner, address, port, index == leader, ranks)
            commands[index] = HealthCommand(self.window * _PAIR_SHARE, pair)
        return commands
