"""What an agent is told: its command line, and the options in it. Standard library alone."""

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

from flagscale.files import json_text, plain
from flagscale.hosts.names import expand_list
from flagscale.status import RUN_ID_VARIABLE

Event = Literal["failed", "stalled", "restarted", "finished"]
"""What people can be notified of."""
OnFailure = Literal["stop", "leave"]
# Evaluations and checkpoints move no step: they get this many times the time, and half an hour
# at the least.
BUSY_FACTOR = 4.0
BUSY_SECONDS = 1800.0
# What stands in no command line comes in the environment.
COMMAND = "FLAGSCALE_NOTIFY_COMMAND"
WEBHOOK = "FLAGSCALE_NOTIFY_WEBHOOK"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Keys of ``experiment.runner`` by their names, which say what they mean. Times are in seconds.

    A key that is to reach the agents is a field here, and no more: planning copies it by name.
    """

    max_restarts: int
    on_failure: OnFailure
    lost_host_timeout: float
    start_timeout: float
    hang_detection_timeout: float
    """0: a stall is never looked for."""

    @property
    def attempts(self) -> int:
        """How often the job may be started: what is left alone after a failure starts once."""
        return self.max_restarts + 1 if self.on_failure == "stop" else 1

    @property
    def beat_seconds(self) -> float:
        """How often each end of a link lets the other hear of it."""
        return min(5.0, self.lost_host_timeout / 5)

    def stall_limit(self, *, busy: bool) -> float | None:
        """How long no rank may get on before the job counts as stalled."""
        if not self.hang_detection_timeout:
            return None
        if not busy:
            # How far ranks are comes with the heartbeats: between two of them nobody knows.
            return max(self.hang_detection_timeout, 2 * self.beat_seconds)
        return max(BUSY_SECONDS, BUSY_FACTOR * self.hang_detection_timeout)


@dataclass(frozen=True, kw_only=True)
class AgentOptions(Policy):
    """What the agent of one host is told. An option that the user gives has the name of its key in
    ``experiment.runner``. Those with a default may be left out: on a run's only host there are no
    others to meet."""

    run_name: str
    """The experiment's name, for people."""
    run_dir: Path
    """The run's directory on this host."""
    name: str
    """This host's name in the plan."""
    node_rank: int
    first_rank: int
    nproc: int
    """0: not known."""
    stop_grace: float
    notify_on: tuple[Event, ...] = ()
    """What people are told of from this host."""
    master_addr: str = ""
    liveness_port: int | None = None
    """Where the agents meet; None for one that is alone."""
    hosts: tuple[str, ...] = ()
    """On host 0, the names of all hosts by node rank, in ranges: ``node[01-16]``."""
    master_name: str = ""
    """On the others, the name of host 0."""
    places: tuple[str, ...] = ()
    """On host 0, what hosts hold where ranks are unlike, as ``NUMBER WHAT``: the host of that
    number, and those after it up to the next one that is named."""
    master_place: str = ""
    """On the others, what host 0 holds."""
    earlier_starts: int = 0
    """How often a scheduler has started this run before."""

    @property
    def names(self) -> list[str]:
        """The names of all hosts, on host 0."""
        return [name for names in self.hosts for name in expand_list(names)] or [self.name]

    @property
    def places_by_host(self) -> list[str]:
        """What each host holds, on host 0; empty where ranks are alike."""
        count, found = len(self.names), list[str]()
        for place in reversed(self.places):
            number, _, what = place.partition(" ")
            found = [what] * (count - len(found) - int(number)) + found
        return found

    def to_json(self) -> str:
        """A line for each option that is given."""
        told = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        return json_text(plain(told)).rstrip("\n")

    @classmethod
    def from_json(cls, *texts: str) -> AgentOptions:
        """The options of a JSON object, or of several, of which later ones go before. Raises
        :class:`ValueError` with a sentence that says what is wrong with a text."""
        record: dict[str, Any] = {}
        for text in texts:
            record |= _object(text)
        kinds = get_type_hints(cls)
        for name in record:
            if name not in kinds:
                near = "".join(f"; did you mean {n!r}?" for n in get_close_matches(name, kinds, 1))
                raise ValueError(f"there is no option {name!r}{near}")
        absent = [f.name for f in fields(cls) if f.default is MISSING and f.name not in record]
        if absent:
            raise ValueError(f"{', '.join(absent)}: missing")
        made = cls(**{name: _value(name, kinds[name], record[name]) for name in record})
        try:
            made.names  # noqa: B018 - what is no range is found now, not in the job
        except ValueError as error:
            raise ValueError(f"hosts: {error}") from None
        if any(not place.partition(" ")[0].isdecimal() for place in made.places):
            raise ValueError("places: each begins with the number of a host")
        return made


def _object(text: str) -> dict[str, Any]:
    """A JSON object. Raises :class:`ValueError` for a text that is none."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"this is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {json.dumps(record)[:80]}")
    return record


def runs(places: Sequence[str]) -> Iterator[str]:
    """What :attr:`AgentOptions.places` says of hosts that hold these."""
    for number, place in enumerate(places):
        if number == 0 or place != places[number - 1]:
            yield f"{number} {place}"


def _value(name: str, kind: Any, value: object) -> Any:
    try:
        return _read(kind, value)
    except ValueError as error:
        raise ValueError(f"{name} is {json.dumps(value)}: expected {error}") from None


_SCALARS: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("a text", (str,)),
    Path: ("a text", (str,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
}


def _read(kind: Any, value: Any) -> Any:
    """A field's value from JSON's. Raises :class:`ValueError` with what was expected."""
    inner = get_args(kind)
    if type(None) in inner:
        return _read(inner[0], value)
    if get_origin(kind) is Literal:
        if value not in inner:
            raise ValueError(" or ".join(inner))
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError("a list")
        return tuple(_read(inner[0], one) for one in value)
    expected, types = _SCALARS[kind]
    if type(value) not in types:
        raise ValueError(expected)
    return kind(value)


@dataclass(frozen=True)
class CommandLine:
    """What an agent is started with. ``sweep``: to end what a killed agent left."""

    options: AgentOptions
    command: tuple[str, ...]
    sweep: bool


def parse(arguments: Sequence[str], run_id: str) -> CommandLine:
    """Read the command line; ends the program with a message where it is wrong."""
    argv = list(arguments)
    # What follows belongs to the command, whatever it looks like.
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="flagscale.launcher.agent", description="Supervises one host's part of a run."
    )
    told = "what it is told, as JSON, in one piece or several"
    parser.add_argument("--options", required=True, nargs="+", metavar="JSON", help=told)
    more = "options that go before those, as JSON: what only a scheduler's job knows"
    parser.add_argument("--meeting", metavar="JSON", default="{}", help=more)
    parser.add_argument("--sweep", action="store_true", help="end what a killed agent left")
    given = parser.parse_args(argv[:at])
    command = tuple(argv[at + 1 :])
    if not run_id:
        parser.error(f"{RUN_ID_VARIABLE} is not set")
    if not command and not given.sweep:
        parser.error("no command given after --")
    try:
        options = AgentOptions.from_json("\n".join(given.options), given.meeting)
    except ValueError as error:
        parser.error(f"--options: {error}")
    return CommandLine(options, command, given.sweep)


def own_output(run_dir: Path) -> Path:
    """The file that this process's errors go to, which is the host's output; where that is a
    terminal or a pipe, the one in the run's directory."""
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            return Path("/proc/self/fd/2").readlink()
    return run_dir / "output"
