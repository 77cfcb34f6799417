"""What Slurm's words for a job that waits mean. Pure.

Limits of accounts ("associations") and of QOS have a name for each thing that is limited, made of
the same parts: ``AssocGrpCpuLimit``, ``QOSMaxGRESPerUser``, ``AssocMaxWallDurationPerJobLimit``.
"""

from __future__ import annotations

import re

_NEVER = "and will never start"
_REASONS = {
    "Resources": "it is the next one, and waits for nodes to get free",
    "Priority": "others go before it",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "what it waits for cannot come true any more",
    "BeginTime": "it may not begin yet; a requeued job waits two minutes",
    "JobHeldUser": "it is held; `scontrol release` frees it",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "PartitionNodeLimit": f"it asks for more nodes than the partition gives, {_NEVER}",
    "PartitionTimeLimit": f"it asks for more time than the partition gives, {_NEVER}",
    "PartitionConfig": "no node of the partition is as large as it asks, and it will never start",
    "BadConstraints": "no nodes are as it asks, and it will never start",
    "Reservation": "it waits for its reservation",
    "Licenses": "it waits for licences",
}
_LIMIT = re.compile(
    r"(?P<whose>Assoc|QOS|)(?P<kind>Grp|Max|Min)(?P<what>[A-Z][A-Za-z]+?)"
    r"(?P<minutes>Minutes|RunMinutes|)(?:Per(?P<each>Job|Node|User|Account))?"
    r"(?:Limit|NotSatisfied|)"
)
_WHOSE = {"Assoc": "the account", "QOS": "the QOS", "": "the QOS"}
_WHAT = {
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


def meaning(reason: str) -> str:
    """What squeue's reason means, in a clause; empty for one that is not known here."""
    word = reason.partition(",")[0]
    limit = _LIMIT.fullmatch(word)
    return _REASONS.get(word) or (_of_limit(limit) if limit is not None else "")


def _of_limit(limit: re.Match[str]) -> str:
    whose, each, minutes = _WHOSE[limit["whose"]], limit["each"], limit["minutes"]
    what = _WHAT.get(limit["what"].lower(), "what Slurm limits")
    if minutes:
        what = f"minutes of {what}"
    if limit["kind"] == "Min":
        return f"it asks for less {what} than {whose} wants of a job, {_NEVER}"
    if each in ("Job", "Node"):
        return f"it asks for more {what} than {whose} gives a {each.lower()}, {_NEVER}"
    if limit["kind"] == "Max":
        owner = "account's" if each == "Account" else "user's"
        return (
            f"the {owner} jobs have all the {what} that {whose} allows; it waits for others to end"
        )
    if limit["what"].lower() == "wall" or minutes == "Minutes":
        return f"the jobs of {whose} have used up the {what} that they have together"
    return (
        f"with it the jobs of {whose} would have more {what} than they may have together; it waits "
        "for others to end"
    )
