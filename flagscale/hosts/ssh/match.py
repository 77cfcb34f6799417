"""paramiko's reader of SSH configurations, with two conditions of ``Match`` put right."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping
from typing import Any

import paramiko

#: Seconds a ``Match exec`` command may take.
_PATIENCE = 30


class Parsed(paramiko.SSHConfig):
    """``Match host`` sees a HostName with its ``%h`` replaced; ``Match exec`` leaves stdin alone.

    paramiko compares with the text of HostName, tokens and all, and runs commands through a
    package that copies this process's stdin to them.
    """

    def _does_match(
        self,
        match_list: list[dict[str, Any]],
        target_hostname: str,
        canonical: bool,
        final: bool,
        options: Mapping[str, Any],
    ) -> bool:
        seen = type(options)(options)  # type: ignore[call-arg]
        if "hostname" in seen:
            seen["hostname"] = seen["hostname"].replace("%h", target_hostname)  # type: ignore[index]
        commands = [condition for condition in match_list if condition["type"] == "exec"]
        others = [condition for condition in match_list if condition["type"] != "exec"]
        decide = super()._does_match  # type: ignore[misc]
        if others and not decide(others, target_hostname, canonical, final, seen):
            return False
        for condition in commands:
            command = self._tokenize(  # type: ignore[attr-defined]
                seen, target_hostname, "match-exec", condition["param"]
            )
            if _succeeds(command) == condition["negate"]:
                return False
        return bool(match_list)


@functools.cache
def _succeeds(command: str) -> bool:
    """Whether the user's command ends with 0. It is a shell's, as in ssh_config(5)."""
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
