"""All ranks name the rank that lacks threads or descriptors; see scarce_resources.py.

test_fsccl_faults.py has the tests of memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.fsccl_ranks import ROOT
from support.waiting import PATIENCE_SECONDS

PROGRAM = Path(__file__).with_name("scarce_resources.py")
TRANSPORTS = {
    "shared-memory": {},
    "messages": {"FSCCL_SHM": "0"},
    "nodes": {"FSCCL_CLUSTERS": "1,1"},
}
REASONS = {
    "descriptors": "all descriptors open that it may have",
    "threads": "cannot start a thread|MiB of shared memory",
}

pytestmark = [pytest.mark.integration, pytest.mark.torch]


@pytest.mark.parametrize("transport", list(TRANSPORTS))
@pytest.mark.parametrize("resource", list(REASONS))
def test_rank_that_lacks_a_resource_is_named(
    built_extension: None, resource: str, transport: str
) -> None:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **TRANSPORTS[transport]}
    program = subprocess.run(
        [sys.executable, str(PROGRAM), resource],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-4000:]
    result = json.loads(program.stdout)
    for rank, error in enumerate(result["errors"]):
        # the part after the name of the reporting rank
        reason = error.partition(f", rank {rank}: ")[2]
        assert re.match(r"rank 1( \[.*\])?: ", reason), result
        assert re.search(REASONS[resource], reason), result
    assert result["seconds"] < 15, result  # the timeout of the operation
