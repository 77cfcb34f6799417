"""Parts of a plan that are only determined when a scheduler starts the job.

A scheduler allocates nodes when it starts a job. Until then the nodes' names, the address of the
first node and a free port there are undetermined. The job passes them to the script of each host in
environment variables (:data:`.environment.JOB_VARIABLES`). Scripts and plans refer to these like to
any variable of the host (:mod:`flagscale.config.interpolation`). Pure functions.
"""

from __future__ import annotations

from dataclasses import replace

from flagscale.config.interpolation import host_reference
from flagscale.config.schema import Runner
from flagscale.launcher.planning.environment import (
    MASTER_ADDR_VARIABLE,
    MASTER_PORT_VARIABLE,
    NODE_VARIABLE,
)
from flagscale.launcher.planning.model import HostPlan, LaunchPlan
from flagscale.launcher.planning.plan import requested_port

_LINE_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_MAX_SHUTDOWN_SECONDS = 25.0


def defer_to_job(plan: LaunchPlan, runner: Runner) -> LaunchPlan:
    """Return the plan with the values that its job determines replaced by references.

    A plan on a single host keeps its address, because its ranks rendezvous at the loopback address.
    A port or an address given by the user is kept as well.
    """
    single_host = len(plan.hosts) == 1
    keep_address = runner.master_addr or single_host
    address = plan.master_addr if keep_address else host_reference(MASTER_ADDR_VARIABLE)
    port = requested_port(runner)
    options = {
        "master_addr": address,
        "master_port": str(port or host_reference(MASTER_PORT_VARIABLE)),
    }
    return replace(
        plan,
        master_addr=address,
        master_port=port or 0,
        liveness_port=None if single_host else (runner.liveness_port or 0),
        hosts=tuple(_defer_host_values(host, options, runner.stop_grace) for host in plan.hosts),
    )


def _defer_host_values(host: HostPlan, options: dict[str, str], grace: float) -> HostPlan:
    starter = list(host.starter)
    for name, value in options.items():
        starter[starter.index(f"--{name}") + 1] = value
    # A scheduler that ends a job sends TERM to every process, including torchrun, which then
    # allows its ranks this long to save. Schedulers themselves send KILL after about 30 seconds.
    defaults = {
        _LINE_PREFIX_VARIABLE: f"{host_reference(NODE_VARIABLE)}:${{rank}}: ",
        _SHUTDOWN_TIMEOUT_VARIABLE: str(max(1, round(min(grace, _MAX_SHUTDOWN_SECONDS)))),
    }
    environment = tuple(
        replace(variable, value=defaults.get(variable.name, variable.value))
        if variable.origin == "default"
        else variable
        for variable in host.environment
    )
    agent = replace(host.agent, master_addr="", liveness_port=None, hosts=(), master_name="")
    return replace(host, late=True, starter=tuple(starter), environment=environment, agent=agent)
