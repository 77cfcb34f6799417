"""Options and command line of an agent. Standard library alone.

The plan writes the options into a host's script (:mod:`flagscale.launcher.planning`), which starts
the agent with them.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flagscale.files import format_json, to_plain
from flagscale.hosts.names import expand_list
from flagscale.status import RUN_ID_VARIABLE

NotificationEvent = Literal["failed", "stalled", "restarted", "finished"]
"""Events that can be notified."""
OnFailure = Literal["stop", "leave"]
OnBadHost = Literal["stop", "replace", "shrink"]
HealthCheckKind = Literal["off", "quick", "full"]
# Evaluations and checkpoints do not advance the step: their stall limit is this many times longer,
# and at least half an hour.
BUSY_STALL_FACTOR = 4.0
MIN_BUSY_STALL_SECONDS = 1800.0
# Environment variables for values that must not be on a command line.
NOTIFY_COMMAND_VARIABLE = "FLAGSCALE_NOTIFY_COMMAND"
NOTIFY_WEBHOOK_VARIABLE = "FLAGSCALE_NOTIFY_WEBHOOK"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Keys of ``experiment.runner`` that the agents need, by name. Times are in seconds.

    To pass another key to the agents, add a field here: planning copies the values by name.
    """

    max_restarts: int
    on_failure: OnFailure
    lost_host_timeout: float
    start_timeout: float
    hang_detection_timeout: float
    """0 disables the detection of stalls."""
    on_bad_host: OnBadHost = "stop"
    spares: int = 0
    """Number of hosts, the last ones, that wait until they take the place of another host."""
    min_nnodes: int | None = None
    """Smallest number of hosts that the job goes on with (``on_bad_host: shrink``)."""
    health: HealthCheckKind = "off"
    """Kind of the hardware check after a failure; ``off`` if ``on_bad_host`` is ``stop``."""

    @property
    def attempts(self) -> int:
        """Maximum number of starts of the job. With ``on_failure: leave`` it is started once."""
        return self.max_restarts + 1 if self.on_failure == "stop" else 1

    @property
    def beat_seconds(self) -> float:
        """Interval between the heartbeats of each end of a link."""
        return min(5.0, self.lost_host_timeout / 5)

    def stall_limit_seconds(self, *, in_busy_activity: bool) -> float | None:
        """Return the seconds without progress of any rank after which the job is stalled; None if
        never.
        """
        if not self.hang_detection_timeout:
            return None
        if not in_busy_activity:
            # Progress is reported with the heartbeats, so it can be one interval old.
            return max(self.hang_detection_timeout, 2 * self.beat_seconds)
        return max(MIN_BUSY_STALL_SECONDS, BUSY_STALL_FACTOR * self.hang_detection_timeout)


@dataclass(frozen=True, kw_only=True)
class AgentOptions(Policy):
    """Options of the agent of one host.

    An option that comes from the user has the name of its key in ``experiment.runner``. Options
    with a default may be omitted, because a single host has no peers to rendezvous with.
    """

    run_name: str
    """Name of the experiment, for messages."""
    run_dir: Path
    """Directory of the run on this host."""
    name: str
    """Name of this host in the plan."""
    node_rank: int
    first_rank: int
    nproc: int
    """Number of ranks on this host; 0 if unknown. Of a spare: of each host."""
    is_spare: bool = False
    """True if this host waits until it takes the place of another host."""
    device: str = "auto"
    """Kind of this host's devices, for measuring them."""
    stop_grace: float
    """Seconds between SIGTERM and SIGKILL when the job is stopped."""
    notify_on: tuple[NotificationEvent, ...] = ()
    """Events that this host sends notifications of."""
    master_addr: str = ""
    liveness_port: int | None = None
    """Port at which the agents rendezvous; None for a single host."""
    hosts: tuple[str, ...] = ()
    """On host 0, and on all if ``on_bad_host`` allows to lose it: names of all hosts by number, as
    ranges: ``node[01-16]``. Spares come last.
    """
    addresses: tuple[str, ...] = ()
    """Addresses of these hosts after host 0, as ranges, if ``on_bad_host`` allows to lose it."""
    master_name: str = ""
    """On the other hosts: name of host 0."""
    places: tuple[str, ...] = ()
    """On hosts that may coordinate: positions of the hosts in heterogeneous meshes, as ``NUMBER
    POSITION``. Each applies to the host of that number and the following ones, up to the next
    entry.
    """
    master_place: str = ""
    """On the other hosts: position of host 0 in the heterogeneous meshes."""
    saves_when_stopped: bool = False
    """On hosts that may coordinate: True if ranks save a checkpoint when they are stopped."""
    earlier_starts: int = 0
    """Number of times that a scheduler has started this run before."""
    metrics_port: int | None = None
    """Port at which this host serves metrics for Prometheus; None if it does not."""
    metrics_address: str = "127.0.0.1"
    reports_status: bool = True
    """False for a command, whose ranks do not report that they have joined."""

    @property
    def names(self) -> list[str]:
        """Names of all hosts, on host 0."""
        return [name for names in self.hosts for name in expand_list(names)] or [self.name]

    @property
    def addresses_by_host(self) -> list[str]:
        """Addresses of all hosts; empty if host 0 cannot be lost."""
        others = [address for addresses in self.addresses for address in expand_list(addresses)]
        return [self.master_addr, *others] if others else []

    @property
    def positions_by_host(self) -> list[str]:
        """Position of each host, on host 0; empty for a homogeneous run."""
        count = len(self.names)
        by_host: list[str] = []
        for entry in reversed(self.places):
            number, _, position = entry.partition(" ")
            by_host = [position] * (count - len(by_host) - int(number)) + by_host
        return by_host

    def to_json(self) -> str:
        """Return the options that differ from their defaults as JSON, one per line."""
        options = {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        return format_json(to_plain(options)).rstrip("\n")

    @classmethod
    def from_json(cls, *texts: str) -> AgentOptions:
        """Parse one or several JSON objects; later ones take precedence.

        Raises:
            ValueError: With a message that explains the error.
        """
        record: dict[str, Any] = {}
        for text in texts:
            record |= _parse_object(text)
        type_by_name = get_type_hints(cls)
        for name in record:
            if name not in type_by_name:
                suggestions = get_close_matches(name, type_by_name, 1)
                hint = "".join(f"; did you mean {suggestion!r}?" for suggestion in suggestions)
                raise ValueError(f"there is no option {name!r}{hint}")
        missing = [
            field.name
            for field in fields(cls)
            if field.default is MISSING and field.name not in record
        ]
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing")
        options = cls(
            **{name: _convert_option(name, type_by_name[name], record[name]) for name in record}
        )
        try:
            count = len(options.names)
        except ValueError as error:
            raise ValueError(f"hosts: {error}") from None
        try:
            addresses = options.addresses_by_host
        except ValueError as error:
            raise ValueError(f"addresses: {error}") from None
        if addresses and len(addresses) != count:
            raise ValueError(f"addresses: expected one for each of {count} hosts")
        if any(not place.partition(" ")[0].isdecimal() for place in options.places):
            raise ValueError("places: each begins with the number of a host")
        return options


def _parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: If the text is not a JSON object.
    """
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"this is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {json.dumps(record)[:80]}")
    return record


def compress_positions(positions: Sequence[str]) -> Iterator[str]:
    """Yield the entries of :attr:`AgentOptions.places` for the position of each host."""
    for number, position in enumerate(positions):
        if number == 0 or position != positions[number - 1]:
            yield f"{number} {position}"


def _convert_option(name: str, field_type: Any, value: object) -> Any:
    try:
        return _convert(field_type, value)
    except ValueError as error:
        raise ValueError(f"{name} is {json.dumps(value)}: expected {error}") from None


_SCALARS: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("a text", (str,)),
    Path: ("a text", (str,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
}


def _convert(field_type: Any, value: Any) -> Any:
    """Convert a JSON value to a field's type.

    Raises:
        ValueError: With a description of the expected value.
    """
    type_arguments = get_args(field_type)
    if type(None) in type_arguments:
        return _convert(type_arguments[0], value)
    if get_origin(field_type) is Literal:
        if value not in type_arguments:
            raise ValueError(" or ".join(type_arguments))
        return value
    if get_origin(field_type) is tuple:
        if not isinstance(value, list):
            raise ValueError("a list")
        return tuple(_convert(type_arguments[0], item) for item in value)
    expected, types = _SCALARS[field_type]
    if type(value) not in types:
        raise ValueError(expected)
    return field_type(value)


@dataclass(frozen=True)
class CommandLine:
    """Parsed command line of an agent.

    ``sweep`` is True if the agent only ends processes that a killed agent left behind.
    """

    options: AgentOptions
    command: tuple[str, ...]
    sweep: bool


def parse_command_line(arguments: Sequence[str], run_id: str) -> CommandLine:
    """Parse the command line; exits with a message on an error."""
    argv = list(arguments)
    # Everything after the separator belongs to the command.
    separator = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="flagscale.launcher.agent", description="Supervises one host's part of a run."
    )
    parser.add_argument(
        "--options",
        required=True,
        nargs="+",
        metavar="JSON",
        help="options as JSON, in one or several parts",
    )
    parser.add_argument(
        "--meeting",
        metavar="JSON",
        default="{}",
        help="options that take precedence, as JSON: values that a scheduler's job determines",
    )
    parser.add_argument(
        "--sweep", action="store_true", help="end the processes that a killed agent left behind"
    )
    parsed = parser.parse_args(argv[:separator])
    command = tuple(argv[separator + 1 :])
    if not run_id:
        parser.error(f"{RUN_ID_VARIABLE} is not set")
    if not command and not parsed.sweep:
        parser.error("no command given after --")
    try:
        options = AgentOptions.from_json("\n".join(parsed.options), parsed.meeting)
    except ValueError as error:
        parser.error(f"--options: {error}")
    return CommandLine(options, command, parsed.sweep)


def find_output(run_dir: Path) -> Path:
    """Return the file that this process's stderr is redirected to, which is the host's output.

    If stderr is a terminal or a pipe, return a file in the run's directory.
    """
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            return Path("/proc/self/fd/2").readlink()
    return run_dir / "output"
