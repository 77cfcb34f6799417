"""Fixtures of the SSH tests.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import pytest
from bed.lab import Bed

from flagscale.hosts.ssh.ssh_config import SshConfig


@pytest.fixture
def config(bed: Bed) -> SshConfig:
    """SSH configuration of the test bed's user."""
    return SshConfig.load(bed.ssh_config)
