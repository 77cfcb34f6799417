"""Pairs of states of two ranks in a group, one of which leaves it, aborts it or is killed.

usage: group_states.py OPERATION        (all_reduce or recv)

For every pair of states, forks two ranks with three groups: the default group, the group under
test, and a bystander, which both ranks have used. Rank 1 departs from the group under test in its
state. Rank 0, in its own state, calls the operation, and then both ranks that still exist use the
bystander. Prints one line of JSON per case: error and delay of rank 0 in each of the two groups.

The states of a rank in a group, each with what it knows of the other rank:

    created   has published its identity, and knows nothing
    met       knows the identities of all ranks
    messaged  has sent and received a message
    used      has run a collective
    waiting   waits in the operation, in rank 0 only
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from forked_store import start_store
from torch._C._distributed_c10d import TCPStore

import flagscale.comm.fsccl

DEPARTURES = ("leaves", "aborts", "is-killed")
# state of rank 1, state of rank 0; messages and collectives take both ranks
STATES = (
    *[(departing, other) for departing in ("created", "met") for other in ("created", "met")],
    ("messaged", "messaged"),
    ("used", "used"),
    *[(departing, "waiting") for departing in ("created", "met", "messaged", "used")],
)
TIMEOUT = timedelta(seconds=15)
"""Longer than any delay that is not a timeout."""


def enter_state(state: str, group: Any, rank: int) -> None:
    """Bring this rank's end of the group into a state."""
    if state == "met":
        group._get_backend(torch.device("cpu")).path_of(torch.ones(1))
    elif state == "messaged":
        sent = dist.isend(torch.ones(1), 1 - rank, group=group)
        dist.recv(torch.ones(1), 1 - rank, group=group)
        sent.wait()
    elif state == "used":
        dist.all_reduce(torch.ones(1), group=group)


def call(operation: str, group: Any) -> None:
    if operation == "recv":
        dist.recv(torch.ones(1), 1, group=group)
    else:
        dist.all_reduce(torch.ones(1), group=group)


def depart(departure: str, group: Any) -> None:
    if departure == "leaves":
        dist.destroy_process_group(group)
    elif departure == "aborts":
        group._get_backend(torch.device("cpu")).abort()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def measure_error(function: Callable[[], object]) -> tuple[str, float]:
    """Return the error that a call raises, empty if it raises none, and its duration in seconds."""
    start = time.monotonic()
    try:
        function()
    except Exception as error:  # noqa: BLE001 - the test decides what it means
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def run_rank(
    rank: int, port: int, case: str, operation: str, states: tuple[str, str], departure: str
) -> dict[str, Any] | None:
    """Run a rank of a case. Return rank 0's errors and delays."""
    torch.set_num_threads(1)
    server = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    store = dist.PrefixStore(case, server)
    signals = dist.PrefixStore("signals", store)
    dist.init_process_group("fsccl", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    group, bystander = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=bystander)
    departing_state, other_state = states
    joint_state = departing_state if departing_state in ("messaged", "used") else ""
    enter_state(joint_state, group, rank)
    own_state = other_state if rank == 0 else departing_state
    if own_state == "met":
        enter_state("met", group, rank)
    if rank == 1:
        signals.wait(["ready"])
        if other_state == "waiting":
            time.sleep(0.1)
        signals.set("departed", "")
        depart(departure, group)
        dist.all_reduce(torch.ones(1), group=bystander)
        signals.wait(["end"])
        return None
    signals.set("ready", "")
    if other_state != "waiting":
        signals.wait(["departed"])
        time.sleep(0.1)
    error, seconds = measure_error(lambda: call(operation, group))
    bystander_error, bystander_seconds = measure_error(
        lambda: dist.all_reduce(torch.ones(1), group=bystander)
    )
    signals.set("end", "")
    return {
        "error": error,
        "seconds": seconds,
        "bystander_error": bystander_error,
        "bystander_seconds": bystander_seconds,
    }


def run_case(port: int, operation: str, states: tuple[str, str], departure: str) -> None:
    case = f"{departure} {states}"
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                result = run_rank(rank, port, case, operation, states, departure)
                if result is not None:
                    row = {"departure": departure, "states": states, **result}
                    os.write(1, f"{json.dumps(row)}\n".encode())
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def main() -> None:
    (operation,) = sys.argv[1:]
    os.environ.update({"FSCCL_DEVICE": "cpu", "FSCCL_SOCKET_IFNAME": "lo"})
    flagscale.comm.fsccl.load_extension()
    server, port = start_store()
    try:
        for departure in DEPARTURES:
            for states in STATES:
                run_case(port, operation, states, departure)
    finally:
        os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    main()
