"""Run tests of torch's own suite for communication backends against fsccl.

usage: torch_suite.py RESULTS.json [NAME …]

The tests are those of ``torch.testing._internal.distributed.distributed_test``, which are part of
the torch wheel. Without names, all of them run. RESULTS is {name: "passed", "skipped: reason" or
"failed: message"}. torch starts a new interpreter per rank and test. Here, ranks are forked from
this process, which has already imported torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORLD_SIZE = 4
TEST_TIMEOUT_SECONDS = 60

# Tests that torch restricts to certain backends by name, although fsccl supports them.
ENABLED_PREFIXES = (
    "test_all_reduce_coalesced",
    "test_all_to_all",
    "test_barrier_timeout_full_group",
    "test_barrier_timeout_group",
    "test_batch_isend_irecv_gloo",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_scatter_object_list",
)


def prepare_environment() -> None:
    """Set the environment that the suite reads on import and in its decorators."""
    os.environ.update(
        BACKEND="fsccl",
        WORLD_SIZE=str(WORLD_SIZE),
        INIT_METHOD="env://",
        MASTER_ADDR="127.0.0.1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_TIMEOUT_SECONDS),
    )
    import torch
    from torch.testing._internal.common_distributed import DistTestCases

    import flagscale.comm.fsccl

    torch.set_num_threads(1)
    flagscale.comm.fsccl.load_extension()  # once, instead of in every rank
    for feature in ("gpu", "ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("fsccl")


def build_suite() -> type[unittest.TestCase]:
    """Return torch's generic tests as a class that runs them on forked ranks."""
    from torch.testing._internal.distributed import distributed_test

    # Profiling is tested for backends by name.
    for names in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        getattr(distributed_test, names).append("fsccl")
    # Tests on a subset of the ranks require 8 ranks except with MPI, where 4 are enough.
    os.environ["BACKEND"] = "mpi"
    base: Any = distributed_test.DistributedTest._DistTestBase

    class TorchSuite(distributed_test.TestDistBackend, base):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    for name in dir(base):
        if name.startswith(ENABLED_PREFIXES) and "cuda" not in name:
            vars(getattr(base, name)).pop("__unittest_skip__", None)
    return TorchSuite


class OutcomeRecorder(unittest.TestResult):
    """Test result that records the outcome of each test."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}

    def _record(self, test: unittest.TestCase, outcome: str) -> None:
        self.outcomes[test.id().rpartition(".")[2]] = outcome
        print(f"{test.id().rpartition('.')[2]}: {outcome}", file=sys.stderr, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._record(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._record(test, f"skipped: {reason}")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        kind, value, trace = err
        self._record(test, "failed: " + "".join(traceback.format_exception(kind, value, trace)))

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.addFailure(test, err)


def main(argv: Sequence[str]) -> None:
    result_file, *selected = argv
    prepare_environment()
    case = build_suite()
    names = selected or unittest.defaultTestLoader.getTestCaseNames(case)
    results = OutcomeRecorder()
    unittest.TestSuite(case(name) for name in names).run(results)
    Path(result_file).write_text(json.dumps(results.outcomes, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
