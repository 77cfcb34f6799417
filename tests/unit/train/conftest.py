"""Fixture with a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def single_process_group() -> Iterator[None]:
    """Initialize the default process group with this process as its only rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
