"""Tests of the selection of runs in a list."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from support.report_lab import store_run

from flagscale.errors import ConfigError
from flagscale.launcher.run_filter import RunFilter, parse_states

NOW = time.mktime((2026, 11, 26, 12, 0, 0, 0, 0, -1))
DAY = 24 * 3600


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ("failed", ("failed",)),
        ("Failed, lost", ("failed", "lost")),
        ("live,running", ("pending", "starting", "running", "unreachable")),
        ("", ()),
    ],
)
def test_states(text: str, states: tuple[str, ...]) -> None:
    assert parse_states(text) == states


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("--state fialed: expected pending, ")) as error:
        parse_states("fialed")
    assert "did you mean 'failed'?" in str(error.value)


@pytest.mark.parametrize(
    ("run_filter", "selected"),
    [
        pytest.param(RunFilter(), True, id="none"),
        pytest.param(RunFilter(name="LLAMA"), True, id="part-of-name"),
        pytest.param(RunFilter(name="llama*"), False, id="pattern-of-whole-name"),
        pytest.param(RunFilter(name="*-8b"), True, id="pattern"),
        pytest.param(RunFilter(host="node1"), True, id="host"),
        pytest.param(RunFilter(host="node"), False, id="part-of-host"),
        pytest.param(RunFilter(host="node*", name="llama"), True, id="both"),
        pytest.param(RunFilter(host="gpu*", name="llama"), False, id="one-of-both"),
    ],
)
def test_names_and_hosts(tmp_path: Path, run_filter: RunFilter, selected: bool) -> None:
    state = store_run(tmp_path, "my-llama-8b", hosts=("node0", "node1")).state
    assert run_filter.accepts_run(state) is selected


@pytest.mark.parametrize(
    ("run_filter", "phase", "selected"),
    [
        pytest.param(RunFilter(("failed",)), "completed", False, id="another-state"),
        pytest.param(RunFilter(since=NOW - 10), "completed", False, id="ended-before"),
        pytest.param(RunFilter(since=NOW - 30), "completed", True, id="ended-since"),
        pytest.param(RunFilter(since=NOW - 10), "running", True, id="alive"),
    ],
)
def test_state_and_time(run_filter: RunFilter, phase: str, selected: bool) -> None:
    assert run_filter.accepts_phase(phase, NOW - 20) is selected
