"""Check of the checkpoint that training would start from.

Rank 0's host decides: its Python reports the latest complete checkpoint, and the ranks' own rules
decide whether it fits. If there is no checkpoint at all, as before every first run, no Python is
queried.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.rules.resuming import missing_checkpoint, parts_to_load
from flagscale.errors import CheckpointError
from flagscale.hosts.facts import HostFacts
from flagscale.launcher.preflight.checks import Check
from flagscale.launcher.preflight.directories import HostPaths
from flagscale.object_storage import is_address

CHECK = "load"
MODULE = "flagscale.checkpoints"
_MAX_LISTED_ITEMS = 3


def check_checkpoint(
    paths: HostPaths, facts: HostFacts, master_facts: HostFacts | None, world_size: int
) -> Check | None:
    """Return the check of one host, or None if nothing is loaded or nothing is known.

    ``facts`` are the host's own; ``master_facts`` are those of rank 0's host, None if it did not
    reply. The reply of its Python (:func:`flagscale.checkpoints.describe_latest`) has these keys:

    - ``path``, ``iteration``, ``content`` and ``skipped`` of the checkpoint to load;
    - ``refused`` and ``hint`` if there are checkpoints, but loading would fail;
    - ``problem`` if the Python could not answer;
    - none if there is no checkpoint.
    """
    if master_facts is None:
        return None
    reply = master_facts.module_reply(CHECK)
    is_stored = is_address(paths.load_dir)
    if reply is None:
        is_expected = is_stored or master_facts.checkpoints
        reply = {"problem": "its Python was not queried"} if is_expected else {}
    if reply.get("path"):
        return _check_fit(paths, reply, facts, world_size)
    if reply.get("refused"):
        finding = reply["refused"]
        if paths.load_dir not in finding:
            finding = f"{paths.load_dir}: {finding}"
        return Check(CHECK, False, _join_lines(finding), str(reply.get("hint") or ""))
    if reply.get("problem"):
        what = (
            "was not checked"
            if is_stored
            else "contains checkpoints, but they could not be checked"
        )
        finding = f"{paths.load_dir} {what}: {reply['problem']}"
        return Check(CHECK, True, finding, warning=True)
    finding, hint = missing_checkpoint(paths.arguments) if paths.arguments else ("", None)
    # With a hint, the arguments require a checkpoint. Without one, training starts from scratch.
    if paths.load_dir or hint is not None:
        return Check(CHECK, hint is None, finding, hint or "", warning=paths.expects_checkpoint)
    return None


def _check_fit(
    paths: HostPaths, reply: Mapping[str, Any], facts: HostFacts, world_size: int
) -> Check:
    """Check a complete checkpoint: every host must see it, and it must fit the run."""
    name = PurePath(reply["path"]).name
    if name not in facts.checkpoints and not is_address(reply["path"]):
        hint = "all hosts have to see the same checkpoints: share the directory, or copy them there"
        return Check(CHECK, False, f"{reply['path']} does not exist on this host", hint)
    args = derive_arguments(argparse.Namespace(**paths.arguments), world_size)
    try:
        parts = parts_to_load(reply["content"], vars(args), world_size)
    except CheckpointError as error:
        finding = f"{name} in {paths.load_dir}: {_join_lines(error.message)}"
        return Check(CHECK, False, finding, error.hint or "")
    # `parts.progress`: the run would continue from the checkpoint's step.
    is_training_complete = (
        parts.progress and not args.skip_train and reply["iteration"] >= args.train_iters
    )
    notes = [*parts.notes]
    notes += (
        [
            f"all {args.train_iters} steps are done: nothing to train; raise train_iters to go on, "
            "or choose another exp_dir to start anew"
        ]
        if is_training_complete
        else []
    )
    notes += [f"skipped {reason}" for reason in _shorten_list(reply["skipped"])]
    finding = "; ".join((f"iteration {reply['iteration']} in {paths.load_dir}", *notes))
    return Check(CHECK, True, finding, warning=bool(is_training_complete or reply["skipped"]))


def _shorten_list(items: list[str]) -> list[str]:
    omitted = len(items) - _MAX_LISTED_ITEMS
    return [*items[:_MAX_LISTED_ITEMS], *([f"{omitted} more"] if omitted > 0 else [])]


def _join_lines(message: str) -> str:
    """Join a message that lists items on lines of their own, for a table cell."""
    head, *items = (line.strip() for line in message.splitlines())
    return " ".join((head, "; ".join(_shorten_list(items)))).strip()
