"""What a plan leaves to the job that runs it: a scheduler gives nodes when it starts a job, and
only then are their names known, the address of the first, and a port that is free there.

The job says it to each host's script in variables (:data:`.environment.JOBS`), and scripts and
plans refer to them as to any variable of the host (:mod:`flagscale.config.interpolation`). Pure.
"""

from __future__ import annotations

from dataclasses import replace

from flagscale.config.interpolation import reference
from flagscale.config.schema import Runner
from flagscale.launcher.planning.environment import MASTER_ADDR, MASTER_PORT, NODE
from flagscale.launcher.planning.model import HostPlan, LaunchPlan
from flagscale.launcher.planning.plan import wanted_port

_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_MOST_SHUTDOWN_SECONDS = 25.0


def left_to_the_job(plan: LaunchPlan, runner: Runner) -> LaunchPlan:
    """The plan with what its job will know left open. Of a plan that is on one host alone the
    address is known: ranks meet at its loopback address. A port or an address that the user
    gives stays."""
    alone = len(plan.hosts) == 1
    address = plan.master_addr if runner.master_addr or alone else reference(MASTER_ADDR)
    port = wanted_port(runner)
    words = {"master_addr": address, "master_port": str(port or reference(MASTER_PORT))}
    return replace(
        plan,
        master_addr=address,
        master_port=port or 0,
        liveness_port=None if alone else (runner.liveness_port or 0),
        hosts=tuple(_left(host, words, runner.stop_grace) for host in plan.hosts),
    )


def _left(host: HostPlan, words: dict[str, str], grace: float) -> HostPlan:
    starter = list(host.starter)
    for name, value in words.items():
        starter[starter.index(f"--{name}") + 1] = value
    # A scheduler that ends a job sends TERM to every process, torchrun among them, which then gives
    # its ranks so long to save; schedulers themselves leave about half a minute.
    own = {
        _PREFIX: f"{reference(NODE)}:${{rank}}: ",
        _SHUTDOWN: str(max(1, round(min(grace, _MOST_SHUTDOWN_SECONDS)))),
    }
    environment = tuple(
        replace(one, value=own.get(one.name, one.value)) if one.origin == "default" else one
        for one in host.environment
    )
    agent = replace(host.agent, master_addr="", liveness_port=None, hosts=(), master_name="")
    return replace(host, late=True, starter=tuple(starter), environment=environment, agent=agent)
