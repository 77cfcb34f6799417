"""What the agent of a host is told, and what its environment holds for it. Pure.

The options stand in the script; the secrets, of which neither a script nor a plan holds the value,
travel in the environment of the script, which hands them to the agent alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from flagscale.config.schema import Runner
from flagscale.launcher.liveness import secret
from flagscale.launcher.liveness.options import COMMAND, WEBHOOK, AgentOptions, runs
from flagscale.launcher.planning.environment import EnvValue
from flagscale.launcher.planning.model import HostAssignment

AGENT_SECRETS = (secret.VARIABLE, WEBHOOK)
"""Variables that the script passes to the agent and to nobody else."""
_LAST_PORT = 65535
_NOTIFYING_HOSTS = 2
"""Host 0 tells people, and host 1 when host 0 is lost."""
_OF_RUNNER = {f.name for f in fields(AgentOptions)} & {f.name for f in fields(Runner)}
"""The options that are the runner's, by name."""


@dataclass(frozen=True)
class Meeting:
    """Where the agents of several hosts meet, and the secret they share. ``names`` are those of
    all hosts in ranges, ``first`` is host 0's. ``places`` are what each holds, where ranks are
    unlike; else there are none."""

    address: str
    port: int
    names: tuple[str, ...]
    first: str
    secret: str | None
    places: tuple[str, ...] = ()


def liveness_port(runner: Runner, master_port: int) -> int:
    """The port of host 0 at which the agents meet: the user's, else the one beside the ranks'."""
    beside = master_port + 1 if master_port < _LAST_PORT else master_port - 1
    return runner.liveness_port or beside


def agent_options(
    runner: Runner, run_name: str, slot: HostAssignment, run_dir: Path, meeting: Meeting | None
) -> AgentOptions:
    """What a host's agent is told. Without a meeting it is alone."""
    told = {name: getattr(runner, name) for name in _OF_RUNNER}
    told |= {"master_addr": "", "liveness_port": None}
    if meeting is not None:
        told |= {"master_addr": meeting.address, "liveness_port": meeting.port}
        told |= _of_others(meeting, slot.node_rank)
    if runner.notify is not None and slot.node_rank < _NOTIFYING_HOSTS:
        told["notify_on"] = runner.notify.on
    return AgentOptions(
        run_name=run_name,
        run_dir=run_dir,
        name=slot.host.name,
        node_rank=slot.node_rank,
        first_rank=slot.first_rank,
        nproc=slot.nproc,
        **told,
    )


def _of_others(meeting: Meeting, node_rank: int) -> dict[str, object]:
    """What host 0 is told of all, and the others of host 0."""
    if not node_rank:
        return {"hosts": meeting.names, "places": tuple(runs(meeting.places))}
    return {"master_name": meeting.first, "master_place": "".join(meeting.places[:1])}


def agent_environment(runner: Runner, slot: HostAssignment, meeting: Meeting | None) -> Iterator[EnvValue]:
    """What a host's script gives to its agent."""
    if meeting is not None and meeting.secret is not None:
        yield EnvValue(secret.VARIABLE, meeting.secret, "run", secret=True)
    notify = runner.notify
    if notify is None or slot.node_rank >= _NOTIFYING_HOSTS:
        return
    if notify.command:
        yield EnvValue(COMMAND, notify.command, NOTIFY)
    if notify.webhook:
        yield EnvValue(WEBHOOK, notify.webhook, NOTIFY, secret=True)


NOTIFY = "runner.notify"
"""The origin of what only the hosts that tell people have in their environment."""
