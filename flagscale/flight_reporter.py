"""Thread of a rank that answers the launcher's requests for its latest collectives.

:func:`start` is called by our training program, and for other programs by the launcher's
``sitecustomize`` (:mod:`flagscale.rank_hooks`). It costs nothing until a request arrives: the
thread waits in a read. See :mod:`flagscale.flight_records` for the files.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flagscale.files import make_private_directory
from flagscale.flight_records import (
    FAILURE_REQUEST,
    RAW_REQUEST,
    FlightRecord,
    RecordedGroup,
    RecordedOperation,
    format_ranks,
    raw_path,
    request_path,
    write_digest,
)
from flagscale.status import STATUS_DIR_VARIABLE

_POLL_SECONDS = 1.0
_LATEST_OPERATIONS = 16
_LATEST_PER_GROUP = 2
_MAX_OPERATIONS = 32
_MAX_INPUTS = 4
_MAX_STACK_CHARACTERS = 4000
# Backends that torchfrtrace knows; it refuses other names.
_TRACE_BACKENDS = ("nccl", "gloo", "xccl", "hccl")


def start() -> bool:
    """Start the thread if the launcher started this process as a rank.

    Returns:
        False if it did not, or if the directory cannot hold a named pipe.
    """
    directory, rank = os.environ.get(STATUS_DIR_VARIABLE), os.environ.get("RANK", "")
    if not directory or not rank.isdigit():
        return False
    previous_hook = sys.excepthook

    def report_exception(*exception: Any) -> None:
        record_failure()
        previous_hook(*exception)

    sys.excepthook = report_exception
    thread = threading.Thread(
        target=_answer_requests,
        args=(Path(directory), int(rank)),
        name="flagscale-flight",
        daemon=True,
    )
    thread.start()
    return True


def record_failure() -> None:
    """Write this rank's last digest, because the rank fails."""
    directory, rank = os.environ.get(STATUS_DIR_VARIABLE), os.environ.get("RANK", "")
    with suppress(Exception):
        if directory and _is_rank_of_process_group(int(rank)):
            record = build_record(int(rank), FAILURE_REQUEST, read_entries(), list_groups())
            write_digest(Path(directory), record)


def _answer_requests(status_directory: Path, rank: int) -> None:
    """Answer requests until the process ends. Errors end the thread, never the rank."""
    pid = os.getpid()
    while not _is_rank_of_process_group(rank):
        time.sleep(_POLL_SECONDS)
    path = request_path(status_directory, rank)
    with suppress(OSError):
        make_private_directory(status_directory)
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Open for writing as well, so that reads wait, and do not end with the last writer.
        with path.open("r+b", buffering=0) as pipe:
            while (data := pipe.read(4096)) and os.getpid() == pid:
                request = data.decode("ascii", "replace").split("\n")[-2:][0].strip()
                # A program may end its process group at any time.
                with suppress(Exception):
                    _answer(status_directory, rank, request)


def _answer(status_directory: Path, rank: int, request: str) -> None:
    entries = read_entries()
    write_digest(status_directory, build_record(rank, request, entries, list_groups()))
    if request.startswith(RAW_REQUEST):
        path = raw_path(status_directory, rank)
        make_private_directory(path.parent)
        temporary = path.with_name(f".{path.name}")
        temporary.write_bytes(pickle.dumps(_build_trace()))
        temporary.replace(path)


def _is_rank_of_process_group(rank: int) -> bool:
    """Return whether this process is the rank: a rank's subprocesses have its variables too."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return distributed is not None and bool(
            distributed.is_initialized() and distributed.get_rank() == rank
        )
    except (AttributeError, RuntimeError, ValueError):
        return False


def read_entries(*, stacks: bool = False) -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorders in this process, unpickled."""
    return [entry for dump in _read_dumps(stacks=stacks) for entry in dump.get("entries", ())]


def _read_dumps(*, stacks: bool) -> Iterator[dict[str, Any]]:
    import torch._C._distributed_c10d as c10d

    # NCCL has a recorder of its own. Each function exists in some versions of torch only.
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            yield pickle.loads(dump(True, stacks, False))


def _build_trace() -> dict[str, Any]:
    """Return the entries with stacks as one trace for ``torchfrtrace``."""
    trace: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    for dump in _read_dumps(stacks=True):
        new_entries = [
            e for e in dump.get("entries", ()) if ":recvAnySource" not in e["profiling_name"]
        ]
        if new_entries or not trace:
            trace = {**dump, "pg_config": {**trace.get("pg_config", {}), **dump["pg_config"]}}
        entries += new_entries
    for number, entry in enumerate(entries):
        backend, _, name = entry["profiling_name"].partition(":")
        if backend not in _TRACE_BACKENDS:
            entry["profiling_name"] = f"gloo:{name}"
        entry["record_id"] = number
    # gloo does not record the ranks of its groups.
    groups = {
        group.name: {"name": group.name, "desc": group.description, "ranks": str(list(ranks))}
        for group, ranks in list_groups().values()
    }
    return {**trace, "pg_config": {**trace.get("pg_config", {}), **groups}, "entries": entries}


def list_groups() -> dict[str, tuple[RecordedGroup, Sequence[int]]]:
    """Return this rank's process groups and their global ranks, by name."""
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    groups: dict[str, tuple[RecordedGroup, Sequence[int]]] = {}
    for group, name in list(world.pg_names.items()):
        with suppress(Exception):  # the group may be ended meanwhile
            ranks = dist.get_process_group_ranks(group)
            description = str(getattr(group, "group_desc", "") or "")
            recorded = RecordedGroup(str(name), "", description, format_ranks(ranks))
            groups[str(name)] = (recorded, ranks)
    return groups


def build_record(
    rank: int,
    request: str,
    entries: Sequence[Mapping[str, Any]],
    groups: Mapping[str, tuple[RecordedGroup, Sequence[int]]],
) -> FlightRecord:
    """Return the digest of recorder entries.

    Args:
        rank: Global rank of this process.
        request: The request that is answered.
        entries: Entries of torch's format, oldest first.
        groups: Groups of the process with their global ranks, by name.
    """
    keys: dict[tuple[str, str], int] = {}
    recorded_groups: list[RecordedGroup] = []
    operations = []
    for entry in _resolve_coalesced(entries):
        backend, _, title = str(entry["profiling_name"]).partition(":")
        name, description = entry["process_group"]
        group, ranks = groups.get(name, (RecordedGroup(name, "", description, ""), ()))
        if (backend, name) not in keys:
            keys[backend, name] = len(recorded_groups)
            recorded_groups.append(
                RecordedGroup(name, backend, group.description or description, group.ranks)
            )
        operations.append(_build_operation(entry, title, keys[backend, name], ranks))
    operations.sort(key=lambda operation: operation.time)
    return FlightRecord(
        rank=rank,
        request=request,
        count=max((int(entry["record_id"]) + 1 for entry in entries), default=0),
        groups=tuple(recorded_groups),
        operations=tuple(_select_operations(operations)),
        stack=_format_main_stack(),
    )


def _resolve_coalesced(entries: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield entries of which each has the state of its own operation.

    NCCL runs coalesced operations as one, and records the state of that one only, in an entry
    ``coalesced`` with the same numbers. For messages, this entry is left out.
    """

    def key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
        return (
            entry["process_group"],
            entry["collective_seq_id"],
            entry["p2p_seq_id"],
            bool(entry.get("is_p2p")),
        )

    states = {
        key(entry): {"state": entry["state"], "retired": entry.get("retired")}
        for entry in entries
        if _is_coalesced(entry)
    }
    for entry in entries:
        if not _is_coalesced(entry):
            yield {**entry, **states.get(key(entry), {})}
        elif not entry.get("is_p2p"):
            yield entry


def _is_coalesced(entry: Mapping[str, Any]) -> bool:
    return str(entry["profiling_name"]).endswith(":coalesced")


def _format_main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = [
        f'  File "{f.f_code.co_filename}", line {line} in {f.f_code.co_name}'
        for f, line in traceback.walk_stack(frame)
    ]
    return "\n".join(lines)[:_MAX_STACK_CHARACTERS]


def _build_operation(
    entry: Mapping[str, Any], title: str, group: int, ranks: Sequence[int]
) -> RecordedOperation:
    name, _, peers = title.partition(" ")
    is_message = bool(entry.get("is_p2p")) and ("->" in peers or "<-" in peers)
    peer = None
    if is_message:
        other = peers.replace("<-", "->").partition("->")[2]
        if other.isdigit():
            peer = ranks[int(other)] if int(other) < len(ranks) else int(other)
    sizes = [list(size) for size in entry["input_sizes"]]
    types = [str(kind) for kind in entry["input_dtypes"]]
    texts = [
        f"{size} {kind}".strip()
        for size, kind in zip(sizes, types + [""] * (len(sizes) - len(types)), strict=False)
    ]
    more = [f"and {len(texts) - _MAX_INPUTS} more"] if len(texts) > _MAX_INPUTS else []
    return RecordedOperation(
        group=group,
        sequence=int(entry["p2p_seq_id"] if is_message else entry["collective_seq_id"]),
        name=name,
        inputs=", ".join(texts[:_MAX_INPUTS] + more),
        elements=sum(math.prod(size) for size in sizes),
        started=entry["state"] in ("started", "completed"),
        ended=entry["state"] == "completed" or bool(entry.get("retired")),
        time=round(entry["time_created_ns"] / 1e9, 3),
        timeout=entry.get("timeout_ms", 0) / 1e3,
        peer=peer,
        sends="->" in peers,
    )


def _select_operations(operations: Sequence[RecordedOperation]) -> list[RecordedOperation]:
    """Return the latest operations: some of all groups, of each one, and the oldest pending."""
    selected = set(range(max(0, len(operations) - _LATEST_OPERATIONS), len(operations)))
    counts: dict[tuple[int, bool], int] = {}
    for index in range(len(operations) - 1, -1, -1):
        key = operations[index].group, operations[index].peer is None
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= _LATEST_PER_GROUP:
            selected.add(index)
    pending = [index for index, operation in enumerate(operations) if not operation.ended]
    selected |= set(pending[: max(0, _MAX_OPERATIONS - len(selected))])
    return [operations[index] for index in sorted(selected)]
