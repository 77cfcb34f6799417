"""Process of a rank that uploads its files of checkpoints, while the rank trains.

    python -m flagscale.train.checkpoint.upload_worker ADDRESS

reads requests from stdin, one JSON object per line, and answers each with one line: ``result``, or
``error`` and ``hint``. The request ``end`` ends it. ``ADDRESS`` is the address of the checkpoints.
The process has an interpreter of its own, because transfers at full speed would occupy the rank's
interpreter most of the time.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.errors import CheckpointError
from flagscale.object_storage import ObjectStore, StorageAddress, check_usable
from flagscale.train.checkpoint.object_writer import StoredCheckpointWriter

_NICENESS = 5
_PR_SET_PDEATHSIG = 1
Request = Mapping[str, Any]


def main(argv: Sequence[str]) -> int:
    """Answer requests until one of them ends the process; return the exit code."""
    # The trainer handles a stop request, and waits for this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Processes that the rank forks keep stdin open after the rank was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.nice(_NICENESS)
    address = StorageAddress.parse(argv[0])
    worker: UploadWorker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "end":
            break
        try:
            worker = worker or UploadWorker(address)
            reply = {"result": worker.answer(request)}
        except CheckpointError as error:
            reply = {"error": error.message, "hint": error.hint}
        except OSError as error:
            reply = {"error": f"{error.filename or address}: {error.strerror or error}"}
        print(json.dumps(reply), flush=True)
    return 0


class UploadWorker:
    """Executes the requests of a rank."""

    def __init__(self, address: StorageAddress) -> None:
        self._checkpoints = StoredCheckpointWriter(address, ObjectStore(address))

    def answer(self, request: Request) -> Any:
        """Execute a request, whose ``op`` is the name of a method below; return its result.

        Raises:
            CheckpointError: a transfer failed.
            OSError: a local file cannot be read.
        """
        operations: dict[str, Callable[[Request], Any]] = {
            "check": self._check,
            "begin": self._begin,
            "upload": self._upload,
            "publish": self._publish,
        }
        return operations[request["op"]](request)

    def _check(self, _request: Request) -> dict[str, Any]:
        """Check that checkpoints can be saved."""
        check_usable(self._checkpoints.store)
        self._checkpoints.refresh()
        return {"is_new": not self._checkpoints.iterations()}

    def _begin(self, request: Request) -> None:
        self._checkpoints.begin(request["iteration"])

    def _upload(self, request: Request) -> None:
        directory = Path(request["directory"])
        self._checkpoints.upload(request["iteration"], directory, request["names"])

    def _publish(self, request: Request) -> dict[str, Any]:
        """Publish a checkpoint, and delete superseded ones; return ``address`` and ``warnings``."""
        iteration, warnings = request["iteration"], []
        path = self._checkpoints.publish(iteration, request["manifest"])
        superseded = []
        try:
            if request["is_best"]:
                superseded += self._checkpoints.mark_best(iteration)
            if request["keep_count"]:
                superseded += self._checkpoints.list_superseded(
                    iteration, request["keep_count"], request["retain_interval"]
                )
            self._checkpoints.remove(dict.fromkeys(superseded))
        except CheckpointError as error:  # the checkpoint itself is complete
            warnings.append(
                f"{path} is saved, but earlier checkpoints are not cleaned up: {error.message}"
            )
        return {"address": str(path), "warnings": warnings}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
