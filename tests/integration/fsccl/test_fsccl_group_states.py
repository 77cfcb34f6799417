"""Departures from a group in every pair of states of two ranks; see group_states.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fsccl_ranks import ROOT

PROGRAM = Path(__file__).with_name("group_states.py")
# Operation, variables. Groups of a native library are its own affair.
TRANSPORTS = {
    "shared-memory": ("all_reduce", {}),
    "messages": ("all_reduce", {"FSCCL_SHM": "0"}),
    "nodes": ("all_reduce", {"FSCCL_CLUSTERS": "1,1"}),
    "receive-between-nodes": ("recv", {"FSCCL_CLUSTERS": "1,1"}),
    "device-engine": ("all_reduce", {"FSCCL_NATIVE": "fsccl", "FSCCL_CLUSTERS": "1,1"}),
}
REASONS = {
    "leaves": "has left the group",
    "aborts": "the program aborted the group",
    "is-killed": "ended without leaving the group",
}
CASES = 30

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def describe_fault(case: dict[str, Any]) -> str:
    """Return what is wrong with the outcome of a case; empty if it is as expected."""
    departure = case["departure"]
    if "rank 1" not in case["error"] or not case["error"].endswith(REASONS[departure]):
        return "another error in the group"
    if departure == "is-killed":
        if not case["bystander_error"].endswith(REASONS[departure]):
            return "another error in the other group"
    elif case["bystander_error"]:
        return "the other group has failed"
    # the timeout of the operation
    is_late = max(case["seconds"], case["bystander_seconds"]) >= 15
    return "found by the timeout" if is_late else ""


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param(name, marks=[pytest.mark.slow] if "nodes" in name else [])
        for name in TRANSPORTS
    ],
)
def test_departure_is_told_in_this_group_alone(built_extension: None, transport: str) -> None:
    operation, variables = TRANSPORTS[transport]
    program = subprocess.run(
        [sys.executable, str(PROGRAM), operation],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=500,  # there are many cases
        check=False,
    )
    cases = [json.loads(line) for line in program.stdout.splitlines()]
    assert program.returncode == 0, program.stderr[-4000:]
    faults = [(describe_fault(case), case) for case in cases if describe_fault(case)]
    assert faults == []
    assert len(cases) == CASES, program.stderr[-4000:]
