"""What the tests of the transport share."""

from __future__ import annotations

import pytest
from bed.lab import Bed

from flagscale.hosts.ssh.ssh_config import SshConfig


@pytest.fixture
def config(bed: Bed) -> SshConfig:
    """The configuration of the bed's user."""
    return SshConfig.load(bed.ssh_config)
