"""Running the benchmark on hosts behind SSH, through the launcher's way to them.

Every host is reached before any rank starts, and told over one connection what to run. A rank's
end with an error, a lost host or a signal to this process ends all: a host ends its ranks when
the connection that brought them is closed. Ranks meet at an address that every host takes for the
first one: a name may be SSH's alone, an alias that no host can resolve; so the hosts are asked.
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

from flagscale.bench.host import LOGS, Order, PreparedHost, look_up
from flagscale.bench.placement import Placement, require_room
from flagscale.bench.rank import Job
from flagscale.bench.spawn import RankRange, handed_on, interruptible, own_code, python_path
from flagscale.errors import ConfigError, FlagscaleError, UnreachableError
from flagscale.hosts.errors import HostError
from flagscale.hosts.executor import Endpoint, Executor
from flagscale.hosts.fan_out import Hosts, describe, require_all
from flagscale.hosts.names import compress
from flagscale.hosts.ssh.ssh_config import SshConfig
from flagscale.records import decode, encode, with_files

# Longer than a host takes to end its own ranks, so that it can still say why.
_GRACE_SECONDS = 12.0
_PREPARE_SECONDS = 60.0
P = TypeVar("P")


def run_over_ssh(place: Placement, run: str, plan: Any, environment: Mapping[str, str]) -> int:
    """Have every rank of ``place`` carry out ``run`` (:attr:`.Job.run`) with ``plan``.

    The files that the plan says are written come back. The exit code is rank 0's host's own, or
    that of the first other host that failed.

    Raises:
        UnreachableError: a host cannot be reached, by us or by the others, or was lost in the
            middle.
        ConfigError: a host has no flagscale at this machine's path, or no room for its ranks.
    """
    ends = [Endpoint(h.name, h.via or "ssh", h.user, h.port, h.proxy) for h in place.hosts]
    with interruptible(), Hosts(ends, {"ssh": {"config": place.ssh_config}}) as hosts:
        prepared, address = _prepare(hosts, place)
        port = place.port or prepared[0].port
        orders: list[Order] = []
        files: dict[str, Path] = {}
        for number, (host, count) in enumerate(zip(prepared, place.per_host, strict=True)):
            moved, files = carried(plan, host.scratch)
            first = sum(place.per_host[:number])
            order = Order(
                job=Job.of(run, moved),
                count=count,
                ranks=RankRange(first, place.workers or 1, address, port),
                environment={**handed_on(environment), **variables_of(place, number)},
                directory=str(Path.cwd()),
                scratch=host.scratch,
                files=tuple(files),
                logs=place.log_dir is not None,
            )
            orders.append(order)
        if place.log_dir is not None:
            files[LOGS] = place.log_dir
        return _Run(hosts, orders, files).run()


def carried(plan: P, scratch: str) -> tuple[P, dict[str, Path]]:
    """``plan`` for a host that has this directory for the files of the run; and of each file its
    name there and where it belongs here. Each lies in a numbered directory of its own, so that
    equal names do not meet."""
    names: dict[Path, str] = {}

    def place(path: Path) -> Path:
        name = names.setdefault(path.absolute(), f"{len(names) + 1}/{path.name}")
        return Path(scratch) / name

    moved = with_files(plan, place)
    return moved, {name: local for local, name in names.items()}


def variables_of(place: Placement, number: int) -> dict[str, str]:
    """What the ranks of one of the hosts are to have in their environment; its own goes last."""
    own = place.hosts[number].name
    ordered = sorted(place.environment, key=lambda one: bool(one[0]))
    return {name: value for host, name, value in ordered if host in ("", own)}


def _command(*words: str) -> list[str]:
    python = ["env", f"PYTHONPATH={python_path()}", sys.executable]
    return [*python, "-m", "flagscale.bench.host", *words]


def _prepare(hosts: Hosts, place: Placement) -> tuple[list[PreparedHost], str]:
    """Every host's port and directory, and an address that all of them can meet at. Where a host
    fails, all are clean again."""
    choices = candidates(place)

    def prepare(number: int, host: Executor) -> PreparedHost:
        done = host.run(_command("prepare", *choices), timeout=_PREPARE_SECONDS)
        if done.ok:
            return decode(PreparedHost, done.stdout)
        said = done.error_text.strip().splitlines() or [f"exit code {done.exit_status}"]
        raise ConfigError(
            f"{hosts.names[number]}: {sys.executable} there cannot run the benchmark: {said[-1]}",
            hint="flagscale and its Python must be at the same path on every host",
        )

    prepared, errors = hosts.each(prepare)
    try:
        require_all(errors, hosts.names, "nothing was measured")
        found = [prepared[number] for number in sorted(prepared)]
        for name, count, host in zip(hosts.names, place.per_host, found, strict=True):
            require_room(count, host.cores, place, name)
        return found, agreed(choices, found, hosts.names)
    except FlagscaleError:
        hosts.each(lambda n, host: _bring(host, prepared[n].scratch), list(prepared))
        raise


def _bring(host: Executor, scratch: str, into: IO[bytes] | None = None) -> None:
    """The tar file of a run's directory, which is gone then."""
    write = into.write if into is not None else lambda _: 0
    done = host.run(_command("bring", scratch), timeout=None, on_stdout=write)
    if not done.ok:
        raise HostError(host.name, f"{scratch} cannot be read: {done.error_text.strip()}")


def unpack(archive: IO[bytes], files: Mapping[str, Path]) -> None:
    """Put files of an archive where they belong: ``files`` tells of names, of files or of
    directories, where they are here. Others, and what is no plain file, are left."""
    with tarfile.open(fileobj=archive, mode="r:") as found:
        for member in found:
            path = PurePosixPath(member.name)
            content = found.extractfile(member) if member.isfile() else None
            for name in (path, *path.parents):
                local = files.get(str(name))
                if local is None or content is None or ".." in path.parts:
                    continue
                target = local.joinpath(path.relative_to(name))
                target.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as draft:
                    shutil.copyfileobj(content, draft)
                Path(draft.name).chmod(member.mode & 0o777)
                Path(draft.name).replace(target)


class _Run:
    """All hosts at work, until the last has ended or the first has failed."""

    def __init__(self, hosts: Hosts, orders: Sequence[Order], files: Mapping[str, Path]) -> None:
        self._hosts, self._orders, self._files = hosts, orders, files
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._ended_by_us = threading.Event()
        self._lost: dict[int, FlagscaleError] = {}

    def run(self) -> int:
        """Carry out each host's order; the exit code of the whole."""
        try:
            codes, _ = self._hosts.each(self._one)
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if self._lost:
            lost = describe(self._lost, self._hosts.names)
            raise UnreachableError(f"lost in the middle:\n{lost}")
        return own_code(next((codes[n] for n in sorted(codes) if codes[n]), 0))

    def _one(self, number: int, host: Executor) -> int:
        """Runs in a thread of the host."""
        code = 1
        try:
            code = host.run(
                _command("run"),
                stdin=encode(self._orders[number]).encode(),
                timeout=None,
                on_stdout=partial(self._hand_on, sys.stdout),
                on_stderr=partial(self._hand_on, sys.stderr),
            ).exit_status
            # What rank 0 wrote, complete or not, and what every host has of logs and dumps.
            with tempfile.TemporaryFile() as archive:
                _bring(host, self._orders[number].scratch, archive)
                archive.seek(0)
                unpack(archive, self._files)
        except FlagscaleError as error:
            if not self._ended_by_us.is_set():
                self._lost[number] = error
            code = code or 1
            raise
        finally:
            if code:
                self._end_soon()
        return code

    def _hand_on(self, stream: TextIO, data: bytes) -> None:
        with self._lock:
            stream.buffer.write(data)
            stream.flush()

    def _end_soon(self) -> None:
        """End the other hosts, too, if they do not end by themselves."""
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(_GRACE_SECONDS, self._end_all)
                self._timer.daemon = True
                self._timer.start()

    def _end_all(self) -> None:
        self._ended_by_us.set()
        self._hosts.close()


def candidates(place: Placement) -> tuple[str, ...]:
    """What the ranks may meet at, the first choice first: what the user says or the first host's
    name, then what the SSH configuration has for that name."""
    first = place.hosts[0]
    given = place.address or ("127.0.0.1" if len(place.hosts) == 1 else first.addr)
    if given:
        return (given,)
    address = SshConfig.load(place.ssh_config).target(first.name).address
    return tuple(dict.fromkeys((first.name, address)))


def known_here(addresses: Sequence[str]) -> str:
    """The first address that this machine can resolve, where the hosts cannot be asked."""
    return next(iter(look_up(addresses)), addresses[0])


def agreed(addresses: Sequence[str], prepared: Sequence[PreparedHost], names: Sequence[str]) -> str:
    """The first address that every host can resolve, and that no host but the first takes for
    itself. ``names`` are what the user calls the hosts.

    Raises:
        UnreachableError: there is none.
    """
    complaints: list[str] = []
    for address in addresses:
        hosts = list(zip(names, prepared, strict=True))
        lost = [name for name, host in hosts if address not in host.known]
        itself = [
            name
            for name, host in hosts
            if host.known.get(address) is False and host.machine != prepared[0].machine
        ]
        if not lost and not itself:
            return address
        if lost:
            complaints.append(f"{address} means nothing on {compress(lost)}")
        if itself:
            complaints.append(f"{address} is {compress(itself)} itself on {compress(itself)}")
    raise UnreachableError(
        f"nothing was measured: the ranks cannot meet on {names[0]}: {'; '.join(complaints)}",
        hint="give an address of it that every host reaches: --data-collector-host, or addr= in "
        "a hostfile",
    )
