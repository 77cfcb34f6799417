"""Runner that starts this host's part of a run on hosts that something else has started.

After the hosts have agreed on a run (:mod:`.rendezvous`), each plans the whole job and starts its
own part as a run on this machine: from then on it is the business of :class:`HostRunner`, and the
agents of all hosts supervise the job together, as they do for other runners.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.config import per_host_allowlist
from flagscale.config.arguments.spec.values import format_value
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError, FlagscaleError, Problem
from flagscale.hosts.hostfile import Host
from flagscale.launcher.layout import Layout
from flagscale.launcher.liveness import secret
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.planning.supervision import liveness_port
from flagscale.launcher.runners import endpoints
from flagscale.launcher.runners.base import ConfigTexts, PreparedRun
from flagscale.launcher.runners.cloud.position import Position, find_position
from flagscale.launcher.runners.cloud.rendezvous import Agreement, Introduction, agree
from flagscale.launcher.runners.hosts import HostRunner, check_hardware
from flagscale.launcher.state import RunState, load_state, new_run_id

if TYPE_CHECKING:
    from flagscale.launcher.preflight.checks import Check

_TORCHRUN_PREFIX = "PET_"
"""Prefix of variables that set defaults of torchrun's options."""
NO_SECRET_NOTE = (
    f"{secret.SECRET_VARIABLE} is not set: whoever reaches port {{port}} of {{address}} can join "
    "this run or end it; give all hosts the same secret of at least "
    f"{secret.MIN_SECRET_CHARACTERS} characters"
)


class CloudRunner(HostRunner):
    """Starts this host's part of a run; the hosts of the run start the same command."""

    def plan(self, experiment: Experiment) -> LaunchPlan:
        position = find_position(experiment.runner, os.environ)
        return _plan_job(experiment, position, _expected(experiment, position), "")

    @contextmanager
    def prepare(
        self, experiment: Experiment, *, checking: bool, fresh: bool = False
    ) -> Iterator[PreparedRun]:
        from flagscale.launcher.preflight.host_probe import query_hosts
        from flagscale.launcher.preflight.hosts import MASTER_PORT, check_hosts

        position = find_position(experiment.runner, os.environ)
        shared_secret = _shared_secret(position)
        agreement = _expected(experiment, position)
        plan = _plan_job(experiment, position, agreement, "")
        own_part = _own_part(plan, position)
        handle = own_part.runner
        with endpoints.open_hosts(handle, [own_part.hosts[0].name]) as connected_hosts:
            checks: list[Check] = []
            if checking:
                local = _as_single_host(experiment, position)
                replies = query_hosts(
                    local,
                    (Host(own_part.hosts[0].name),),
                    connected_hosts,
                    is_local=True,
                    for_preflight=True,
                    ignore_cache=fresh,
                )
                # The directories are those of the job, and the only host is the first one.
                first = replace(own_part.hosts[0], node_rank=0)
                checked_plan = replace(
                    own_part, exp_dir=plan.exp_dir, hosts=(first,), liveness_port=None
                )
                previous = load_state(own_part.layout.state)
                checks = check_hosts(local, checked_plan, replies, previous)
                if position.node_rank:
                    checks = [check for check in checks if check.name != MASTER_PORT]
                if all(check.ok for check in checks):
                    # Before the agreement, which tells the other hosts of problems.
                    checks += check_hardware(local, replies, connected_hosts)
            # A check alone starts nothing, so the other hosts need not be there.
            if not fresh:
                problem = "; ".join(f"{c.name}: {c.found}" for c in checks if not c.ok)
                agreement = self._agree(experiment, position, agreement, shared_secret, problem)
                run_secret = hmac.digest(shared_secret, agreement.run_id.encode(), "sha256").hex()
                plan = _plan_job(experiment, position, agreement, run_secret)
                own_part = _own_part(plan, position)
            if not os.environ.get(secret.SECRET_VARIABLE) and position.nnodes > 1:
                note = NO_SECRET_NOTE.format(port=plan.liveness_port, address=position.master_addr)
                own_part = replace(own_part, notes=(*own_part.notes, note))
            self._hosts = connected_hosts
            yield PreparedRun(own_part, checks)

    def _agree(
        self,
        experiment: Experiment,
        position: Position,
        expected: Agreement,
        shared_secret: bytes,
        problem: str,
    ) -> Agreement:
        """Return the agreement with the other hosts, or what is expected of a single one.

        Raises:
            JobError: If hosts do not come, or do not fit together.
        """
        rank = position.node_rank
        if position.nnodes == 1:
            return expected
        own = Introduction(
            rank,
            position.nnodes,
            os.uname().nodename,
            expected.nprocs[rank],
            _common_settings(experiment),
            problem,
        )
        port = liveness_port(experiment.runner, position.master_port)
        timeout = experiment.runner.start_timeout
        try:
            return agree(
                own, position, port, _rendezvous_key(shared_secret), expected.run_id, timeout
            )
        except FlagscaleError:
            # This host's own failed checks say more, and the caller reports them.
            if problem:
                return expected
            raise

    def submit(self, plan: LaunchPlan, texts: ConfigTexts, *, foreground: bool = False) -> RunState:
        # torchrun would take options from them that the plan does not have.
        for name in [name for name in os.environ if name.startswith(_TORCHRUN_PREFIX)]:
            del os.environ[name]
        return super().submit(plan, texts, foreground=foreground)


def _shared_secret(position: Position) -> bytes:
    """Return the secret that all hosts of the job have.

    Without one from the environment it is derived from the master's address. That keeps the hosts
    of different jobs apart, and protects from nobody who knows the address.

    Raises:
        ConfigError: If the secret is too short.
    """
    text = os.environ.get(secret.SECRET_VARIABLE, "")
    if not text:
        address = f"flagscale {position.master_addr} {position.master_port}"
        return hashlib.sha256(address.encode()).hexdigest().encode()
    if len(text) < secret.MIN_SECRET_CHARACTERS:
        message = f"has {len(text)} characters; expected at least {secret.MIN_SECRET_CHARACTERS}"
        raise ConfigError(Problem(secret.SECRET_VARIABLE, message))
    return text.encode()


def _rendezvous_key(shared_secret: bytes) -> bytes:
    return hmac.digest(shared_secret, b"rendezvous", "sha256")


def _expected(experiment: Experiment, position: Position) -> Agreement:
    """Return what the hosts will agree on if they are all like this one."""
    from flagscale.launcher.planning.assignment import assign_ranks, this_machine

    (assignment,) = assign_ranks(experiment, [Host(os.uname().nodename)], [this_machine()])
    names = [f"node-{rank}" for rank in range(position.nnodes)]
    names[position.node_rank] = os.uname().nodename
    return Agreement(new_run_id(), tuple(names), (assignment.nproc,) * position.nnodes)


def _plan_job(
    experiment: Experiment, position: Position, agreement: Agreement, run_secret: str
) -> LaunchPlan:
    """Return the plan of the whole job.

    Raises:
        ConfigError: If the configuration does not fit the hosts and ranks.
    """
    from flagscale.launcher.plan_builder import build_unprobed_plan

    runner = replace(
        experiment.runner,
        nnodes=None,
        master_addr=position.master_addr,
        master_port=position.master_port,
        no_shared_fs=False,
    )
    hosts = [Host(name, slots=n) for name, n in zip(agreement.names, agreement.nprocs, strict=True)]
    return build_unprobed_plan(
        replace(experiment, runner=runner),
        hosts,
        RunnerHandle("cloud"),
        is_local=position.nnodes == 1,
        is_deferred=True,
        run_id=agreement.run_id,
        run_secret=run_secret or None,
    )


def _own_part(plan: LaunchPlan, position: Position) -> LaunchPlan:
    """Return the part of a plan that this host starts, as a run on this machine.

    The state of hosts other than the first is in a directory of its own, because they may share the
    file system.
    """
    rank, exp_dir = position.node_rank, plan.exp_dir
    return replace(
        plan,
        exp_dir=exp_dir / "logs" / "nodes" / str(rank) if rank else exp_dir,
        log_dir=plan.log_dir or (Layout(exp_dir).logs / "details" if rank else None),
        hosts=(plan.hosts[rank],),
        runner=RunnerHandle("local", {"machine": os.uname().nodename}),
        shared_fs=True,
    )


def _as_single_host(experiment: Experiment, position: Position) -> Experiment:
    """Return the experiment for the checks of this host. Only the first one needs free ports."""
    port = None if position.node_rank else position.master_port
    runner = replace(experiment.runner, nnodes=None, master_addr=None, master_port=port)
    return replace(experiment, runner=runner)


def _common_settings(experiment: Experiment) -> dict[str, str]:
    """Return the settings that have to be equal on all hosts, without paths of this one."""
    settings = {
        argument.key: format_value(argument.value)
        for argument in experiment.train
        if argument.name not in per_host_allowlist.ARGUMENTS
        and not Path(str(argument.value)).is_absolute()
    }
    task = experiment.task
    command = [word for word in task.command if not Path(word).is_absolute()]
    return {**settings, "experiment.task.type": task.type, "experiment.task.command": str(command)}
