"""Fixtures of the bed.

A test asks for ``bed`` and gets two hosts of its own; ``@pytest.mark.bed(hosts=8, ...)`` passes
arguments to :meth:`bed.lab.Bed.open`. ``make_bed`` builds one in the middle of a test. ``slurm`` is
a Slurm on the test's bed. Where the machine does not allow a bed, or has no Slurm, the test is
skipped with the reason, unless FLAGSCALE_REQUIRE_BED or FLAGSCALE_REQUIRE_SLURM is ``1``: then it
fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from bed.lab import Bed
from bed.namespaces import why_not
from bed.slurm import Slurm, why_no_slurm

REQUIRE = "FLAGSCALE_REQUIRE_BED"
REQUIRE_SLURM = "FLAGSCALE_REQUIRE_SLURM"
MakeBed = Callable[..., AbstractContextManager[Bed]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "bed(**options): needs the test bed; options of Bed.open")


def need_bed() -> None:
    """Skip the running test where no bed can be built; fail it where one must."""
    reason = why_not()
    if reason is None:
        return
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, but the test bed cannot be built: {reason}", pytrace=False)
    pytest.skip(f"test bed: {reason}")


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
    reason = why_no_slurm()
    if reason is not None:
        if os.environ.get(REQUIRE_SLURM) == "1":
            pytest.fail(f"{REQUIRE_SLURM}=1, but there is {reason}", pytrace=False)
        pytest.skip(f"Slurm: {reason}")
    with Slurm.open(request.getfixturevalue("bed")) as cluster:
        yield cluster
