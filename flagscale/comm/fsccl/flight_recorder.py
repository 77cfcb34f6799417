"""Flight recorder: the latest operations of fsccl in this process, in torch's format.

fsccl records when each operation was called, began and ended, and the sizes of its tensors
(``csrc/torch/flight_recorder.h``). ``TORCH_FR_BUFFER_SIZE`` is the number of operations that are
kept (2000 by default; 0 switches it off). torch's recorder is hidden in its library, so the entries
are added where it is read: to the dumps of ``torch._C._distributed_c10d``.

A file for ``torchfrtrace``, one per rank::

    import flagscale.comm.fsccl
    flagscale.comm.fsccl.write_flight_record(f"/tmp/flight/rank_{dist.get_rank()}")
    # then: torchfrtrace -p rank_ /tmp/flight
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flagscale import __version__
from flagscale.comm.fsccl.build import load_extension

_FORMAT_VERSION = "2.10"
"""Version of torch's format that the entries have."""
_TRACE_NAMES = {
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_coalesced": "ALLGATHER_coalesced",
    "monitored_barrier": "barrier",
    "connect": "barrier",
    "tail": "barrier",
}
"""torchfrtrace's names of operations that have another name here."""


def dump(*, only_active: bool = False) -> dict[str, Any]:
    """Return the recorded operations as torch's ``_dump_fr_trace`` does, unpickled.

    Args:
        only_active: leave out operations that have ended.
    """
    descriptions = _describe_groups()
    entries, groups = [], {}
    group_numbers: dict[str, int] = {}
    # Without the extension, this process has no groups of fsccl.
    rows = load_extension().flight_entries() if load_extension.cache_info().currsize else []
    for row in rows:
        name = row["group"]
        number = group_numbers.setdefault(name, len(group_numbers))
        description = descriptions.get(name, "undefined")
        ranks = [int(rank) for rank in row["global_ranks"]]
        groups[name] = {"name": name, "desc": description, "ranks": str(ranks)}
        entry = _format_entry(row, number, (name, description))
        if not (only_active and entry["state"] == "completed"):
            entries.append(entry)
    return {
        "version": _FORMAT_VERSION,
        "comm_lib_version": f"fsccl {__version__}",
        "pg_config": groups,
        "pg_status": {},
        "entries": entries,
    }


def write_flight_record(path: str | Path) -> None:
    """Write this rank's operations to a file that ``torchfrtrace`` reads.

    torchfrtrace refuses names of backends that it does not know, so the operations are those of
    ``gloo`` in the file. Receives from any source are left out: it cannot represent them.
    """
    record = dump()
    for entry in record["entries"]:
        operation, _, peers = entry["profiling_name"].removeprefix("fsccl:").partition(" ")
        entry["profiling_name"] = f"gloo:{_TRACE_NAMES.get(operation, operation)} {peers}".rstrip()
    record["entries"] = [
        e for e in record["entries"] if ":recvAnySource" not in e["profiling_name"]
    ]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(pickle.dumps(record))


def extend_torch_dumps() -> None:
    """Add the entries of fsccl to the dumps of torch's flight recorder. Idempotent."""
    module = torch._C._distributed_c10d
    for name, load, write in (
        ("_dump_fr_trace", pickle.loads, pickle.dumps),
        ("_dump_fr_trace_json", json.loads, _dump_json),
    ):
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, "__wrapped__"):
            setattr(module, name, _add_entries(original, load, write))


def _add_entries(
    original: Callable[..., bytes],
    load: Callable[[bytes], dict[str, Any]],
    write: Callable[[dict[str, Any]], bytes],
) -> Callable[..., bytes]:
    @functools.wraps(original)
    def dump_all(
        includeCollectives: bool | None = None,  # noqa: N803 - torch's names
        *arguments: Any,
        onlyActive: bool | None = None,  # noqa: N803
        **options: Any,
    ) -> bytes:
        if onlyActive is not None:
            options["onlyActive"] = onlyActive
        trace = original(includeCollectives, *arguments, **options)
        if includeCollectives is False:
            return trace
        record = load(trace)
        own = dump(only_active=bool(onlyActive))
        present = record.setdefault("entries", [])
        first_id = 1 + max((entry["record_id"] for entry in present), default=-1)
        present += [{**e, "record_id": first_id + e["record_id"]} for e in own["entries"]]
        record["pg_config"] = {**own["pg_config"], **record.get("pg_config", {})}
        return write(record)

    return dump_all


def _dump_json(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode()


def _describe_groups() -> dict[str, str]:
    """Return the descriptions of torch's groups, by name."""
    names = dist.distributed_c10d._world.pg_names
    return {name: str(group.group_desc) for group, name in names.items()}


def _format_entry(row: dict[str, Any], number: int, group: tuple[str, str]) -> dict[str, Any]:
    title = row["title"]
    if row["is_message"]:
        arrow = "->" if title.endswith(":send") else "<-"
        title += f" {row['rank']}{arrow}{row['peer']}"
    has_ended = row["ended_at"] > 0
    if has_ended and not row["failed"]:
        state = "completed"
    else:
        state = "started" if row["began_at"] > 0 else "scheduled"
    return {
        "frames": [],
        "record_id": row["id"],
        "pg_id": number,
        "process_group": group,
        "thread_name": "",
        "thread_id": "",
        "collective_seq_id": 0 if row["is_message"] else row["sequence"],
        "p2p_seq_id": row["sequence"] if row["is_message"] else 0,
        "op_id": row["sequence"],
        "profiling_name": title,
        "time_created_ns": row["called_at"],
        "input_sizes": row["input_sizes"],
        "input_dtypes": row["input_dtypes"],
        "output_sizes": row["output_sizes"],
        "output_dtypes": row["output_dtypes"],
        "state": state,
        "time_discovered_started_ns": row["began_at"] or None,
        "time_discovered_completed_ns": (row["ended_at"] or None) if state == "completed" else None,
        "retired": has_ended,
        "timeout_ms": row["timeout_ms"],
        "is_p2p": row["is_message"],
    }
