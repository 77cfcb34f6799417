"""Record of what a run was: code, software, hardware and data, and how it differs from another's.

Its sources are the record of the start, the records that hosts have written
(:mod:`flagscale.launcher.host_record`), and what ranks reported when they joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from flagscale.hosts.names import compress_names
from flagscale.launcher.host_record import HostRecord, InputRecord, read_host_record
from flagscale.launcher.job_hosts import name_hosts_of_ranks
from flagscale.launcher.launch_record import LaunchRecord
from flagscale.launcher.layout import STATUS_DIRECTORY
from flagscale.launcher.state import RunState
from flagscale.report.history import Attempt

_DIGEST_CHARACTERS = 12
_MAX_NAMED_CHANGES = 4
NOT_RECORDED = "(none)"
"""Value of an entry that one of several runs or hosts lacks."""
_LIBRARY_NAMES = {"cuda": "CUDA", "nccl": "NCCL", "hip": "HIP", "git_version": "torch commit"}
_COMPARED_SECTIONS = ("software", "data", "packages", "environment")
"""Sections in which a run is compared with the one before; the record of the start has its code."""
_MAX_VALUE_CHARACTERS = 80
_CHECKSUM = ", sha256 "
_DIGEST_NAME = "files of"


@dataclass(frozen=True)
class RunRecord:
    """Record of a run.

    ``sections`` have values by name: ``code``, ``software``, ``hardware``, ``data``, ``packages``
    and ``environment``. A value that differs between hosts names them. ``files`` are the changed
    and untracked files of the code.
    """

    sections: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    files: Sequence[str] = ()

    @property
    def values(self) -> dict[str, str]:
        """All values, by section and name: ``software.torch``."""
        return {
            f"{section}.{name}": value
            for section, values in self.sections.items()
            for name, value in values.items()
        }


class Difference(NamedTuple):
    """Value that differs between runs; None where a run has none."""

    key: str
    values: tuple[str | None, ...]

    def __str__(self) -> str:
        return f"{self.key}: {' | '.join(map(cut_value, self.values))}"


def find_differences(records: Sequence[Mapping[str, str]]) -> list[Difference]:
    """Return the entries whose values are not the same in all of these mappings."""
    keys = dict.fromkeys(key for record in records for key in record)
    rows = (Difference(key, tuple(record.get(key) for record in records)) for key in keys)
    return [row for row in rows if not _agree(row.key, row.values)]


def _agree(key: str, values: Sequence[str | None]) -> bool:
    """Return True if values are the same as far as they were recorded: the checksums of a short run
    may be missing.
    """
    if len(set(values)) == 1:
        return True
    recorded = [value for value in values if value is not None]
    if not (_CHECKSUM in "".join(recorded) or key.rpartition(".")[2].startswith(_DIGEST_NAME)):
        return False
    if not all(_CHECKSUM in value for value in recorded):
        recorded = [value.partition(_CHECKSUM)[0] for value in recorded]
    return len(set(recorded)) == 1


def cut_value(value: str | None) -> str:
    """Return a value for a list of changes: shortened, and a word where there is none."""
    if value is None:
        return NOT_RECORDED
    is_long = len(value) > _MAX_VALUE_CHARACTERS
    return f"{value[:_MAX_VALUE_CHARACTERS]}…" if is_long else value


def describe_record_changes(before: RunRecord, after: RunRecord) -> Iterator[str]:
    """Yield texts about software and data that differ from those of the run before. The code of
    checkouts is left out, because the records of the starts describe it.
    """
    records = [
        {
            name: value
            for section in _COMPARED_SECTIONS
            for name, value in record.sections.get(section, {}).items()
        }
        for record in (before, after)
    ]
    if not all(records):
        return
    differences = find_differences(records)
    for name, (old, new) in differences[:_MAX_NAMED_CHANGES]:
        yield f"{name} {cut_value(old)} → {cut_value(new)}"
    if len(differences) > _MAX_NAMED_CHANGES:
        yield f"{len(differences) - _MAX_NAMED_CHANGES} more differences of software and data"


def collect_record(
    state: RunState, launch: LaunchRecord | None, attempts: Sequence[Attempt], image: str = ""
) -> RunRecord:
    """Collect the record of a run from its files. ``image`` is the container image that its
    configuration names.
    """
    hosts: dict[str, HostRecord] = {}
    inputs: dict[str, InputRecord] = {}
    for host in state.hosts:
        record, inputs[host.name] = read_host_record(host.run_dir / STATUS_DIRECTORY)
        if record is not None:
            hosts[host.name] = record
    libraries = _read_libraries(state, attempts)
    sections = {
        "code": {**_describe_code(launch), **_fold(_code_digests(hosts))},
        "software": _fold(
            {name: _software(r, libraries.get(name, {}), image) for name, r in hosts.items()}
        ),
        "hardware": _fold({name: _hardware(record) for name, record in hosts.items()}),
        "data": _describe_inputs(inputs),
        "packages": _fold({name: dict(record.packages) for name, record in hosts.items()}),
        "environment": _fold({name: dict(record.environment) for name, record in hosts.items()}),
    }
    code = () if launch is None else launch.code
    files = [f"{Path(version.checkout).name}: {name}" for version in code for name in version.files]
    omitted = sum(version.file_count - len(version.files) for version in code)
    files += [f"and {omitted} more"] if omitted > 0 else []
    return RunRecord({name: values for name, values in sections.items() if values}, files)


def _read_libraries(state: RunState, attempts: Sequence[Attempt]) -> dict[str, dict[str, str]]:
    """Return the versions of libraries by host that ranks of the last attempt reported."""
    libraries: dict[str, dict[str, str]] = {}
    host_names = name_hosts_of_ranks(state)
    for event in (e for attempt in attempts[-1:] for e in attempt.events_of_kind("joined")):
        versions = event.get("libraries")
        if isinstance(versions, dict):
            libraries[host_names.get(event.rank, "")] = {
                str(library): str(text) for library, text in versions.items()
            }
    return libraries


def _describe_code(launch: LaunchRecord | None) -> dict[str, str]:
    if launch is None:
        return {}
    values = {"flagscale": launch.version}
    for version in launch.code:
        suffix = f" ({version.changes})" if version.changes else ""
        values[version.checkout] = f"{version}{suffix}"
    return values


def _code_digests(hosts: Mapping[str, HostRecord]) -> dict[str, dict[str, str]]:
    return {
        name: {f"{_DIGEST_NAME} {root}": d[:_DIGEST_CHARACTERS] for root, d in record.code.items()}
        for name, record in hosts.items()
    }


def _software(record: HostRecord, libraries: Mapping[str, str], image: str) -> dict[str, str]:
    build = {name: text for name, text in record.torch.items() if name != "git_version"}
    versions = {"torch": record.packages.get("torch", ""), **build, **libraries}
    if "nccl" not in versions:
        nccl = (v for name, v in record.packages.items() if name.startswith("nvidia-nccl"))
        versions["nccl"] = next(nccl, "")
    values = {
        "python": record.python,
        **{_LIBRARY_NAMES.get(name, name): text for name, text in versions.items()},
        **{f"driver ({kind})": version for kind, version in record.drivers.items()},
        "container": image or record.container,
        "os": record.os,
        "kernel": record.kernel,
        "interpreter": record.executable,
    }
    return {name: value for name, value in values.items() if value}


def _hardware(record: HostRecord) -> dict[str, str]:
    devices = ", ".join(f"{count} x {product}" for product, count in record.devices.items())
    values = {
        "devices": devices,
        "processor": f"{record.cpus} cores, {record.cpu}".rstrip(", "),
        "memory": f"{record.memory_gib:g} GiB",
    }
    return {name: value for name, value in values.items() if value}


def _describe_inputs(inputs: Mapping[str, InputRecord]) -> dict[str, str]:
    values = {}
    first = next((record for record in inputs.values() if record.mixtures), InputRecord())
    for argument, words in first.mixtures.items():
        values[argument] = " ".join(words)
    for file in (file for record in inputs.values() for file in record.files):
        digest = f"{_CHECKSUM}{file.sha256[:_DIGEST_CHARACTERS]}" if file.sha256 else ""
        values[file.path] = f"{file.size:,} bytes{digest}"
    sizes = {name: record.sizes for name, record in inputs.items() if record.sizes}
    if len(set(sizes.values())) > 1:
        digests = _fold({n: {"": text[:_DIGEST_CHARACTERS]} for n, text in sizes.items()})[""]
        values["sizes of the files differ between hosts"] = digests
    return values


def _fold(values_by_host: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the values that all hosts share; others list the hosts of each."""
    names = dict.fromkeys(name for values in values_by_host.values() for name in values)
    folded = {}
    for name in names:
        hosts_by_value: dict[str, list[str]] = {}
        for host, values in values_by_host.items():
            hosts_by_value.setdefault(values.get(name, NOT_RECORDED), []).append(host)
        folded[name] = (
            next(iter(hosts_by_value))
            if len(hosts_by_value) == 1
            else "; ".join(f"{v} ({compress_names(hosts)})" for v, hosts in hosts_by_value.items())
        )
    return folded
