"""Worker process of one rank: runs the test cases that a test requests, one JSON line each."""

from __future__ import annotations

import json
import os
import sys
import traceback

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fsccl_bounded_cases
import fsccl_cases
import fsccl_checks
import fsccl_cuda_cases
import fsccl_device_cases
import fsccl_program_cases
import fsccl_torch_cases
import torch

MODULES = (
    fsccl_cuda_cases,
    fsccl_torch_cases,
    fsccl_device_cases,
    fsccl_checks,
    fsccl_program_cases,
    fsccl_bounded_cases,
    fsccl_cases,
)
CASES = {name: case for module in MODULES for name, case in vars(module).items()}

torch.set_num_threads(1)


def main() -> None:
    # Keep output of cases and libraries out of the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": os.getpid()}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": CASES[request["case"]](**request["arguments"])}
        except Exception as error:  # noqa: BLE001 - the test decides what it means
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
