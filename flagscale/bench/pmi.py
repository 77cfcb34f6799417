"""The little of PMI-1 that ranks need to meet under MPICH's mpirun, without an MPI library.

Hydra gives every rank a socket (``PMI_FD``) and speaks lines of ``key=value`` words over it: put
a pair, wait for all ranks, get another's pair. It works between hosts and needs no shared disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType

from flagscale.errors import UnreachableError


class Pmi:
    """A rank's conversation with its launcher; leave the ``with`` block before any work.

    Raises:
        UnreachableError: the launcher does not answer as PMI-1 says.
    """

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(os.dup(descriptor), "r+b", buffering=0)
        self._name = ""

    def __enter__(self) -> Pmi:
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        self._name = self._ask("get_my_kvsname", "my_kvsname").get("kvsname", "")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A rank that has said init and ends without finalize counts as failed.
        if kind is None:
            self._ask("finalize", "finalize_ack")
        self._stream.close()

    def put(self, key: str, value: str) -> None:
        """Publish a pair; ``value`` holds no blanks. Others see it after :meth:`barrier`."""
        self._ask(f"put kvsname={self._name} key={key} value={value}", "put_result")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._ask("barrier_in", "barrier_out")

    def get(self, key: str) -> str:
        """A pair that some rank has put before the last barrier."""
        return self._ask(f"get kvsname={self._name} key={key}", "get_result")["value"]

    def _ask(self, request: str, expected: str) -> Mapping[str, str]:
        try:
            self._stream.write(f"cmd={request}\n".encode())
            line = self._stream.readline().decode(errors="replace").strip()
        except OSError as error:
            raise UnreachableError(f"mpirun does not answer on PMI_FD: {error}") from error
        words = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        if words.get("cmd") != expected or words.get("rc", "0") != "0":
            asked = request.partition(" ")[0]
            raise UnreachableError(f"mpirun answered {line!r} to {asked!r} over PMI")
        return words
