"""Starter of ranks on other hosts over the launcher's SSH connections.

Every host is reached before any rank starts, and receives its task over one connection. A failed
rank, a lost host or a signal to this process ends all ranks: a host ends its ranks when its
connection is closed. The rendezvous address must be one that every host resolves to the first host.
A host's name may be an SSH alias that other hosts cannot resolve, so every host tries the
candidates (:func:`.host.prepare`).
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, TextIO, TypeVar

from flagscale.bench.placement import Placement, require_capacity
from flagscale.bench.starters.host import (
    LOGS,
    Addresses,
    HostTask,
    PreparedHost,
    Scratch,
    resolve_addresses,
)
from flagscale.bench.starters.local import RankRange, overall_exit_code
from flagscale.bench.world import forwarded_variables
from flagscale.errors import ConfigError, FlagscaleError, UnreachableError
from flagscale.hosts.connection import Endpoint, HostConnection
from flagscale.hosts.errors import HostError
from flagscale.hosts.fan_out import Hosts, format_host_errors, raise_host_errors
from flagscale.hosts.names import compress_names
from flagscale.hosts.ssh.ssh_config import SshConfig
from flagscale.hosts.workers.children import unwind_on_signal
from flagscale.hosts.workers.remote import explain_task_failure, run_on_host
from flagscale.hosts.workers.task import WorkerTask
from flagscale.records import decode, relocate_outputs

# Longer than a host needs to end its own ranks, so that it can still report the reason.
_GRACE_SECONDS = 12.0
_PREPARE_SECONDS = 60.0
_HOST_MODULE = "flagscale.bench.starters.host"
P = TypeVar("P")


def run_over_ssh(
    placement: Placement, entry_point: str, plan: Any, environment: Mapping[str, str]
) -> int:
    """Run a function with ``plan`` on every rank of ``placement``.

    The files that the plan marks as written are copied back. The exit code is that of rank 0's
    host, or of the first other host that failed.

    Args:
        placement: hosts and ranks.
        entry_point: function of the ranks, as ``module:function``.
        plan: argument of the function.
        environment: environment of this process, parts of which are forwarded.

    Raises:
        UnreachableError: a host cannot be reached, by this machine or by the others, or was
            lost.
        ConfigError: a host has no flagscale at this machine's path, or too few cores for its
            ranks.
    """
    endpoints = [Endpoint(h.name, h.via or "ssh", h.user, h.port, h.proxy) for h in placement.hosts]
    with unwind_on_signal(), Hosts(endpoints, {"ssh": {"config": placement.ssh_config}}) as hosts:
        prepared, address = _prepare_hosts(hosts, placement)
        port = placement.port or prepared[0].port
        host_tasks: list[HostTask] = []
        files: dict[str, Path] = {}
        for number, (host, count) in enumerate(zip(prepared, placement.per_host, strict=True)):
            host_plan, files = relocate_plan(plan, host.scratch)
            first = sum(placement.per_host[:number])
            host_task = HostTask(
                task=WorkerTask.create(entry_point, host_plan),
                count=count,
                ranks=RankRange(first, placement.ranks or 1, address, port),
                environment={
                    **forwarded_variables(environment),
                    **host_variables(placement, number),
                },
                directory=str(Path.cwd()),
                scratch=host.scratch,
                files=tuple(files),
                logs=placement.log_dir is not None,
            )
            host_tasks.append(host_task)
        if placement.log_dir is not None:
            files[LOGS] = placement.log_dir
        return _HostRuns(hosts, host_tasks, files).run()


def relocate_plan(plan: P, scratch: str) -> tuple[P, dict[str, Path]]:
    """Return ``plan`` with its output files in a host's scratch directory, and the local path of
    each file by its name there. Files are in numbered directories, so that equal names do not
    collide.
    """
    names: dict[Path, str] = {}

    def relocate(path: Path) -> Path:
        name = names.setdefault(path.absolute(), f"{len(names) + 1}/{path.name}")
        return Path(scratch) / name

    relocated = relocate_outputs(plan, relocate)
    return relocated, {name: local for local, name in names.items()}


def host_variables(placement: Placement, number: int) -> dict[str, str]:
    """Return the environment variables for the ranks of one host. Those for this host alone take
    precedence over those for all hosts.
    """
    host_name = placement.hosts[number].name
    ordered = sorted(placement.environment, key=lambda entry: bool(entry[0]))
    return {name: value for host, name, value in ordered if host in ("", host_name)}


def _host_task(function: str, argument: Any) -> WorkerTask:
    return WorkerTask.create(f"{_HOST_MODULE}:{function}", argument)


def _prepare_hosts(hosts: Hosts, placement: Placement) -> tuple[list[PreparedHost], str]:
    """Prepare every host, and return the results with the rendezvous address. If a host fails, the
    directories are removed on all hosts.
    """
    candidates = rendezvous_candidates(placement)

    def prepare(number: int, host: HostConnection) -> PreparedHost:
        task = _host_task("prepare", Addresses(candidates))
        result = run_on_host(host, task, timeout=_PREPARE_SECONDS)
        if result.ok:
            return decode(PreparedHost, result.stdout)
        reason = explain_task_failure("benchmark", result.error_text, result.exit_status)
        raise ConfigError(
            f"{hosts.names[number]}: {reason}",
            hint="flagscale and its Python must be at the same path on every host",
        )

    prepared, errors = hosts.run_on_hosts(prepare)
    try:
        raise_host_errors(errors, hosts.names, "nothing was measured")
        hosts_in_order = [prepared[number] for number in sorted(prepared)]
        for name, count, host in zip(hosts.names, placement.per_host, hosts_in_order, strict=True):
            require_capacity(count, host.cores, placement, name)
        return hosts_in_order, choose_address(candidates, hosts_in_order, hosts.names)
    except FlagscaleError:
        hosts.run_on_hosts(lambda n, host: _fetch_files(host, prepared[n].scratch), list(prepared))
        raise


def _fetch_files(host: HostConnection, scratch: str, output_file: IO[bytes] | None = None) -> None:
    """Fetch a run's directory as a tar file and remove it on the host. Without ``output_file`` the
    content is discarded.
    """
    write = output_file.write if output_file is not None else lambda _: 0
    task = _host_task("send_files", Scratch(scratch))
    result = run_on_host(host, task, timeout=None, on_stdout=write)
    if not result.ok:
        raise HostError(host.name, f"{scratch} cannot be read: {result.error_text.strip()}")


def unpack(archive: IO[bytes], files: Mapping[str, Path]) -> None:
    """Unpack files of an archive.

    Args:
        archive: tar file.
        files: local path of each file or directory by its name in the archive. Other members,
            and members that are no plain files, are ignored.
    """
    with tarfile.open(fileobj=archive, mode="r:") as members:
        for member in members:
            path = PurePosixPath(member.name)
            content = members.extractfile(member) if member.isfile() else None
            for name in (path, *path.parents):
                local_path = files.get(str(name))
                if local_path is None or content is None or ".." in path.parts:
                    continue
                target = local_path.joinpath(path.relative_to(name))
                target.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as temporary_file:
                    shutil.copyfileobj(content, temporary_file)
                Path(temporary_file.name).chmod(member.mode & 0o777)
                Path(temporary_file.name).replace(target)


class _HostRuns:
    """Runs the ranks of all hosts until the last host has ended or the first has failed.

    ``files`` are the local paths of the files to fetch, by name in a host's directory.
    """

    def __init__(
        self, hosts: Hosts, host_tasks: Sequence[HostTask], files: Mapping[str, Path]
    ) -> None:
        self._hosts, self._host_tasks, self._files = hosts, host_tasks, files
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._ending_all = threading.Event()
        self._lost_hosts: dict[int, FlagscaleError] = {}

    def run(self) -> int:
        """Run each host's task, and return the overall exit code."""
        try:
            codes, _ = self._hosts.run_on_hosts(self._run_host)
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if self._lost_hosts:
            lost = format_host_errors(self._lost_hosts, self._hosts.names)
            raise UnreachableError(f"lost during the measurement:\n{lost}")
        return overall_exit_code(next((codes[n] for n in sorted(codes) if codes[n]), 0))

    def _run_host(self, number: int, host: HostConnection) -> int:
        """Run one host's task, in a thread of its own."""
        code = 1
        try:
            code = run_on_host(
                host,
                _host_task("run_ranks", self._host_tasks[number]),
                timeout=None,
                on_stdout=partial(self._forward, sys.stdout),
                on_stderr=partial(self._forward, sys.stderr),
            ).exit_status
            # Results of rank 0, complete or not, and logs and dumps of every host.
            with tempfile.TemporaryFile() as archive:
                _fetch_files(host, self._host_tasks[number].scratch, archive)
                archive.seek(0)
                unpack(archive, self._files)
        except FlagscaleError as error:
            if not self._ending_all.is_set():
                self._lost_hosts[number] = error
            code = code or 1
            raise
        finally:
            if code:
                self._schedule_end()
        return code

    def _forward(self, stream: TextIO, data: bytes) -> None:
        with self._lock:
            stream.buffer.write(data)
            stream.flush()

    def _schedule_end(self) -> None:
        """End the ranks of the other hosts after some seconds, unless they end by themselves."""
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(_GRACE_SECONDS, self._end_all)
                self._timer.daemon = True
                self._timer.start()

    def _end_all(self) -> None:
        self._ending_all.set()
        self._hosts.close()


def rendezvous_candidates(placement: Placement) -> tuple[str, ...]:
    """Return possible rendezvous addresses, best first: the user's address or the first host's
    name, then that name's address in the SSH configuration.
    """
    first = placement.hosts[0]
    explicit = placement.address or ("127.0.0.1" if len(placement.hosts) == 1 else first.addr)
    if explicit:
        return (explicit,)
    address = SshConfig.load(placement.ssh_config).target(first.name).address
    return tuple(dict.fromkeys((first.name, address)))


def first_resolvable(addresses: Sequence[str]) -> str:
    """Return the first address that this machine can resolve, for starters that cannot query
    the hosts.
    """
    return next(iter(resolve_addresses(addresses)), addresses[0])


def choose_address(
    addresses: Sequence[str], prepared: Sequence[PreparedHost], names: Sequence[str]
) -> str:
    """Return the first address that every host can resolve, and that only the first host
    resolves to itself. ``names`` are the hosts' names for messages.

    Raises:
        UnreachableError: there is none.
    """
    problems: list[str] = []
    for address in addresses:
        hosts = list(zip(names, prepared, strict=True))
        unresolved = [name for name, host in hosts if address not in host.resolvable]
        on_loopback = [
            name
            for name, host in hosts
            if host.resolvable.get(address) is False and host.machine != prepared[0].machine
        ]
        if not unresolved and not on_loopback:
            return address
        if unresolved:
            problems.append(f"{address} cannot be resolved on {compress_names(unresolved)}")
        if on_loopback:
            names_there = compress_names(on_loopback)
            problems.append(f"{address} is a loopback address on {names_there}")
    raise UnreachableError(
        f"nothing was measured: no rendezvous address of {names[0]}: {'; '.join(problems)}",
        hint="set an address of it that every host can reach: --data-collector-host, or addr= in "
        "a hostfile",
    )
