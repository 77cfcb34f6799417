"""Explanations of the reasons that Slurm gives for a pending job. Pure functions.

Limits of accounts ("associations") and of QOS have one name per limited resource, built from the
same parts: ``AssocGrpCpuLimit``, ``QOSMaxGRESPerUser``, ``AssocMaxWallDurationPerJobLimit``.
"""

from __future__ import annotations

import re

_NEVER = "and will never start"
# The reason is the same if the job alone exceeds the limit.
_WAITS = "it waits for other jobs to end, and never starts if it exceeds the limit by itself"
_REASONS = {
    "Resources": "it is the next one, and waits for nodes to become free",
    "Priority": "jobs of higher priority are before it",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "its dependency can never be satisfied",
    "BeginTime": "its begin time is not reached; a requeued job waits two minutes",
    "JobHeldUser": "it is held; `scontrol release` frees it",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "PartitionNodeLimit": f"it requests more nodes than the partition allows, {_NEVER}",
    "PartitionTimeLimit": f"it requests more time than the partition allows, {_NEVER}",
    "PartitionConfig": f"no node of the partition is as large as requested, {_NEVER}",
    "BadConstraints": f"no nodes satisfy its constraints, {_NEVER}",
    "Reservation": "it waits for its reservation",
    "Licenses": "it waits for licences",
}
_LIMIT = re.compile(
    r"(?P<owner>Assoc|QOS|)(?P<kind>Grp|Max|Min)(?P<resource>[A-Z][A-Za-z]+?)"
    r"(?P<minutes>Minutes|RunMinutes|)(?:Per(?P<each>Job|Node|User|Account))?"
    r"(?:Limit|NotSatisfied|)"
)
_OWNERS = {"Assoc": "the account", "QOS": "the QOS", "": "the QOS"}
_RESOURCES = {
    "cpu": "CPUs",
    "gres": "GPUs (or other GRES)",
    "mem": "memory",
    "memory": "memory",
    "node": "nodes",
    "jobs": "jobs at once",
    "submitjobs": "jobs in the queue",
    "submitjob": "jobs in the queue",
    "wall": "time",
    "wallduration": "time",
    "license": "licences",
    "billing": "billing units",
}
_MINUTES = {
    "CPUs": "CPU minutes",
    "nodes": "node minutes",
    "GPUs (or other GRES)": "GPU minutes (or minutes of other GRES)",
}


def explain_reason(reason: str) -> str:
    """Return an explanation of squeue's reason, as a clause; empty for an unrecognized one."""
    name = reason.partition(",")[0]
    limit = _LIMIT.fullmatch(name)
    return _REASONS.get(name) or (_explain_limit(limit) if limit is not None else "")


def _explain_limit(limit: re.Match[str]) -> str:
    owner, per, minutes = _OWNERS[limit["owner"]], limit["each"], limit["minutes"]
    resource = _RESOURCES.get(limit["resource"].lower(), "a limited resource")
    if minutes:
        resource = _MINUTES.get(resource, f"minutes of {resource}")
    if limit["kind"] == "Min":
        fewer = "less" if resource in ("memory", "time") else "fewer"
        return f"it requests {fewer} {resource} than {owner} requires of a job, {_NEVER}"
    if per in ("Job", "Node"):
        return f"it requests more {resource} than {owner} allows per {per.lower()}, {_NEVER}"
    if limit["kind"] == "Max":
        holder = "account's" if per == "Account" else "user's"
        return f"with it the {holder} jobs would use more {resource} than {owner} allows; {_WAITS}"
    if limit["resource"].lower() == "wall" or minutes == "Minutes":
        return f"the jobs of {owner} have used up their total of {resource}"
    return f"with it the jobs of {owner} would exceed their total of {resource}; {_WAITS}"
