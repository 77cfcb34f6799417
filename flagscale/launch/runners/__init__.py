"""Ways of starting a plan's hosts, one file each, with the same verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flagscale.launch.runners.base import Runner
    from flagscale.launch.state import RunState


def runner_of(state: RunState) -> Runner:
    """The runner that looks after a run that was started before."""
    if state.over_ssh:
        from flagscale.launch.runners.ssh import SshRunner

        return SshRunner()
    from flagscale.launch.runners.local import LocalRunner

    return LocalRunner()
