"""Fixtures of the bed.

The fixture ``bed`` provides two hosts; ``@pytest.mark.bed(hosts=8, ...)`` passes arguments to
:meth:`bed.lab.Bed.open`. ``make_bed`` builds a bed during a test. ``slurm`` is a Slurm on the
test's bed. Tests are skipped if the machine does not allow a bed, or has no Slurm (see needs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.needs import require_program, skip_or_fail

from bed.lab import Bed
from bed.namespaces import explain_no_bed
from bed.slurm import PROGRAMS, Slurm

MakeBed = Callable[..., AbstractContextManager[Bed]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "bed(**options): needs the test bed; options of Bed.open")


def require_bed() -> None:
    """Skip the running test if no bed can be built."""
    if reason := explain_no_bed():
        skip_or_fail("bed", f"test bed: {reason}")


@pytest.fixture
def make_bed(tmp_path_factory: pytest.TempPathFactory) -> MakeBed:
    """Return ``make_bed(hosts, **options)``, a context manager: see :meth:`bed.lab.Bed.open`."""
    require_bed()

    def make(hosts: int | list[str] = 2, **options: Any) -> AbstractContextManager[Bed]:
        return Bed.open(tmp_path_factory.mktemp("bed"), hosts, **options)

    return make


@pytest.fixture
def bed(request: pytest.FixtureRequest, make_bed: MakeBed, tmp_path: Path) -> Iterator[Bed]:
    """The bed of this test. All hosts share the test's ``tmp_path``."""
    marker = request.node.get_closest_marker("bed")
    options: dict[str, Any] = {"shared": [tmp_path], **(marker.kwargs if marker else {})}
    with make_bed(**options) as new_bed:
        yield new_bed


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A real Slurm whose nodes are the hosts of this test's ``bed``."""
    for program in PROGRAMS:
        require_program("slurm", program)
    with Slurm.open(request.getfixturevalue("bed")) as cluster:
        yield cluster
