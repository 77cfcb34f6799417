"""Tests of the errors that failed preflight checks raise."""

from __future__ import annotations

import pytest

from flagscale.errors import ConfigError, RunStateError
from flagscale.launcher.preflight.checks import EARLIER_RUN, Check, require_passed

FINE = Check("torch", True, "found")
ALIVE = Check(EARLIER_RUN, False, "run r of n is alive in /x", "stop it")


def test_a_run_that_is_alive_is_no_mistake_in_the_configuration() -> None:
    with pytest.raises(RunStateError) as error:
        require_passed([FINE, ALIVE])
    assert (error.value.exit_code, error.value.hint) == (1, "stop it")


def test_unreachable_host_is_reported_with_other_failures() -> None:
    with pytest.raises(ConfigError) as error:
        require_passed([ALIVE, Check("data", False, "no data set")])
    assert [problem.key for problem in error.value.problems] == [EARLIER_RUN, "data"]


def test_nothing_is_raised_when_all_is_well() -> None:
    require_passed([FINE])
