"""Runs tests of torch's own suite for backends against fsccl.

usage: torch_suite.py RESULTS.json [NAME …]

The tests are those of ``torch.testing._internal.distributed.distributed_test``, which the torch
wheel brings; without names all of them run. RESULTS is {name: "passed", "skipped: reason" or
"failed: what was said"}. torch starts new interpreters for the ranks of every test; here they are
forked from this process, which has imported torch already.
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
SECONDS_A_TEST = 60

# Tests that torch limits to backends by name, though nothing in them is special to those.
OPENED = (
    "test_all_reduce_coalesced",
    "test_all_to_all",
    "test_batch_isend_irecv_gloo",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_scatter_object_list",
)


def prepare() -> None:
    """What the suite reads from the environment when it is imported, and at its gates."""
    os.environ.update(
        BACKEND="fsccl",
        WORLD_SIZE=str(WORLD_SIZE),
        INIT_METHOD="env://",
        MASTER_ADDR="127.0.0.1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(SECONDS_A_TEST),
    )
    import torch
    from torch.testing._internal.common_distributed import DistTestCases

    import flagscale.comm.fsccl

    torch.set_num_threads(1)
    flagscale.comm.fsccl.load_extension()  # once, and not in every rank
    for feature in ("gpu", "ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("fsccl")


def suite() -> type[unittest.TestCase]:
    """torch's generic tests as a class that runs them on forked ranks."""
    from torch.testing._internal.distributed import distributed_test as theirs

    # The gate of tests on some of the ranks asks for 8, except of MPI: 4 do, too.
    os.environ["BACKEND"] = "mpi"
    base: Any = theirs.DistributedTest._DistTestBase

    class TorchSuite(theirs.TestDistBackend, base):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    for name in dir(base):
        if name.startswith(OPENED) and "cuda" not in name:
            vars(getattr(base, name)).pop("__unittest_skip__", None)
    return TorchSuite


class Results(unittest.TestResult):
    """Writes down how each test ended."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def _end(self, test: unittest.TestCase, how: str) -> None:
        self.found[test.id().rpartition(".")[2]] = how
        print(f"{test.id().rpartition('.')[2]}: {how}", file=sys.stderr, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._end(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._end(test, f"skipped: {reason}")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        kind, value, trace = err
        self._end(test, "failed: " + "".join(traceback.format_exception(kind, value, trace)))

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.addFailure(test, err)


def main(argv: Sequence[str]) -> None:
    answer, *wanted = argv
    prepare()
    case = suite()
    names = wanted or unittest.defaultTestLoader.getTestCaseNames(case)
    results = Results()
    unittest.TestSuite(case(name) for name in names).run(results)
    Path(answer).write_text(json.dumps(results.found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
