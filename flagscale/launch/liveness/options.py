"""The agent's command line."""

from __future__ import annotations

import argparse
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.launch.liveness.policy import Policy
from flagscale.launch.liveness.watch import HostView
from flagscale.status import RUN_ID_VARIABLE

EVENTS = ("failed", "stalled", "restarted", "finished")
"""What people can be notified of."""


@dataclass(frozen=True)
class Options:
    """What an agent is told. ``coordinator`` is None on a run's only host."""

    view: HostView
    grace: float
    command: tuple[str, ...]
    sweep: bool
    policy: Policy
    run_name: str
    host: int
    hosts: tuple[str, ...]
    master_name: str
    coordinator: tuple[str, int] | None
    notify_on: frozenset[str]


def parse(arguments: Sequence[str], run_id: str) -> Options:
    """Read the command line; ends the program with a message where it is wrong."""
    words = list(arguments)
    # What follows belongs to the command, whatever it looks like.
    at = words.index("--") if "--" in words else len(words)
    parser = _parser()
    options = parser.parse_args(words[:at])
    command = tuple(words[at + 1 :])
    if not run_id:
        parser.error(f"{RUN_ID_VARIABLE} is not set")
    if not command and not options.sweep:
        parser.error("no command given after --")
    output = _own_output() or options.run_dir / "output"
    coordinator = None
    if options.coordinator:
        address, _, port = options.coordinator.rpartition(":")
        if not address or not port.isdigit():
            parser.error(f"--coordinator {options.coordinator}: expected host:port")
        coordinator = (address.strip("[]"), int(port))
    name = options.name or socket.gethostname()
    return Options(
        view=HostView(name, options.first_rank, options.nproc, options.run_dir, output),
        grace=options.grace,
        command=command,
        sweep=options.sweep,
        policy=Policy(
            output=output,
            max_restarts=options.max_restarts,
            on_failure=options.on_failure,
            lost_host_timeout=options.lost_host_timeout,
            start_timeout=options.start_timeout,
            hang_timeout=options.hang_timeout,
        ),
        run_name=options.run_name or run_id,
        host=options.host,
        hosts=tuple(options.hosts or [name]),
        master_name=options.master_name or "host 0",
        coordinator=coordinator,
        notify_on=frozenset(options.notify_on or ()),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flagscale.launch.agent", description="Supervises one host's part of a run."
    )
    add = parser.add_argument
    add("--run-dir", type=Path, required=True, help="the run's directory on this host")
    add("--grace", type=float, required=True, help="seconds between TERM and KILL")
    add("--sweep", action="store_true", help="end what a killed agent left")
    add("--run-name", help="name of the experiment, for people")
    add("--name", help="this host's name in the plan")
    add("--host", type=int, default=0, help="this host's number in the plan")
    add("--first-rank", type=int, default=0, help="this host's first rank")
    add("--nproc", type=int, default=0, help="this host's number of ranks; 0: not known")
    add("--coordinator", help="host:port at which the agents meet; without it this one is alone")
    add("--hosts", nargs="+", help="on host 0: the names of all hosts")
    add("--master-name", help="on the others: the name of host 0")
    add("--lost-host-timeout", type=float, default=60.0, help="seconds of silence that end a job")
    add("--start-timeout", type=float, default=600.0, help="seconds for hosts and ranks to join")
    add("--hang-timeout", type=float, default=0.0, help="seconds without a step; 0: never")
    add("--max-restarts", type=int, default=0, help="how often the whole job starts again")
    add("--on-failure", choices=("stop", "leave"), default="stop", help="what the rest does")
    add("--notify-on", nargs="+", choices=EVENTS, help="what people are told of")
    return parser


def _own_output() -> Path | None:
    """The file that this process's errors go to, which is the host's output; None if it is a
    terminal or a pipe."""
    try:
        if not stat.S_ISREG(os.fstat(2).st_mode):
            return None
        return Path("/proc/self/fd/2").readlink()
    except OSError:
        return None
