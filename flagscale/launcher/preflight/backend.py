"""The communication backend, looked at on the host that is to use it: its own Python, in the
environment of its ranks, says whether it can.

What comes with every torch is not asked about: that takes an import of torch, a second or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagscale.accelerators.registry import ACCELERATORS, AUTO, accelerator
from flagscale.accelerators.visible import hidden, kind_of
from flagscale.config.checks import Arguments
from flagscale.config.schema import Experiment
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.backends import chooses_here
from flagscale.launcher.preflight.checks import Check

CHECK = "communication"
MODULE = "flagscale.comm.check"
_WITH_TORCH = ("auto", "nccl", "gloo")
_NO_GLOO = "gloo cannot do sendrecv, permute on {} memory"


def words(experiment: Experiment) -> list[str] | None:
    """What is asked of :data:`MODULE`; None where nothing needs to be asked."""
    name, device = _wanted(experiment)
    # A package's kind of device is one of its Python's packages.
    known = name in _WITH_TORCH and device in (AUTO, *ACCELERATORS.own)
    return None if not chooses_here(experiment) or known else [name, device]


def judge(
    experiment: Experiment, host: Host, answer: Mapping[str, Any] | None, devices: Mapping[str, int]
) -> Check:
    """The check that a host's ``answer`` comes to; None where it was not asked. ``devices``: how
    many of each kind it has."""
    name, device = _wanted(experiment)
    if not chooses_here(experiment):
        return Check(CHECK, True, f"{experiment.task.program} chooses by itself")
    variables = experiment.envs.for_host(host.name, host.device_type)
    kind = accelerator(kind_of(device, devices, variables))
    there = devices.get(kind.name) and not hidden(variables, kind.name)
    if name == "gloo" and there and not kind.is_host:
        hint = f"auto takes {kind.default_backend}; device: cpu trains without {kind.unit}s"
        answer = {"problem": _NO_GLOO.format(kind.unit), "hint": hint}
    if answer is None:
        known = "which comes with torch" if name in _WITH_TORCH else "not asked for"
        return Check(CHECK, True, f"{name}, {known}")
    if problem := answer.get("problem"):
        found = Arguments.of(experiment).problem("distributed_backend", problem)
        return Check(CHECK, False, str(found), str(answer.get("hint") or ""))
    return Check(CHECK, True, " ".join(filter(None, (name, answer.get("version")))))


def _wanted(experiment: Experiment) -> tuple[str, str]:
    args = Arguments.of(experiment)
    return str(args["distributed_backend"]), str(args["device"])
