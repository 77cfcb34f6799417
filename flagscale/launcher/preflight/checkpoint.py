"""The checkpoint that training would start from, looked at on the host of rank 0, whose files
decide: its own Python says which one is whole, and the rules of the ranks whether it fits.

Where there is no checkpoint at all, as before every first run, no Python is asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from flagscale.config.arguments import rules
from flagscale.config.arguments.resolve import resolve
from flagscale.config.arguments.resuming import parts_to_load
from flagscale.errors import CheckpointError
from flagscale.hosts.facts import Facts
from flagscale.launcher.preflight.checks import Check
from flagscale.launcher.preflight.directories import Wanted

CHECK = "load"
MODULE = "flagscale.checkpoints"
_MOST = 3


def judge(want: Wanted, facts: Facts, master: Facts | None, world_size: int) -> Check | None:
    """The check of a host that has these ``facts``; ``master`` is rank 0's, None where it did not
    answer. None where nothing is to be loaded, or nothing is known."""
    if master is None:
        return None
    told = master.answer(CHECK)
    if told is None:
        told = {"problem": "its Python was not asked"} if master.checkpoints else {}
    if told.get("path"):
        return _fits(want, told, facts, world_size)
    if told.get("refused"):
        found = told["refused"]
        if want.load not in found:
            found = f"{want.load}: {found}"
        return Check(CHECK, False, _one_line(found), str(told.get("hint") or ""))
    if told.get("problem"):
        found = f"{want.load} holds checkpoints; which one is whole is not known: {told['problem']}"
        return Check(CHECK, True, found, warning=True)
    found, hint = rules.missing_checkpoint(want.values) if want.values else ("", None)
    if want.load or hint is not None:
        return Check(CHECK, hint is None, found, hint or "", warning=want.expected)
    return None


def _fits(want: Wanted, told: Mapping[str, Any], facts: Facts, world_size: int) -> Check:
    """What a whole checkpoint comes to: it has to be there for every host, and to fit."""
    name = PurePath(told["path"]).name
    if name not in facts.checkpoints:
        hint = "all hosts have to see the same checkpoints: share the directory, or copy them there"
        return Check(CHECK, False, f"{told['path']} is not there", hint)
    args = resolve(argparse.Namespace(**want.values), world_size)
    try:
        parts = parts_to_load(told["content"], vars(args), world_size)
    except CheckpointError as error:
        found = f"{name} in {want.load}: {_one_line(error.message)}"
        return Check(CHECK, False, found, error.hint or "")
    done = parts.progress and told["iteration"] >= args.train_iters
    notes = [*parts.notes]
    notes += [f"all {args.train_iters} steps are done: nothing to train"] if done else []
    notes += [f"passed over {one}" for one in _first(told["skipped"])]
    found = "; ".join((f"iteration {told['iteration']} in {want.load}", *notes))
    return Check(CHECK, True, found, warning=bool(done or told["skipped"]))


def _first(items: list[str]) -> list[str]:
    left = len(items) - _MOST
    return [*items[:_MOST], *([f"{left} more"] if left > 0 else [])]


def _one_line(message: str) -> str:
    """A message whose list has a line each, as a table shows it."""
    head, *rest = (line.strip() for line in message.splitlines())
    return " ".join((head, "; ".join(_first(rest)))).strip()
