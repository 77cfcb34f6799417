"""What the agents of a plan are told, beside what each of them needs by itself. Pure.

The words of the command line stand in the script; the secrets, of which neither a script nor a
plan holds the value, travel in the environment of the script, which hands them to the agent alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from flagscale.config.schema import Notify, Runner
from flagscale.launch.liveness import secret, variables
from flagscale.launch.planning.environment import EnvValue

if TYPE_CHECKING:
    from flagscale.launch.planning.plan import HostPlan, LaunchPlan

AGENT_SECRETS = (secret.VARIABLE, variables.WEBHOOK)
"""Variables that the script passes to the agent and to nobody else."""
_LAST_PORT = 65535
_NOTIFYING_HOSTS = 2
"""Host 0 tells people, and host 1 when host 0 is lost."""


def supervised(plan: LaunchPlan, runner: Runner, run_secret: str | None) -> LaunchPlan:
    """The plan with all that its agents are told. Hosts that share a run meet at one port, and
    know ``run_secret``, a new one where None is given."""
    several = len(plan.hosts) > 1
    run_secret = run_secret or secret.new()
    made = replace(plan, liveness_port=liveness_port(runner, plan.master_port) if several else None)
    hosts = []
    for host in plan.hosts:
        words = (*host.agent, *_words(made, runner, host))
        values = (*host.environment, *_values(made, runner, host, run_secret))
        hosts.append(replace(host, agent=words, environment=values))
    return replace(made, hosts=tuple(hosts))


def liveness_port(runner: Runner, master_port: int) -> int:
    """The port of host 0 at which the agents meet: the user's, else the one beside the ranks'."""
    beside = master_port + 1 if master_port < _LAST_PORT else master_port - 1
    return runner.liveness_port or beside


def _words(plan: LaunchPlan, runner: Runner, host: HostPlan) -> Iterator[str]:
    # One word: the name of an experiment may look like an option.
    yield f"--run-name={plan.name}"
    yield from ("--name", host.name)
    yield from ("--first-rank", str(host.first_rank))
    yield from ("--nproc", str(host.nproc))
    yield from ("--start-timeout", f"{runner.start_timeout:g}")
    yield from ("--hang-timeout", f"{runner.hang_detection_timeout:g}")
    yield from ("--max-restarts", str(runner.max_restarts))
    notify = runner.notify
    if notify is not None and notify.on and host.rank < _NOTIFYING_HOSTS:
        yield from ("--notify-on", *notify.on)
    if plan.liveness_port is None:
        return
    address = f"[{plan.master_addr}]" if ":" in plan.master_addr else plan.master_addr
    yield from ("--host", str(host.rank))
    yield from ("--coordinator", f"{address}:{plan.liveness_port}")
    yield from ("--lost-host-timeout", f"{runner.lost_host_timeout:g}")
    yield from ("--on-failure", runner.on_failure)
    if host.rank == 0:
        yield from ("--hosts", *(other.name for other in plan.hosts))
    else:
        yield from ("--master-name", plan.hosts[0].name)


def _values(
    plan: LaunchPlan, runner: Runner, host: HostPlan, run_secret: str
) -> Iterator[EnvValue]:
    if plan.liveness_port is not None:
        yield EnvValue(secret.VARIABLE, run_secret, "run", secret=True)
    if runner.notify is not None and host.rank < _NOTIFYING_HOSTS:
        yield from _notify_values(runner.notify)


def _notify_values(notify: Notify) -> Iterator[EnvValue]:
    origin = "runner.notify"
    if notify.command:
        yield EnvValue(variables.COMMAND, notify.command, origin)
    if notify.webhook:
        yield EnvValue(variables.WEBHOOK, notify.webhook, origin, secret=True)
