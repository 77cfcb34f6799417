"""Check of the communication backend, made by each host's own Python in its ranks' environment.

Backends that every torch contains are not checked, because importing torch takes a second or
more. :mod:`.host_probe` sends the query and :mod:`.hosts` evaluates the reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagscale.accelerators.registry import ACCELERATORS, AUTO, get_accelerator
from flagscale.accelerators.visible import choose_visible_kind, hides_all_devices
from flagscale.config.schema import Experiment
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.support import uses_backend_registry
from flagscale.launcher.preflight.checks import Check

CHECK = "communication"
"""Name of this check, and of its query."""
MODULE = "flagscale.comm.check"
"""Module that the host's Python runs."""
_BACKENDS_IN_TORCH = ("auto", "nccl", "gloo")
_GLOO_PROBLEM = "gloo cannot do sendrecv, permute on {} memory"


def query_arguments(experiment: Experiment) -> list[str] | None:
    """Return the arguments of :data:`MODULE`, or None if the hosts need not be queried."""
    name, device = _backend_and_device(experiment)
    # A kind of device from a package requires that package in the host's Python.
    needs_no_query = name in _BACKENDS_IN_TORCH and device in (AUTO, *ACCELERATORS.builtin)
    return None if not uses_backend_registry(experiment.task) or needs_no_query else [name, device]


def check_backend(
    experiment: Experiment, host: Host, reply: Mapping[str, Any] | None, devices: Mapping[str, int]
) -> Check:
    """Return the check of one host.

    ``reply`` is the reply of :data:`MODULE` there, None if it was not queried. ``devices`` has the
    number of devices by kind.
    """
    name, device = _backend_and_device(experiment)
    if not uses_backend_registry(experiment.task):
        return Check(CHECK, True, f"{experiment.task.program} chooses by itself")
    variables = experiment.envs.for_host(host.name, host.device_type)
    kind = get_accelerator(choose_visible_kind(device, devices, variables))
    uses_devices = devices.get(kind.name) and not hides_all_devices(variables, kind.name)
    if name == "gloo" and uses_devices and not kind.is_host:
        hint = f"auto takes {kind.default_backend}; device: cpu trains without {kind.unit}s"
        reply = {"problem": _GLOO_PROBLEM.format(kind.unit), "hint": hint}
    if reply is None:
        reason = "which comes with torch" if name in _BACKENDS_IN_TORCH else "not asked for"
        return Check(CHECK, True, f"{name}, {reason}")
    if problem := reply.get("problem"):
        problem_text = experiment.train.problem("distributed_backend", problem)
        return Check(CHECK, False, str(problem_text), str(reply.get("hint") or ""))
    return Check(CHECK, True, " ".join(filter(None, (name, reply.get("version")))))


def _backend_and_device(experiment: Experiment) -> tuple[str, str]:
    args = experiment.train
    return str(args["distributed_backend"]), str(args["device"])
