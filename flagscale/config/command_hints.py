"""Commands in hints, in the form that fits how the user called this program and from where."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flagscale.config.schema import PROJECT

_HYDRA_PROGRAM = "run.py"
"""Program whose actions are overrides: ``action=stop``."""


def action_command(action: str) -> str:
    """Return the command of an action: ``action=stop`` for ``python run.py``, otherwise ``flagscale
    stop``.
    """
    return f"action={action}" if _called_as_hydra_program() else f"`flagscale {action}`"


def unpatch_command(backend: str = "Megatron-LM") -> str:
    """Return the command that fetches and adapts the source of a training backend."""
    return _tool_command("unpatch", PROJECT / "tools" / "patch" / "unpatch.py", backend)


def make_command(target: str) -> str:
    """Return the command that makes a target of this project."""
    directory = "" if _is_in_project() else f"-C {PROJECT} "
    return f"make {directory}{target}"


def _tool_command(command: str, script: Path, backend: str) -> str:
    if _called_as_hydra_program() or _is_in_project():
        path = script.relative_to(PROJECT) if _is_in_project() else script
        return f"python {path} --backend {backend}"
    return f"flagscale {command} --backend {backend}"


def _called_as_hydra_program() -> bool:
    return os.path.basename(sys.argv[0]) == _HYDRA_PROGRAM  # noqa: PTH119 - argv[0] may be empty


def _is_in_project() -> bool:
    return Path.cwd() == PROJECT
