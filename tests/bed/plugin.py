"""Fixtures of the bed.

A test asks for ``bed`` and gets two hosts of its own; ``@pytest.mark.bed(hosts=8, ...)`` passes
arguments to :meth:`bed.lab.Bed.open`. ``make_bed`` builds one in the middle of a test. ``slurm`` is
a Slurm on the test's bed. Where the machine does not allow a bed, or has no Slurm, the test is left
out (see needs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.needs import leave_out, need_program

from bed.lab import Bed
from bed.namespaces import why_not
from bed.slurm import PROGRAMS, Slurm

MakeBed = Callable[..., AbstractContextManager[Bed]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "bed(**options): needs the test bed; options of Bed.open")


def need_bed() -> None:
    """Leave the running test out where no bed can be built."""
    if reason := why_not():
        leave_out("bed", f"test bed: {reason}")


@pytest.fixture
def make_bed(tmp_path_factory: pytest.TempPathFactory) -> MakeBed:
    """``make_bed(hosts, **options)``: a context manager, see :meth:`bed.lab.Bed.open`."""
    need_bed()

    def make(hosts: int | list[str] = 2, **options: Any) -> AbstractContextManager[Bed]:
        return Bed.open(tmp_path_factory.mktemp("bed"), hosts, **options)

    return make


@pytest.fixture
def bed(request: pytest.FixtureRequest, make_bed: MakeBed, tmp_path: Path) -> Iterator[Bed]:
    """A bed of this test's own. All hosts share the test's ``tmp_path``."""
    marker = request.node.get_closest_marker("bed")
    options: dict[str, Any] = {"shared": [tmp_path], **(marker.kwargs if marker else {})}
    with make_bed(**options) as built:
        yield built


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A real Slurm whose nodes are the hosts of this test's ``bed``."""
    for program in PROGRAMS:
        need_program("slurm", program)
    with Slurm.open(request.getfixturevalue("bed")) as cluster:
        yield cluster
